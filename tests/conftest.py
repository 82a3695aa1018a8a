"""Fixtures shared by the tests: a tiny model, one training step, an outer counter of operators, and kept bytes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAMILIES = {"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}


def build_tiny(kind: str = "qwen3", *, attention: str = "sdpa", seed: int = 0, **changes):
    """A random causal LM: vocabulary 128, hidden 32, MLP 64, 4 layers, 4 heads / 2 K/V heads of 8, float32."""
    import transformers

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
    }
    config = getattr(transformers, f"{FAMILIES[kind]}Config")(**{**sizes, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.train()


def token_ids(batch: int = 2, seqlen: int = 16) -> torch.Tensor:
    return torch.randint(0, 128, (batch, seqlen), generator=torch.Generator().manual_seed(1))


class OpCounts(TorchDispatchMode):
    """Counts in `of` the operators executed inside the block, by `aten` name without overload."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[str(func).removeprefix("aten.").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Step(NamedTuple):
    """What one training step gave, and the operators it executed in forward and backward."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    forward: Counter[str]
    backward: Counter[str]

    @property
    def mm(self) -> tuple[int, int]:
        """Matrix products (with or without bias) in forward and in backward."""
        return tuple(ops["mm"] + ops["addmm"] for ops in (self.forward, self.backward))

    def equals(self, other: Step) -> bool:
        """Bitwise the same loss and gradients."""
        same = self.grads.keys() == other.grads.keys() and torch.equal(self.loss, other.loss)
        return same and all(torch.equal(grad, other.grads[name]) for name, grad in self.grads.items())

    def worst(self, other: Step) -> float:
        """The largest gradient difference, relative to the largest entry of that gradient."""
        pairs = [(grad, other.grads[name]) for name, grad in self.grads.items()]
        return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def training_step(model, ids: torch.Tensor | None = None, *, amp: bool = False, **inputs) -> Step:
    """One forward and backward, seeded, from gradients None, in an autocast block of its own if `amp`."""
    ids = token_ids() if ids is None else ids
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    with OpCounts() as forward, torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        loss = model(input_ids=ids, labels=ids, **inputs).loss
    with OpCounts() as backward:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), grads, forward.of, backward.of)


class LiveStorages(TorchDispatchMode):
    """Every storage an operator of the block returned, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self.seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out


def activation_bytes(model, ids: torch.Tensor | None = None, *, amp: bool = False, **inputs) -> int:
    """Bytes alive after the forward when only the loss is held, parameters and buffers excluded."""
    ids = token_ids(8, 128) if ids is None else ids
    static = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    with LiveStorages() as live, torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        loss = model(input_ids=ids, labels=ids, **inputs).loss
    alive = sum(size for key, (ref, size) in live.seen.items() if key not in static and not ref.expired())
    del loss
    return alive


@pytest.fixture
def tiny():
    """`tiny(kind="qwen3", attention="sdpa", **config)` builds the tiny model."""
    return build_tiny


@pytest.fixture
def step():
    """`step(model, ids=None, amp=False, **inputs)`: one training step, as a `Step`."""
    return training_step


@pytest.fixture
def counts():
    """`with counts() as c: ...` then `c.of["mm"]`."""
    return OpCounts


@pytest.fixture
def kept_bytes():
    """`kept_bytes(model, ids=None, amp=False, **inputs)`: activation bytes by storage, counted without gctutor."""
    return activation_bytes
