"""How a cost grows with sequence length or batch, one line a policy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter
from matplotlib.transforms import ScaledTranslation

from gctutor.errors import UserError
from gctutor.plots.canvas import dress, head, new_axes, plain_log
from gctutor.plots.labels import annotation, end_label, label_ends, label_points
from gctutor.plots.style import INK, line_looks, readable, styled
from gctutor.plots.words import Quantity, policy_lines, quantity, row_names, subtitle
from gctutor.results import Results, StepCost

SIZES = {"seqlen": "sequence length (tokens)", "batch": "batch (sequences)"}


@styled
def plot_scaling(
    results: Results,
    *,
    ax: Axes | None = None,
    x: str = "seqlen",
    y: str = "activation_bytes",
    limit_bytes: float | None = None,
    limit_label: str | None = None,
    title: str | None = None,
) -> Axes:
    """`y` of each policy over the workload's `x` (`seqlen` or `batch`), filled when measured or recorded.

    Rows out of memory stand hollow at the limit line (`limit_bytes`, in the units of `y`). Raises `UserError` for
    another `x`.
    """
    if x not in SIZES:
        raise UserError(f"x must be {' or '.join(SIZES)}, not {x!r}.")
    ax = ax or new_axes()[0]
    q = quantity(y)
    curves = _curves(results, x, y)
    dress(ax, _xlabel(results, x), q.axis, grid="y")
    looks = line_looks(rows[0].policy for rows in curves.values())
    sizes = sorted({_size(row, x) for row in results})
    right = sizes[-1] if sizes else 1
    ends: list[Annotation] = []
    inside: list[Annotation] = []
    lines: list[Line2D] = []
    for name, rows in curves.items():
        look = looks[rows[0].policy]
        known = [row for row in rows if row.ok]
        at = [(_size(row, x), getattr(row, y) / q.scale) for row in known]
        face = "white" if rows[0].source == "estimated" else look["color"]
        edge = {"markeredgecolor": look["color"], "markeredgewidth": rcParams["lines.linewidth"]}
        lines += ax.plot(*zip(*at, strict=True), **look, markerfacecolor=face, zorder=3, **edge)
        last = at[-1][0] == right
        label = (end_label if last else annotation)(
            ax, policy_lines(name), *at[-1], color=readable(look["color"]), weight="bold"
        )
        (ends if last else inside).append(label)
    _set_limits(ax, q, sizes, limit_bytes)
    limits = _limit(ax, q, limit_bytes, limit_label) if limit_bytes is not None else ([], [])
    lines += limits[0] + _failed(ax, curves, q, x, limit_bytes, looks)
    label_ends(ax, ends)
    label_points(ax, inside, lines=lines, texts=limits[1])
    head(ax, title or _finding(curves, q, x, y, limit_bytes), subtitle(results))
    return ax


def _size(row: StepCost, x: str) -> int:
    return getattr(row.workload, x)


def _curves(results: Results, x: str, y: str) -> dict[str, list[StepCost]]:
    """Rows by name, ascending in `x`; names as if all workloads had one `x`. Policies without a value drop out."""
    alike = [dataclasses.replace(row, workload=row.workload.replace(**{x: 2})) for row in results]
    curves: dict[str, list[StepCost]] = {}
    for row, name in zip(results, row_names(alike), strict=True):
        if row.status == "oom" or (row.ok and getattr(row, y) is not None):
            curves.setdefault(name, []).append(row)
    curves = {name: sorted(rows, key=lambda row: _size(row, x)) for name, rows in curves.items()}
    return {name: rows for name, rows in curves.items() if any(row.ok for row in rows)}


def _xlabel(results: Results, x: str) -> str:
    other = "batch" if x == "seqlen" else "seqlen"
    sizes = {_size(row, other) for row in results}
    if len(sizes) != 1:
        return SIZES[x]
    (size,) = sizes
    return f"{SIZES[x]}, {f'batch {size}' if other == 'batch' else f'{size:,} tokens each'}"


def _set_limits(ax: Axes, q: Quantity, sizes: Sequence[int], limit: float | None) -> None:
    """Both axes logarithmic, so that costs in proportion to the size are parallel lines; ticks at the sizes run."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sizes))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    plain_log(ax, "y", subs=(1, 2, 5))
    level = limit / q.scale if limit is not None else 0.0
    ax.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.1)
    ax.set_ylim(0.7 * ax.dataLim.y0, 1.6 * max(ax.dataLim.y1, level))


def _limit(ax: Axes, q: Quantity, limit: float, label: str | None) -> tuple[list[Line2D], list[Text]]:
    level = limit / q.scale
    line = ax.axhline(level, color=INK, linestyle=(0, (2, 2)), zorder=1)
    text = ax.annotate(
        f"{label or f'limit {q.show(limit)}'} (marks on it: out of memory)",
        (0, level),
        xycoords=ax.get_yaxis_transform(),
        xytext=(0.5 * rcParams["font.size"], 0.8 * rcParams["font.size"]),
        textcoords="offset points",
        va="bottom",
    )
    text.set_in_layout(False)
    return [line], [text]


def _failed(
    ax: Axes, curves: dict[str, list[StepCost]], q: Quantity, x: str, limit: float | None, looks: dict
) -> list[Line2D]:
    """A hollow mark at the limit (or the top) for the first size at which each policy ran out of memory."""
    level = limit / q.scale if limit is not None else ax.get_ylim()[1]
    taken: Counter[int] = Counter()
    marks: list[Line2D] = []
    for rows in curves.values():
        failed = next((row for row in rows if row.status == "oom"), None)
        if failed is None:
            continue
        look, size = looks[failed.policy], _size(failed, x)
        aside = ScaledTranslation(1.4 * rcParams["lines.markersize"] * taken[size] / 72, 0, ax.figure.dpi_scale_trans)
        taken[size] += 1
        edge = {"markeredgecolor": look["color"], "markeredgewidth": rcParams["lines.linewidth"]}
        marks += ax.plot(
            size,
            level,
            look["marker"],
            markerfacecolor="white",
            transform=ax.transData + aside,
            clip_on=False,
            zorder=4,
            **edge,
        )
    return marks


def _finding(curves: dict[str, list[StepCost]], q: Quantity, x: str, y: str, limit: float | None) -> str:
    """With a limit, how far the best and the worst policy get below it; else their ratio at the largest common size."""
    if limit is not None:
        reach = {
            name: max((_size(r, x) for r in rows if r.ok and getattr(r, y) <= limit), default=0)
            for name, rows in curves.items()
        }
        least, most = min(reach, key=lambda name: reach[name]), max(reach, key=lambda name: reach[name])
        what = "tokens" if x == "seqlen" else "sequences"
        if reach[least] < reach[most]:
            shortest = f"only {reach[least]:,}" if reach[least] else "no size that was tried"
            return f"{most} fits {reach[most]:,} {what}, {least} {shortest}"
        return f"Every policy fits {reach[most]:,} {what}"
    ok = {name: {_size(r, x): getattr(r, y) for r in rows if r.ok} for name, rows in curves.items()}
    common = set.intersection(*map(set, ok.values())) if ok else set()
    if not common:
        return f"{q.label.capitalize()} by {SIZES[x]}"
    at = max(common)
    low, high = min(ok, key=lambda name: ok[name][at]), max(ok, key=lambda name: ok[name][at])
    ratio = ok[high][at] / ok[low][at]
    return f"At {at:,} {'tokens' if x == 'seqlen' else 'sequences'}, {high} needs {ratio:.1f} × what {low} does"
