"""Which attention implementations run here, which kernel each workload really runs, and what it keeps."""

import pytest
import torch

from gctutor.attention import availability
from gctutor.estimation import trace
from gctutor.workload import ATTENTIONS, Workload

TOKENS, HEADS, KV_HEADS, DIM, BF16, FP32 = 64, 32, 8, 128, 2, 4
FLASH, EFFICIENT = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient"))


def test_every_implementation_is_listed_with_a_reason():
    found = {each.name: each for each in availability()}
    assert tuple(found) == ATTENTIONS
    assert found["eager"].available and found["sdpa"].available
    assert all(each.reason for each in found.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may well have them")
@pytest.mark.parametrize("name", ATTENTIONS[2:])
def test_flash_attention_without_a_gpu_says_what_it_needs(name):
    found = next(each for each in availability() if each.name == name)
    assert not found.available and "CUDA GPU" in found.reason and "kernels" in found.reason


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_on_a_gpu_depends_on_the_package(monkeypatch, version, installed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(f"transformers.utils.is_flash_attn_{version}_available", lambda **_: installed)
    found = {each.name: each for each in availability()}[f"flash_attention_{version}"]
    assert found.available is installed
    assert found.reason == "installed" if installed else found.reason.startswith("needs")


def traced(kind="cuda", precision="bf16", **changes):
    workload = Workload("Qwen3-8B@2", seqlen=TOKENS, precision=precision, **changes)
    return trace(workload, "none", kind=kind, cache=False)


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, [FLASH]),
        ({"kind": "cpu"}, [f"{FLASH}_for_cpu"]),
        ({"precision": "fp32"}, [EFFICIENT]),
        ({"mask": "padding"}, [EFFICIENT]),
        ({"mask": "packed"}, [EFFICIENT]),
        ({"attention": "eager"}, ["bmm"]),
        ({"attention": "flash_attention_2"}, [FLASH]),
        ({"attention": "flash_attention_2", "mask": "packed"}, [FLASH]),
    ],
)
def test_the_kernel_that_really_ran(changes, kernels):
    assert traced(**changes).attention_kernels == kernels


def layer_bytes(step):
    """Bytes that the second layer keeps in its attention module, outside its linear layers and norms."""
    return sum(step.kept.get((1, site), 0) for site in ("self_attn", "self_attn.core_attn"))


def test_flash_keeps_one_number_a_row_where_eager_keeps_the_square():
    flash, eager = traced(), traced(attention="eager")
    query, grouped = TOKENS * HEADS * DIM * BF16, TOKENS * KV_HEADS * DIM * BF16
    rotated, logsumexp, seeds = query + grouped, TOKENS * HEADS * FP32, 2 * 8 + 8
    assert layer_bytes(flash) == pytest.approx(rotated + query + logsumexp, abs=seeds)
    square = HEADS * TOKENS * TOKENS
    repeated = 2 * query  # K and V for each query head
    softmax = square * (FP32 + BF16)  # in fp32, and its bf16 copy for the product with V
    assert layer_bytes(eager) == 2 * query + repeated + softmax


@pytest.mark.parametrize("mask", ["padding", "packed"])
def test_a_mask_makes_sdpa_repeat_keys_and_values(mask):
    more = layer_bytes(traced(mask=mask)) - layer_bytes(traced())
    groups = HEADS // KV_HEADS
    assert more > (groups - 1) * TOKENS * KV_HEADS * DIM * BF16  # at least one of the two, every group of heads
    assert traced(mask=mask, attention="flash_attention_2").activation_bytes == traced().activation_bytes
