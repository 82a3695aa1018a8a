"""Sliders over the same plots: `explore` draws from pure functions, or small multiples where there is no front end.

Every picture comes from cached traces and arithmetic: an answer takes well under 100 ms once a trace is there, and
matplotlib about as long again to draw it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gctutor import estimation, plots
from gctutor.devices import find_device
from gctutor.operators import layer_operators
from gctutor.optimum import best, frontier, layer_costs
from gctutor.plots.canvas import dress, head, headline
from gctutor.plots.labels import annotation, label_points
from gctutor.plots.style import GREY, family_look, styled
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

    A choice of numbers becomes a slider, of names a drop-down. Returns the widget, or the picture of the grid.
    """
    return _widget(draw, choices) if has_front_end() else _grid(draw, static)


def _widget(draw: Callable[..., Axes], choices: Mapping[str, Sequence[Any]]) -> Any:
    import ipywidgets
    from IPython.display import display

    controls = {name: _control(name, values) for name, values in choices.items()}
    out = ipywidgets.interactive_output(lambda **values: display(_grid(draw, [values])), controls)
    return ipywidgets.VBox([ipywidgets.HBox(list(controls.values())), out])


def _control(name: str, values: Sequence[Any]) -> Any:
    import ipywidgets

    if all(isinstance(value, (int, float)) for value in values):
        return ipywidgets.SelectionSlider(options=list(values), description=name, continuous_update=False)
    return ipywidgets.Dropdown(options=list(values), description=name)


def _grid(draw: Callable[..., Axes], cases: Sequence[Mapping[str, Any]]) -> Any:
    columns = min(len(cases), STATIC_COLUMNS)
    rows = -(-len(cases) // columns)
    size = (12.8, 4.8 * rows) if rows * columns > 1 else None
    with plots.notebook():
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for ax, case in itertools.zip_longest(axes.flat, cases):
            if case is None:
                ax.set_axis_off()
            else:
                draw(ax=ax, **case)
        picture = _picture(figure)
        plt.close(figure)
    return picture


def _picture(figure: Figure) -> Any:
    """The figure as an IPython image, with its findings as alt text: drawn once, where `savefig` draws it twice."""
    from IPython.display import Image
    from PIL import Image as pillow

    canvas, png = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    pillow.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).save(png, "png", compress_level=1)
    width, _ = canvas.get_width_height()
    alt = ". ".join(part for part in headline(figure) if part)
    return Image(png.getvalue(), width=width, metadata={"alt": alt})


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar while the block runs, moved on by the function it gives; nothing where there is no front end."""
    if not has_front_end():
        yield lambda text: None
        return
    import ipywidgets
    from IPython.display import display

    bar, label = ipywidgets.IntProgress(value=-1, min=-1, max=steps), ipywidgets.Label()
    box = ipywidgets.HBox([bar, label])

    def step(text: str) -> None:
        bar.value += 1
        label.value = text

    display(box)
    try:
        yield step
    finally:
        box.close()


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
    curve = [_spot(c.activation_bytes, c.recompute_s, none) for c in planned(workload, card)]
    lines = ax.plot(*zip(*curve, strict=True), color=GREY)
    choice = best(costs, budget * costs.most_bytes)
    if choice is None:
        title = f"{budget:.0%} is less than block needs"
    else:
        x, y = _spot(choice.activation_bytes, choice.recompute_s, none)
        look = family_look(str(choice.policy))
        ax.plot(x, y, look.marker, color=look.color)
        label_points(ax, [annotation(ax, _short(str(choice.policy)), x, y)], lines=lines)
        title = f"{budget:.0%} of none's bytes: {x:.1f} GB and {y:.0f} ms"
    head(ax, title, plots.subtitle([none]))
    return ax


def _spot(activation_bytes: float, recompute_s: float, none: StepCost) -> tuple[float, float]:
    assert none.step_s is not None
    return activation_bytes / 1e9, (none.step_s + recompute_s) * 1e3


def _short(policy: str, longest: int = 44) -> str:
    return policy if len(policy) <= longest else policy[: longest - 1] + "…"
