"""Plans: what a request stands for, and the fastest policy for a workload on a device, with advice when none fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gctutor.devices import Device, find_device
from gctutor.errors import UserError
from gctutor.estimation import estimate, trace
from gctutor.optimum import Choice, LayerCosts, best, greedy, layer_costs, middle_segment
from gctutor.policies import Policy, Request, concrete, parse
from gctutor.results import StepCost
from gctutor.steptrace import FORWARD
from gctutor.workload import Workload

RESERVE_BYTES = 2_000_000_000  # for fragmentation, NCCL buffers and kernels' own workspaces: an assumption


def resolve(policy: str | Policy | Request, workload: Workload, device: str | Device) -> Policy:
    """The concrete policy that a request stands for on `device`; a concrete policy is returned as it is."""
    device = find_device(device) if isinstance(device, str) else device
    parsed = parse(policy) if isinstance(policy, str) else policy
    if isinstance(parsed, Policy):
        return parsed
    if parsed.kind == "auto":
        return by_intensity(workload, device)
    assert parsed.share is not None
    return _within_budget(workload, device, parsed.share * _none_bytes(workload, device), str(parsed)).policy


def _none_bytes(workload: Workload, device: Device) -> int:
    return trace(workload, "none", kind=device.kind).activation_bytes


def _within_budget(workload: Workload, device: Device, budget: float, asked: str) -> Choice:
    """The optimum that keeps at most `budget` bytes. Raises `UserError` when even `block` keeps more."""
    choice = _within_bytes(workload, device, budget)
    if choice is None:
        raise _too_little(workload, device, budget, asked)
    return choice


def _within_bytes(workload: Workload, device: Device, budget: float) -> Choice | None:
    """The optimum whose *traced* bytes keep the budget, or None."""
    costs = layer_costs(workload, device)
    # The sums take every layer for a middle one and may end a few KB above the trace: begin there, let the trace judge.
    allowed = budget + max(0.0, costs.most_bytes - _none_bytes(workload, device))
    while (choice := best(costs, allowed)) is not None:
        excess = trace(workload, choice.policy, kind=device.kind).activation_bytes - budget
        if excess <= 0:
            return choice
        allowed -= excess
    return None


def _too_little(workload: Workload, device: Device, budget: float, asked: str) -> UserError:
    least = trace(workload, "block", kind=device.kind).activation_bytes
    return UserError(f"{asked} allows {budget / 1e9:.2f} GB, but block, which keeps least, keeps {least / 1e9:.2f} GB.")


def by_intensity(workload: Workload, device: Device) -> Policy:
    """The article's rule: keep each matrix product and the attention if its intensity lies right of the ridge."""
    forward = middle_segment(trace(workload, "none", kind=device.kind), min(1, workload.n_layers - 1), FORWARD)
    heavy = [k for k in forward.kernels if k.work.kind in ("gemm", "attention")]
    ridge = device.ridge()
    keep = {k for k in heavy if k.work.flop / k.work.bytes > ridge}
    if not keep:
        return concrete("block")
    names = [
        name for name, kind in (("mm", "gemm"), ("core_attn", "attention")) if any(k.work.kind == kind for k in keep)
    ]
    dropped = [k.site.rpartition(".")[2] for k in heavy if k.work.kind == "gemm" and k not in keep and "mm" in names]
    return concrete("ops:" + ",".join([*names, *(f"-{name}" for name in dict.fromkeys(dropped))]))


@dataclass(frozen=True)
class Plan:
    """What `plan` recommends: the policy, its cost, `none` and `block` beside it, and advice when nothing fits.

    `greedy_recompute_s` is the recompute time of the ranking's answer, `best_recompute_s` the optimum's. `brought`
    lists, per choice of kernels tried, the best step time found.
    """

    workload: Workload
    device: Device
    limit_bytes: float
    cost: StepCost | None
    none: StepCost
    block: StepCost
    best_recompute_s: float | None = None
    greedy_recompute_s: float | None = None
    advice: tuple[str, ...] = ()
    brought: tuple[tuple[str, StepCost], ...] = ()

    @property
    def fits(self) -> bool:
        return self.cost is not None

    @property
    def policy(self) -> str:
        """The recommended policy's string. Raises `UserError` when nothing fits."""
        if self.cost is None:
            raise UserError("Nothing fits: " + " ".join(self.advice))
        return self.cost.resolved


