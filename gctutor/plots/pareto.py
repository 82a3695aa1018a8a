"""The Pareto plot: memory against time, one point a policy, and the frontier nothing else beats on both."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text

from gctutor.plots.canvas import dress, head, new_axes
from gctutor.plots.labels import annotation, label_points
from gctutor.plots.style import FAMILY_STYLE, INK, PALE, QUIET_INK, family_look, readable, styled
from gctutor.plots.words import Quantity, more_or_less, policy_lines, quantity, row_names, subtitle
from gctutor.results import Results, StepCost


def frontier(results: Iterable[StepCost], x: str = "activation_bytes", y: str = "step_s") -> Results:
    """The rows that no other row beats: none is at least as good in `x` and `y` and better in one. Ascending in `x`.

    Less is better, except in tokens per second. Equal rows stay together; rows that failed or lack a value drop out.
    """
    rows = [row for row in results if _placed(row, x, y)]

    def cost(row: StepCost) -> tuple[float, ...]:
        return tuple(-value(row, f) if quantity(f).more_is_better else value(row, f) for f in (x, y))

    def beaten(row: StepCost) -> bool:
        mine = cost(row)
        return any(all(a <= b for a, b in zip(cost(r), mine, strict=True)) and cost(r) != mine for r in rows)

    return Results(sorted((row for row in rows if not beaten(row)), key=lambda row: (value(row, x), value(row, y))))


def value(row: StepCost, field: str) -> float:
    """A field of `row` as a number, in SI units."""
    return float(getattr(row, field))


def _placed(row: StepCost, x: str, y: str) -> bool:
    return row.ok and getattr(row, x) is not None and getattr(row, y) is not None


@styled
def plot_pareto(
    results: Results,
    *,
    ax: Axes | None = None,
    x: str = "activation_bytes",
    y: str = "step_s",
    limit_bytes: float | None = None,
    limit_label: str | None = None,
    line: Sequence[tuple[float, float]] = (),
    line_name: str = "",
    title: str | None = None,
) -> Axes:
    """Each row at (`x`, `y`): filled when measured or recorded, hollow when estimated, grey when dominated.

    Estimated rows and the others have a frontier each; a `line` of pairs of `x` and `y`, ascending and in SI units, is
    drawn instead, with its name. Bars run from the fastest to the slowest repeat. Rows out of
    memory stand hollow at the limit (`limit_bytes`, in the units of `x`; without one, at the right edge). Rows that
    were refused or failed are named in the subtitle.
    """
    ax = ax or new_axes()[0]
    qx, qy = quantity(x), quantity(y)
    dress(ax, qx.axis, qy.axis)
    named = dict(zip(map(id, results), row_names(results.rows), strict=True))
    drawn = [row for row in results if _placed(row, x, y)]
    fronts = [frontier(group, x, y) for group in _by_certainty(drawn)]
    _set_limits(ax, drawn, qx, qy, x, y, limit_bytes)
    if line:
        lines, labels = _named_line(ax, np.array(line) / (qx.scale, qy.scale), line_name)
    else:
        lines, labels = [_step_line(ax, front, qx, qy, x, y) for front in fronts], []
    texts = [_arrow_to_better(ax, qy)]
    if limit_bytes is not None:
        limit, text = _limit(ax, limit_bytes / qx.scale, limit_label or f"limit {qx.show(limit_bytes)}")
        lines.append(limit)
        texts.append(text)
    best = {id(row) for front in fronts for row in front}
    lines += [bar for row in drawn for bar in _spread_bar(ax, row, id(row) in best, qx, qy, x, y)]
    marks, names = _points(ax, drawn, named, best, qx, qy, x, y)
    labels += names + _out_of_memory(ax, [row for row in results if row.status == "oom"], named, qx, limit_bytes)
    label_points(ax, labels, lines=lines + marks, texts=texts)
    head(ax, title or _finding(fronts, named, qx, qy, x, y), _under(results, drawn, named))
    return ax


def _by_certainty(rows: Sequence[StepCost]) -> list[list[StepCost]]:
    groups = [[r for r in rows if r.source != "estimated"], [r for r in rows if r.source == "estimated"]]
    return [group for group in groups if group]


def _set_limits(
    ax: Axes, rows: Sequence[StepCost], qx: Quantity, qy: Quantity, x: str, y: str, limit: float | None
) -> None:
    xs = [value(row, x) / qx.scale for row in rows] + ([limit / qx.scale] if limit is not None else [])
    ys = [end for row in rows for end in _extent(row, y, qy)]
    if xs and ys:
        wide, high = max(xs) or 1.0, (max(ys) - min(ys)) or 0.2 * max(ys)
        ax.set_xlim(0, 1.12 * wide)
        ax.set_ylim(min(ys) - 0.22 * high, max(ys) + 0.18 * high)


def _extent(row: StepCost, y: str, qy: Quantity) -> list[float]:
    """The value and its repeats in the unit shown."""
    samples = row.samples.get("step_s" if y == "tokens_per_s" else y, [])
    if y == "tokens_per_s":
        samples = [row.workload.tokens / sample for sample in samples]
    return [v / qy.scale for v in (value(row, y), *samples)]


def _step_line(ax: Axes, front: Results, qx: Quantity, qy: Quantity, x: str, y: str) -> Line2D:
    """The best `y` reachable with at most so much `x`, from the first point to the right edge."""
    xs = [value(row, x) / qx.scale for row in front]
    ys = [value(row, y) / qy.scale for row in front]
    dashes = (0, (4, 2)) if front.rows[0].source == "estimated" else "-"
    edge = ax.get_ylim()[0 if qy.more_is_better else 1]
    (line,) = ax.plot(
        [xs[0], *xs, ax.get_xlim()[1]],
        [edge, *ys, ys[-1]],
        drawstyle="steps-post",
        color=PALE,
        linestyle=dashes,
        zorder=1,
    )
    return line


def _named_line(ax: Axes, points: np.ndarray, name: str) -> tuple[list[Line2D], list[Annotation]]:
    """A line through `points` (n, 2), in the units shown, and its name in the upper part."""
    color = FAMILY_STYLE["budget"].color
    lines = ax.plot(*points.T, color=color, zorder=1)
    at = points[len(points) // 6]
    labels = [annotation(ax, name, *at, color=readable(color), style="italic", marked=False)] if name else []
    return lines, labels


def _spread_bar(ax: Axes, row: StepCost, best: bool, qx: Quantity, qy: Quantity, x: str, y: str) -> list[Line2D]:
    extent = _extent(row, y, qy)
    if len(extent) < 3:
        return []
    at = value(row, x) / qx.scale
    color = family_look(row.policy).color if best else PALE
    return ax.plot([at, at], [min(extent), max(extent)], color=color, marker="_", zorder=2)


def _arrow_to_better(ax: Axes, qy: Quantity) -> Text:
    """In the corner that the frontier leaves empty."""
    tip, tail = ((0.012, 0.985), (0.06, 0.91)) if qy.more_is_better else ((0.012, 0.015), (0.06, 0.09))
    ax.annotate(
        "",
        tip,
        tail,
        xycoords="axes fraction",
        textcoords="axes fraction",
        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": rcParams["lines.linewidth"], "mutation_scale": 20},
    )
    return ax.text(0.066, tail[1], "better", transform=ax.transAxes, va="center", style="italic")


def _limit(ax: Axes, at: float, label: str) -> tuple[Line2D, Text]:
    line = ax.axvline(at, color=INK, linestyle=(0, (2, 2)), zorder=1)
    text = ax.annotate(
        label,
        (at, 0),
        xycoords=ax.get_xaxis_transform(),
        xytext=(-0.4 * rcParams["font.size"], 0.5 * rcParams["font.size"]),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=INK,
    )
    text.set_in_layout(False)
    return line, text


def _points(
    ax: Axes,
    rows: Sequence[StepCost],
    named: dict[int, str],
    best: set[int],
    qx: Quantity,
    qy: Quantity,
    x: str,
    y: str,
) -> tuple[list[Line2D], list[Annotation]]:
    """The marks, and a label for each, but rows at the very same place share one, and so do prediction and fact."""
    marks: list[Line2D] = []
    spots: dict[tuple[float, float], list[StepCost]] = {}
    sure = {named[id(row)] for row in rows if row.source != "estimated"}
    for row in rows:
        at = (value(row, x) / qx.scale, value(row, y) / qy.scale)
        look = family_look(row.policy)
        color = look.color if id(row) in best else PALE
        face = "white" if row.source == "estimated" else color
        edge = {"markeredgecolor": color, "markeredgewidth": rcParams["lines.linewidth"]}
        marks += ax.plot(*at, look.marker, markerfacecolor=face, zorder=4 if id(row) in best else 3, **edge)
        if row.source != "estimated" or named[id(row)] not in sure:
            spots.setdefault(at, []).append(row)
    labels = []
    for at, here in spots.items():
        text = " = ".join(dict.fromkeys(named[id(row)] for row in here))
        leading = any(id(row) in best for row in here)
        color, weight = (INK, "bold") if leading else (QUIET_INK, "normal")
        labels.append(annotation(ax, policy_lines(text), *at, color=color, weight=weight))
    return marks, labels


def _out_of_memory(
    ax: Axes, rows: Sequence[StepCost], named: dict[int, str], qx: Quantity, limit: float | None
) -> list[Annotation]:
    """Hollow marks at the limit, one below the other from the top."""
    labels = []
    for number, row in enumerate(rows):
        at = (limit / qx.scale if limit is not None else ax.get_xlim()[1], 0.94 - 0.09 * number)
        look = family_look(row.policy)
        where = ax.get_xaxis_transform()
        edge = {"markeredgecolor": look.color, "markeredgewidth": rcParams["lines.linewidth"]}
        ax.plot(*at, look.marker, markerfacecolor="white", transform=where, clip_on=False, zorder=4, **edge)
        labels.append(annotation(ax, f"{policy_lines(named[id(row)])}: out of memory", *at, xycoords=where))
    return labels


def _finding(fronts: Sequence[Results], named: dict[int, str], qx: Quantity, qy: Quantity, x: str, y: str) -> str:
    """A sentence on the bend of the first frontier, against its right end."""
    if not fronts:
        return "No policy ran"
    front = fronts[0]
    last, bend = front.rows[-1], _bend(front, x, y)
    if bend is last:
        return f"{named[id(last)]} is best in both: {qx.show(value(last, x))} and {qy.show(value(last, y))}"
    memory = more_or_less(value(bend, x) / value(last, x))
    speed = more_or_less(value(bend, y) / value(last, y))
    joint = "at" if qy.more_is_better else "for"
    return f"{named[id(bend)]} takes {memory} memory than {named[id(last)]}, {joint} {speed} {qy.label}"


def _bend(front: Results, x: str, y: str) -> StepCost:
    """The point farthest on the better side of the line between the frontier's ends; with two points, the first."""
    first, last = front.rows[0], front.rows[-1]
    wide, high = value(last, x) - value(first, x), value(last, y) - value(first, y)
    inner = front.rows[1:-1]
    if not wide or not high:
        return last
    if not inner:
        return first

    def gain(row: StepCost) -> float:
        return (value(row, y) - value(first, y)) / high - (value(row, x) - value(first, x)) / wide

    return max(inner, key=gain)


def _under(results: Results, drawn: Sequence[StepCost], named: dict[int, str]) -> str:
    """The subtitle, with what the marks mean where that is not plain and with the rows that could not be drawn."""
    parts = [subtitle(results)]
    if len(_by_certainty(drawn)) == 2:
        parts.append("hollow: estimated")
    repeats = [len(row.samples["step_s"]) for row in drawn if len(row.samples.get("step_s", [])) > 1]
    if repeats:
        parts.append(f"bars: fastest to slowest of {statistics.median_low(repeats)} repeats")
    shown = {id(row) for row in drawn}
    failed = [row for row in results if id(row) not in shown and row.status != "oom"]
    if failed:
        parts.append("not drawn: " + ", ".join(f"{named[id(row)]} ({_why(row)})" for row in failed))
    return " · ".join(parts)


def _why(row: StepCost) -> str:
    return "no value" if row.ok else row.status
