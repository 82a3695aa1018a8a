"""What a notebook asserts (`check`), and the source article's claims: judged by code, stored, shown as a scorecard."""

from __future__ import annotations

import datetime
import functools
import hashlib
import html
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gctutor.devices import DATA
from gctutor.errors import UserError, unknown
from gctutor.results import source_hash

if TYPE_CHECKING:
    import pandas

ROOT = DATA.parent
COMMITTED = DATA / "verdicts.json"

Figure = float | tuple[float, float]  # a number, or a range from low to high
Source = Literal["measured", "recorded", "estimated"]
Outcome = Literal["holds", "holds when", "does not hold"]
STRENGTH = ("estimated", "recorded", "measured")
STALE = "older than its notebook: run it again"


def check(condition: object, message: str) -> None:
    """A lesson's check: print `message` with a tick, or raise `AssertionError` with it."""
    if not condition:
        raise AssertionError(message)
    print(f"✓ {message}")


def check_close(value: float, expected: float, *, rel: float, what: str) -> None:
    """Check that `value` is within the share `rel` of `expected`; both are shown, passed or failed."""
    off = abs(value - expected) / abs(expected) if expected else math.inf if value else 0.0
    check(off <= rel, f"{what}: {value:,.6g} against {expected:,.6g}, {off:.2%} off ({rel:.2%} allowed)")


class Claim(BaseModel):
    """One claim of the article. `value` is a number, a range, a table of either by name, or None for a statement."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    section: str
    claim: str
    needs: Literal["any", "gpu"]
    notebook: str
    value: Figure | dict[str, Figure] | None = None
    unit: str | None = None


class Verdict(BaseModel):
    """What code found about a claim, and where. Shown as one paragraph; stored as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    verdict: Outcome
    when: str | None = None
    because: str
    value: float | dict[str, float] | None = None
    tolerance: float | None = None
    source: Source
    device: str | None = None
    notebook: str
    notebook_hash: str | None = None
    source_hash: str
    date: str

    @property
    def headline(self) -> str:
        """`holds`, `holds when …` or `does not hold`."""
        return f"{self.verdict} {self.when}" if self.verdict == "holds when" else self.verdict

    @property
    def stale(self) -> bool:
        """Whether the notebook has changed since it gave this verdict."""
        now = notebook_hash(self.notebook)
        return now is not None and now != self.notebook_hash

    @property
    def origin(self) -> str:
        """The source of the figures, with the device: `estimated for H100 SXM`."""
        where = {"measured": "on", "recorded": "on", "estimated": "for"}[self.source]
        return f"{self.source} {where} {self.device}" if self.device else self.source

    def __str__(self) -> str:
        claim = find_claim(self.id)
        figures = _comparison(claim, self.value)
        return f"{self.id} {self.headline}: {claim.claim} {figures}{_sentence(self.because)} ({self.origin})"

    def _repr_html_(self) -> str:
        claim = find_claim(self.id)
        figures = html.escape(_comparison(claim, self.value) + _sentence(self.because))
        return (
            f"<p><b>{self.id} {html.escape(self.headline)}.</b> <i>{html.escape(claim.claim)}</i> {figures} "
            f"<small>({html.escape(self.origin)})</small></p>"
        )


@functools.cache
def list_claims() -> tuple[Claim, ...]:
    """Every claim of `data/claims.toml`, in the article's order."""
    entries = tomllib.loads((DATA / "claims.toml").read_text(encoding="utf-8"))["claim"]
    return tuple(Claim.model_validate(entry) for entry in entries)


def find_claim(claim_id: str) -> Claim:
    """The claim called `claim_id`; `UserError` when there is none."""
    claims = {claim.id: claim for claim in list_claims()}
    if claim_id not in claims:
        raise unknown("claim", claim_id, claims)
    return claims[claim_id]


def verdict_of(value: float, claimed: Figure, rel: float) -> Outcome:
    """`holds` when `value` is within the share `rel` of the claimed number, or of the ends of the claimed range."""
    low, high = claimed if isinstance(claimed, tuple) else (claimed, claimed)
    return "holds" if low - rel * abs(low) <= value <= high + rel * abs(high) else "does not hold"


