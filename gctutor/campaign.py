"""`gctutor campaign`: the fixed rows of one device, most telling first, in a fixed time, each round saved when taken.

A campaign is a row of turns: in each, the policies of one workload take turns on one model. What the file already holds
is not taken again, so a campaign that was stopped anywhere goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gctutor import gpu_probe
from gctutor.devices import DATA, Device, slug
from gctutor.errors import UserError
from gctutor.estimation import estimate
from gctutor.measurement import STEPS_A_ROUND, WARM_UP_STEPS, Bench, unmeasured
from gctutor.planner import RESERVE_BYTES
from gctutor.policies import parse
from gctutor.results import Results, StepCost
from gctutor.workload import Workload

RECORDED = DATA / "recorded"
POLICIES = (
    "none",
    "block",
    "modules:all",
    "budget:0.2",
    "budget:0.36",
    "ops:mm,core_attn,-down_proj",
    "sub:mlp",
    "block/2",
    "block+offload",
    "ops:every2mm,core_attn",
    "ops:mm,core_attn",
)
FOR_LIGER = ("none", "block", "modules:all", "budget:0.2", "budget:0.36", "ops:mm,core_attn,-down_proj", "sub:mlp")
COMPILED = ("compile", "compile:0.5", "compile:0.2")
NO_LOSS = "liger:rms_norm,rope,swiglu"
DRAWN = ("none", "block", "modules:all")  # of the first turn: their memory timelines are kept too
COMPILE_CAP_S = 120.0
# Assumed when minutes are predicted: to build a model, to compile once, and steps that are traced and not timed.
BUILD_S, COMPILE_S, UNTIMED_STEPS = 5.0, 30.0, 3
HOST_BOUND_BELOW_S = 1.0  # a longer step is not bound by the host: its busy share is not taken


@dataclass(frozen=True)
class Turn:
    """`policies` take turns on `workload` until each has `rounds` rounds, or until the turn has lasted `cap_s`."""

    workload: Workload
    policies: tuple[str, ...]
    rounds: int = 2
    cap_s: float = math.inf


@dataclass(frozen=True)
class Planned:
    """A row of the plan: its place in it, how many rounds it still takes there, what a step should cost, and how long.

    `in_time` says whether its rounds should fit the campaign's minutes.
    """

    priority: int
    group: int
    workload: Workload
    policy: str
    rounds: int
    cost: StepCost
    seconds: float
    in_time: bool

    def to_dict(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**data, "workload": self.workload.to_dict(), "cost": self.cost.to_dict()}


# --- the plan ---


def plan(model: str, device: Device) -> tuple[Turn, ...]:
    """The turns for `model` on `device`, most telling first. Raises `UserError` when not even one layer fits.

    Every row gets its first round before any on a CPU gets its second, which only refines it.
    """
    if model == "nano":
        return _nano_plan()
    if device.kind == "cpu":
        raise UserError(f"A campaign on a CPU runs nano, not {model}: leave --model out.")
    first = deepest(Workload(model, 1, 4096), device)
    larger = [first.replace(batch=4), first.replace(seqlen=16384)]
    turns = [Turn(first, POLICIES), Turn(first.replace(kernels=NO_LOSS), FOR_LIGER)]
    if first.layers is not None and first.layers > 1:
        turns.append(Turn(first.replace(layers=first.layers // 2), POLICIES))  # with which `at_depth` extrapolates
    turns.append(Turn(first.replace(kernels="liger"), FOR_LIGER))
    for workload in larger:
        turns += [Turn(workload, POLICIES), Turn(workload.replace(kernels=NO_LOSS), FOR_LIGER)]
        turns.append(Turn(workload.replace(kernels="liger"), FOR_LIGER))
    return (*turns, Turn(first, COMPILED, rounds=1, cap_s=COMPILE_CAP_S))


def _nano_plan() -> tuple[Turn, ...]:
    small = Workload("nano", 1, 256, precision="fp32")
    large, shallow = small.replace(batch=2), small.replace(layers=2)
    first = [Turn(small, POLICIES, 1), Turn(large, POLICIES, 1), Turn(shallow, ("compile",), 1)]
    return (*first, Turn(small, POLICIES, 3), Turn(large, POLICIES, 3))


def deepest(workload: Workload, device: Device) -> Workload:
    """`workload`, with fewer layers if that is what it takes for `none` to fit `device` by its estimate."""

    def fits(layers: int) -> bool:
        peak = estimate(workload.replace(layers=layers), "none", device).peak_bytes
        return peak is not None and peak <= device.usable_bytes - RESERVE_BYTES

    if fits(workload.n_layers):
        return workload
    low, high = 0, workload.n_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise UserError(f"Not one layer of {workload.model} fits {device.name}: name a smaller model, or nano.")
    return workload.replace(layers=low)


def forecast(turns: Sequence[Turn], device: Device, minutes: float) -> Iterator[Planned]:
    """The rows in order, each with its estimate on `device` and the seconds that its rounds should take."""
    done: dict[tuple[Workload, str], int] = {}
    left, priority = 60 * minutes, 0
    for group, turn in enumerate(turns):
        cap = turn.cap_s
        left -= BUILD_S
        for policy in turn.policies:
            before = done.get((turn.workload, policy), 0)
            cost = predicted(turn.workload, policy, device)
            rounds = (turn.rounds if cost.ok else 1) - before  # what cannot run is tried once
            if rounds < 1:
                continue
            seconds = sum(round_seconds(cost, number == 0) for number in range(before, before + rounds))
            done[turn.workload, policy] = before + rounds
            in_time = seconds <= min(left, cap)
            if in_time:
                left, cap = left - seconds, cap - seconds
            yield Planned(priority, group, turn.workload, policy, rounds, cost, seconds, in_time)
            priority += 1


def predicted(workload: Workload, policy: str, device: Device) -> StepCost:
    """The estimate of a row; for a compiled one, which cannot be traced, that of eager `none`."""
    try:
        row = estimate(workload, "none" if policy.startswith("compile") else policy, device)
    except UserError as error:  # a budget that not even `block` keeps
        return StepCost(workload, policy, device.name, "estimated", "", status="refused", error=str(error))
    return dataclasses.replace(row, policy=policy)


def round_seconds(cost: StepCost, first: bool) -> float:
    """How long one round should take: its steps, timed and not, and the compiler's time."""
    compiling = COMPILE_S if cost.policy.startswith("compile") else 0.0
    if not cost.ok:  # out of memory shows within a step, a refusal at once
        return cost.step_s or 0.0
    steps = STEPS_A_ROUND + (WARM_UP_STEPS + UNTIMED_STEPS if first else 1)
    return compiling + steps * (cost.step_s or 0.0)


