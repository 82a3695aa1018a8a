"""What the lessons on pitfalls share: a model small enough to break many times, and a way to look at what broke."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def tiny_qwen3(*, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """A random float32 Qwen3 on the CPU, in train mode: 4 layers, hidden 32, MLP 64, 4 heads, 2 K/V heads.

    `changes` go to its configuration; the KV cache is off unless they say otherwise.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**{**sizes, **changes}), attn_implementation=attention, dtype=torch.float32
        )
    return model.train()


@dataclass(frozen=True)
class Attempt:
    """What came of a call: its value, or the first line of its error; and the first line of each distinct warning."""

    value: Any
    error: str | None
    warnings: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return self.error is not None


def attempt(run: Callable[[], Any]) -> Attempt:
    """Call `run`; errors and warnings become part of the answer."""
    value, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = run()
        except Exception as problem:
            error = f"{type(problem).__name__}: {_first_line(problem)}"
    return Attempt(value, error, tuple(dict.fromkeys(_first_line(each.message) for each in caught)))


def _first_line(message: object) -> str:
    return (str(message).strip() or "no message").splitlines()[0]


def matmuls(model: Any, batch: dict[str, Any]) -> tuple[int, int]:
    """How many `aten.mm` one training step runs: in the forward, and in the backward with what it recomputes."""
    model.zero_grad(set_to_none=True)
    with _Matmuls() as forward:
        loss = model(**batch).loss
    with _Matmuls() as backward:
        loss.backward()
    model.zero_grad(set_to_none=True)
    return forward.count, backward.count


class _Matmuls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def hook_calls(model: Any, module: torch.nn.Module, batch: dict[str, Any]) -> dict[str, int]:
    """How often hooks on `module` fire in one training step: before and after its forward, and after its backward."""
    calls: Counter[str] = Counter({"forward pre": 0, "forward": 0, "backward": 0})
    hooks = [
        module.register_forward_pre_hook(lambda *_: calls.update(["forward pre"])),
        module.register_forward_hook(lambda *_: calls.update(["forward"])),
        module.register_full_backward_hook(lambda *_: calls.update(["backward"])),
    ]
    try:
        model(**batch).loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    model.zero_grad(set_to_none=True)
    return dict(calls)
