"""One thing against another: decisions in a row, prediction against measurement, one loss curve against the next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes

from gctutor.errors import UserError
from gctutor.plots.canvas import dress, head, new_axes
from gctutor.plots.labels import annotation, end_label, label_ends, label_points
from gctutor.plots.style import GREEN, INK, PALE, QUIET_INK, VERMILLION, family_look, line_looks, readable, styled
from gctutor.plots.words import (
    NBSP,
    brief,
    number,
    percent,
    policy_lines,
    power,
    quantity,
    row_names,
    subtitle,
    wrapped,
)
from gctutor.results import StepCost


@styled
def plot_waterfall(
    steps: Sequence[tuple[str, StepCost]], *, ax: Axes | None = None, y: str = "step_s", title: str | None = None
) -> Axes:
    """From the first configuration to the last, one bar a decision: what each of `steps` (name, row) changes in `y`.

    Raises `UserError` when a row has no value to show.
    """
    missing = [name for name, row in steps if not row.ok or getattr(row, y) is None]
    if missing or len(steps) < 2:
        raise UserError(f"A waterfall needs two or more rows with {y}; missing: {', '.join(missing) or 'rows'}.")
    ax = ax or new_axes()[0]
    q = quantity(y)
    dress(ax, "", q.axis, grid="y")
    values = [getattr(row, y) / q.scale for _, row in steps]
    names = [steps[0][0], *(name for name, _ in steps[1:]), "result"]
    ax.bar(0, values[0], 0.62, color=PALE)
    for at, (before, after) in enumerate(itertools.pairwise(values), start=1):
        good = (after > before) == q.more_is_better
        look: dict[str, Any] = (
            {"color": GREEN} if good else {"facecolor": "#F9D9C2", "edgecolor": VERMILLION, "hatch": "//"}
        )
        ax.bar(at, abs(after - before), 0.62, bottom=min(before, after), linewidth=0, **look)
        change = number(abs(after - before))
        sign = "±" if change == number(0) else "+" if after > before else "−"
        color = INK if sign == "±" else readable(GREEN if good else VERMILLION)
        _above(ax, at, max(before, after), f"{sign}{change} {q.unit}", color)
    ax.bar(len(steps), values[-1], 0.62, color=INK)
    _above(ax, 0, values[0], f"{number(values[0])} {q.unit}", INK)
    _above(ax, len(steps), values[-1], f"{number(values[-1])} {q.unit}", INK)
    for at, level in enumerate(values):
        ax.plot([at + 0.31 * (at == 0) - 0.31 * (at > 0), at + 0.69], [level, level], color=PALE, zorder=1)
    width = 0.92 * 72 * ax.get_window_extent().width / ax.figure.dpi / (len(steps) + 1)
    ax.set_xticks(range(len(steps) + 1), [_tick(name, width) for name in names])
    ax.set_ylim(0, 1.12 * max(values))
    ax.tick_params(axis="x", length=0)
    finding = f"{len(steps) - 1} decisions change {q.label} from {q.show(getattr(steps[0][1], y))} to "
    finding += f"{q.show(getattr(steps[-1][1], y))} ({percent(values[-1] / values[0])})"
    head(ax, title or finding, subtitle(row for _, row in steps))
    return ax


def _tick(name: str, width_pt: float) -> str:
    return wrapped(name.replace(",", ", "), width_pt, rcParams["font.size"]).replace(", ", ",")


def _above(ax: Axes, x: float, y: float, text: str, color: str) -> None:
    nudge = (0, 0.3 * rcParams["font.size"])
    ax.annotate(
        text, (x, y), xytext=nudge, textcoords="offset points", ha="center", va="bottom", color=color, weight="bold"
    )


@styled
def plot_predicted_vs_measured(
    pairs: Sequence[tuple[StepCost, StepCost]],
    *,
    axes: Sequence[Axes] | None = None,
    bytes_field: str = "activation_bytes",
    titles: Sequence[str] | None = None,
) -> list[Axes]:
    """Two panels, bytes (band of 2 %) and step time (band of 10 %): measured over predicted, on the line when equal."""
    axes = list(axes) if axes is not None else new_axes(1, 2)
    text = subtitle(row for pair in pairs for row in pair)
    findings = []
    for ax, field, band in zip(axes, (bytes_field, "step_s"), (0.02, 0.10), strict=True):
        findings.append(_panel(ax, pairs, field, band))
    if titles is not None:
        findings = list(titles)
    head(axes, "; ".join(findings), text)
    return axes


def _panel(ax: Axes, pairs: Sequence[tuple[StepCost, StepCost]], field: str, band: float) -> str:
    """Draw one panel; returns its finding."""
    q = quantity(field)
    dress(ax, f"predicted ({q.unit})", f"measured ({q.unit})")
    ax.set_title(q.label, loc="left", size=rcParams["font.size"], weight="normal")
    known = [(p, m) for p, m in pairs if getattr(p, field) and getattr(m, field)]
    if not known:
        return f"{q.label}: nothing to compare"
    points = np.array([[getattr(row, field) / q.scale for row in pair] for pair in known])
    low, high = points.min(), points.max()
    pad = 0.12 * (high - low) or 0.2 * high
    ends = np.array([max(0.0, low - pad), high + 1.8 * pad])
    ax.fill_between(ends, ends * (1 - band), ends * (1 + band), color=PALE, alpha=0.45, linewidth=0, zorder=1)
    (identity,) = ax.plot(ends, ends, color=QUIET_INK, zorder=2)
    ax.set(xlim=ends, ylim=ends)
    ax.set_box_aspect(1)
    labels = []
    for (x, y), (_, measured), name in zip(points, known, row_names([p for p, _ in known]), strict=True):
        look = family_look(measured.policy)
        ax.plot(x, y, look.marker, color=look.color, zorder=3)
        labels.append(annotation(ax, policy_lines(name, 20), x, y))
    note = ax.text(0.98, 0.02, f"band: ± {100 * band:.0f} %", transform=ax.transAxes, ha="right", color=QUIET_INK)
    label_points(ax, labels, lines=[identity], texts=[note])
    errors = np.abs(points[:, 0] / points[:, 1] - 1)
    inside = int((errors <= band).sum())
    what = "Bytes" if field.endswith("bytes") else "step time"
    return (
        f"{what} within {100 * errors.max():.1f}{NBSP}% ({inside} of {len(errors)} in the {100 * band:.0f}{NBSP}% band)"
    )


@styled
def plot_loss_curves(
    curves: dict[str, list[float]], *, ax: Axes | None = None, title: str | None = None, subtitle: str = ""
) -> Axes:
    """The loss of each policy over the steps. Curves that coincide stay visible: later ones are thinner and dashed."""
    ax = ax or new_axes()[0]
    dress(ax, "step", "loss", grid="y")
    looks = line_looks(curves)
    width = rcParams["lines.linewidth"]
    labels = []
    for number_, (name, losses) in enumerate(curves.items()):
        steps = np.arange(1, len(losses) + 1)
        dashes = "-" if number_ == 0 else (3 * number_, (4, 4 * (len(curves) - 1)))
        ax.plot(
            steps,
            losses,
            color=looks[name]["color"],
            linewidth=width * (2.2 if number_ == 0 else 1.2),
            linestyle=dashes,
        )
        labels.append(
            end_label(
                ax, policy_lines(name), steps[-1], losses[-1], color=readable(looks[name]["color"]), weight="bold"
            )
        )
    ax.margins(x=0.02, y=0.1)
    label_ends(ax, labels)
    head(ax, title or _loss_finding(curves), subtitle)
    return ax


def _loss_finding(curves: dict[str, list[float]]) -> str:
    (reference, base), *others = curves.items()
    if not others:
        return f"Loss under {reference}"
    gaps = {name: max(abs(a - b) for a, b in zip(base, losses, strict=False)) for name, losses in others}
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] == 0:
        return f"All {len(curves)} policies give exactly the same losses"
    farthest = f"(the farthest: {brief(worst)})"
    return f"No policy strays more than {power(gaps[worst])} from the losses of {brief(reference)} {farthest}"
