"""When the kernels of a traced step run on a device, by the roofline, and what is alive at each moment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from gctutor.devices import Device
from gctutor.policies import Policy
from gctutor.roofline import VIEW, Stream, compute_seconds, kernel_seconds
from gctutor.steptrace import BACKWARD, CATEGORIES, FORWARD, Kernel, StepTrace


@dataclass(frozen=True)
class Span:
    """A stretch of one phase in one place of the model, in seconds from the start of the step."""

    phase: str
    layer: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Live bytes by category at each operator of a step, and what ran when.

    `seconds` and each array of `live` have one entry an operator; `peak_index` points at the highest total and
    `peak_owner` names the call site that ran there. `busy_s` is kernel time, without gaps.
    """

    seconds: np.ndarray
    live: dict[str, np.ndarray]
    spans: tuple[Span, ...]
    peak_index: int
    peak_owner: str
    label: str
    forward_s: float
    step_s: float
    busy_s: float


def simulate(step: StepTrace, policy: Policy, device: Device, label: str = "") -> Timeline:
    """Run the kernels of a trace on `device` by the roofline, in order, on one stream.

    The host launches one kernel every `device.launch_s` seconds, plus what the policy's mechanism costs in Python; a
    kernel starts when it is launched and the stream is free.
    """
    kinds = policy.layers(step.n_layers)
    stream = Stream(device)
    times: list[float] = []
    rows: list[list[int]] = []
    level = [step.static_bytes, 0, 0, 0, 0]
    spans: list[Span] = []
    owners: list[str] = []
    forward_s = 0.0
    for segment in step.segments:
        host = kinds[segment.layer].host_s_per_op if isinstance(segment.layer, int) else 0.0
        for kernel in segment.kernels:
            if kernel.work.kind != VIEW:
                extra = host if kernel.phase != BACKWARD else 0.0
                start, end = stream.launch(seconds_of(kernel, device), extra)
                _extend(spans, kernel.phase, segment.layer, start, end)
            for index, size in enumerate(kernel.born):
                level[index + 1] += size
            times.append(stream.now)
            rows.append(list(level))
            owners.append(f"{kernel.site or 'loss'} ({kernel.phase})")
            for index, size in enumerate(kernel.freed):
                level[index + 1] -= size
        if segment.phase == FORWARD:
            forward_s = stream.now
    live = np.array(rows)
    peak = int(live.sum(axis=1).argmax())
    return Timeline(
        seconds=np.array(times),
        live={name: live[:, column] for column, name in enumerate(CATEGORIES)},
        spans=tuple(spans),
        peak_index=peak,
        peak_owner=owners[peak],
        label=label,
        forward_s=forward_s,
        step_s=stream.now,
        busy_s=stream.busy_s,
    )


def seconds_of(kernel: Kernel, device: Device) -> float:
    """Roofline time of a traced kernel; attention's backward has an efficiency of its own."""
    if kernel.phase == BACKWARD and kernel.work.kind == "attention":
        return max(
            compute_seconds(kernel.work, device, backward=True), kernel_seconds(kernel.work._replace(flop=0), device)
        )
    return kernel_seconds(kernel.work, device)


def _extend(spans: list[Span], phase: str, layer: int | str, start: float, end: float) -> None:
    where = layer if isinstance(layer, int) else None
    if spans and (spans[-1].phase, spans[-1].layer) == (phase, where):
        spans[-1] = dataclasses.replace(spans[-1], end_s=end)
    else:
        spans.append(Span(phase, where, start, end))
