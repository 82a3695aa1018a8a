"""The best policy under a byte budget: an exact optimum over `none`, `block` and kept modules.

A replay runs everything of its layer that is not kept, so both bytes and recompute time are sums: over replayed layers,
over call sites kept, over layers left alone. With whole numbers of layers a kind, the best choice is a small integer
programme (HiGHS, through scipy). Where the kept layers sit matters to the peak only: they go last, where backward frees
them first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gctutor.devices import Device, find_device
from gctutor.estimation import trace
from gctutor.policies import Policy, concrete
from gctutor.policies.modules import SITES
from gctutor.simulation import seconds_of
from gctutor.steptrace import BACKWARD, FORWARD, RECOMPUTE, Kernel, Segment, StepTrace
from gctutor.workload import Workload


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
    block_bytes = middle_segment(block, layer, FORWARD).kernels.delta
    return LayerCosts(
        n_layers=n,
        base_bytes=block.activation_bytes - n * block_bytes,
        block_bytes=block_bytes,
        none_bytes=middle_segment(none, layer, FORWARD).kernels.delta,
        replay_s=sum(seconds_of(k, device) for k in replay),
        sites=tuple(sites),
    )


def middle_segment(step: StepTrace, layer: int, half: str) -> Segment:
    return next(s for s in step.segments if s.layer == layer and s.phase == half)


def _replayed(step: StepTrace, layer: int) -> list[Kernel]:
    return [k for k in middle_segment(step, layer, BACKWARD).kernels if k.phase == RECOMPUTE]


def _within(site: str, name: str) -> bool:
    return name in site.split(".")


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
