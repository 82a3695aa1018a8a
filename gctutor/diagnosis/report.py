"""What the doctor says: findings in plain sentences, with the tables they rest on."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gctutor.gradients import LayerGradient

Table = tuple[str, Sequence[str], list[Sequence[str]]]  # title, heads, rows
FAULT, WARNING, OK = "fault", "warning", "ok"


@dataclass(frozen=True)
class Finding:
    """One thing found: `severity` is `fault`, `warning` or `ok`, `code` names the kind, `sentence` explains it."""

    severity: str
    code: str
    sentence: str

    @property
    def rank(self) -> int:
        """0 for a fault, the worst."""
        return (FAULT, WARNING, OK).index(self.severity)

    def __str__(self) -> str:
        return f"{self.severity.upper():7}  {self.sentence}"


@dataclass(frozen=True)
class CallSite:
    """A matrix product or attention kernel of the decoder layers, counted over all of them in one step.

    `forward` and `replayed` are how often it ran in each; `kept_bytes` is what its site kept, `replayed_flop` what
    running it again cost.
    """

    site: str
    operator: str
    forward: int
    replayed: int
    replayed_flop: int
    kept_bytes: int


@dataclass(frozen=True)
class Report:
    """A diagnosis of `policy` on `subject`; `how` says what was run. Prints as tables and sentences.

    `matched` counts what each mechanism matched in one step, by name. Bytes and FLOPs are of one step, None where the
    policy cannot be traced or did not run.
    """

    subject: str
    policy: str
    how: str
    findings: tuple[Finding, ...]
    gradients: tuple[LayerGradient, ...] = ()
    call_sites: tuple[CallSite, ...] = ()
    matched: dict[str, int] = field(default_factory=dict)
    activation_bytes: int | None = None
    none_activation_bytes: int | None = None
    recompute_flop: int | None = None
    flop: int | None = None

    @property
    def ok(self) -> bool:
        """Whether no fault was found (there may be warnings)."""
        return not any(finding.severity == FAULT for finding in self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the faults and warnings."""
        return tuple(finding.code for finding in self.findings if finding.severity != OK)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def tables(self) -> list[Table]:
        """Title, heads and rows of each table that has rows."""
        sites: list[Sequence[str]] = [
            (
                s.site,
                s.operator,
                str(s.forward),
                str(s.replayed),
                readable(s.replayed_flop, "FLOP"),
                readable(s.kept_bytes),
            )
            for s in self.call_sites
        ]
        gradients: list[Sequence[str]] = [
            (g.layer, f"{g.cosine:.6f}", f"{g.relative:.1e}", f"{g.worst:.1e}", g.worst_name.removeprefix("model."))
            for g in self.gradients
        ]
        matched: list[Sequence[str]] = [(name, str(count)) for name, count in self.matched.items()]
        tables: list[Table] = [
            ("Matched in one step", ("what", "calls"), matched),
            (
                "Expensive operators of the decoder layers, one step",
                ("site", "operator", "forward", "run again", "work again", "kept"),
                sites,
            ),
            (
                "Gradients against the same step without checkpointing",
                ("layer", "cosine", "relative error", "worst", "of parameter"),
                gradients,
            ),
        ]
        return [table for table in tables if table[2]]

    def __str__(self) -> str:
        parts = [f"{self.subject}: {self.policy}", self.how]
        for title, heads, rows in self.tables():
            parts.append("\n".join(["", title, *_aligned(heads, rows)]))
        return "\n".join([*parts, "", *map(str, self.findings)])

    def _repr_html_(self) -> str:
        tables = "".join(_html_table(*table) for table in self.tables())
        items = "".join(f"<li><b>{f.severity}</b> {html.escape(f.sentence)}</li>" for f in self.findings)
        head = f"<p><b>{html.escape(self.subject)}: {html.escape(self.policy)}</b><br>{html.escape(self.how)}</p>"
        return f"{head}<ul>{items}</ul>{tables}"


def readable(amount: float, unit: str = "B") -> str:
    """An amount with an SI prefix, to three digits or more: `1.21 GB`, `512 B`, `30.1 MFLOP`."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= scale:
            return f"{amount / scale:#.3g} {prefix}{unit}".replace(". ", " ")
    return f"{amount:.0f} {unit}"


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)]


def _html_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(title)}</caption>{line(heads, 'th')}{body}</table>"
