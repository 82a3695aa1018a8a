"""`StepCost` (one row: what a step costs) and `Results` (many), with their provenance and their file format."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gctutor.errors import UserError
from gctutor.workload import Workload

if TYPE_CHECKING:
    import pandas

SCHEMA = 1
TIMES = ("forward_s", "backward_s", "step_s")
BYTES = ("static_bytes", "activation_bytes", "peak_bytes", "reserved_bytes", "host_bytes")
NUMBERS = (*TIMES, *BYTES, "flop", "recompute_flop", "model_flop")


@dataclass(frozen=True)
class StepCost:
    """What one training step of `workload` costs under `policy`; bytes in bytes, times in seconds, work in FLOP.

    `source` is `measured`, `recorded` or `estimated`; `meter` says which instrument gave the bytes. `samples` holds
    the timed repeats, `forward_s`, `backward_s` and `step_s` their medians. `None` means "not available", never zero.
    """

    workload: Workload
    policy: str
    device: str
    source: str
    meter: str
    resolved: str = ""
    status: str = "ok"
    error: str | None = None
    static_bytes: int | None = None
    activation_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    step_s: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    flop: int | None = None
    recompute_flop: int | None = None
    model_flop: int | None = None
    breakdown: dict[str, int] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def tokens_per_s(self) -> float | None:
        return self.workload.tokens / self.step_s if self.step_s else None

    def mfu(self, peak_flop_per_s: float) -> float | None:
        """Model FLOPs utilisation: `model_flop` over what the device could do in `step_s`."""
        return self.model_flop / (self.step_s * peak_flop_per_s) if self.step_s and self.model_flop else None

    @property
    def key(self) -> tuple:
        """What makes two rows the same configuration on the same machine and code."""
        versions = {name: self.provenance.get(name) for name in ("torch", "transformers", "source_hash", "hardware")}
        return (self.workload, self.policy, self.device, self.source, json.dumps(versions, sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["workload"] = self.workload.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCost:
        """The row that `to_dict` gave. Raises `TypeError`, `KeyError` or `ValueError` for anything else."""
        row = cls(**{**data, "workload": Workload.from_dict(data["workload"])})
        for name in NUMBERS:
            value = getattr(row, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is {value!r}")
        return row

    def with_samples(self, samples: dict[str, list[float]]) -> StepCost:
        """This row with other samples, the medians computed again."""
        timed = {name: values for name, values in samples.items() if values and name in TIMES}
        medians: dict[str, Any] = {name: statistics.median(values) for name, values in timed.items()}
        return dataclasses.replace(self, samples=samples, **medians)


@dataclass(frozen=True)
class Results:
    """Rows in the order they were taken. Immutable; `+` joins, `where` selects, `to_frame` tabulates."""

    rows: tuple[StepCost, ...] = ()

    def __init__(self, rows: Iterable[StepCost] = ()) -> None:
        object.__setattr__(self, "rows", tuple(rows))

    def __iter__(self) -> Iterator[StepCost]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, policy: str) -> StepCost:
        """The only row of `policy`; `KeyError` when there is none, `UserError` when there are several."""
        found = [row for row in self.rows if row.policy == policy]
        if not found:
            raise KeyError(policy)
        if len(found) > 1:
            raise UserError(f"{len(found)} rows have the policy {policy!r}: narrow them with where(…) first.")
        return found[0]

    def __add__(self, other: Iterable[StepCost]) -> Results:
        return Results([*self.rows, *other])

    def where(self, test: Callable[[StepCost], bool] | None = None, **fields: Any) -> Results:
        """Rows that pass `test` and whose own or workload's `fields` have these values."""

        def matches(row: StepCost) -> bool:
            return all(
                getattr(row, name) == value if hasattr(row, name) else getattr(row.workload, name) == value
                for name, value in fields.items()
            )

        return Results(row for row in self.rows if matches(row) and (test is None or test(row)))

    def folded(self) -> Results:
        """One row a configuration: samples of its rounds joined, medians anew, the newest bytes and status.

        A round that failed does not hide an earlier one that succeeded.
        """
        groups: dict[tuple, list[StepCost]] = {}
        for row in self.rows:
            groups.setdefault(row.key, []).append(row)
        return Results(_fold(rounds) for rounds in groups.values())

    def to_frame(self) -> pandas.DataFrame:
        """A pandas table, one row a step, with the workload's fields as columns and the units in the names."""
        import pandas

        records = []
        for row in self.rows:
            record = row.to_dict()
            workload = record.pop("workload")
            for name in ("samples", "breakdown", "provenance"):
                record.pop(name)
            records.append({"policy": record.pop("policy"), **workload, **record})
        return pandas.DataFrame.from_records(records)

    def append_to(self, path: Path | str) -> None:
        """Append these rows to a JSON-lines file, one complete line each, flushed.

        A torn last line (a killed process) is taken off first. Raises `UserError` when the file ends in anything else.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_tail(path)
        with path.open("a", encoding="utf-8") as file:
            for row in self.rows:
                file.write(json.dumps({"schema": SCHEMA, **row.to_dict()}, ensure_ascii=False) + "\n")
                file.flush()

    @classmethod
    def read(cls, *paths: Path | str) -> Results:
        """Rows of JSON-lines files, folded. Raises `UserError` with file and line for anything that is not a row.

        The one exception is a torn last line, all that a killed process can leave: it is passed over.
        """
        rows: list[StepCost] = []
        for path in map(Path, paths):
            if not path.is_file():
                raise UserError(f"There is no results file {path}.")
            lines = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                torn = number == len(lines)
                row = _read_row(line, f"{path.name}, line {number}", torn)
                if row is not None:
                    rows.append(row)
        return cls(rows).folded()


def _read_row(line: bytes, where: str, torn: bool) -> StepCost | None:
    try:
        data = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        if torn and _starts_like_a_row(line):
            return None
        raise UserError(f"{where} is not JSON; the file was left as it is.") from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise UserError(f"{where} is not a gctutor row of schema {SCHEMA}; the file was left as it is.")
    try:
        return StepCost.from_dict(data)
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{where} is not a gctutor row ({error}); the file was left as it is.") from error


def _starts_like_a_row(line: bytes) -> bool:
    start = json.dumps({"schema": SCHEMA}).encode()[:-1]
    return line.startswith(start) or start.startswith(line)


def _mend_tail(path: Path) -> None:
    """Leave `path` ending in a complete line, or absent."""
    if not path.exists():
        return
    content = path.read_bytes()
    tail = content.rpartition(b"\n")[2]
    if not tail:
        return
    if _read_row(tail, f"{path.name}, last line", torn=True) is None:
        os.truncate(path, len(content) - len(tail))
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def _fold(rounds: list[StepCost]) -> StepCost:
    good = [row for row in rounds if row.ok]
    if not good:
        return rounds[-1]
    samples = {name: [s for row in good for s in row.samples.get(name, [])] for name in TIMES}
    samples = {name: values for name, values in samples.items() if values}
    return good[-1].with_samples(samples) if samples else good[-1]


@functools.cache
def source_hash() -> str:
    """A hash of the package's own source files: twelve hex digits."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(**more: Any) -> dict[str, Any]:
    """Where a row comes from: date, versions, the hash of the package's source, and `more`."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "liger": version_of("liger-kernel"),
        "source_hash": source_hash(),
        **more,
    }


def colophon(seed: int = 0) -> str:
    """The last line of a notebook: versions, device, seed and the hash of the package's source."""
    import torch

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    origin = provenance()
    names = ("python", "torch", "transformers", "liger")
    versions = ", ".join(f"{name} {origin[name]}" for name in names if origin[name])
    return f"gctutor source {origin['source_hash']}; {versions}; on {hardware}; seed {seed}"