def decide(
    claim_id: str,
    *,
    because: str,
    value: float | Mapping[str, float] | None = None,
    tolerance: float | None = None,
    holds: bool | None = None,
    when: str | None = None,
    source: Source = "estimated",
    device: str | None = None,
    notebook: str | None = None,
) -> Verdict:
    """The verdict on a claim from computed figures; nothing is shown or stored.

    A claim with figures is compared with `value` (same unit and names) within the share `tolerance`, all figures
    together; otherwise, or to overrule that with a finer computed test, pass `holds`. `when` is the condition under
    which it holds. Raises `UserError` when the verdict cannot be derived.
    """
    claim = find_claim(claim_id)
    if holds is None:
        holds = _matches(claim, value, tolerance)
    outcome: Outcome = ("holds when" if when else "holds") if holds else "does not hold"
    home = notebook or claim.notebook
    if value is not None:
        value = {k: float(v) for k, v in value.items()} if isinstance(value, Mapping) else float(value)
    return Verdict(
        id=claim_id,
        verdict=outcome,
        when=when if holds else None,
        because=because,
        value=value,
        tolerance=tolerance,
        source=source,
        device=device,
        notebook=home,
        notebook_hash=notebook_hash(home),
        source_hash=source_hash(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def judge(claim_id: str, *, because: str, **evidence: Any) -> None:
    """Decide a claim (the arguments are those of `decide`), show the verdict, and store it in the run folder."""
    verdict = decide(claim_id, because=because, **evidence)
    path = run_folder() / verdict.notebook / f"{claim_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(verdict.model_dump_json(indent=1) + "\n", encoding="utf-8")
    _show(verdict)


def _matches(claim: Claim, value: float | Mapping[str, float] | None, tolerance: float | None) -> bool:
    if value is None or tolerance is None or claim.value is None:
        raise UserError(
            f"{claim.id} needs holds=True or False from a computed test"
            + ("." if claim.value is None else ", or value=… and tolerance=… to compare with the claimed figures.")
        )
    claimed = _named(claim.value)
    found = _named(value)
    if found.keys() != claimed.keys():
        raise UserError(f"{claim.id} claims {_names(claimed)}, so value must have the same, not {_names(found)}.")
    return all(verdict_of(found[name], claimed[name], tolerance) == "holds" for name in claimed)


def _named(value: Figure | Mapping[str, Any]) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"": value}


def _names(figures: Iterable[str]) -> str:
    return ", ".join(name or "one number" for name in figures)


def notebook_hash(name: str) -> str | None:
    """A hash of the notebook's source in `notebooks/src`: twelve hex digits, None when there is no such notebook."""
    path = ROOT / "notebooks" / "src" / f"{name}.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else None


def run_folder() -> Path:
    """Where this run's verdicts go: `verdicts` under `$GCTUTOR_OUT`, or under the repository's `build`."""
    return Path(os.environ.get("GCTUTOR_OUT") or ROOT / "build") / "verdicts"


def verdicts(folder: Path | str | None = None, committed: Path | str = COMMITTED) -> list[Verdict]:
    """Every verdict: those of the run folder, and the committed ones where this run gave none, in the claims' order.

    A claim may have one verdict from each notebook that judges it. Raises `UserError` for an unreadable file.
    """
    found = {(v.id, v.notebook): v for v in _committed(Path(committed))}
    for path in sorted(Path(folder or run_folder()).glob("*/*.json")):
        verdict = _verdict(_json(path), path)
        found[verdict.id, verdict.notebook] = verdict
    order = [claim.id for claim in list_claims()]
    return sorted(found.values(), key=lambda v: (order.index(v.id), v.notebook))


def collect(folder: Path | str | None = None, path: Path | str = COMMITTED) -> None:
    """Write the run's verdicts to `path`, over the committed ones; a verdict that says the same keeps its old date."""
    path = Path(path)
    before = {(v.id, v.notebook): v for v in _committed(path)}
    lines = []
    for verdict in verdicts(folder, path):
        old = before.get((verdict.id, verdict.notebook))
        if old is not None and _same(old, verdict):
            verdict = old
        lines.append(verdict.model_dump_json(exclude_none=True))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _same(one: Verdict, other: Verdict) -> bool:
    unlike = {"date", "source_hash"}
    return one.model_dump(exclude=unlike) == other.model_dump(exclude=unlike)


def _committed(path: Path) -> list[Verdict]:
    if not path.exists():
        return []
    entries = _json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path.name} is not a list of verdicts.")
    return [_verdict(entry, path) for entry in entries]


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path.name} is not JSON; run its notebook again, or delete it.") from error


