"""The `Policy` value, the interface every mechanism implements, and applying a policy to a model and undoing it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gctutor import liger
from gctutor.errors import UserError
from gctutor.workload import Workload, decoder_layers

if TYPE_CHECKING:
    from torch import nn

ACTIVE = "_gctutor_active_policy"


class PolicyError(UserError):
    """A policy that cannot be applied here, or that did not do what its name says."""


class Mechanism(ABC):
    """How a decoder layer keeps or recomputes. Subclasses are frozen dataclasses, one file each.

    `str(mechanism)` is its name in the policy grammar. `recomputes` says whether backward runs any operator again.
    `traceable` is False where a dispatch mode would change what runs, so that a tracer cannot count it.
    `host_s_per_op` is Python time it adds to each operator of a layer (an estimate's input, assumed, see each file).
    """

    recomputes: bool = True
    traceable: bool = True
    host_s_per_op: float = 0.0

    @abstractmethod
    def __str__(self) -> str: ...

    def refuse(self, workload: Workload, device_kind: str) -> None:
        """Raise `PolicyError` when this mechanism cannot work with `workload` on a `cuda`, `rocm` or `cpu` device."""

    @abstractmethod
    def on(
        self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]
    ) -> contextlib.AbstractContextManager:
        """Apply to `layers` of `model` for the block, and undo exactly. `hits` counts what matched, by name."""

    def unmatched(self, hits: Counter[str]) -> list[str]:
        """Names this mechanism was asked to keep that matched nothing in the steps run so far."""
        return []


@dataclass(frozen=True)
class Part:
    """One mechanism and the layers it governs: `first` to `last` inclusive (all when None), every `every`-th."""

    mechanism: Mechanism
    first: int | None = None
    last: int | None = None
    every: int = 1

    def __str__(self) -> str:
        text = str(self.mechanism) + (f"/{self.every}" if self.every > 1 else "")
        if self.first is None:
            return text
        return f"{text}@{self.first}" if self.first == self.last else f"{text}@{self.first}-{self.last}"


@dataclass(frozen=True)
class Request:
    """`auto` or `budget:SHARE`: a wish that the planner's `resolve` turns into a concrete `Policy`."""

    kind: str
    share: float | None = None

    concrete = False

    def __str__(self) -> str:
        return self.kind if self.share is None else f"{self.kind}:{self.share:g}"


@dataclass(frozen=True)
class Policy:
    """A concrete policy: mechanisms by layer. Layers that no part names get `rest` (`block` in a mix)."""

    parts: tuple[Part, ...]
    rest: Mechanism
    skipped: Mechanism

    concrete = True

    def __str__(self) -> str:
        return ";".join(map(str, self.parts))

    def layers(self, n: int) -> tuple[Mechanism, ...]:
        """The mechanism of each of `n` layers. Raises `PolicyError` for ranges beyond the model or that overlap."""
        kinds: list[Mechanism] = [self.rest] * n
        taken: set[int] = set()
        for part in self.parts:
            first, last = (0, n - 1) if part.first is None or part.last is None else (part.first, part.last)
            if last >= n:
                raise PolicyError(f"'{self}' names layer {last}, but the model has layers 0 to {n - 1}.")
            for index in range(first, last + 1):
                if index in taken:
                    raise PolicyError(f"'{self}' names layer {index} twice.")
                taken.add(index)
                kinds[index] = part.mechanism if (index - first) % part.every == 0 else self.skipped
        return tuple(kinds)

    def refuse(self, workload: Workload, device_kind: str = "cuda") -> None:
        """Raise `PolicyError` when the policy cannot work with `workload` on this kind of device."""
        for mechanism in dict.fromkeys(self.layers(workload.n_layers)):
            mechanism.refuse(workload, device_kind)

    @contextlib.contextmanager
    def applied(self, model: nn.Module, kinds: Sequence[Mechanism] | None = None) -> Iterator[Applied]:
        """Apply to `model` for the block, check the structure, and undo modules, hooks, flags and `use_cache` exactly.

        A policy already active on the model is taken off first, so that applying twice equals applying once; leaving
        either block leaves the model as it was. `kinds` overrides the mechanism of each layer (the estimate's
        shortened model). Raises `PolicyError` when another tool's checkpointing is in place.
        """
        layers = decoder_layers(model)
        previous: contextlib.ExitStack | None = getattr(layers[0], ACTIVE, None)
        if previous is not None:
            previous.close()
        refuse_foreign_checkpointing(model)
        kinds = tuple(kinds) if kinds is not None else self.layers(len(layers))
        state = Applied(self, kinds, frozen_prefix(model, layers))
        with contextlib.ExitStack() as undo:
            undo.enter_context(_cache_off(model))
            for mechanism in dict.fromkeys(kinds):
                chosen = [layer for layer, kind in zip(layers, kinds, strict=True) if kind == mechanism]
                undo.enter_context(mechanism.on(model, chosen, state.hits.setdefault(mechanism, Counter())))
            undo.enter_context(attributes(layers[0], **{ACTIVE: undo}))
            yield state


@dataclass
class Applied:
    """A policy in force on a model: the mechanism of each layer, and what each has matched so far.

    `frozen` counts the layers at the start of the model that backward does not reach: nothing there or before trains.
    """

    policy: Policy
    kinds: tuple[Mechanism, ...]
    frozen: int = 0
    hits: dict[Mechanism, Counter[str]] = field(default_factory=dict)

    def verify(self, recomputed_layers: set[int]) -> None:
        """Raise `PolicyError` when, after a step, the policy did not do what it says.

        `recomputed_layers` are the layers in which backward ran forward operators again (counted by the tracer).
        """
        for mechanism, counter in self.hits.items():
            missing = mechanism.unmatched(counter)
            if missing:
                raise PolicyError(f"'{mechanism}' kept nothing called {', '.join(missing)}: no such call in this step.")
        for index, kind in enumerate(self.kinds):
            if not kind.traceable:
                continue
            if kind.recomputes and index >= self.frozen and index not in recomputed_layers:
                raise PolicyError(f"'{kind}' had no effect: layer {index} recomputed nothing in backward.")
            if not kind.recomputes and index in recomputed_layers:
                raise PolicyError(f"'{kind}' should recompute nothing, but layer {index} ran operators again.")


def frozen_prefix(model: Any, layers: Sequence[nn.Module]) -> int:
    """How many layers at the start have no trainable parameter in them or in the embedding before them."""
    before = [model.get_input_embeddings(), *layers]
    trains = (any(p.requires_grad for p in module.parameters()) for module in before)
    first = next((index for index, trained in enumerate(trains) if trained), len(before))
    return max(0, first - 1)


def refuse_foreign_checkpointing(model: nn.Module) -> None:
    """Raise `PolicyError` when a checkpoint that is not ours is already on the model."""
    found = foreign_checkpointing(model)
    if found:
        raise PolicyError(f"The model is already checkpointed by {found}: switch that off first.")


def refuse_overwritten(mechanism: Mechanism, layer: nn.Module, kept: Collection[str]) -> None:
    """Raise `PolicyError` when modules whose output is `kept` are overwritten in place by a kernel behind them."""
    lost = " and ".join(name for name in liger.overwritten(layer) if name in kept)
    if lost:
        raise PolicyError(
            f"'{mechanism}' keeps the output of {lost}, which Liger's RoPE overwrites in place: gradients would go "
            f"wrong without an error. Do not keep {lost}, or leave Liger's rope off."
        )


def foreign_checkpointing(model: nn.Module) -> str | None:
    """What other checkpointing is on `model`: torch's wrapper, or Hugging Face's switch; None when there is none."""
    for name, module in model.named_modules():
        if type(module).__name__ == "CheckpointWrapper":
            return f"torch's checkpoint_wrapper round {name!r}"
    layers = decoder_layers(model)
    if getattr(layers[0], ACTIVE, None) is None:
        for layer in layers:
            if layer.gradient_checkpointing:
                return "Hugging Face's own switch (activation_checkpointing_enable)"
    return None


@contextlib.contextmanager
def _cache_off(model: Any) -> Iterator[None]:
    """A replayed layer must not append to a KV cache (pytorch/pytorch#155171)."""
    before = model.config.use_cache
    model.config.use_cache = False
    try:
        yield
    finally:
        model.config.use_cache = before


@contextlib.contextmanager
def attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """Set instance attributes of a module for the block; afterwards each is as it was, absent ones absent."""
    missing = object()
    before = {name: module.__dict__.get(name, missing) for name in values}
    for name, value in values.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                module.__dict__.pop(name, None)
            else:
                object.__setattr__(module, name, value)
