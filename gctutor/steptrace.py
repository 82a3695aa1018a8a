"""A traced step as a value: kernels in segments, and what was kept when the forward had returned. Device-free.

A step is a row of *segments*: the start (embedding), each layer's forward, the head (norm, logits, loss), each layer's
backward, and the rest. Layers of one kind behave alike, so `StepTrace.stretched` repeats a short trace to full depth.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Segment:
    """A stretch of the step: `layer` is a layer's number, `start` or `head`; `forward` says in which half it lies."""

    layer: int | str
    phase: str
    kernels: tuple[Kernel, ...]

    @property
    def delta(self) -> int:
        """Net change of live bytes."""
        return sum(sum(k.born) - sum(k.freed) for k in self.kernels)

    @property
    def rise(self) -> int:
        """Highest live bytes above the level at which the segment begins."""
        level = highest = 0
        for kernel in self.kernels:
            level += sum(kernel.born)
            highest = max(highest, level)
            level -= sum(kernel.freed)
        return highest

    def flop(self, *phases: str) -> int:
        """Matrix FLOPs (GEMMs and attention) run in these phases, in all when none is named."""
        return sum(
            k.work.flop
            for k in self.kernels
            if k.work.kind in ("gemm", "attention") and (not phases or k.phase in phases)
        )


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
        return sum(segment.delta for segment in self.segments if segment.phase == FORWARD)

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step, static bytes included."""
        level, highest = self.static_bytes, self.static_bytes
        for segment in self.segments:
            highest = max(highest, level + segment.rise)
            level += segment.delta
        return highest

    @property
    def host_bytes(self) -> int:
        return sum(self.on_host.values())

    def flop(self, *phases: str) -> int:
        return sum(segment.flop(*phases) for segment in self.segments)

    @property
    def attention_kernels(self) -> list[str]:
        """The attention operators that really ran in forward (`bmm` is eager attention's)."""
        ran = {k.name for s in self.segments for k in s.kernels if k.work.kind == "attention" and k.phase == FORWARD}
        eager = any(k.name == "bmm" for s in self.segments for k in s.kernels)
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
            return dataclasses.replace(segment, kernels=tuple(k.stretched(representatives) for k in segment.kernels))

        last = [s for s in self.segments if s.phase == OPTIMIZER or (s.phase == BACKWARD and s.layer == START)]
        segments = [outside(forward[START]), *(layer(i, forward) for i in range(n)), outside(forward[HEAD])]
        segments += [outside(backward[HEAD]), *(layer(i, backward) for i in reversed(range(n))), *map(outside, last)]

        def everywhere(sizes: Sizes) -> Sizes:
            longer = {key: size for key, size in sizes.items() if not isinstance(key[0], int)}
            for index, source in enumerate(representatives):
                longer |= {(index, site): size for (where, site), size in sizes.items() if where == source}
            return longer

        static = self.static_bytes + (n - self.n_layers) * self.layer_static_bytes
        sizes: dict[str, Any] = {name: everywhere(getattr(self, name)) for name in BY_SITE}
        return dataclasses.replace(self, segments=tuple(segments), n_layers=n, static_bytes=static, **sizes)


def is_loss(site: str) -> bool:
    """Whether a call site outside the layers belongs to the logits and the loss."""
    return site == "" or "lm_head" in site
