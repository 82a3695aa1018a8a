"""The operators of one decoder layer: work, arithmetic intensity, time, and what recomputing them would buy (ROI)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gctutor.devices import Device, find_device
from gctutor.estimation import trace
from gctutor.roofline import VIEW
from gctutor.simulation import seconds_of
from gctutor.steptrace import FORWARD, Kernel
from gctutor.workload import Workload


@dataclass(frozen=True)
class OperatorCost:
    """One call site of a layer, or one operator in it, summed over the `count` kernels it runs.

    `flop` counts matrix products and, for element-wise kernels, one FLOP an output element; `bytes` what they read and
    write; `kept_bytes` what `none` keeps of it for backward; `recompute_s` the time to run it again; `share` its part
    of the listed operators' time.
    """

    name: str
    site: str
    phase: str
    count: int
    flop: int
    bytes: int
    seconds: float
    bound: str
    kept_bytes: int
    recompute_s: float
    share: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP/byte."""
        return self.flop / self.bytes if self.bytes else 0.0

    @property
    def roi(self) -> float:
        """Recompute ROI: bytes that recomputing frees per second that it costs; infinite when it costs nothing."""
        return self.kept_bytes / self.recompute_s if self.recompute_s else float("inf")


def layer_operators(
    workload: Workload, device: str | Device = "H100", *, phase: str = FORWARD, by: str = "site"
) -> list[OperatorCost]:
    """What one middle layer of `workload` runs in `phase` (`forward`, `backward`) on `device`, slowest first.

    `by="site"` sums the kernels of a module (`mlp.gate_proj`, `self_attn.q_norm`), `by="operator"` those of one
    operator at a site. `kept_bytes` is filled for the forward.
    """
    device = find_device(device) if isinstance(device, str) else device
    step = trace(workload, "none", kind=device.kind)
    layer = min(1, workload.n_layers - 1)
    kernels = [
        k for s in step.segments if s.layer == layer for k in s.kernels if k.phase == phase and k.work.kind != VIEW
    ]
    kept = {site: size for (where, site), size in step.kept.items() if where == layer} if phase == FORWARD else {}
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.site, "" if by == "site" else kernel.name].append(kernel)
    total = sum(seconds_of(k, device) for k in kernels)
    costs = [
        _summed(site, group, device, kept.get(site, 0) if by == "site" else 0, total)
        for (site, _), group in groups.items()
    ]
    return sorted(costs, key=lambda cost: -cost.seconds)


def _summed(site: str, kernels: list[Kernel], device: Device, kept: int, total: float) -> OperatorCost:
    seconds = sum(seconds_of(k, device) for k in kernels)
    flop, moved = sum(k.work.flop for k in kernels), sum(k.work.bytes for k in kernels)
    names = list(dict.fromkeys(k.name for k in kernels))
    memory = moved / (device.bandwidth_bytes_per_s * device.efficiency.bandwidth)
    return OperatorCost(
        name=names[0] if len(names) == 1 else "+".join(names),
        site=site,
        phase=kernels[0].phase,
        count=len(kernels),
        flop=flop,
        bytes=moved,
        seconds=seconds,
        bound="memory" if memory >= seconds * 0.999 else "compute",
        kept_bytes=kept,
        recompute_s=seconds,
        share=seconds / total,
    )
