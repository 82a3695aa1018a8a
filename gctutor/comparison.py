"""Prediction against measurement, row by row: bytes, time, and the order of policies beyond the spread."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gctutor.devices import Device, find_device
from gctutor.errors import UserError
from gctutor.estimation import estimate
from gctutor.results import NUMBERS, StepCost

if TYPE_CHECKING:
    import pandas

Pair = tuple[StepCost, StepCost]


def device_of(row: StepCost) -> Device:
    """The device of the estimates that a measured row is compared with."""
    return find_device("cpu" if row.device.startswith("CPU") else row.device)


def pairs(measured: Iterable[StepCost]) -> list[Pair]:
    """(estimated, measured) for every row that ran and can be estimated; compiled layers cannot.

    The estimate is of the policy that ran: what a budget had been resolved to.
    """
    found = []
    for row in measured:
        if row.ok and not row.policy.startswith("compile"):
            guess = estimate(row.workload, row.resolved or row.policy, device_of(row))
            found.append((dataclasses.replace(guess, policy=row.policy), row))
    return found


def errors(compared: Sequence[Pair]) -> pandas.DataFrame:
    """One row a pair: bytes and step time, estimated and measured, and the relative error of the estimate."""
    import pandas

    records = []
    for guess, row in compared:
        record: dict[str, Any] = {"policy": row.policy, "workload": row.workload.label, "device": row.device}
        for name in ("activation_bytes", "peak_bytes", "step_s"):
            expected, found = getattr(guess, name), getattr(row, name)
            known = expected is not None and found
            record |= {f"{name}_estimated": expected, f"{name}_measured": found}
            record[f"{name}_error"] = expected / found - 1 if known else None
        records.append(record)
    return pandas.DataFrame.from_records(records)


def order_agreement(compared: Sequence[Pair]) -> tuple[int, int]:
    """(alike, all): pairs of policies of one workload that differ beyond the spread, and those estimated in that order.

    Two rows differ beyond the spread when the middle halves of their step times do not overlap.
    """
    alike = total = 0
    for (guess_a, a), (guess_b, b) in itertools.combinations(compared, 2):
        if (a.workload, a.device) != (b.workload, b.device) or not _apart(a, b):
            continue
        total += 1
        alike += (guess_a.step_s < guess_b.step_s) == (a.step_s < b.step_s)  # type: ignore[operator]
    return alike, total


def _apart(a: StepCost, b: StepCost) -> bool:
    (low_a, high_a), (low_b, high_b) = _middle_half(a), _middle_half(b)
    return high_a < low_b or high_b < low_a


def _middle_half(row: StepCost) -> tuple[float, float]:
    samples = row.samples.get("step_s", [])
    if len(samples) < 2:
        raise UserError(f"{row.policy!r} has {len(samples)} timed steps, and a spread needs two: measure more rounds.")
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def at_depth(shallow: StepCost, deep: StepCost, layers: int) -> StepCost:
    """What `layers` layers cost by the additive rule, from two measured depths of the same workload and policy.

    Bytes, times and FLOPs grow by the same amount a layer. The note in the provenance says that it is extrapolated.
    """
    a, b = shallow.workload, deep.workload
    if (a.replace(layers=b.layers), shallow.policy) != (b, deep.policy) or a.n_layers == b.n_layers:
        raise UserError("The additive rule needs two rows that differ in nothing but their depth.")
    more = (layers - b.n_layers) / (b.n_layers - a.n_layers)
    values: dict[str, Any] = {}
    for name in NUMBERS:
        low, high = getattr(shallow, name), getattr(deep, name)
        if low is None or high is None:
            values[name] = None
        else:
            value = high + more * (high - low)
            values[name] = round(value) if isinstance(high, int) else value
    note = f"extrapolated to {layers} layers from {a.n_layers} and {b.n_layers}"
    values |= {"samples": {}, "breakdown": {}, "provenance": {**deep.provenance, "note": note}}
    return dataclasses.replace(deep, workload=b.replace(layers=layers), **values)
