"""The chunked loss: Hugging Face's loss and gradients without the logits, and what it keeps."""

import pytest
import torch
from conftest import build_tiny, token_ids

from gctutor import chunked_loss
from gctutor.errors import UserError
from gctutor.estimation import trace
from gctutor.tracing import trace_step
from gctutor.workload import Workload, build, inputs

needs_torch = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch's chunked loss is of 2.13"
)
TOLERANCE = 1e-5  # fp32, relative: sums are taken in another order


def gradients(model, **batch):
    model.zero_grad(set_to_none=True)
    loss = model(use_cache=False, **batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@needs_torch
@pytest.mark.parametrize("tokens", [None, 32, 7, 1])
@pytest.mark.parametrize("items", [None, 29])
def test_loss_and_gradients_are_hugging_faces(tokens, items):
    ids = token_ids()
    labels = ids.clone()
    labels[0, :5] = -100  # padding counts in neither
    batch = {"input_ids": ids, "labels": labels, "num_items_in_batch": items and torch.tensor(items)}
    loss, expected = gradients(build_tiny(), **batch)
    model = build_tiny()
    chunked_loss.patch(model, tokens)
    chunked, found = gradients(model, **batch)
    assert chunked.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= TOLERANCE * scale, name


@needs_torch
def test_without_labels_there_are_logits():
    model = build_tiny()
    expected = model(token_ids(), use_cache=False).logits
    chunked_loss.patch(model)
    assert torch.equal(model(token_ids(), use_cache=False).logits, expected)


@needs_torch
def test_only_the_patched_model_is_changed():
    before = type(build_tiny()).forward
    chunked_loss.patch(build_tiny())
    assert type(build_tiny()).forward is before and "forward" not in vars(build_tiny())


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(UserError, match=r"torch 2\.13"):
        chunked_loss.patch(build_tiny())


@needs_torch
@pytest.mark.parametrize("kernels", ["hf+chunked", "hf+chunked:8"])
def test_estimated_bytes_are_the_traced_ones(kernels):
    workload = Workload("nano", seqlen=64, layers=2, precision="fp32", kernels=kernels)
    real = trace_step(build(workload), inputs(workload))
    assert real.activation_bytes == trace(workload, "none", kind="cpu", cache=False).activation_bytes


@needs_torch
def test_the_logits_are_gone_and_the_gradients_of_the_head_are_held():
    tokens, hidden, vocabulary = 256, 4096, 151_936
    plain, chunked = (
        trace(Workload("Qwen3-8B@1", seqlen=tokens, kernels=kernels), "none", cache=False)
        for kernels in ("hf", "hf+chunked:128")
    )
    logits_fp32 = tokens * vocabulary * 4
    chunk_fp32 = 128 * (vocabulary + hidden) * 4
    head = [kernel for s in chunked.segments if s.layer == "head" for kernel in s.kernels]
    loss = next(kernel for kernel in head if "linear_cross_entropy" in kernel.name)
    assert sum(loss.born) - sum(loss.freed) < sum(loss.born) - chunk_fp32 + 64
    assert plain.breakdown()["loss"] == pytest.approx(logits_fp32, rel=0.05)
    assert chunked.breakdown()["loss"] == pytest.approx((vocabulary + tokens) * hidden * 2, abs=64)
