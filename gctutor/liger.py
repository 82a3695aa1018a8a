"""Liger kernels on one model: patched without leaking into the next, and traced without a GPU.

Liger patches Hugging Face's modules by name, for the whole process. Here each patch lands on one model instance and the
module's names are put back, so the next model built is a plain one. For an estimate the real Liger code runs on fake
tensors: Triton launches are recorded instead of run, so every buffer is the one a GPU would hold.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from gctutor.errors import UserError

PARTS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "cross_entropy")
# How often a kernel goes over its tensors when that is more than once, read off the kernels of liger-kernel 0.8.5:
# in place is a read and a write; the cross entropy reads the logits twice and writes their gradient over them.
PASSES = {"_triton_rope": 2, "liger_cross_entropy_kernel": 3, "_swiglu_backward_kernel": 2, "element_mul_kernel": 2}


def patch(model: Any, parts: Sequence[str]) -> None:
    """Switch Liger's `parts` on for `model` alone. Raises `UserError` when Liger or its kernels are not available."""
    apply = _apply_function(model.config.model_type)
    module = sys.modules[type(model).__module__]
    chosen = {part: part in parts for part in PARTS}
    own = {name: chosen.pop(name) for name in ("rope", "cross_entropy")}
    before = dict(vars(module))
    try:
        apply(**chosen, **dict.fromkeys(own, False), model=model)
    finally:
        for name, value in before.items():
            setattr(module, name, value)
    if own["rope"]:
        _patch_rope(model, module)
    if own["cross_entropy"]:
        model.loss_function = _liger_loss
    if chosen["fused_linear_cross_entropy"]:
        model.forward = _without_cache_warning(model.forward)


def _apply_function(model_type: str) -> Callable:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as functions
    except ImportError as error:
        raise UserError(
            "Liger kernels are not available here: pip install 'gctutor[liger]' (they need triton: Linux only)."
        ) from error
    if model_type not in functions:
        raise UserError(f"Liger has no kernels for {model_type!r} models: use kernels='hf'.")
    return functions[model_type]


def _patch_rope(model: Any, module: types.ModuleType) -> None:
    """Give each attention module a forward that looks `apply_rotary_pos_emb` up as Liger's."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    seen_by_forward = {**vars(module), "apply_rotary_pos_emb": liger_rotary_pos_emb}
    for layer in model.model.layers:
        attention = layer.self_attn
        plain = inspect.unwrap(type(attention).forward)
        rotated = types.FunctionType(
            plain.__code__, seen_by_forward, plain.__name__, plain.__defaults__, plain.__closure__
        )
        rotated.__kwdefaults__ = plain.__kwdefaults__
        attention.forward = types.MethodType(rotated, attention)


def _without_cache_warning(forward: Callable) -> Callable:
    """Liger's forward passes `past_key_values` on, a name that Hugging Face has deprecated."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            return forward(*args, **kwargs)

    return run


def overwritten(layer: Any) -> tuple[str, ...]:
    """The modules of a decoder layer whose outputs Liger's RoPE overwrites in place; none without it.

    No replay can start from such an output: it would be rotated twice, and no version counter tells. Where a model has
    q and k norms (Qwen3), they stand between the projections and the rotation; Llama and Qwen2 have none.
    """
    for attention in layer.modules():
        names = getattr(inspect.unwrap(attention.forward), "__globals__", {})
        rotation = getattr(names.get("apply_rotary_pos_emb"), "__module__", "")
        if hasattr(attention, "q_proj") and rotation.startswith("liger_kernel"):
            return ("q_norm", "k_norm") if hasattr(attention, "q_norm") else ("q_proj", "k_proj")
    return ()


def _liger_loss(logits: Any, labels: Any, vocab_size: int, **options: Any) -> Any:
    """Hugging Face's causal loss with Liger's cross entropy kernel in place of torch's."""
    from liger_kernel.transformers.functional import liger_cross_entropy
    from transformers.loss.loss_utils import ForCausalLMLoss

    with mock.patch.object(torch.nn.functional, "cross_entropy", liger_cross_entropy):
        return ForCausalLMLoss(logits, labels, vocab_size, **options)


@contextlib.contextmanager
def launches(note: Callable[[str, Sequence[torch.Tensor]], None], *, as_cuda: bool = True) -> Iterator[None]:
    """For the block, Triton kernels do not run: `note(kernel name, tensors)` is told of each launch instead.

    Liger's fused loss chooses its path by the tensors' device. With `as_cuda` it takes that of a CUDA card of compute
    capability 8 or more, which adds to the head's gradient in place; elsewhere it makes an fp32 copy a chunk.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        note(self.fn.__name__, tensors)

    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it reports each optional backend that is not there
    with mock.patch.object(JITFunction, "run", run), _loss_as_on_cuda() if as_cuda else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _loss_as_on_cuda() -> Iterator[None]:
    try:
        from liger_kernel.ops import fused_linear_cross_entropy as loss
    except ImportError:
        yield
        return
    on_cuda = _on_cuda(loss)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(loss, "fused_linear_cross_entropy_forward", on_cuda.fused_linear_cross_entropy_forward),
    ):
        yield


# Liger's questions about the device, and what they are for fake `cpu` tensors that stand for `cuda` ones.
AS_ON_CUDA = {
    '.device.type == "cuda"': '.device.type == "cpu"',
    '.device.type != "cuda"': '.device.type != "cpu"',
    "torch.is_autocast_enabled()": 'torch.is_autocast_enabled("cpu")',
    'torch.get_autocast_dtype("cuda")': 'torch.get_autocast_dtype("cpu")',
}


@functools.cache
def _on_cuda(module: types.ModuleType) -> types.ModuleType:
    """A copy of Liger's `module` that takes fake `cpu` tensors for `cuda` ones."""
    source = inspect.getsource(module)
    for question, answered in AS_ON_CUDA.items():
        source = source.replace(question, answered)
    copy = types.ModuleType(module.__name__ + "_on_cuda")
    exec(compile(source, f"<{copy.__name__}>", "exec"), vars(copy))
    return copy