def plan(
    workload: Workload,
    device: str | Device = "H100",
    *,
    budget: float | None = None,
    fits_in: str | float | None = None,
    reserve_bytes: int = RESERVE_BYTES,
    kernels: Sequence[str] = (),
) -> Plan:
    """The fastest policy for `workload` on `device`.

    With `budget` (a share of `none`'s activation bytes with `workload`'s own kernels) activations are limited; with
    `fits_in` (a device's name or bytes; the default is `device` itself) the whole step's peak: weights, gradients,
    optimizer state, the optimizer's own temporaries, and `reserve_bytes`. `kernels` are further kernels to try
    (`liger`, …) under the same limit; the fastest wins. Raises `UserError` for a budget that nothing meets.
    """
    device = find_device(device) if isinstance(device, str) else device
    options = [workload, *(workload.replace(kernels=k) for k in kernels if k != workload.kernels)]
    limit = _usable(fits_in, device) - reserve_bytes if budget is None else budget * _none_bytes(workload, device)
    tried = [_plan_one(option, device, limit, of_peak=budget is None) for option in options]
    fitting = [p for p in tried if p.cost is not None]
    if budget is not None and not fitting:
        raise _too_little(workload, device, limit, f"budget={budget:g}")
    winner = min(fitting, key=lambda p: p.cost.step_s) if fitting else tried[0]  # type: ignore[union-attr,arg-type,return-value]
    brought = tuple((p.workload.kernels, p.cost) for p in fitting if p.cost is not None)
    return dataclasses.replace(winner, brought=brought)


def _plan_one(workload: Workload, device: Device, limit: float, *, of_peak: bool) -> Plan:
    none, block = estimate(workload, "none", device), estimate(workload, "block", device)
    costs = layer_costs(workload, device)
    choice = _within_peak(workload, device, costs, limit) if of_peak else _within_bytes(workload, device, limit)
    if choice is None:
        return Plan(workload, device, limit, None, none, block, advice=tuple(_advice(workload, device, limit, block)))
    cost = estimate(workload, choice.policy, device)
    ranked = greedy(costs, choice.activation_bytes)
    return Plan(
        workload,
        device,
        limit,
        cost,
        none,
        block,
        best_recompute_s=choice.recompute_s,
        greedy_recompute_s=None if ranked is None else ranked.recompute_s,
    )


def _usable(fits_in: str | float | None, device: Device) -> float:
    if fits_in is None:
        return device.usable_bytes
    return find_device(fits_in).usable_bytes if isinstance(fits_in, str) else float(fits_in)


def _within_peak(workload: Workload, device: Device, costs: LayerCosts, limit: float) -> Choice | None:
    """The fastest choice whose traced peak is within `limit`: bisection over the activation budget."""

    def peak(choice: Choice) -> int:
        return trace(workload, choice.policy, kind=device.kind).peak_bytes

    low, high = costs.least_bytes, costs.most_bytes
    everything, least = best(costs, high), best(costs, low)
    assert everything is not None and least is not None
    if peak(everything) <= limit:
        return everything
    if peak(least) > limit:
        return None
    fits = least
    for _ in range(6):
        middle = (low + high) / 2
        choice = best(costs, middle)
        assert choice is not None
        if peak(choice) <= limit:
            fits, low = choice, middle
        else:
            high = middle
    return fits


def _advice(workload: Workload, device: Device, limit: float, block: StepCost) -> list[str]:
    """When nothing fits: by how much, and which single change would make `block` fit."""
    assert block.peak_bytes is not None
    found = [
        f"Even block peaks at {block.peak_bytes / 1e9:.1f} GB, {(block.peak_bytes - limit) / 1e9:.1f} GB too much."
    ]
    for words, change in _changes(workload):
        cost = estimate(change, "block", device)
        if cost.peak_bytes is not None and cost.peak_bytes <= limit:
            found.append(f"{words} would fit ({cost.peak_bytes / 1e9:.1f} GB with block).")
    if block.static_bytes is not None:
        gpus = _shards(workload, device, limit)
        if gpus:
            found.append(f"FSDP over {gpus} GPUs would fit.")
    return found


def _changes(workload: Workload) -> list[tuple[str, Workload]]:
    changes = []
    if workload.batch > 1:
        changes.append((f"Batch {workload.batch // 2}", workload.replace(batch=workload.batch // 2)))
    if workload.trainable == "full":
        changes.append(("LoRA (lora:16)", workload.replace(trainable="lora:16")))
    if workload.optimizer == "adamw":
        changes.append(("8-bit AdamW", workload.replace(optimizer="adamw8bit")))
    if workload.seqlen >= 2048:
        changes.append((f"{workload.seqlen // 2} tokens", workload.replace(seqlen=workload.seqlen // 2)))
    return changes


def _shards(workload: Workload, device: Device, limit: float) -> int | None:
    """The fewest GPUs (a power of two up to 64) over which weights, gradients and state shard so that `block` fits.

    FSDP2 shards all three evenly; a layer's own weights and gradients are whole while it runs.
    """
    step = trace(workload, "block", kind=device.kind)
    rest = step.peak_bytes - step.static_bytes
    for gpus in (2, 4, 8, 16, 32, 64):
        if step.static_bytes / gpus + 2 * step.layer_static_bytes + rest <= limit:
            return gpus
    return None
