"""The best policy under a byte budget: an exact optimum over `none`, `block` and kept modules, and the lines to paste.

A replay runs everything of its layer that is not kept, so both bytes and recompute time are sums: over replayed layers,
over call sites kept, over layers left alone. With whole numbers of layers a kind, the best choice is a small integer
programme (HiGHS, through scipy). Where the kept layers sit matters to the peak only: they go last, where backward frees
them first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gctutor.devices import Device, find_device
from gctutor.errors import UserError
from gctutor.estimation import estimate, seconds_of, trace
from gctutor.policies import Policy, Request, concrete, parse
from gctutor.policies.modules import SITES
from gctutor.results import StepCost
from gctutor.tracing import BACKWARD, FORWARD, RECOMPUTE, Kernel, Segment, StepTrace
from gctutor.workload import Workload

RESERVE_BYTES = 2_000_000_000  # for fragmentation, NCCL buffers and kernels' own workspaces: an assumption


@dataclass(frozen=True)
class Site:
    """A call site that can be kept: per layer, the bytes it costs and the recompute seconds it saves."""

    name: str
    bytes: int
    seconds: float

    @property
    def seconds_per_gb(self) -> float:
        return self.seconds / self.bytes * 1e9 if self.bytes else math.inf


@dataclass(frozen=True)
class LayerCosts:
    """What the optimum is computed from, for a workload on a device; bytes and seconds are per layer.

    `base_bytes` is kept whatever the layers do, `block_bytes` by a replayed layer, `none_bytes` by one left alone;
    `replay_s` is the time of a whole replay, early stop included.
    """

    n_layers: int
    base_bytes: int
    block_bytes: int
    none_bytes: int
    replay_s: float
    sites: tuple[Site, ...]

    @property
    def least_bytes(self) -> float:
        """Activation bytes with every layer replayed and nothing kept (`block`)."""
        return float(self.base_bytes + self.n_layers * self.block_bytes)

    @property
    def most_bytes(self) -> float:
        """Activation bytes with every layer left alone (`none`)."""
        return float(self.base_bytes + self.n_layers * self.none_bytes)


@dataclass(frozen=True)
class Choice:
    """How many layers are left alone, and in how many of the replayed ones each site is kept."""

    costs: LayerCosts
    none_layers: int
    kept: tuple[int, ...]

    @property
    def activation_bytes(self) -> int:
        c = self.costs
        layers = c.none_bytes * self.none_layers + c.block_bytes * (c.n_layers - self.none_layers)
        return c.base_bytes + layers + sum(n * site.bytes for n, site in zip(self.kept, c.sites, strict=True))

    @property
    def recompute_s(self) -> float:
        c = self.costs
        saved = sum(n * site.seconds for n, site in zip(self.kept, c.sites, strict=True))
        return c.replay_s * (c.n_layers - self.none_layers) - saved

    @property
    def policy(self) -> Policy:
        """The policy in the grammar: replayed layers first, those that keep most last, then the ones left alone."""
        replayed = self.costs.n_layers - self.none_layers
        names = [s.name for s in self.costs.sites]
        rows = [
            [name for name, n in zip(names, self.kept, strict=True) if layer >= replayed - n]
            for layer in range(replayed)
        ]
        kinds = [f"modules:{','.join(row)}" if row else "block" for row in rows] + ["none"] * self.none_layers
        return concrete(_spell(kinds))


def _spell(kinds: Sequence[str]) -> str:
    """The policy string of one mechanism name a layer, equal neighbours joined, `block` left implicit in a mix."""
    if len(set(kinds)) == 1:
        return kinds[0]
    pieces: list[tuple[str, int, int]] = []
    for index, kind in enumerate(kinds):
        if pieces and pieces[-1][0] == kind:
            pieces[-1] = (kind, pieces[-1][1], index)
        else:
            pieces.append((kind, index, index))
    return ";".join(f"{k}@{a}" if a == b else f"{k}@{a}-{b}" for k, a, b in pieces)


# --- costs ---


@functools.lru_cache(maxsize=64)
def layer_costs(workload: Workload, device: Device) -> LayerCosts:
    """Bytes and seconds of a middle layer by three traces (`none`, `block`, every site kept) and the roofline."""
    names = ("none", "block", f"modules:{','.join(SITES)}")
    none, block, modules = (trace(workload, name, kind=device.kind) for name in names)
    layer = min(1, workload.n_layers - 1)
    replay, rest = (_replayed(step, layer) for step in (block, modules))
    kept = {site: size for (where, site), size in modules.kept.items() if where == layer}
    sites = []
    for name in SITES:
        # What is kept is not always all spared: casts of weights and inputs (autocast, LoRA) are made again.
        whole, left = (sum(seconds_of(k, device) for k in ran if _within(k.site, name)) for ran in (replay, rest))
        sites.append(
            Site(name, sum(size for site, size in kept.items() if _within(site, name)), max(0.0, whole - left))
        )
    n = workload.n_layers
    block_bytes = _segment(block, layer, FORWARD).delta
    return LayerCosts(
        n_layers=n,
        base_bytes=block.activation_bytes - n * block_bytes,
        block_bytes=block_bytes,
        none_bytes=_segment(none, layer, FORWARD).delta,
        replay_s=sum(seconds_of(k, device) for k in replay),
        sites=tuple(sites),
    )


def _segment(step: StepTrace, layer: int, half: str) -> Segment:
    return next(s for s in step.segments if s.layer == layer and s.phase == half)


def _replayed(step: StepTrace, layer: int) -> list[Kernel]:
    return [k for k in _segment(step, layer, BACKWARD).kernels if k.phase == RECOMPUTE]


def _within(site: str, name: str) -> bool:
    return name in site.split(".")


# --- the optimum ---


def best(costs: LayerCosts, budget_bytes: float) -> Choice | None:
    """The choice with the least recompute time whose activations fit `budget_bytes`; None when even `block` does not.

    An integer programme: variables are the layers left alone and, for each site, the layers that keep it.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    n, sites = costs.n_layers, costs.sites
    room = budget_bytes - costs.least_bytes
    if room < 0:
        return None
    weight = np.array([costs.none_bytes - costs.block_bytes, *(s.bytes for s in sites)], dtype=float)
    gain = np.array([costs.replay_s, *(s.seconds for s in sites)])
    # A replayed layer keeps a site or not, and a layer left alone keeps none: none + kept ≤ n for every site.
    exclusive = np.hstack([np.ones((len(sites), 1)), np.eye(len(sites))])
    # The solver stops at fixed tolerances: scale bytes to 1 and seconds to 1000, whatever the model's size.
    weight, room = weight / weight.max(), room / weight.max()
    gain = 1e3 * gain / gain.max()
    constraints = [LinearConstraint(weight[None], ub=room), LinearConstraint(exclusive, ub=n)]
    tie = 1e-4 * weight  # of two equally fast choices the smaller
    options = {"mip_rel_gap": 0.0}
    found = milp(
        tie - gain, constraints=constraints, integrality=np.ones(len(weight)), bounds=Bounds(0, n), options=options
    )
    counts = [round(value) for value in found.x]
    return Choice(costs, counts[0], tuple(counts[1:]))


