"""Operators against a device's ceilings (roofline), and call sites ranked by what their recompute buys (ROI)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Text

from gctutor.plots.canvas import dress, head, new_axes, plain_log
from gctutor.plots.labels import annotation, end_label, label_ends, label_points
from gctutor.plots.style import BOUND_STYLE, INK, PALE, QUIET_INK, readable, styled
from gctutor.plots.words import GB, MB, MS, NBSP, number, policy_lines

if TYPE_CHECKING:
    from gctutor.devices import Device
    from gctutor.operators import OperatorCost

TFLOP = 1e12
_LEAST_SHARE = 0.001  # of the operators' time, for a point of its own


@styled
def plot_roofline(
    operators: Sequence[OperatorCost],
    device: Device,
    *,
    ax: Axes | None = None,
    named: int = 8,
    title: str | None = None,
    subtitle: str | None = None,
) -> Axes:
    """Achieved FLOP/s over arithmetic intensity, log–log, area by share of their time, the `named` longest named.

    Solid ceilings are the data sheet's, dashed ones what real kernels reach (`device.efficiency`). Operators without
    FLOPs have no place on it; the subtitle says how much of the time they take.
    """
    ax = ax or new_axes()[0]
    dress(ax, "arithmetic intensity (FLOP/byte)", "rate (TFLOP/s)")
    plain_log(ax, "x")
    plain_log(ax, "y")
    shown = [op for op in operators if op.flop > 0 and op.bytes > 0 and op.seconds > 0 and op.share >= _LEAST_SHARE]
    shown.sort(key=lambda op: op.share, reverse=True)
    _frame(ax, shown, device)
    lines, texts = _ceilings(ax, device)
    size = rcParams["lines.markersize"]
    for op in shown:
        look = BOUND_STYLE[op.bound]
        area = size**2 * (0.25 + 60 * op.share)
        ax.scatter(op.intensity, _rate(op), area, look.color, marker=look.marker, edgecolors="white", zorder=3)
    labels = [annotation(ax, policy_lines(text), *at) for text, at in _clusters(shown)[:named]]
    label_points(ax, labels, lines=lines, texts=texts)
    left = sum(op.share for op in operators if op.flop == 0 or op.intensity < device.ridge())
    finding = f"{100 * left:.0f}{NBSP}% of these operators' time is spent left of the ridge"
    head(ax, title or finding, subtitle or _roofline_subtitle(operators, shown, device))
    return ax


def _rate(op: OperatorCost) -> float:
    return op.flop / op.seconds / TFLOP


def _clusters(ordered: Sequence[OperatorCost]) -> list[tuple[str, tuple[float, float]]]:
    """A name and a place for each group of operators that the eye sees as one point; the longest in time first."""
    groups: list[list[OperatorCost]] = []
    for op in ordered:
        near = (g for g in groups if all(abs(np.log10(f(op) / f(g[0]))) < 0.07 for f in (lambda o: o.intensity, _rate)))
        group = next(near, None)
        if group is None:
            groups.append([op])
        else:
            group.append(op)
    one_phase = len({op.phase for op in ordered}) == 1
    groups.sort(key=lambda group: sum(op.share for op in group), reverse=True)
    return [(_cluster_name(group, one_phase), (group[0].intensity, _rate(group[0]))) for group in groups]


def _cluster_name(group: Sequence[OperatorCost], one_phase: bool) -> str:
    """The sites, and their phase where the figure shows several; what the layer itself runs has no site of its own."""
    sites = ", ".join(dict.fromkeys(op.site.rpartition(".")[2] or "layer" for op in group))
    phases = {op.phase for op in group}
    return f"{sites} ({phases.pop()})" if len(phases) == 1 and not one_phase else sites


def _frame(ax: Axes, shown: Sequence[OperatorCost], device: Device) -> None:
    ridge, top = device.ridge(), device.bf16_flop_per_s / TFLOP
    xs = [op.intensity for op in shown] or [ridge]
    left = 0.15 * min([*xs, ridge / 10])
    ax.set_xlim(left, 2.5 * max([*xs, 2 * ridge]))
    ax.set_ylim(0.08 * min([left * device.bandwidth_bytes_per_s / TFLOP, *map(_rate, shown)]), 8 * top)


def _ceilings(ax: Axes, device: Device) -> tuple[list[Line2D], list[Text]]:
    """Roofs and ridge: bandwidth written along each slope, compute rate in the margin, the ridge at its foot."""
    low, high = ax.get_xlim()
    rates = device.efficiency
    roofs = (
        ("data sheet", device.bf16_flop_per_s, device.bandwidth_bytes_per_s, "-", INK, 1.35),
        (
            "kernels reach",
            device.bf16_flop_per_s * rates.gemm,
            device.bandwidth_bytes_per_s * rates.bandwidth,
            (0, (4, 2)),
            QUIET_INK,
            0.7,
        ),
    )
    lines: list[Line2D] = []
    margin, slopes = [], []
    for name, flop_per_s, bytes_per_s, dashes, color, aside in roofs:
        y = np.array([low * bytes_per_s, flop_per_s, flop_per_s]) / TFLOP
        lines += ax.plot([low, flop_per_s / bytes_per_s, high], y, color=color, linestyle=dashes, zorder=2)
        margin.append(
            end_label(ax, f"{name}\n{number(flop_per_s / TFLOP)} TFLOP/s", high, flop_per_s / TFLOP, color=color)
        )
        x = np.sqrt(low * device.ridge())
        rate = f"{name} {number(bytes_per_s / 1e12)} TB/s"
        slopes.append(_along_slope(ax, rate, x, x * bytes_per_s / TFLOP, aside, color))
    label_ends(ax, margin)
    ridge = device.ridge()
    lines.append(ax.axvline(ridge, color=PALE, linestyle=(0, (1, 1.5)), zorder=1))
    return lines, slopes + _feet(ax, ridge)


def _along_slope(ax: Axes, text: str, x: float, y: float, aside: float, color: str) -> Text:
    """Text along a line of slope 1 on log–log axes, above it (`aside` > 1) or below."""
    va = "bottom" if aside > 1 else "top"
    angle = float(np.degrees(np.arctan2(y * aside, x)))
    along: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "transform_rotates_text": True}
    return ax.text(x, y * aside, text, ha="center", va=va, color=color, **along)


def _feet(ax: Axes, ridge: float) -> list[Text]:
    """What the two sides of the ridge mean, and where it is, at the bottom of the axes."""
    font = rcParams["font.size"]
    words = (
        ("memory-bound", "right", 0.5, readable(BOUND_STYLE["memory"].color)),
        ("compute-bound", "left", 0.5, readable(BOUND_STYLE["compute"].color)),
        (f"ridge {number(ridge)} FLOP/byte", "right", 2.0, QUIET_INK),
    )
    texts = [
        ax.annotate(
            text,
            (ridge, 0),
            xycoords=ax.get_xaxis_transform(),
            xytext=(0.5 * font * (1 if ha == "left" else -1), up * font),
            textcoords="offset points",
            ha=ha,
            color=color,
            weight="bold",
        )
        for text, ha, up, color in words
    ]
    for text in texts:
        text.set_in_layout(False)
    return list(texts)


def _roofline_subtitle(operators: Sequence[OperatorCost], shown: Sequence[OperatorCost], device: Device) -> str:
    parts = [f"estimated for {device.name}, {device.profile}", "area: share of time"]
    rest = sum(op.share for op in operators) - sum(op.share for op in shown)
    if rest > 0.0005:
        parts.append(f"not drawn: operators without FLOPs or below 0.1 % each, {100 * rest:.1f} % of the time in all")
    return " · ".join(parts)


class Site(NamedTuple):
    """A call site's kept bytes, the seconds its recompute takes, and what bounds it."""

    name: str
    kept_bytes: int
    recompute_s: float
    bound: str

    @property
    def roi(self) -> float:
        return self.kept_bytes / self.recompute_s


