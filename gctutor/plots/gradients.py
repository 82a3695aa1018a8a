"""Gradients: how far each layer is from a reference, and how their norm runs over a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator

from gctutor.plots.canvas import dress, head, new_axes, plain_log
from gctutor.plots.labels import end_label, label_ends
from gctutor.plots.style import BLACK, BLUE, DASHES, GREEN, ORANGE, PURPLE, VERMILLION, readable, styled
from gctutor.plots.words import NBSP, wrapped

COLORS = (BLACK, BLUE, GREEN, VERMILLION, ORANGE, PURPLE)
MARKERS = "oD^sPX"


@styled
def plot_gradient_errors(
    curves: Mapping[str, Mapping[str, float]], *, ax: Axes | None = None, title: str | None = None, subtitle: str = ""
) -> Axes:
    """The relative error of each layer's gradient, one line a run, on a log scale; layers in the model's order.

    The lowest and the highest run make the title.
    """
    ax = ax or new_axes()[0]
    dress(ax, "", "relative error of the gradient", grid="y")
    plain_log(ax, "y", (1.0, 2.0, 5.0))
    labels = []
    for number, (name, errors) in enumerate(curves.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        values = list(errors.values())
        ax.plot(values, color=color, marker=marker, linestyle=DASHES[number % len(DASHES)])
        labels.append(_end(ax, name, values, color))
    layers = list(next(iter(curves.values())))
    ax.set_xticks(range(len(layers)), [layer if len(layer) < 9 else layer.replace("_", "_\n") for layer in layers])
    label_ends(ax, labels)
    worst = {name: max(errors.values()) for name, errors in curves.items()}
    low, high = min(worst, key=worst.__getitem__), max(worst, key=worst.__getitem__)
    finding = f"{_percent(worst[low])} off with {low}, {_percent(worst[high])} with {high}"
    head(ax, title or finding, subtitle)
    return ax


def _end(ax: Axes, name: str, values: Sequence[float], color: str) -> Annotation:
    """The name of a run at the end of its line, in lines that leave most of the width to the axes."""
    text = wrapped(name, 12 * rcParams["font.size"], rcParams["font.size"], "bold")
    return end_label(ax, text, len(values) - 1, values[-1], color=readable(color), weight="bold")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}{NBSP}%"


@styled
def plot_gradient_norms(
    norms: Mapping[str, Sequence[float]],
    *,
    jumps: Mapping[str, Sequence[int]] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    subtitle: str = "",
) -> Axes:
    """The gradient norm over the steps, one line a run, on a log scale; the steps in `jumps` are ringed."""
    ax = ax or new_axes()[0]
    dress(ax, "step", "gradient norm", grid="y")
    plain_log(ax, "y", (1.0, 2.0, 5.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    width, labels, jumps = rcParams["lines.linewidth"], [], jumps or {}
    for number, (name, values) in enumerate(norms.items()):
        color = COLORS[number % len(COLORS)]
        look = {"linewidth": width * (2.2 if number == 0 else 1.2), "linestyle": DASHES[number % len(DASHES)]}
        ax.plot(values, color=color, **look)
        found = list(jumps.get(name, ()))
        rings = {"markersize": 2 * rcParams["lines.markersize"], "markerfacecolor": "none"}
        ax.plot(found, np.array(values)[found], "o", color=color, **rings)
        labels.append(_end(ax, name, values, color))
    label_ends(ax, labels)
    seen = [name for name in norms if jumps.get(name)]
    quiet = [name for name in norms if not jumps.get(name)]
    finding = f"The norm jumps for {', '.join(seen) or 'none of the runs'}; it stays quiet for {', '.join(quiet)}"
    head(ax, title or finding, subtitle)
    return ax
