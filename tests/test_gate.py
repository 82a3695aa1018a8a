"""The gate: equal bits pass, rounding passes, wrong gradients stop the job; and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from gctutor.errors import UserError
from gctutor.gate import compare_recompute, norm_jumps, recompute_gate, step_of, widened
from gctutor.pitfalls import tiny_qwen3
from gctutor.policies.block import checkpointed
from gctutor.workload import decoder_layers

IDS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Forgetful(torch.autograd.Function):
    """A checkpoint that replays outside autocast."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def forgetful(model):
    return checkpointed(decoder_layers(model), lambda run, x, *_: Forgetful.apply(run, x))


def in_place(model):
    for layer in decoder_layers(model):
        layer.mlp.act_fn = nn.SiLU(inplace=True)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["block", "block+reentrant", "sub:mlp", "ops:mm,core_attn", "modules:all"])
def test_policies_give_the_same_bits(policy, dtype):
    report = recompute_gate(tiny_qwen3().to(dtype), policy, BATCH)
    assert report.exact and report.repeatable and report.passed and "bit for bit" in str(report)


def test_lost_autocast_is_rounding():
    report = recompute_gate(tiny_qwen3(), forgetful, BATCH, autocast=autocast)
    assert not report.exact and report.passed
    assert report.policy == "forgetful" and "float32 reference" in str(report) and "rounding only" in str(report)
    assert (report.table["without"] > 1e-3).all() and (report.table["allowed"] == 2 * report.table["without"]).all()


@pytest.mark.filterwarnings("ignore:.*in-place module")
@pytest.mark.parametrize(("dtype", "reference"), [(torch.float32, "float64"), (torch.bfloat16, "float32")])
def test_an_overwritten_value_is_stopped(dtype, reference):
    model = in_place(tiny_qwen3().to(dtype))
    with pytest.raises(UserError, match="wrong gradients") as stopped:
        recompute_gate(model, "ops:mm", BATCH)
    assert reference in str(stopped.value) and "the loss is the same" in str(stopped.value)
    report = compare_recompute(model, "ops:mm", BATCH)
    assert not report.passed and report.worst_layer.startswith("layers.")


def test_gradients_that_are_missing_are_wrong():
    @contextlib.contextmanager
    def cut(model):
        hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output.detach())
        yield
        hook.remove()

    report = compare_recompute(tiny_qwen3(), cut, BATCH)
    assert not report.passed and math.isinf(report.table.loc["layers.0", "with"])


def test_numpy_noise_is_found():
    class Noise(nn.Module):
        def forward(self, x):
            return x * torch.from_numpy(np.random.rand(*x.shape)).to(x)

    model = tiny_qwen3()
    for layer in decoder_layers(model):
        layer.mlp.act_fn = Noise()
    assert not compare_recompute(model, "block", BATCH).passed


def test_nothing_outlasts_the_gate():
    model = tiny_qwen3().to(torch.bfloat16)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    compare_recompute(in_place(model), forgetful, BATCH)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[1]).all()


def test_widened_gives_the_same_bits_back_and_works_with_replaced_forwards():
    model = tiny_qwen3().to(torch.bfloat16)
    layer = model.model.layers[0]
    layer.forward = functools.partial(layer.forward)
    before = step_of(model, BATCH)
    with widened(model, torch.float32):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert step_of(model, BATCH).loss != before.loss
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert before.same_bits(step_of(model, BATCH))


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="request"):
        recompute_gate(tiny_qwen3(), "auto", BATCH)
    model = tiny_qwen3()
    model.activation_checkpointing_enable()
    with pytest.raises(UserError, match="already checkpointed"):
        recompute_gate(model, "block", BATCH)


def test_a_reference_that_is_another_function_is_refused():
    class Fickle(nn.Module):
        def forward(self, x):
            return x if x.dtype == torch.bfloat16 else 300 * x

    @contextlib.contextmanager
    def perturbed(model):
        hook = model.model.layers[0].register_forward_hook(lambda module, args, output: 1.01 * output)
        yield
        hook.remove()

    model = tiny_qwen3().to(torch.bfloat16)
    for layer in decoder_layers(model):
        layer.mlp.act_fn = Fickle()
    with pytest.raises(UserError, match="another function"):
        compare_recompute(model, perturbed, BATCH)


def test_a_step_differs_from_itself_by_nothing():
    step = step_of(tiny_qwen3(), BATCH)
    assert step.off(step) == 0 and step.same_bits(step)
    expected = math.sqrt(sum(g.square().sum().item() for g in step.gradients.values()))
    assert step.norm == pytest.approx(expected, rel=1e-5)


# --- jumps of the norm ------------------------------------------------------------------------------------------------


def test_a_jump_is_flagged_at_its_step_and_noise_is_not():
    norms = [1 + 0.1 * math.sin(step) for step in range(40)]
    assert norm_jumps(norms) == []
    norms[25] *= 5
    norms[30] /= 5
    assert norm_jumps(norms) == [25, 30]
    assert norm_jumps(norms, factor=6) == []


def test_norms_that_are_no_numbers_are_jumps():
    assert norm_jumps([1.0, math.nan, 1.0, math.inf, 0.0]) == [1, 3, 4]


def test_the_first_steps_are_not_judged():
    assert norm_jumps([1, 100, 1, 100, 1]) == []
