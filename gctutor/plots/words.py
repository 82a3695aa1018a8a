"""What a figure says: quantities with their units, row names, subtitles, and text wrapped to a width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from gctutor.errors import unknown
from gctutor.policies import PolicyError, parse
from gctutor.results import StepCost

NBSP = "\u00a0"  # keeps a number and its unit on one line
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Quantity:
    """How a field of a row is shown: a name, a unit and how many SI units make one of it."""

    label: str
    unit: str
    scale: float
    more_is_better: bool = False

    @property
    def axis(self) -> str:
        return f"{self.label} ({self.unit})"

    def show(self, value: float) -> str:
        """`value` (in SI units) with its unit, to three digits."""
        return f"{number(value / self.scale)}{NBSP}{self.unit}"


QUANTITIES = {
    "activation_bytes": Quantity("activations kept for backward", "GB", 1e9),
    "peak_bytes": Quantity("peak memory of the step", "GB", 1e9),
    "reserved_bytes": Quantity("memory reserved by the allocator", "GB", 1e9),
    "static_bytes": Quantity("weights and optimizer state", "GB", 1e9),
    "host_bytes": Quantity("memory used on the host", "GB", 1e9),
    "step_s": Quantity("step time", "ms", 1e-3),
    "forward_s": Quantity("forward time", "ms", 1e-3),
    "backward_s": Quantity("backward time", "ms", 1e-3),
    "tokens_per_s": Quantity("throughput", "tokens/s", 1.0, more_is_better=True),
    "flop": Quantity("work of a step", "TFLOP", 1e12),
    "recompute_flop": Quantity("work done again", "TFLOP", 1e12),
}
GB = Quantity("memory", "GB", 1e9)
MB = Quantity("memory", "MB", 1e6)
MS = Quantity("time", "ms", 1e-3)


def quantity(field: str) -> Quantity:
    """How to show `field` of a row. Raises `UserError` for a field that is not a number with a unit."""
    if field not in QUANTITIES:
        raise unknown("quantity to plot", field, QUANTITIES)
    return QUANTITIES[field]


def number(value: float) -> str:
    """Three significant digits, thousands separated: `0.41`, `3.83`, `34.4`, `435`, `9,420`."""
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}".replace("-", "−")


def percent(ratio: float) -> str:
    """A change as a signed percentage: `percent(1.24)` is `+24 %`."""
    change = 100 * (ratio - 1)
    digits = 0 if abs(change) >= 9.95 else 1
    return f"{change:+.{digits}f}{NBSP}%".replace("-", "−")


def more_or_less(ratio: float) -> str:
    """A change in words: `more_or_less(0.45)` is `55 % less`."""
    text = percent(ratio)
    return f"{text[1:]} {'less' if text[0] == '−' else 'more'}"


def power(value: float) -> str:
    """A small number to one digit: `power(3.2e-6)` is `3 × 10⁻⁶`."""
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}{NBSP}×{NBSP}10{str(int(exponent)).translate(_RAISED)}"


def subtitle(rows: Iterable[StepCost]) -> str:
    """Workload, then source and device, as the rows have them; days for what was measured or recorded."""
    rows = list(rows)
    parts = [*_common_parts(rows), *_origins(rows)]
    return " · ".join(part for part in parts if part)


def _common_parts(rows: Sequence[StepCost]) -> list[str]:
    labels = [row.workload.label.split(", ") for row in rows]
    return [", ".join(part for part in labels[0] if all(part in label for label in labels))] if labels else []


def _origins(rows: Sequence[StepCost]) -> list[str]:
    days: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        day = str(row.provenance.get("date", ""))[:10]
        days.setdefault((row.source, row.device), set()).update({day} - {""})
    return [_origin(source, device, sorted(found)) for (source, device), found in days.items()]


def _origin(source: str, device: str, days: list[str]) -> str:
    if source == "estimated" or not days:
        return f"{source} {'for' if source == 'estimated' else 'on'} {device}"
    return f"{source} on {device}, {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}"


def row_names(rows: Sequence[StepCost]) -> list[str]:
    """Each row's policy, followed by what sets its workload (or, within one source, its device) apart."""
    labels = [row.workload.label.split(", ") for row in rows]
    several = {row.source for row in rows if len({r.device for r in rows if r.source == row.source}) > 1}
    names = []
    for row, label in zip(rows, labels, strict=True):
        apart = [part for part in label if not all(part in other for other in labels)]
        apart += [row.device] if row.source in several else []
        names.append(" · ".join([brief(row.policy), *([", ".join(apart)] if apart else [])]))
    return names


def text_width_pt(text: str, size: float, weight: str = "normal") -> float:
    """Width in points of one line of text in the figures' font."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]


def wrapped(text: str, width_pt: float, size: float, weight: str = "normal") -> str:
    """`text` broken between words into lines of at most `width_pt` points where words allow it."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width_pt(longer, size, weight) <= width_pt:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def balanced(text: str, width_pt: float, size: float, weight: str = "normal") -> str:
    """`wrapped` in as many lines, of about equal length: no last line of one word."""
    best = wrapped(text, width_pt, size, weight)
    for share in (0.9, 0.8, 0.7, 0.6):
        narrower = wrapped(text, share * width_pt, size, weight)
        if len(narrower.splitlines()) == len(best.splitlines()):
            best = narrower
    return best


def brief(policy: str) -> str:
    """A policy's canonical spelling, which names a full list shortly (`modules:all`); other text as it is."""
    try:
        return str(parse(policy))
    except PolicyError:
        return policy


def policy_lines(name: str, most: int = 27) -> str:
    """A policy's name, in brief, broken after commas and semicolons into lines of about `most` characters."""
    lines = [""]
    for piece in re.findall(r"[^,; ]+[,; ]*", brief(name)):
        if lines[-1] and len(lines[-1]) + len(piece.strip()) > most:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip() for line in lines)
