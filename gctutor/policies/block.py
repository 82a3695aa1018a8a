"""`none` and `block`: keep everything, or Hugging Face's own switch, which checkpoints whole decoder layers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gctutor.policies.core import Mechanism, PolicyError, attributes
from gctutor.workload import Workload, causal_model, decoder_layers


@dataclass(frozen=True)
class Keep(Mechanism):
    """`none`: nothing is recomputed."""

    recomputes = False

    def __str__(self) -> str:
        return "none"

    def on(
        self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]
    ) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Block(Mechanism):
    """`block`, `block+offload`, `block+reentrant`: only a layer's input is kept, the layer is replayed in backward."""

    offload: bool = False
    reentrant: bool = False

    def __str__(self) -> str:
        return "block" + ("+offload" if self.offload else "") + ("+reentrant" if self.reentrant else "")

    def refuse(self, workload: Workload, device_kind: str) -> None:
        if self.offload and device_kind == "cpu":
            raise PolicyError(
                "'block+offload' moves activations from an accelerator to the host: a CPU has nothing to move."
            )

    @contextlib.contextmanager
    def on(self, model: Any, layers: Sequence[nn.Module], hits: Counter[str]) -> Iterator[None]:
        before = {
            module: {name: module.__dict__[name] for name in SWITCH if name in module.__dict__}
            for module in model.modules()
            if hasattr(module, "gradient_checkpointing")
        }
        with contextlib.ExitStack() as undo:
            for module, switch in before.items():
                undo.callback(_restore, module, switch)
            with _input_hook_kept(model, needed=self.reentrant, undo=undo):
                model.activation_checkpointing_enable({"use_reentrant": self.reentrant}, offload=self.offload)
            for layer in set(decoder_layers(model)).difference(layers):
                _restore(layer, before[layer])
            yield


SWITCH = ("gradient_checkpointing", "_gradient_checkpointing_func")


def _restore(module: nn.Module, switch: dict[str, Any]) -> None:
    for name in SWITCH:
        module.__dict__.pop(name, None)
    module.__dict__.update(switch)


@contextlib.contextmanager
def _input_hook_kept(model: Any, *, needed: bool, undo: contextlib.ExitStack) -> Iterator[None]:
    """Keep Hugging Face's input-gradient hook only where reentrant checkpointing needs it, and remove it on undo.

    The switch installs it always and leaves it behind; on frozen embeddings it makes backward run through frozen
    layers for nothing (modelscope/ms-swift#10214).
    """
    owner = causal_model(model)
    before = list(getattr(owner, "_require_grads_hooks", None) or [])
    yield
    added = [hook for hook in getattr(owner, "_require_grads_hooks", []) if hook not in before]

    def remove() -> None:
        for hook in added:
            hook.remove()
        owner._require_grads_hooks = before
        if before:
            owner._require_grads_hook = before[0]
        else:
            owner.__dict__.pop("_require_grads_hooks", None)
            owner.__dict__.pop("_require_grads_hook", None)

    if needed:
        undo.callback(remove)
    else:
        remove()


@contextlib.contextmanager
def checkpointed(layers: Sequence[nn.Module], function: Any) -> Iterator[None]:
    """Let Hugging Face's layers run through `function(layer_forward, *args)`, the way its own switch does."""
    with contextlib.ExitStack() as undo:
        for layer in layers:
            undo.enter_context(attributes(layer, gradient_checkpointing=True, _gradient_checkpointing_func=function))
        yield
