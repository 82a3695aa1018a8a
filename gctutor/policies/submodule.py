"""`sub:mlp`, `sub:attn`, `sub:norms`: a non-reentrant checkpoint round submodules of each layer."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

from gctutor.policies.core import Mechanism, attributes

PARTS = ("attn", "mlp", "norms")
_NAMES = {"mlp": ("mlp", "feed_forward"), "attn": ("self_attn", "attention", "attn")}


@dataclass(frozen=True)
class Sub(Mechanism):
    """Checkpoint these parts of a layer (`mlp`, `attn`: the attention module, `norms`: every norm in the layer)."""

    parts: tuple[str, ...]

    def __str__(self) -> str:
        return "sub:" + ",".join(self.parts)

    @contextlib.contextmanager
    def on(self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for layer in layers:
                for part, module in submodules(layer, self.parts):
                    replay = functools.partial(checkpoint, _counted(module.forward, part, hits), use_reentrant=False)
                    undo.enter_context(attributes(module, forward=replay))
            yield

    def unmatched(self, hits: Counter[str]) -> list[str]:
        return [part for part in self.parts if not hits[part]]


def submodules(layer: nn.Module, parts: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules of `layer` that `parts` name; a norm inside a part already taken is not taken twice."""
    found: list[tuple[str, nn.Module]] = []
    for part in ("mlp", "attn"):
        if part in parts:
            found += [(part, module) for name, module in layer.named_children() if name in _NAMES[part]]
    if "norms" in parts:
        inside = {id(module) for _, taken in found for module in taken.modules()}
        norms = [m for m in layer.modules() if "norm" in type(m).__name__.lower() and id(m) not in inside]
        found += [("norms", module) for module in norms]
    return found


def _counted(forward: Callable, part: str, hits: Counter[str]) -> Callable:
    @functools.wraps(forward)
    def run(*args, **kwargs):
        hits[part] += 1
        return forward(*args, **kwargs)

    return run
