"""When the kernels of a traced step run on a device, by the roofline, and what is alive at each moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gctutor.devices import Device
from gctutor.policies import Policy
from gctutor.roofline import compute_seconds, kernel_seconds
from gctutor.steptrace import BACKWARD, CATEGORIES, FORWARD, MOVING, Kernel, StepTrace

OUTSIDE = -1


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
    runs = [segment.kernels for segment in step.segments]
    distinct = {id(run): run for run in runs}
    timed = {key: np.array([seconds_of(kernel, device) for kernel in run]) for key, run in distinct.items()}
    seconds = np.concatenate([timed[id(run)] for run in runs])
    launched, phases = (np.concatenate([getattr(run, name) for run in runs]) for name in ("launched", "phases"))
    born, freed = (np.concatenate([getattr(run, name) for run in runs]) for name in ("born", "freed"))
    segment_of = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    kinds = policy.layers(step.n_layers)
    python_s = np.array([kinds[s.layer].host_s_per_op if isinstance(s.layer, int) else 0.0 for s in step.segments])
    host_s = launched * (device.launch_s + python_s[segment_of] * (phases != BACKWARD))
    ends = stream_ends(seconds, host_s)
    live = born.cumsum(axis=0) - freed.cumsum(axis=0) + freed
    total = step.static_bytes + live.sum(axis=1)
    peak = int(total.argmax())
    owner = step.segments[segment_of[peak]].kernels[peak - int(np.argmax(segment_of == segment_of[peak]))]
    in_forward = np.array([segment.phase == FORWARD for segment in step.segments])[segment_of]
    return Timeline(
        seconds=ends,
        live={CATEGORIES[0]: np.full(len(ends), step.static_bytes), **dict(zip(MOVING, live.T, strict=True))},
        spans=_spans(step, phases[launched], segment_of[launched], (ends - seconds)[launched], ends[launched]),
        peak_index=peak,
        peak_owner=f"{owner.site or 'loss'} ({owner.phase})",
        label=label,
        forward_s=float(ends[in_forward].max()),
        step_s=float(ends[-1]),
        busy_s=float(seconds.sum()),
    )


def stream_ends(seconds: np.ndarray, host_s: np.ndarray) -> np.ndarray:
    """When each kernel ends on one stream fed by one host thread, both (n,) and in seconds.

    The host takes `host_s` for each launch, and a kernel starts when it is launched and the one before has ended:
    `end[i] = max(end[i-1], launch[i]) + seconds[i]`, summed in closed form.
    """
    done = seconds.cumsum()
    return done + np.maximum.accumulate(host_s.cumsum() - (done - seconds))


def seconds_of(kernel: Kernel, device: Device) -> float:
    """Roofline time of a traced kernel; attention's backward has an efficiency of its own."""
    if kernel.phase == BACKWARD and kernel.work.kind == "attention":
        return max(
            compute_seconds(kernel.work, device, backward=True), kernel_seconds(kernel.work._replace(flop=0), device)
        )
    return kernel_seconds(kernel.work, device)


def _spans(
    step: StepTrace, phases: np.ndarray, segment_of: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[Span, ...]:
    """Neighbouring kernels of one phase and one layer make a span; all outside the layers count as one place."""
    layers = np.array([s.layer if isinstance(s.layer, int) else OUTSIDE for s in step.segments])[segment_of]
    first = np.flatnonzero(np.append(True, (phases[1:] != phases[:-1]) | (layers[1:] != layers[:-1])))
    last = np.append(first[1:], len(phases)) - 1
    return tuple(
        Span(phases[a], None if layers[a] == OUTSIDE else int(layers[a]), float(starts[a]), float(ends[b]))
        for a, b in zip(first, last, strict=True)
    )