def rank_sites(operators: Iterable[OperatorCost]) -> list[Site]:
    """Call sites by bytes freed per second of recompute, best first; those that keep nothing or rerun nothing drop out.

    A site of several operators is bound by what bounds the longest of them.
    """
    groups: dict[str, list[OperatorCost]] = {}
    for op in operators:
        groups.setdefault(op.site, []).append(op)
    sites = [
        Site(
            name or "layer",
            sum(op.kept_bytes for op in ops),
            sum(op.recompute_s for op in ops),
            max(ops, key=lambda op: op.recompute_s).bound,
        )
        for name, ops in groups.items()
    ]
    return sorted((s for s in sites if s.kept_bytes > 0 and s.recompute_s > 0), key=lambda s: s.roi, reverse=True)


@styled
def plot_roi(
    operators: Sequence[OperatorCost],
    *,
    ax: Axes | None = None,
    most: int = 12,
    title: str | None = None,
    subtitle: str | None = None,
) -> Axes:
    """Bytes freed per second of recompute, per call site, best first (at most `most`), coloured by what bounds them."""
    ax = ax or new_axes()[0]
    ranked = rank_sites(operators)
    sites = ranked[:most]
    dress(ax, "GB freed per second of recompute", "")
    widest = max((site.roi for site in sites), default=1.0) / GB.scale
    for level, site in enumerate(sites):
        hatch = "//" if site.bound == "memory" else None
        ax.barh(
            level,
            site.roi / GB.scale,
            0.66,
            color=BOUND_STYLE[site.bound].color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        size = GB if site.kept_bytes >= GB.scale else MB
        detail = f"{size.show(site.kept_bytes)} for {number(site.recompute_s / MS.scale)} ms"
        text = ax.text(site.roi / GB.scale + 0.01 * widest, level, detail, va="center_baseline")
        text.set_in_layout(False)  # its place depends on the layout
    ax.set_yticks(range(len(sites)), [site.name for site in sites])
    ax.set(xlim=(0, 1.42 * widest), ylim=(len(sites) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    _name_bounds(ax, sites)
    left_out = f" · {len(ranked) - most} sites of lower rank not drawn" if len(ranked) > most else ""
    head(ax, title or _roi_finding(sites), (subtitle or "kept bytes over the time to compute them again") + left_out)
    return ax


def _name_bounds(ax: Axes, sites: Sequence[Site]) -> None:
    """The bounds' names in their colours, in the corner that a ranking leaves empty."""
    for number_, bound in enumerate(dict.fromkeys(site.bound for site in sites)):
        offset = (-0.5 * rcParams["font.size"], (0.6 + 1.5 * number_) * rcParams["font.size"])
        ax.annotate(
            f"{bound}-bound",
            (1, 0),
            xycoords="axes fraction",
            xytext=offset,
            textcoords="offset points",
            ha="right",
            color=readable(BOUND_STYLE[bound].color),
            weight="bold",
        )


def _roi_finding(sites: Sequence[Site]) -> str:
    if len(sites) < 2:
        return "What recompute buys, by call site"
    ratio = sites[0].roi / sites[-1].roi
    return f"A second of recompute at {sites[0].name} frees {number(ratio)} times what it frees at {sites[-1].name}"
