"""A traced step as a value: kernels in segments, and what was kept when the forward had returned. Device-free.

A step is a row of *segments*: the start (embedding), each layer's forward, the head (norm, logits, loss), each layer's
backward, and the rest. Layers of one kind behave alike, so `StepTrace.stretched` repeats a short trace to full depth.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gctutor.roofline import VIEW, Work

CATEGORIES = ("weights", "gradients", "activations", "loss", "temporary")
MOVING = CATEGORIES[1:]
FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER = "forward", "recompute", "backward", "optimizer"
START, HEAD = "start", "head"
Sizes = dict[tuple[int | str, str], int]  # bytes by (layer, call site)


@dataclass(frozen=True)
class Kernel:
    """One operator that ran: where (`site`, relative to its layer), its work, and the bytes it made and let go.

    `born` and `freed` are bytes by category, in the order of `MOVING`; frees come after the operator. Outside the
    layers, `freed_of` says which part of `freed` each layer had made (autocast's weight copies go when it closes).
    """

    name: str
    site: str
    phase: str
    work: Work
    born: tuple[int, ...]
    freed: tuple[int, ...]
    freed_of: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def stretched(self, representatives: Sequence[int]) -> Kernel:
        """The same kernel for more layers: what it frees of each is freed of every layer that behaves alike."""
        if not self.freed_of:
            return self
        parts = dict(self.freed_of)
        own = [total - sum(part[i] for part in parts.values()) for i, total in enumerate(self.freed)]
        nothing = (0,) * len(MOVING)
        every = [parts.get(source, nothing) for source in representatives]
        freed = tuple(base + sum(part[i] for part in every) for i, base in enumerate(own))
        return dataclasses.replace(self, freed=freed, freed_of=())


class Run(tuple[Kernel, ...]):
    """Kernels in the order they ran. A stretched trace's layers share one, so its sums are made once for all of them.

    `born` and `freed` are bytes by kernel and category, (n, 4); `launched` says which kernels are more than a view.
    """

    @cached_property
    def born(self) -> np.ndarray:
        return np.array([kernel.born for kernel in self], dtype=np.int64).reshape(-1, len(MOVING))

    @cached_property
    def freed(self) -> np.ndarray:
        return np.array([kernel.freed for kernel in self], dtype=np.int64).reshape(-1, len(MOVING))

    @cached_property
    def launched(self) -> np.ndarray:
        return np.array([kernel.work.kind != VIEW for kernel in self], dtype=bool)

    @cached_property
    def phases(self) -> np.ndarray:
        return np.array([kernel.phase for kernel in self], dtype=object)

    @cached_property
    def delta(self) -> int:
        """Net change of live bytes."""
        return int((self.born - self.freed).sum())

    @cached_property
    def rise(self) -> int:
        """Highest live bytes above the level at which the run begins."""
        born, freed = self.born.sum(axis=1), self.freed.sum(axis=1)
        return int(max((born.cumsum() - freed.cumsum() + freed).max(initial=0), 0))

    @cached_property
    def flop_by_phase(self) -> dict[str, int]:
        """Matrix FLOPs (GEMMs and attention) by phase."""
        total: dict[str, int] = defaultdict(int)
        for kernel in self:
            if kernel.work.kind in ("gemm", "attention"):
                total[kernel.phase] += kernel.work.flop
        return total


@dataclass(frozen=True)
class Segment:
    """A stretch of the step: `layer` is a layer's number, `start` or `head`; `phase` says in which half it lies."""

    layer: int | str
    phase: str
    kernels: Run

    def flop(self, *phases: str) -> int:
        """Matrix FLOPs run in these phases, in all when none is named."""
        return sum(flop for phase, flop in self.kernels.flop_by_phase.items() if not phases or phase in phases)


BY_SITE = ("kept", "unused", "on_host")  # the fields of a trace that map (layer, call site) to bytes


@dataclass(frozen=True)
class StepTrace:
    """A traced step, device-free: segments in the order they ran, and what was kept when the forward had returned.

    `kept` maps (layer, call site) to the bytes alive at the end of forward that were made there; `unused` to those of
    them that no later operator read; `on_host` to what was moved to the host by then (offloading).
    """

    segments: tuple[Segment, ...]
    static_bytes: int
    layer_static_bytes: int
    kept: Sizes
    n_layers: int
    meter: str
    hits: dict[str, dict[str, int]] = field(default_factory=dict)
    unused: Sizes = field(default_factory=dict)
    on_host: Sizes = field(default_factory=dict)

    @property
    def activation_bytes(self) -> int:
        return sum(segment.kernels.delta for segment in self.segments if segment.phase == FORWARD)

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step, static bytes included."""
        level, highest = self.static_bytes, self.static_bytes
        for segment in self.segments:
            highest = max(highest, level + segment.kernels.rise)
            level += segment.kernels.delta
        return highest

    @property
    def host_bytes(self) -> int:
        return sum(self.on_host.values())

    def flop(self, *phases: str) -> int:
        return sum(segment.flop(*phases) for segment in self.segments)

    @property
    def attention_kernels(self) -> list[str]:
        """The attention operators that really ran in forward (`bmm` is eager attention's)."""
        kernels = [k for run in {id(s.kernels): s.kernels for s in self.segments}.values() for k in run]
        ran = {k.name for k in kernels if k.work.kind == "attention" and k.phase == FORWARD}
        eager = any(k.name == "bmm" for k in kernels)
        return sorted(ran) or (["bmm"] if eager else [])

    @property
    def recomputed_layers(self) -> set[int]:
        """Layers in which backward ran a forward operator (not a view) again."""
        return {
            s.layer
            for s in self.segments
            if isinstance(s.layer, int) and any(k.phase == RECOMPUTE and k.work.kind != VIEW for k in s.kernels)
        }

    def kept_by_site(self) -> dict[str, int]:
        """Bytes alive after forward by call site, summed over layers, largest first."""
        total: dict[str, int] = defaultdict(int)
        for (_, site), size in self.kept.items():
            total[site] += size
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def breakdown(self) -> dict[str, int]:
        """`activation_bytes` split into `layer_activations`, `loss` and `other` (embedding, rotary, final norm)."""
        loss = sum(size for (layer, site), size in self.kept.items() if layer == HEAD and is_loss(site))
        layers = sum(size for (layer, _), size in self.kept.items() if isinstance(layer, int))
        return {"layer_activations": layers, "loss": loss, "other": self.activation_bytes - layers - loss}

    def stretched(self, representatives: Sequence[int]) -> StepTrace:
        """The same step for more layers: layer `i` of the result behaves as layer `representatives[i]` of this one."""
        forward = {s.layer: s for s in self.segments if s.phase == FORWARD}
        backward = {s.layer: s for s in self.segments if s.phase == BACKWARD}

        def layer(index: int, source: dict[int | str, Segment]) -> Segment:
            return dataclasses.replace(source[representatives[index]], layer=index)

        n = len(representatives)

        def outside(segment: Segment) -> Segment:
            return dataclasses.replace(segment, kernels=Run(k.stretched(representatives) for k in segment.kernels))

        segments = [outside(forward[START]), *(layer(i, forward) for i in range(n)), outside(forward[HEAD])]
        segments += [outside(backward[HEAD]), *(layer(i, backward) for i in reversed(range(n)))]
        segments += [outside(s) for s in self.segments if s.phase == BACKWARD and s.layer == START]
        more = _gradient_bytes(segments) / (_gradient_bytes(self.segments) or 1)
        segments += [_times(outside(s), more) for s in self.segments if s.phase == OPTIMIZER]

        def everywhere(sizes: Sizes) -> Sizes:
            longer = {key: size for key, size in sizes.items() if not isinstance(key[0], int)}
            for index, source in enumerate(representatives):
                longer |= {(index, site): size for (where, site), size in sizes.items() if where == source}
            return longer

        static = self.static_bytes + (n - self.n_layers) * self.layer_static_bytes
        sizes: dict[str, Any] = {name: everywhere(getattr(self, name)) for name in BY_SITE}
        return dataclasses.replace(self, segments=tuple(segments), n_layers=n, static_bytes=static, **sizes)


def _gradient_bytes(segments: Sequence[Segment]) -> int:
    """Bytes of gradients made before the optimizer runs: in proportion to the parameters that it updates."""
    column = MOVING.index("gradients")
    return int(sum(segment.kernels.born[:, column].sum() for segment in segments if segment.phase != OPTIMIZER))


def _times(segment: Segment, factor: float) -> Segment:
    """The segment with `factor` times the work: the optimizer handles all parameters in a few kernels."""

    def grown(work: Work) -> Work:
        return work._replace(flop=round(work.flop * factor), bytes=round(work.bytes * factor))

    return dataclasses.replace(
        segment, kernels=Run(dataclasses.replace(k, work=grown(k.work)) for k in segment.kernels)
    )


def is_loss(site: str) -> bool:
    """Whether a call site outside the layers belongs to the logits and the loss."""
    return site == "" or "lm_head" in site
