"""What lives in memory: over the time of a step, and by kind for each policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.text import Annotation, Text

from gctutor.plots.canvas import dress, head, new_axes
from gctutor.plots.labels import AtDraw, annotation, label_points, pixels, show_if_fits, spread
from gctutor.plots.style import (
    BLUE,
    CATEGORY_COLOR,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    QUIET_INK,
    SKY,
    VERMILLION,
    YELLOW,
    readable,
    styled,
    text_on,
)
from gctutor.plots.words import GB, MS, NBSP, more_or_less, number, policy_lines, row_names, subtitle
from gctutor.results import Results, StepCost

if TYPE_CHECKING:
    from gctutor.simulation import Span, Timeline

_PART_COLORS = (ORANGE, PURPLE, SKY, GREEN, YELLOW, BLUE, VERMILLION, "#999999")


@styled
def plot_memory_timeline(timeline: Timeline, *, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Live bytes over a step, stacked by category in a fixed order, phases as bands, the peak named with its owner."""
    ax = ax or new_axes()[0]
    dress(ax, MS.axis, "live memory (GB)")
    ms = timeline.seconds / MS.scale
    layers = np.array([timeline.live[name] for name in CATEGORY_COLOR]) / GB.scale
    tops = np.cumsum(layers, axis=0)
    ax.stackplot(ms, layers, colors=list(CATEGORY_COLOR.values()), edgecolor="white", linewidth=0.4, zorder=2)
    peak = (ms[timeline.peak_index], tops[-1, timeline.peak_index])
    ax.set_xlim(ms[0], ms[-1])
    ax.set_ylim(0, 1.32 * tops[-1].max())
    bands = phase_bands(ax, timeline.spans)
    ax.plot(*peak, "o", color=INK, zorder=5, clip_on=False)
    summit = annotation(ax, f"peak {number(peak[1])} GB: {timeline.peak_owner}", *peak, weight="bold")
    areas = zip(CATEGORY_COLOR, tops - layers, tops, strict=True)
    names = [_category_label(ax, name, ms, low, high) for name, low, high in areas]
    outside = [label for label in names if label is not None]

    def under_curve() -> np.ndarray:
        x, y = ax.transData.transform(np.column_stack([ms, tops[-1]])).T
        starts = np.unique(np.linspace(0, len(ms) - 1, 300).astype(int))  # thousands of operators: some to a column
        ends = np.append(x[starts[1:]], x[-1])
        return np.column_stack([x[starts], np.full(len(starts), ax.bbox.y0), ends, np.maximum.reduceat(y, starts)])

    label_points(ax, [summit, *outside], texts=bands, avoid=under_curve)
    head(ax, title or _peak_finding(timeline, layers[:, timeline.peak_index]), timeline.label)
    return ax


def phase_bands(ax: Axes, spans: Iterable[Span]) -> list[Text]:
    """Shade forward, backward (with its recompute) and optimizer, each named at the top of the axes."""
    texts = []
    found = list(spans)
    shades = {
        "forward": ("forward", "#F6F6F6"),
        "backward": ("recompute", "backward", "#EBEBEB"),
        "optimizer": ("optimizer", "#F6F6F6"),
    }
    for name, (*phases, shade) in shades.items():
        inside = [span for span in found if span.phase in phases]
        if not inside:
            continue
        start = min(span.start_s for span in inside) / MS.scale
        end = max(span.end_s for span in inside) / MS.scale
        ax.axvspan(start, end, color=shade, linewidth=0, zorder=0)
        text = ax.text((start + end) / 2, 0.98, name, transform=ax.get_xaxis_transform(), ha="center", va="top")
        text.set(color=QUIET_INK, style="italic")
        texts.append(text)
    return texts


