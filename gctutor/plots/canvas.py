"""New axes in the current style, and their heading: a title (the finding) over a subtitle (workload, source)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gctutor.plots.style import QUIET_INK
from gctutor.plots.words import balanced, wrapped

HEAD_MARGIN = 0.02  # of the figure, left and right of the heading
_HEADING = "heading"


def new_axes(rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """The axes of a new figure in the current style, row by row; `options` go to `plt.subplots`."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.1)
    return list(axes.flat)


def dress(ax: Axes, xlabel: str, ylabel: str, *, grid: Literal["x", "y"] | None = None) -> None:
    """Label the axes, and fix the ticks' look now: matplotlib makes some late, when the style is no longer in force."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.tick_params(
        labelsize=rcParams["xtick.labelsize"],
        width=rcParams["xtick.major.width"],
        color=rcParams["xtick.color"],
        labelcolor=rcParams["xtick.labelcolor"],
    )
    if grid:
        ax.grid(axis=grid, color="#EBEBEB", linewidth=rcParams["axes.linewidth"])


def plain_log(ax: Axes, which: str, subs: tuple[float, ...] = (1.0,)) -> None:
    """A logarithmic axis labelled 0.1, 1, 10, 1,000 (powers written small would be unreadable on a slide)."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def head(axes: Axes | Sequence[Axes], title: str, subtitle: str) -> None:
    """Write title and subtitle: over the whole figure when `axes` are all it has, else over the first of them."""
    axes = [axes] if isinstance(axes, Axes) else list(axes)
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    if figure.axes == axes and isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        _head_of_figure(figure, title, subtitle)
    else:
        _head_of_axes(axes[0], title, subtitle)


def _head_of_figure(figure: Figure, title: str, subtitle: str) -> None:
    width, height = 72 * figure.get_size_inches()
    big, small = rcParams["axes.titlesize"], rcParams["font.size"]
    usable = (1 - 2 * HEAD_MARGIN) * width
    title, subtitle = balanced(title, usable, big, "bold"), wrapped(subtitle, usable, small)
    top = 0.5 * big
    figure.text(
        HEAD_MARGIN,
        1 - top / height,
        title,
        size=big,
        weight="bold",
        va="top",
        linespacing=1.15,
        gid=f"{_HEADING}-title",
    )
    top += 1.3 * big * len(title.splitlines()) + 0.15 * big
    figure.text(
        HEAD_MARGIN, 1 - top / height, subtitle, size=small, color=QUIET_INK, va="top", gid=f"{_HEADING}-subtitle"
    )
    top += 1.25 * small * len(subtitle.splitlines()) + 0.4 * small
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - top / height))


def _head_of_axes(ax: Axes, title: str, subtitle: str) -> None:
    big, small = 1.15 * rcParams["font.size"], rcParams["font.size"]
    width = ax.get_window_extent().width * 72 / ax.figure.dpi
    title, subtitle = balanced(title, width, big, "bold"), wrapped(subtitle, width, small)
    pad = 1.25 * small * len(subtitle.splitlines()) + 0.8 * small if subtitle else 0.6 * small
    ax.set_title(title, loc="left", size=big, pad=pad)
    ax.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 0.5 * small),
        textcoords="offset points",
        color=QUIET_INK,
        va="bottom",
    )


def headline(figure: Figure) -> tuple[str, str]:
    """Title and subtitle of a figure, unwrapped; without a heading of its own, the titles of its axes, joined."""
    found = {text.get_gid(): text.get_text().replace("\n", " ") for text in figure.texts}
    titles = [ax.get_title("left").replace("\n", " ") for ax in figure.axes]
    title = found.get(f"{_HEADING}-title") or "; ".join(title for title in titles if title)
    return title, found.get(f"{_HEADING}-subtitle", "")


def title_height(figure: Figure) -> float:
    """The share of the figure's height that its own title takes, above the subtitle; 0 without one."""
    found = {text.get_gid(): text for text in figure.texts}
    subtitle = found.get(f"{_HEADING}-subtitle")
    return round(1 - subtitle.get_position()[1], 4) if subtitle is not None else 0.0