def greedy(costs: LayerCosts, budget_bytes: float) -> Choice | None:
    """The answer by rank: keep whole sites in the order of seconds saved per byte, as many layers as fit."""
    room = budget_bytes - costs.least_bytes
    if room < 0:
        return None
    counts = dict.fromkeys((s.name for s in costs.sites), 0)
    for site in sorted((s for s in costs.sites if s.seconds), key=lambda s: -s.seconds_per_gb):
        counts[site.name] = min(costs.n_layers, int(room // site.bytes)) if site.bytes else costs.n_layers
        room -= counts[site.name] * site.bytes
    return Choice(costs, 0, tuple(counts.values()))


def frontier(workload: Workload, device: str | Device, points: int = 25) -> list[Choice]:
    """The optimum at evenly spaced budgets from `block`'s bytes to `none`'s, each choice once."""
    device = find_device(device) if isinstance(device, str) else device
    costs = layer_costs(workload, device)
    found = [best(costs, budget) for budget in np.linspace(costs.least_bytes, costs.most_bytes, points)]
    return list(dict.fromkeys(choice for choice in found if choice is not None))


# --- requests and plans ---


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
    forward = _segment(trace(workload, "none", kind=device.kind), min(1, workload.n_layers - 1), FORWARD)
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


# --- lines to paste ---


def lines_to_paste(policy: str | Policy) -> dict[str, str]:
    """The same choice for plain transformers, `Trainer`/TRL, and torchtitan, Axolotl and Megatron where it exists."""
    text = str(parse(policy) if isinstance(policy, str) else policy)
    applied = f'from gctutor import parse\n\nwith parse("{text}").applied(model):\n    '
    lines = {
        "transformers": applied + "train(model)  # your loop",
        "Trainer / TRL": applied + "trainer.train()  # leave gradient_checkpointing=False in the arguments",
    }
    return {**lines, **NATIVE.get(text, {})}


_SWITCH = 'model.activation_checkpointing_enable({"use_reentrant": False}'
_ARGUMENTS = 'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}'
NATIVE: dict[str, dict[str, str]] = {
    "none": {
        "transformers": "model.activation_checkpointing_disable()",
        "Trainer / TRL": "gradient_checkpointing=False",
        "torchtitan": '[activation_checkpoint]\nmode = "none"',
        "Axolotl": "gradient_checkpointing: false",
        "Megatron": "(leave --recompute-granularity out)",
    },
    "block": {
        "transformers": f"{_SWITCH})",
        "Trainer / TRL": _ARGUMENTS,
        "torchtitan": '[activation_checkpoint]\nmode = "full"',
        "Axolotl": "gradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: false",
        "Megatron": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    },
    "block/2": {
        "transformers": f"{_SWITCH}, every_n_layers=2)",
        "torchtitan": '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"',
    },
    "block+offload": {
        "transformers": f"{_SWITCH}, offload=True)",
        "Axolotl": "gradient_checkpointing: offload",
    },
    "sub:mlp": {"Megatron": "--recompute-granularity selective --recompute-modules mlp"},
    "ops:every2mm,core_attn": {"torchtitan": '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"'},
}
