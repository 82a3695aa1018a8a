"""`gctutor calibrate`: the ceilings that kernels really reach on the device here, written as a profile for estimates.

A GPU's profile gives shares of its data sheet's rates; a CPU has no data sheet, so its profile gives the rates.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from gctutor import devices, tracing
from gctutor.devices import Device, find_device, list_devices, slug
from gctutor.measurement import hardware_name
from gctutor.results import provenance
from gctutor.roofline import VIEW, attention_flop
from gctutor.workload import SIZES, Workload

SAMPLES, SAMPLE_S = 7, 0.05
LINK_BYTES = 256 * 2**20
STAGES = ("matrix products", "attention", "memory", "launches", "host link")
Timing = tuple[float, float]  # work done (FLOP or bytes), seconds


def calibrate(device: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure the ceilings of `device` (`cuda` or `cpu`); returns the fields of its profile.

    Matrix products and attention have the shapes of Qwen3-8B at 1 × 4096 in bf16, on a CPU those of nano at 1 × 256 in
    fp32. Raises `UserError` for a GPU that has no data sheet in `data/devices.toml`.
    """
    card = card_of(device)
    cpu = card.kind == "cpu"
    workload = Workload("nano", 1, 256, precision="fp32") if cpu else Workload("Qwen3-8B", 1, 4096)
    progress(STAGES[0])
    products = rate(matrix_products(workload, device, workload.dtype))
    halves = rate(matrix_products(workload, device, torch.bfloat16)) if cpu else products
    progress(STAGES[1])
    forward, backward = attention(workload, device)
    progress(STAGES[2])
    bandwidth = rate(streams(workload, device))
    progress(STAGES[3])
    launch = seconds_a_launch(device)
    if cpu:
        rates = {"fp32_flop_per_s": products, "bf16_flop_per_s": halves, "bandwidth_bytes_per_s": bandwidth}
        peak, memory = products, bandwidth
    else:
        progress(STAGES[4])
        rates = {"host_link_bytes_per_s": host_link()}
        peak, memory = card.bf16_flop_per_s, card.bandwidth_bytes_per_s
    shares = {
        "gemm": products / peak,
        "attention_forward": forward / peak,
        "attention_backward": backward / peak,
        "bandwidth": bandwidth / memory,
    }
    return {"profile": _origin(device), "launch_s": launch, **rates, "efficiency": shares}


def card_of(device: str) -> Device:
    """The data sheet of `device` here. Raises `UserError` for a GPU that `data/devices.toml` does not know."""
    return find_device("cpu" if device == "cpu" else hardware_name(device))


def _origin(device: str) -> str:
    origin = provenance()
    day = origin["date"].partition("T")[0]
    return f"calibrated {day} on {hardware_name(device)}, torch {origin['torch']}, source {origin['source_hash']}"


def save(profile: dict[str, Any], device: str, folder: Path | None = None) -> Path:
    """Write a profile where estimates look for it (or in `folder`), and let them see it; returns the file."""
    path = (folder or devices.DATA / "profiles") / f"{slug(card_of(device).name)}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in profile.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in profile.items() if isinstance(value, dict)}
    lines = ["# Measured by `gctutor calibrate`; read by gctutor/devices.py over the data sheet.", *_toml(plain)]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_toml(table)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    list_devices.cache_clear()
    return path


def _toml(values: dict[str, Any]) -> list[str]:
    return [
        f"{k} = {json.dumps(v, ensure_ascii=False) if isinstance(v, str) else f'{v:.4g}'}" for k, v in values.items()
    ]


# --- what is timed ---


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Median seconds of one `call`, warmed up; short calls are timed many in a row, so that the queue stays full."""

    def took(repeats: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        _synchronize(device)
        return time.perf_counter() - start

    took(2)
    repeats = max(1, math.ceil(SAMPLE_S / took(1)))
    return statistics.median(took(repeats) for _ in range(SAMPLES)) / repeats


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rate(timings: list[Timing]) -> float:
    """Work a second over all timings together: the large ones count most, as they do in a step."""
    return sum(work for work, _ in timings) / sum(seconds for _, seconds in timings)


def matrix_products(workload: Workload, device: str, dtype: torch.dtype) -> list[Timing]:
    """FLOPs and seconds of the forward products of one layer and of the LM head."""
    hidden, mlp, _, heads, kv_heads, dim, vocab, _, _ = SIZES[workload.model]
    shapes = [(hidden, heads * dim), (hidden, kv_heads * dim), (hidden, mlp), (mlp, hidden), (hidden, vocab)]
    timings = []
    for inner, outer in shapes:
        left = torch.randn(workload.tokens, inner, device=device, dtype=dtype)
        right = torch.randn(outer, inner, device=device, dtype=dtype)
        timings.append(
            (2.0 * workload.tokens * inner * outer, seconds_of(partial(torch.matmul, left, right.T), device))
        )
    return timings


def attention(workload: Workload, device: str) -> tuple[float, float]:
    """FLOP a second of causal attention, forward and backward; on a GPU with grouped K/V, as a step runs it."""
    _, _, _, heads, kv_heads, dim, _, _, _ = SIZES[workload.model]
    kv_heads = heads if device == "cpu" else kv_heads
    shapes = [(workload.batch, n, workload.seqlen, dim) for n in (heads, kv_heads, kv_heads)]
    query, key, value = (torch.randn(s, device=device, dtype=workload.dtype, requires_grad=True) for s in shapes)

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kv_heads != heads)

    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    flop = [attention_flop(shapes[0], shapes[1], causal=True, backward=half) for half in (False, True)]
    return flop[0] / seconds_of(forward, device), flop[1] / seconds_of(backward, device)


def streams(workload: Workload, device: str) -> list[Timing]:
    """Bytes and seconds of a copy, a sum and SiLU, on tensors of the MLP's width."""
    shape = (workload.tokens, SIZES[workload.model][1])
    a, b, out = (torch.randn(shape, device=device, dtype=workload.dtype) for _ in range(3))
    size = a.numel() * a.element_size()
    calls: list[tuple[int, Callable[[], Any]]] = [
        (2, lambda: out.copy_(a)),
        (3, lambda: torch.add(a, b, out=out)),
        (2, lambda: functional.silu(a)),
    ]
    return [(float(moved * size), seconds_of(call, device)) for moved, call in calls]


def seconds_a_launch(device: str) -> float:
    """Host seconds a kernel of a Hugging Face training step: a step of a tiny Qwen3, over the kernels it runs."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "vocab_size": 64,
        "head_dim": 16,
    }
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.zeros(1, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    trace = tracing.trace_step(model, batch)
    kernels = sum(kernel.work.kind != VIEW for segment in trace.segments for kernel in segment.kernels)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    return seconds_of(step, device) / kernels


def host_link() -> float:
    """Bytes a second from pinned host memory to the GPU and back."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty_like(host, device="cuda")
    there = seconds_of(lambda: card.copy_(host, non_blocking=True), "cuda")
    back = seconds_of(lambda: host.copy_(card, non_blocking=True), "cuda")
    return 2 * LINK_BYTES / (there + back)
