"""`ops:`: PyTorch's selective activation checkpointing (SAC), which keeps the outputs of chosen operators.

A dispatch mode sees every operator of a layer: the outputs of those named go into SAC's own store, everything else is
recomputed. Names are forgiving, but what SAC compares are overloads, so each name is expanded to all of them: a
packet such as `aten.mm` in a policy function would match nothing, silently (pytorch/pytorch#176065).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gctutor.errors import unknown
from gctutor.policies.block import checkpointed
from gctutor.policies.core import Mechanism, PolicyError, attributes, refuse_overwritten

CORE_ATTN = "core_attn"
EVERY_SECOND_MM = "every2mm"
COMMON = ("mm", "addmm", "bmm", CORE_ATTN)
ATTENTION = re.compile(
    r"aten::_(scaled_dot_product_(flash|efficient|cudnn|fused)_attention\w*|(flash|efficient|cudnn)_attention_forward)"
    r"|\w*flash_attn\w*::\w*(fwd|forward)\w*"
)


@dataclass(frozen=True)
class Ops(Mechanism):
    """Keep the outputs of the operators `kept`, but not where module `excluded` of the layer calls them.

    Names are those of `canonical`: `mm`, `core_attn` (the attention kernel, whatever the backend), `every2mm`
    (torchtitan's rule: the first, third, … `mm` of a layer).
    """

    kept: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    host_s_per_op = 1e-5  # assumed: Python in SAC's dispatch mode; `make bench` measures it on the machine at hand

    def __str__(self) -> str:
        return "ops:" + ",".join([*self.kept, *(f"-{name}" for name in self.excluded)])

    @contextlib.contextmanager
    def on(self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]) -> Iterator[None]:
        names = {operator: name for name in self.kept for operator in operators(name)}
        contexts = functools.partial(_contexts, names, hits)
        with contextlib.ExitStack() as undo:
            for layer in layers:
                _warn_of_inplace(self, layer)
                refuse_overwritten(self, layer, self._kept_products(layer))
                for name, module in self._excluded_modules(layer):
                    undo.enter_context(attributes(module, forward=_excluding(name, module.forward)))
            region = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
            undo.enter_context(checkpointed(layers, region))
            yield

    def unmatched(self, hits: Counter[str]) -> list[str]:
        return [name for name in (*self.kept, *(f"-{name}" for name in self.excluded)) if not hits[name]]

    def _kept_products(self, layer: nn.Module) -> list[str]:
        """The linear layers whose matrix product is kept."""
        products = {"mm" if name == EVERY_SECOND_MM else name for name in self.kept}
        linear = [(path.rpartition(".")[2], m) for path, m in layer.named_modules() if isinstance(m, nn.Linear)]
        kept = [name for name, m in linear if ("mm" if m.bias is None else "addmm") in products]
        return [name for name in kept if name not in self.excluded]

    def _excluded_modules(self, layer: nn.Module) -> list[tuple[str, nn.Module]]:
        named = [(path.rpartition(".")[2], module) for path, module in layer.named_modules() if path]
        for name in self.excluded:
            if name not in dict(named):
                raise PolicyError(str(unknown(f"module to exclude in '{self}'", name, dict(named))))
        return [(name, module) for name, module in named if name in self.excluded]


def read_ops(listed: str) -> Ops:
    """The mechanism that `mm,core_attn,-down_proj` names. Raises `PolicyError` for what is no operator."""
    names = [name for name in listed.split(",") if name]
    kept = {canonical(name) for name in names if not name.startswith("-")}
    excluded = {name[1:] for name in names if name.startswith("-")}
    if not kept:
        raise PolicyError(f"'ops:{listed}' keeps no operator: name some, as in 'ops:mm,{CORE_ATTN}'.")
    if EVERY_SECOND_MM in kept and "mm" in kept:
        raise PolicyError(f"'ops:{listed}' names both mm and {EVERY_SECOND_MM}: choose one.")
    for name in kept:
        operators(name)
    return Ops(tuple(sorted(kept, key=lambda name: (name == CORE_ATTN, name))), tuple(sorted(excluded)))


def canonical(name: str) -> str:
    """`aten.mm`, `aten::mm` and `torch.ops.aten.mm` are all `mm`."""
    return name.replace("::", ".").removeprefix("torch.ops.").removeprefix("aten.")


def operators(name: str) -> list[Any]:
    """Every overload that `name` stands for, in-place and `out=` ones left out. Raises `PolicyError` for none."""
    if name == CORE_ATTN:
        return attention_operators()
    for namespace, packet, overload in _readings("mm" if name == EVERY_SECOND_MM else name):
        found = getattr(getattr(torch.ops, namespace), packet, None)
        if isinstance(found, torch._ops.OpOverloadPacket):
            overloads = [getattr(found, each) for each in found.overloads() if overload in (None, each)]
            functional = [each for each in overloads if not each._schema.is_mutable]
            if overloads and not functional:
                raise PolicyError(f"Operator '{name}' works in place: its output cannot be kept.")
            if functional:
                return functional
    aten = {each.removeprefix("aten::").split(".")[0] for each in torch._C._dispatch_get_all_op_names()}
    near = difflib.get_close_matches(name, [*COMMON, *sorted(aten)], n=3)
    raise PolicyError(str(unknown("operator", name, near or COMMON)))


def _readings(name: str) -> Iterator[tuple[str, str, str | None]]:
    """How a dotted name may be read, as (namespace, operator, overload): `aten.` may be left out."""
    parts = name.split(".")
    for first in (["aten", *parts], parts):
        if len(first) in (2, 3):
            yield first[0], first[1], first[2] if len(first) == 3 else None


def attention_operators() -> list[Any]:
    """The forward attention kernels of every backend registered in this process, FlexAttention included."""
    found: list[Any] = [torch.ops.higher_order.flex_attention]
    for qualified in torch._C._dispatch_get_all_op_names():
        name, _, overload = qualified.partition(".")
        if ATTENTION.fullmatch(name) and not name.endswith("backward"):
            namespace, _, packet = name.partition("::")
            found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
    return found


class _Calling(threading.local):
    """The excluded module that is running in this thread, if any."""

    excluded: str | None = None


_calling = _Calling()


def _excluding(name: str, forward: Callable) -> Callable:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        outer, _calling.excluded = _calling.excluded, name
        try:
            return forward(*args, **kwargs)
        finally:
            _calling.excluded = outer

    return run


def _contexts(names: dict[Any, str], hits: Counter[str]) -> tuple:
    """The two contexts of one region, with a counter of its own for `every2mm`.

    torch 2.13 asks the policy in the forward only, older ones in the replay too: the two are counted apart.
    """
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = names.get(operator)
        if name is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if _calling.excluded is not None:
            hits[f"-{_calling.excluded}"] += not context.is_recompute
            return CheckpointPolicy.PREFER_RECOMPUTE
        hits[name] += not context.is_recompute
        if name == EVERY_SECOND_MM:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def _warn_of_inplace(policy: Ops, layer: nn.Module) -> None:
    for path, module in layer.named_modules():
        if getattr(module, "inplace", False):
            warnings.warn(
                f"'{policy}' with the in-place module {path}: it may overwrite a kept output, and gradients go wrong.",
                stacklevel=2,
            )
            return
