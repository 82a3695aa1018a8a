"""The full model without the hardware: fake tensors, and the operators a GPU would run for attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from gctutor.workload import Workload, build, causal_model


def gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the operators a CUDA device runs; tensors (batch, heads, tokens, head dim).

    On fake `cpu` tensors torch would pick the CPU kernel, for which K and V are repeated for each group of heads. A GPU
    runs flash attention with grouped K/V when there is no mask, and the memory-efficient kernel when there is one.
    fp32 has no flash kernel: torch takes the memory-efficient one, with K and V repeated.
    """
    tensors = (query, key, value)
    if has_torch_function(tensors):  # as torch's own function does, so that function modes see it
        options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return handle_torch_function(gpu_attention, tensors, *tensors, enable_gqa=enable_gqa, **options)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # torch's own function is on autocast's list
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    needs_grad = torch.is_grad_enabled() and query.requires_grad
    return efficient(query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale)[0]


class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
    """`save_on_cpu` for fake tensors, where the `meta` device stands for the host and `cpu` for the GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(lambda tensor: tensor.to("meta"), lambda packed: packed.to("cpu"))


@contextlib.contextmanager
def fake_tensors(device_kind: str) -> Iterator[FakeTensorMode]:
    """Fake tensors for the block; for a `cuda` device also its attention operators.

    Hugging Face builds a full causal mask when it sees a fake tensor, which a real run does not: it is told otherwise.
    """
    from transformers import masking_utils, modeling_utils

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(masking_utils, "is_tracing", lambda *_: False))
        stack.enter_context(mock.patch.object(modeling_utils, "save_on_cpu", SaveOnHost))
        if device_kind != "cpu":
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", gpu_attention))
        yield stack.enter_context(FakeTensorMode())


def fake_model(workload: Workload, mode: FakeTensorMode) -> Any:
    """The model of `workload` with fake `cpu` weights.

    It is built on the meta device first: PEFT moves modules while it builds, which fake parameters do not survive.
    """
    with unset_fake_temporarily():
        model = build(workload, "meta")
    with mode:
        model._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu"))
    owner = causal_model(model)
    owner.tie_weights()
    return model