def _verdict(data: object, path: Path) -> Verdict:
    try:
        verdict = Verdict.model_validate(data)
        find_claim(verdict.id)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{path.name} is not a verdict ({field}: {first['msg']}); run its notebook again.") from error
    return verdict


def scorecard(folder: Path | str | None = None, committed: Path | str = COMMITTED) -> pandas.DataFrame:
    """Every claim, one row: what is claimed, the verdict, why, from which source and notebook, and its `status`.

    Of several verdicts the one from the strongest source counts (measured, recorded, estimated), then that of the
    claim's own notebook.
    """
    import pandas

    given: dict[str, list[Verdict]] = {}
    for verdict in verdicts(folder, committed):
        given.setdefault(verdict.id, []).append(verdict)
    rows = []
    for claim in list_claims():
        found = given.get(claim.id)
        best = (
            max(found, key=lambda v: (STRENGTH.index(v.source), v.notebook == claim.notebook, v.notebook))
            if found
            else None
        )
        rows.append(
            {
                "id": claim.id,
                "section": claim.section,
                "claim": claim.claim,
                "claimed": _figures(claim.value, claim.unit),
                "verdict": best.headline if best else "not judged here",
                "value": _figures(best.value, claim.unit) if best else "",
                "because": best.because if best else "",
                "source": best.origin if best else "",
                "notebook": best.notebook if best else claim.notebook,
                "status": _status(claim, best),
            }
        )
    return pandas.DataFrame(rows)


def _status(claim: Claim, verdict: Verdict | None) -> str:
    if verdict is None:
        number = claim.notebook.partition("_")[0]
        return "needs a GPU" if claim.needs == "gpu" else f"notebook {number} has not been run"
    if verdict.stale:
        return STALE
    if claim.needs == "gpu" and verdict.source == "estimated":
        return "judged from an estimate: needs a GPU to be measured"
    return "judged"


def _show(verdict: Verdict) -> None:
    try:
        from IPython import get_ipython
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(verdict)
    else:
        from IPython.display import display

        display(verdict)


def _comparison(claim: Claim, value: float | dict[str, float] | None) -> str:
    if value is None:
        return ""
    found = _figures(value, claim.unit)
    return f"Claimed {_figures(claim.value, claim.unit)}; found {found}. " if claim.value is not None else f"{found}. "


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


UNITS = {"_flop_per_byte": "FLOP/byte", "_bytes": "bytes", "_share": "share", "_ratio": "ratio", "_s": "s"}


def _figures(value: Figure | Mapping[str, Figure] | None, unit: str | None) -> str:
    """Figures for reading: `42 GB`, `30–70 %`, or `memory 42 GB, step 612 ms`."""
    if value is None:
        return ""
    if not isinstance(value, Mapping):
        return _figure(value, unit)
    parts = []
    for name, figure in value.items():
        suffix = next((suffix for suffix in UNITS if name.endswith(suffix)), "")
        label = name.removesuffix(suffix).replace("_", " ")
        parts.append(f"{label} {_figure(figure, UNITS.get(suffix))}")
    return ", ".join(parts)


def _figure(value: Figure, unit: str | None) -> str:
    scale, shown = {"bytes": (1e-9, "GB"), "s": (1e3, "ms"), "share": (1e2, "%"), "ratio": (1, "×")}.get(
        unit or "", (1, unit or "")
    )
    ends = value if isinstance(value, tuple) else (value,)
    return f"{'–'.join(f'{scale * end:,.4g}' for end in ends)} {shown}".strip()
