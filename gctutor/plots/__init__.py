"""Figures: pure functions `plot_x(data, *, ax=None, …) -> Axes`, two styles, and `save_figure`, which alone writes."""

from gctutor.plots.compare import plot_loss_curves, plot_predicted_vs_measured, plot_waterfall
from gctutor.plots.gantt import plot_gantt
from gctutor.plots.gradients import plot_gradient_errors, plot_gradient_norms
from gctutor.plots.memory import plot_breakdown, plot_memory_timeline
from gctutor.plots.pareto import frontier, plot_pareto
from gctutor.plots.roofline import plot_roi, plot_roofline
from gctutor.plots.saving import save_figure
from gctutor.plots.scaling import plot_scaling
from gctutor.plots.style import FAMILY_STYLE, notebook, slide
from gctutor.plots.words import subtitle

__all__ = [
    "FAMILY_STYLE",
    "frontier",
    "notebook",
    "plot_breakdown",
    "plot_gantt",
    "plot_gradient_errors",
    "plot_gradient_norms",
    "plot_loss_curves",
    "plot_memory_timeline",
    "plot_pareto",
    "plot_predicted_vs_measured",
    "plot_roi",
    "plot_roofline",
    "plot_scaling",
    "plot_waterfall",
    "save_figure",
    "slide",
    "subtitle",
]