# --- the run ---


def default_file(hardware: str) -> Path:
    """Where the rows of this hardware are recorded."""
    return RECORDED / f"{slug(hardware)}.jsonl"


def run(
    turns: Sequence[Turn],
    card: Device,
    *,
    device: str,
    minutes: float,
    save: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Results:
    """Take the rows of `turns` that `save` lacks on `device` (`cuda` or `cpu`) and return those of the plan so far.

    A round is begun only if it should end within `minutes`. What goes wrong in a row is that row, not the end.
    """
    stored = Results.read(save) if save.exists() else Results()
    log = _Log(save, {row.key: row for row in stored})
    deadline = time.monotonic() + 60 * minutes
    for number, turn in enumerate(turns):
        _take(turn, card, device, deadline, log, progress, drawn=DRAWN if number == 0 else ())
    return taken(turns, device, save)


def taken(turns: Sequence[Turn], device: str, file: Path) -> Results:
    """The rows of `turns` that `file` holds of this device, these versions and this code, in the order of the plan."""
    rows = {row.key: row for row in Results.read(file)} if file.exists() else {}
    keys = dict.fromkeys(unmeasured(t.workload, p, device).key for t in turns for p in t.policies)
    return Results(rows[key] for key in keys if key in rows)


def rounds(turns: Sequence[Turn]) -> int:
    """How many rounds all the rows of the plan take together."""
    most: dict[tuple[Workload, str], int] = {}
    for turn in turns:
        for policy in turn.policies:
            most[turn.workload, policy] = max(turn.rounds, most.get((turn.workload, policy), 0))
    return sum(most.values())


class _Log:
    """The rows by key, in memory and in the file alike."""

    def __init__(self, file: Path, rows: dict[tuple, StepCost]) -> None:
        self.file, self.rows = file, rows
        self.failed: set[tuple] = set()

    def add(self, row: StepCost) -> None:
        Results([row]).append_to(self.file)
        before = [self.rows[row.key]] if row.key in self.rows else []
        (self.rows[row.key],) = Results([*before, row]).folded()
        if row.status == "error":
            self.failed.add(row.key)

    def lacks(self, row: StepCost, rounds: int) -> bool:
        """Whether a row has fewer than `rounds` rounds. Out of memory and refused are final, an error is not."""
        known = self.rows.get(row.key)
        if known is None or known.status == "error":
            return row.key not in self.failed
        return known.ok and len(known.samples.get("step_s", [])) < rounds * STEPS_A_ROUND


def _take(
    turn: Turn,
    card: Device,
    device: str,
    deadline: float,
    log: _Log,
    progress: Callable[[str], None],
    drawn: Sequence[str],
) -> None:
    """One turn: build the model if any row lacks a round and there is time for it, and take what is missing."""
    deadline = min(deadline, time.monotonic() + turn.cap_s)
    rows = {text: unmeasured(turn.workload, text, device) for text in turn.policies}
    bench = None
    try:
        for number in range(1, turn.rounds + 1):
            for text, row in rows.items():
                if not log.lacks(row, number):
                    continue
                before = log.rows.get(row.key)
                before = before if before is not None and before.ok else None
                left = deadline - time.monotonic()
                building = 0.0 if bench else BUILD_S
                if left < building + round_seconds(before or predicted(turn.workload, text, card), before is None):
                    continue
                progress(f"{turn.workload.label}: {text}, {left // 60:.0f}:{left % 60:02.0f} left")
                bench = bench or Bench(turn.workload, device)
                taken = _attempt(bench, text, before)
                if device == "cuda" and before is None and taken.ok:
                    taken = _probed(bench, taken, log.file if text in drawn else None)
                log.add(taken)
    finally:
        if bench:
            bench.close()


def _attempt(bench: Bench, text: str, before: StepCost | None) -> StepCost:
    """A round; an unexpected error is a row, so that the campaign goes on."""
    try:
        return bench.round(text, parse(text), before, STEPS_A_ROUND)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        row = unmeasured(bench.workload, text, bench.device)
        return dataclasses.replace(row, status="error", error=reason)


def _probed(bench: Bench, row: StepCost, file: Path | None) -> StepCost:
    """The row with the time that kernels ran in a step; with `file`, its memory timeline is written beside that."""
    policy, notes = parse(row.policy), dict[str, Any]()
    try:
        if row.step_s and row.step_s < HOST_BOUND_BELOW_S and not row.policy.startswith("compile"):
            notes["gpu_busy_share"] = bench.probed(policy, gpu_probe.busy_seconds) / row.step_s
        if file is not None:
            history = bench.probed(policy, gpu_probe.memory_history)
            about = {"workload": row.workload.to_dict(), "policy": row.policy, "device": row.device}
            path = file.with_name(f"{file.stem}.{slug(row.policy)}.memory.json")
            path.write_text(json.dumps({**about, "date": row.provenance["date"], **history}), encoding="utf-8")
    except Exception as error:  # the row itself is taken: a failing instrument must not lose it
        notes["probe"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return dataclasses.replace(row, provenance={**row.provenance, **notes})


# --- what was recorded ---


def recorded(folder: Path = RECORDED) -> Results:
    """The rows of `data/recorded/`, their source `recorded`: of each configuration and device the newest that ran."""
    newest: dict[tuple, StepCost] = {}
    rows = Results.read(*sorted(folder.glob("*.jsonl")))
    for row in sorted(rows, key=lambda row: (row.ok, row.provenance.get("date", ""))):
        newest[row.workload, row.policy, row.device] = dataclasses.replace(row, source="recorded")
    return Results(newest.values())
