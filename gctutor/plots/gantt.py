"""Forward, recompute and backward of each policy on one time axis, and the memory below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from gctutor.plots.canvas import dress, head, new_axes
from gctutor.plots.labels import annotation, label_points
from gctutor.plots.style import PHASE_COLOR, line_looks, readable, styled
from gctutor.plots.words import GB, MS, brief, more_or_less, number, percent, policy_lines

if TYPE_CHECKING:
    from gctutor.simulation import Span, Timeline


@styled
def plot_gantt(
    timelines: dict[str, Timeline],
    *,
    axes: Sequence[Axes] | None = None,
    title: str | None = None,
    subtitle: str | None = None,
) -> list[Axes]:
    """Returns two axes over one time axis: each policy's phases (recompute hatched), and its live memory below."""
    if axes is None:
        axes = new_axes(2, 1, sharex=True, height_ratios=(max(1.0, 0.34 * len(timelines)), 1.0))
    bars, memory = list(axes)
    dress(bars, "", "")
    dress(memory, MS.axis, "live memory (GB)", grid="y")
    ends = {name: max(span.end_s for span in timeline.spans) / MS.scale for name, timeline in timelines.items()}
    bars.set_xlim(0, 1.34 * max(ends.values()))
    reference = next(iter(ends.values()))
    for level, (name, timeline) in enumerate(timelines.items()):
        for phase, pieces in _merged(timeline.spans).items():
            bars.broken_barh(pieces, (level - 0.3, 0.6), **_phase_look(phase))
        change = "" if level == 0 else f" ({percent(ends[name] / reference)})"
        total = bars.text(
            ends[name] + 0.01 * max(ends.values()),
            level,
            f"{number(ends[name])} ms{change}",
            va="center_baseline",
            weight="bold",
        )
        total.set_in_layout(False)  # its place depends on the layout
    bars.set_yticks(range(len(timelines)), [policy_lines(name, 22) for name in timelines])
    bars.set_ylim(len(timelines) - 0.6, -0.85)
    bars.tick_params(axis="both", length=0)
    bars.tick_params(axis="x", labelbottom=False)
    bars.spines[["left", "bottom"]].set_visible(False)
    _name_phases(bars, timelines)
    _memory(memory, timelines)
    head([bars, memory], title or _finding(timelines), subtitle if subtitle is not None else _common(timelines))
    return [bars, memory]


def _phase_look(phase: str) -> dict[str, Any]:
    color = PHASE_COLOR[phase]
    if phase == "recompute":
        return {"facecolor": "#F9D9C2", "edgecolor": color, "hatch": "////", "linewidth": 0, "zorder": 3}
    return {"facecolor": color, "linewidth": 0, "zorder": 2}


def _merged(spans: Sequence[Span]) -> dict[str, list[tuple[float, float]]]:
    """(start, width) in milliseconds of each phase's pieces; spans that touch are one piece."""
    pieces: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        start, end = span.start_s / MS.scale, span.end_s / MS.scale
        mine = pieces.setdefault(span.phase, [])
        if mine and start - sum(mine[-1]) < 1e-6:
            start = mine.pop()[0]
        mine.append((start, end - start))
    return pieces


def _name_phases(ax: Axes, timelines: dict[str, Timeline]) -> None:
    """Each phase's name over the middle of its pieces in the first policy that has it."""
    named: set[str] = set()
    for level, timeline in enumerate(timelines.values()):
        for phase, pieces in _merged(timeline.spans).items():
            if phase not in named:
                named.add(phase)
                middle = (pieces[0][0] + sum(pieces[-1])) / 2
                color = readable(PHASE_COLOR[phase])
                ax.text(middle, level - 0.34, phase, ha="center", va="bottom", color=color, weight="bold")


def _memory(ax: Axes, timelines: dict[str, Timeline]) -> None:
    looks = line_looks(timelines)
    lines, labels, highest = [], [], 0.0
    for name, timeline in timelines.items():
        total = sum(timeline.live.values(), start=np.zeros(len(timeline.seconds))) / GB.scale
        look = {key: looks[name][key] for key in ("color", "linestyle")}
        lines += ax.plot(timeline.seconds / MS.scale, total, **look)
        peak = (timeline.seconds[timeline.peak_index] / MS.scale, total[timeline.peak_index])
        ax.plot(*peak, looks[name]["marker"], color=look["color"], zorder=5)
        text = f"{policy_lines(name, 20)}: {number(peak[1])} GB"
        labels.append(annotation(ax, text, *peak, color=readable(look["color"]), weight="bold"))
        highest = max(highest, total.max())
    ax.set_ylim(0, 1.25 * highest)
    label_points(ax, labels, lines=lines)


def _common(timelines: dict[str, Timeline]) -> str:
    """What the labels have in common: theirs differ in the policy."""
    labels = [timeline.label.split(", ") for timeline in timelines.values()]
    return ", ".join(part for part in labels[0] if all(part in label for label in labels))


def _finding(timelines: dict[str, Timeline]) -> str:
    names = [brief(name) for name in timelines]
    if len(names) < 2:
        return f"One step of {names[0]}"
    ends = [max(span.end_s for span in timeline.spans) for timeline in timelines.values()]
    peaks = [sum(live[t.peak_index] for live in t.live.values()) for t in timelines.values()]
    lowest = int(np.argmin(peaks))
    if lowest == 0:
        return f"None of the policies lowers the peak of {names[0]}"
    return (
        f"{names[lowest]} lowers the peak by {GB.show(peaks[0] - peaks[lowest])} "
        f"for {more_or_less(ends[lowest] / ends[0])} time"
    )