def _category_label(ax: Axes, name: str, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> Annotation | None:
    """The name inside its area where it fits best, written now; where it fits nowhere, a label for `label_points`."""
    thick = high - low
    if not thick.any():
        return None
    at = int(np.argmax(thick))
    inside = _roomiest(ax, name, x, low, high)
    if inside is not None:
        ax.text(*inside, name, ha="center", va="center", color=text_on(CATEGORY_COLOR[name]), zorder=4)
        return None
    return annotation(ax, name, x[at], (low[at] + high[at]) / 2, color=readable(CATEGORY_COLOR[name]), marked=False)


def _roomiest(ax: Axes, text: str, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, float] | None:
    """Where in the area between two curves a line of text has most room above and below, if it fits at all."""
    font = rcParams["font.size"]
    box = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    wide = 0.62 * font * len(text) / (72 * box.width) * np.diff(ax.get_xlim())[0]
    tall = 1.15 * font / (72 * box.height) * np.diff(ax.get_ylim())[0]
    grid = np.linspace(x[0], x[-1], 600)
    floors, ceilings = np.interp(grid, x, low), np.interp(grid, x, high)
    places = []
    for centre in np.linspace(x[0] + 0.6 * wide, x[-1] - 0.6 * wide, 200):
        inside = np.abs(grid - centre) <= wide / 2
        floor, ceiling = floors[inside].max(), ceilings[inside].min()
        places.append((ceiling - floor, float(centre), float(floor + ceiling) / 2))
    most = max(room for room, *_ in places)
    roomy = [(centre, level) for room, centre, level in places if room >= 0.95 * most]
    return roomy[len(roomy) // 2] if most > tall else None


def _peak_finding(timeline: Timeline, at_peak: np.ndarray) -> str:
    largest = list(CATEGORY_COLOR)[int(np.argmax(at_peak))]
    return (
        f"The peak of {GB.show(at_peak.sum() * GB.scale)} falls at {timeline.peak_owner}; "
        f"{largest} {'is' if largest in ('loss', 'temporary') else 'are'} "
        f"{100 * at_peak.max() / at_peak.sum():.0f}{NBSP}% of it"
    )


@styled
def plot_breakdown(results: Results, *, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Each row's `breakdown` (name to bytes) as one stacked bar, in the order of `results`, totals at the ends."""
    rows = [row for row in results if row.ok and row.breakdown]
    ax = ax or new_axes()[0]
    dress(ax, "memory (GB)", "")
    parts = list(dict.fromkeys(name for row in rows for name in row.breakdown))
    colors = _part_colors(parts)
    widest = max((sum(row.breakdown.values()) for row in rows), default=1) / GB.scale
    rooms: list[tuple[Text, float]] = []
    for level, row in enumerate(rows):
        left = 0.0
        for name in parts:
            width = row.breakdown.get(name, 0) / GB.scale
            ax.barh(level, width, 0.62, left=left, color=colors[name], edgecolor="white", linewidth=1)
            inside = ax.text(left + width / 2, level, number(width), ha="center", va="center_baseline")
            inside.set_color(text_on(colors[name]))
            rooms.append((inside, width))
            left += width
        total = ax.text(left + 0.008 * widest, level, f"{number(left)} GB", va="center_baseline", weight="bold")
        total.set_in_layout(False)  # its place depends on the layout
    show_if_fits(ax, rooms)
    ax.set_yticks(range(len(rows)), [policy_lines(name, 27 if len(rows) <= 8 else 40) for name in row_names(rows)])
    ax.set(xlim=(0, 1.2 * widest), ylim=(len(rows) - 0.5, -1.0))
    ax.tick_params(axis="y", length=0)
    if rows:
        _names_above(ax, rows[0], colors)
    head(ax, title or _breakdown_finding(rows), subtitle(rows))
    return ax


def _part_colors(parts: Sequence[str]) -> dict[str, str]:
    """A category keeps its colour; other parts take the next that no category of this figure has."""
    fixed = {name: CATEGORY_COLOR[name] for name in parts if name in CATEGORY_COLOR}
    free = [color for color in _PART_COLORS if color not in fixed.values()]
    others = [name for name in parts if name not in fixed]
    colors = {**{name: free[i % len(free)] for i, name in enumerate(others)}, **fixed}
    return {name: colors[name] for name in parts}


def _names_above(ax: Axes, row: StepCost, colors: dict[str, str]) -> None:
    """The parts' names over the first bar, each over its own piece as far as the names leave one another room."""
    starts = np.cumsum([0, *(row.breakdown.get(name, 0) for name in colors)]) / GB.scale
    centres = (starts[:-1] + starts[1:]) / 2
    labels = [
        ax.text(
            centre, -0.62, name.replace("_", " "), ha="center", va="center", color=readable(colors[name]), weight="bold"
        )
        for centre, name in zip(centres, colors, strict=True)
    ]
    for label in labels:
        label.set_in_layout(False)
    font = rcParams["font.size"]

    def place(renderer: RendererBase) -> None:
        gap = pixels(renderer, font)
        widths = [label.get_window_extent(renderer).width + gap for label in labels]
        wanted = ax.transData.transform(np.column_stack([centres, np.zeros(len(centres))]))[:, 0]
        placed = spread(wanted, widths, ax.bbox.x0 - gap / 2, ax.bbox.x1)
        for label, x in zip(labels, placed, strict=True):
            label.set_x(ax.transData.inverted().transform((x, 0))[0])

    ax.add_artist(AtDraw(place))


def _breakdown_finding(rows: Sequence[StepCost]) -> str:
    if not rows:
        return "No row has a breakdown"
    totals = [sum(row.breakdown.values()) for row in rows]
    names = row_names(rows)
    least, most = int(np.argmin(totals)), int(np.argmax(totals))
    largest = max(rows[most].breakdown, key=lambda name: rows[most].breakdown[name])
    share = 100 * rows[most].breakdown[largest] / totals[most]
    text = f"{largest.replace('_', ' ').capitalize()}: {share:.0f}{NBSP}% of what {names[most]} keeps"
    return text if least == most else f"{text}; {names[least]} keeps {more_or_less(totals[least] / totals[most])}"
