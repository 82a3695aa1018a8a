"""Sliders over the same plots: `explore` draws from pure functions, or small multiples where there is no front end.

Every picture comes from cached traces and arithmetic, so an answer takes well under 100 ms once a trace is there.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from gctutor import estimation, plots
from gctutor.devices import find_device
from gctutor.operators import layer_operators
from gctutor.optimum import best, frontier, layer_costs
from gctutor.plots.canvas import dress, head
from gctutor.plots.style import styled
from gctutor.results import Results, StepCost
from gctutor.workload import Workload

STATIC_COLUMNS = 2


def has_front_end() -> bool:
    """Whether widgets can be moved here: a Jupyter kernel that is not being run by papermill or a page export."""
    return "ipykernel" in sys.modules and "GCTUTOR_OUT" not in os.environ


def explore(
    draw: Callable[..., Axes], choices: Mapping[str, Sequence[Any]], *, static: Sequence[Mapping[str, Any]]
) -> Any:
    """`draw(ax=…, **values)` under one control for each choice; without a front end, the `static` cases in a grid.

    A choice of numbers becomes a slider, of names a drop-down. Returns the widget, or the figure of the grid.
    """
    return _widget(draw, choices) if has_front_end() else _grid(draw, static)


def _widget(draw: Callable[..., Axes], choices: Mapping[str, Sequence[Any]]) -> Any:
    import ipywidgets

    controls = {name: _control(name, values) for name, values in choices.items()}

    def redraw(**values: Any) -> None:
        with plots.notebook():
            figure, ax = plt.subplots(layout="constrained")
            draw(ax=ax, **values)
            plt.show()
            plt.close(figure)

    out = ipywidgets.interactive_output(redraw, controls)
    return ipywidgets.VBox([ipywidgets.HBox(list(controls.values())), out])


def _control(name: str, values: Sequence[Any]) -> Any:
    import ipywidgets

    if all(isinstance(value, (int, float)) for value in values):
        return ipywidgets.SelectionSlider(options=list(values), description=name, continuous_update=False)
    return ipywidgets.Dropdown(options=list(values), description=name)


def _grid(draw: Callable[..., Axes], cases: Sequence[Mapping[str, Any]]) -> Any:
    rows = -(-len(cases) // STATIC_COLUMNS)
    with plots.notebook():
        figure, axes = plt.subplots(
            rows, STATIC_COLUMNS, figsize=(12.8, 4.8 * rows), layout="constrained", squeeze=False
        )
        for ax, case in itertools.zip_longest(axes.flat, cases):
            if case is None:
                ax.set_axis_off()
            else:
                draw(ax=ax, **case)
        plt.close(figure)
    return figure


# --- what there is to explore ---

estimate = functools.lru_cache(maxsize=4096)(estimation.estimate)
planned = functools.lru_cache(maxsize=64)(frontier)


def draw_costs(policies: Sequence[str], *, batch: int, seqlen: int, device: str, ax: Axes) -> Axes:
    """The policies on the memory–time plane for one batch and length, with the line of what fits on the device."""
    card = find_device(device)
    rows = Results(estimate(Workload(batch=batch, seqlen=seqlen), policy, card) for policy in policies)
    return plots.plot_pareto(rows, ax=ax, x="peak_bytes", limit_bytes=card.usable_bytes, limit_label=card.name)


def draw_timeline(*, policy: str, seqlen: int, device: str, ax: Axes) -> Axes:
    """The memory timeline of one step."""
    return plots.plot_memory_timeline(estimation.timeline(Workload(seqlen=seqlen), policy, device), ax=ax)


def draw_roofline(*, seqlen: int, device: str, ax: Axes) -> Axes:
    """The roofline of one layer's forward."""
    card = find_device(device)
    return plots.plot_roofline(layer_operators(Workload(seqlen=seqlen), card), card, ax=ax)


@styled
def draw_plan(*, budget: float, device: str, ax: Axes) -> Axes:
    """The planner's frontier, and on it the choice for `budget`, a share of `none`'s activation bytes."""
    card, workload = find_device(device), Workload()
    none = estimate(workload, "none", card)
    costs = layer_costs(workload, card)
    dress(ax, "activations kept for backward (GB)", "step time (ms)")
    line = [_spot(c.activation_bytes, c.recompute_s, none) for c in planned(workload, card)]
    ax.step(*zip(*line, strict=True), color="C7", where="post")
    choice = best(costs, budget * costs.most_bytes)
    if choice is None:
        title = f"{budget:.0%} is less than block needs"
    else:
        x, y = _spot(choice.activation_bytes, choice.recompute_s, none)
        ax.plot(x, y, "o", color="C0")
        ax.annotate(_short(str(choice.policy)), (x, y), xytext=(10, 8), textcoords="offset points", wrap=True)
        title = f"{budget:.0%} of none's bytes: {x:.1f} GB and {y:.0f} ms"
    head(ax, title, plots.subtitle([none]))
    return ax


def _spot(activation_bytes: float, recompute_s: float, none: StepCost) -> tuple[float, float]:
    assert none.step_s is not None
    return activation_bytes / 1e9, (none.step_s + recompute_s) * 1e3


def _short(policy: str, longest: int = 44) -> str:
    return policy if len(policy) <= longest else policy[: longest - 1] + "…"
