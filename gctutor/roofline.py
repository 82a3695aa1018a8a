"""What an operator costs: FLOPs, bytes moved, arithmetic intensity, and its time on a device by the roofline.

Roofline: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gctutor.devices import Device

GEMM, ATTENTION, ELEMENTWISE, VIEW, LINK = "gemm", "attention", "elementwise", "view", "link"
FLASH_BACKWARD_FACTOR = 2.5  # five matrix products against two: T. Dao, "FlashAttention-2", 2023, section 4.1


class Work(NamedTuple):
    """What one operator does: its kind, FLOPs, bytes read and written, and whether its matrices are fp32."""

    kind: str
    flop: int
    bytes: int
    fp32: bool


def attention_flop(query: Sequence[int], key: Sequence[int], *, causal: bool, backward: bool = False) -> int:
    """FLOPs of an attention kernel for `query` (batch, heads, T, d) and `key` (batch, K/V heads, S, d).

    Forward is two products of 2·T·S·d a head; a causal kernel does half; flash's backward does 2.5 forwards.
    """
    batch, heads, rows, dim = query
    forward = 4 * batch * heads * rows * key[2] * dim
    if causal:
        forward //= 2
    return int(forward * FLASH_BACKWARD_FACTOR) if backward else forward


def work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], *, makes_new: bool) -> Work:
    """The work of one aten call, from the shapes of its tensors (fake or real).

    `makes_new` says whether any output is new memory: a call that neither makes nor writes memory is a view and free.
    An element-wise operator counts one FLOP an output element.
    """
    import torch

    name = func._schema.name.split("::")[1]
    tensors = [t for t in flatten([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]
    written = _written(func, args, kwargs)
    if name.startswith(("empty", "new_empty")) or not (makes_new or written):
        return Work(VIEW, 0, 0, False)
    if name in ("_to_copy", "copy_") and len({t.device for t in (*tensors, *outputs)}) > 1:
        return Work(LINK, 0, bytes_of(outputs[0]), False)
    fp32 = any(t.dtype == torch.float32 for t in tensors)
    given = [*args, *(value for key, value in kwargs.items() if key != "out")]  # `addmm(c, …, out=c)` reads c as well
    read = [t for t in flatten(given) if isinstance(t, torch.Tensor)]
    moved = sum(map(bytes_of, read)) + sum(map(bytes_of, written or outputs))
    if name in ("mm", "bmm", "addmm", "baddbmm", "_int_mm"):
        left, right = (args[1], args[2]) if "add" in name else (args[0], args[1])
        return Work(GEMM, 2 * math.prod(left.shape) * right.shape[-1], moved, left.dtype == torch.float32)
    if "attention" in name or "flash_attn" in name:
        return Work(ATTENTION, _attention_work(func, args, kwargs), moved, args[0].dtype == torch.float32)
    if name.startswith("_linear_cross_entropy_batch_chunked"):
        return _chunked_loss_work(args[0], args[1], rows=args[8])
    if name in ("embedding", "index", "index_select", "gather"):
        moved = 2 * sum(map(bytes_of, outputs)) + sum(bytes_of(t) for t in tensors if t.dtype == torch.long)
    elif name in ("zero_", "fill_", "embedding_dense_backward", "copy_"):
        moved -= bytes_of(args[0]) if name != "embedding_dense_backward" else 0
    return Work(ELEMENTWISE, sum(t.numel() for t in outputs), moved, fp32)


def _chunked_loss_work(hidden: Any, weight: Any, rows: int) -> Work:
    """torch's chunked loss is one opaque operator: three products of the head's size, `rows` tokens at a time.

    A chunk reads the head's weight twice, reads and writes its gradient, and passes over its fp32 logits about five
    times; this is a formula, not a trace.
    """
    tokens, (vocabulary, width) = hidden.shape[0], weight.shape
    chunks = math.ceil(tokens / rows)
    moved = chunks * 4 * bytes_of(weight) + 5 * 4 * tokens * vocabulary
    return Work(
        GEMM, 3 * 2 * tokens * vocabulary * width, moved, hidden.dtype == weight.dtype and weight.element_size() == 4
    )


def workspace_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes that an operator allocates and frees inside, where no tracer sees them; by formula, 0 for most.

    torch's chunked loss holds one chunk's logits and rows in fp32.
    """
    if "_linear_cross_entropy_batch_chunked" not in func._schema.name or len(args) < 9:
        return 0
    (tokens, width), vocabulary, rows = args[0].shape, args[1].shape[0], args[8]
    return 4 * min(rows, tokens) * (vocabulary + width)


def _attention_work(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    bound = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    query, key = (next(bound[name] for name in names if name in bound) for names in (("query", "q"), ("key", "k")))
    backward = "backward" in func._schema.name
    causal = bool(bound.get("is_causal", bound.get("causal", False)))
    shapes = [tuple(query.shape), tuple(key.shape)]
    if "flash_attn" in func._schema.name:  # the flash-attn package lays tensors out as (batch, T, heads, d)
        shapes = [(b, h, t, d) for b, t, h, d in shapes]
    return attention_flop(*shapes, causal=causal, backward=backward)


def bytes_of(tensor: Any) -> int:
    """Bytes a kernel touches in `tensor`: every element once, broadcast (stride 0) dimensions counted once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride != 0 else min(size, 1)
    return numel * tensor.element_size()


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Tensors that an in-place or `out=` call writes."""
    if not func._schema.is_mutable:
        return []
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    hit = (given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    return [t for t in flatten(hit) if hasattr(t, "element_size")]


def flatten(values: Iterable[Any]) -> Iterable[Any]:
    """The values, those inside lists and tuples included."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flatten(value)
        else:
            yield value


def kernel_seconds(work: Work, device: Device) -> float:
    """Roofline time of one kernel: the larger of compute and memory time, by the device's effective rates."""
    if work.kind == VIEW:
        return 0.0
    if work.kind == LINK:
        return work.bytes / device.host_link_bytes_per_s
    memory = work.bytes / (device.bandwidth_bytes_per_s * device.efficiency.bandwidth)
    return max(compute_seconds(work, device), memory)


def compute_seconds(work: Work, device: Device, *, backward: bool = False) -> float:
    """Time of the FLOPs of a matrix kernel alone; element-wise kernels are bound by memory and count none."""
    if work.kind not in (GEMM, ATTENTION):
        return 0.0
    peak = device.fp32_flop_per_s if work.fp32 else device.bf16_flop_per_s
    if work.kind == GEMM:
        return work.flop / (peak * device.efficiency.gemm)
    share = device.efficiency.attention_backward if backward else device.efficiency.attention_forward
    return work.flop / (peak * share)
