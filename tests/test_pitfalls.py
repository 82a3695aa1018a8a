"""Every trap of lessons 08 and 09: it fails as it should, and its repair passes."""

from __future__ import annotations

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from gctutor.gate import step_of
from gctutor.pitfalls import attempt, hook_calls, matmuls, tiny_qwen3
from gctutor.policies import PolicyError, parse

REENTRANT, SAFE = {"use_reentrant": True}, {"use_reentrant": False}
BOTH = pytest.mark.parametrize("switch", [REENTRANT, SAFE], ids=["reentrant", "non-reentrant"])
IDS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
DROPOUT = {"attention": "eager", "attention_dropout": 0.3}


def tiny(switch=None, **changes):
    model = tiny_qwen3(**changes)
    if switch is not None:
        model.activation_checkpointing_enable(switch)
    return model


def wrapped(model, switch):
    implementation = CheckpointImpl.REENTRANT if switch["use_reentrant"] else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: type(module).__name__ == "Qwen3DecoderLayer",
    )
    return model


# --- the tools --------------------------------------------------------------------------------------------------------


def test_attempt_keeps_values_errors_and_warnings():
    import warnings

    assert attempt(lambda: 3).value == 3
    seen = attempt(lambda: warnings.warn("careful\nmore", stacklevel=1))
    assert seen.warnings == ("careful",) and not seen.failed
    assert attempt(lambda: [][0]).error == "IndexError: list index out of range"


def test_the_tiny_model_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    tiny()
    assert torch.equal(before, torch.get_rng_state())


# --- random numbers ---------------------------------------------------------------------------------------------------


@BOTH
def test_dropout_is_restored_by_both_unless_switched_off(switch):
    plain = step_of(tiny(**DROPOUT), BATCH)
    assert plain.same_bits(step_of(tiny(switch, **DROPOUT), BATCH))
    lost = step_of(tiny({**switch, "preserve_rng_state": False}, **DROPOUT), BATCH)
    assert lost.loss == plain.loss and plain.off(lost) > 0.1


def test_without_preserved_state_the_next_step_draws_other_numbers():
    def next_number(switch):
        model = tiny(switch, **DROPOUT)
        torch.manual_seed(0)
        model(**BATCH).loss.backward()
        return torch.rand(()).item()

    assert next_number(None) == next_number(SAFE) != next_number({**SAFE, "preserve_rng_state": False})


own = torch.Generator()
SOURCES = {
    "own generator": lambda shape: torch.rand(shape, generator=own),
    "numpy": lambda shape: torch.from_numpy(np.random.rand(*shape)),
    "python": lambda shape: torch.tensor([random.random() for _ in range(shape.numel())]).view(shape),
}


class DropOut(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * (self.draw(x.shape).to(x) >= 0.3)


def noisy_step(draw, switch=None):
    model = tiny(switch)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, DropOut(draw))
    own.manual_seed(0)
    return step_of(model, BATCH)


@pytest.mark.parametrize("source", SOURCES)
def test_other_generators_are_never_restored(source):
    plain, replayed = noisy_step(SOURCES[source]), noisy_step(SOURCES[source], SAFE)
    assert replayed.loss == plain.loss and plain.off(replayed) > 0.05


def test_torchs_default_generator_is_restored():
    assert noisy_step(torch.rand).same_bits(noisy_step(torch.rand, SAFE))


def test_a_context_fn_restores_numpy():
    def contexts():
        state = np.random.get_state()

        @contextlib.contextmanager
        def replay():
            now = np.random.get_state()
            np.random.set_state(state)
            try:
                yield
            finally:
                np.random.set_state(now)

        return contextlib.nullcontext(), replay()

    repaired = noisy_step(SOURCES["numpy"], {**SAFE, "context_fn": contexts})
    assert noisy_step(SOURCES["numpy"]).same_bits(repaired)


# --- which implementation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "backward"),
    [(SAFE, 82), (REENTRANT, 86), ({}, 86), ({"preserve_rng_state": True}, 86)],
)
def test_kwargs_without_use_reentrant_select_reentrant(switch, backward):
    assert attempt(lambda: matmuls(tiny(switch), BATCH)).value == (29, backward)


def test_no_kwargs_select_non_reentrant():
    model = tiny()
    model.activation_checkpointing_enable()
    assert matmuls(model, BATCH) == (29, 82)


def test_a_misspelt_option_is_swallowed():
    seen = attempt(lambda: matmuls(tiny({**SAFE, "preserve_rng_sate": False}), BATCH))
    assert seen.value == (29, 82) and not seen.warnings
    with pytest.raises(PolicyError, match="did you mean 'block'"):
        parse("blok")


# --- gradients asked for in another way -------------------------------------------------------------------------------


@BOTH
def test_retain_graph_works_twice(switch):
    plain, model = step_of(tiny(), BATCH), tiny(switch)
    loss = model(**BATCH).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(p.grad / 2, plain.gradients[name]) for name, p in model.named_parameters())


def gradients_by_autograd(model):
    return torch.autograd.grad(model(**BATCH).loss, [*model.parameters()])


def gradients_of_inputs(model):
    return model(**BATCH).loss.backward(inputs=[*model.parameters()])


def gradient_of_a_gradient(model):
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=IDS).loss.backward(create_graph=True)
    embeddings.grad.square().sum().backward()


@pytest.mark.parametrize("way", [gradients_by_autograd, gradients_of_inputs, gradient_of_a_gradient])
def test_only_non_reentrant_gives_gradients_in_other_ways(way):
    assert attempt(lambda: way(tiny(REENTRANT, attention="eager"))).failed
    assert not attempt(lambda: way(tiny(SAFE, attention="eager"))).failed


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "reentrant", "safe"),
    [("", (1, 1), (1, 1)), ("self_attn.q_proj", (2, 2), (2, 2)), ("mlp.down_proj", (2, 2), (2, 1))],
)
def test_hooks_fire_twice_and_unevenly(place, reentrant, safe):
    for switch, expected in ((REENTRANT, reentrant), (SAFE, safe)):
        model = tiny(switch)
        calls = hook_calls(model, model.model.layers[0].get_submodule(place), BATCH)
        assert (calls["forward pre"], calls["forward"], calls["backward"]) == (*expected, 1)


def test_without_early_stop_hooks_are_even():
    model = tiny(SAFE)
    with set_checkpoint_early_stop(False):
        calls = hook_calls(model, model.model.layers[0].mlp.down_proj, BATCH)
        assert matmuls(model, BATCH) == (29, 86)
    assert calls["forward pre"] == calls["forward"] == 2


@BOTH
def test_a_stateful_hook_breaks_both(switch):
    def steered(switch):
        model, calls = tiny(switch), iter(range(1000))
        up_proj = model.model.layers[0].mlp.up_proj
        up_proj.register_forward_hook(lambda module, args, output: output * (1 + 0.5 * next(calls)))
        return step_of(model, BATCH)

    plain, replayed = steered(None), steered(switch)
    assert plain.loss == replayed.loss and plain.off(replayed) > 1e-3


# --- frozen inputs ----------------------------------------------------------------------------------------------------


def lora(switch=None):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = attempt(lambda: peft.get_peft_model(tiny(), config)).value.train()
    if switch is not None:
        model.activation_checkpointing_enable(switch)
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora_under_reentrant_needs_the_switchs_hook():
    plain = step_of(lora(), BATCH)
    assert plain.same_bits(step_of(lora(REENTRANT), BATCH))
    assert plain.same_bits(step_of(wrapped(lora(), SAFE), BATCH))
    cut = attempt(lambda: step_of(wrapped(lora(), REENTRANT), BATCH))
    assert cut.failed and "Gradients will be None" in cut.warnings[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_lora_from_embeddings_passes_the_hook_by():
    batch = {"inputs_embeds": torch.randn(2, 16, 32), "labels": IDS}
    assert attempt(lambda: step_of(lora(REENTRANT), batch)).failed
    assert not attempt(lambda: step_of(lora(SAFE), batch)).failed


def test_switching_off_leaves_the_hook_behind():
    model = tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3." in name or name.startswith(("lm_head", "model.norm")))
    counts = [matmuls(model, BATCH)[1]]
    model.activation_checkpointing_enable(SAFE)
    counts.append(matmuls(model, BATCH)[1])
    model.activation_checkpointing_disable()
    counts.append(matmuls(model, BATCH)[1])
    model.disable_input_require_grads()
    counts.append(matmuls(model, BATCH)[1])
    with parse("block").applied(model):
        counts.append(matmuls(model, BATCH)[1])
    counts.append(matmuls(model, BATCH)[1])
    assert counts == [16, 61, 37, 16, 22, 16]


# --- inputs and outputs -----------------------------------------------------------------------------------------------

WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
START = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def scaled(x, *, by):
    return x @ WEIGHT * by


USES = {
    "tensor": lambda run, h: run(lambda x: x @ WEIGHT, h),
    "number beside": lambda run, h: run(lambda x: (x @ WEIGHT, 3, None), h)[0],
    "keyword": lambda run, h: run(scaled, h, by=2.0),
    "tuple": lambda run, h: run(lambda both: both[0] @ WEIGHT * both[1], (h, h)) + h,
    "closure": lambda run, h: run(lambda x: x @ WEIGHT * h, h) + h,
    "dictionary": lambda run, h: run(lambda x: {"h": x @ WEIGHT}, h)["h"] + h,
}


def gradient(use, run):
    x = START.clone().requires_grad_()
    use(run, 2 * x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("tensor", "right"),
        ("number beside", "right"),
        ("keyword", "error"),
        ("tuple", "wrong"),
        ("closure", "error"),
        ("dictionary", "wrong"),
    ],
)
def test_inputs_and_outputs(name, reentrant):
    expected = gradient(USES[name], lambda function, *args, **kwargs: function(*args, **kwargs))
    assert torch.equal(expected, gradient(USES[name], functools.partial(checkpoint, **SAFE)))
    seen = attempt(lambda: gradient(USES[name], functools.partial(checkpoint, **REENTRANT)))
    found = "error" if seen.failed else "right" if torch.equal(seen.value, expected) else "wrong"
    assert found == reentrant


@BOTH
def test_only_reentrant_marks_a_detached_output(switch):
    x = START.clone().requires_grad_()
    _, aside = checkpoint(lambda x: (x @ WEIGHT, (x @ WEIGHT).detach()), x, **switch)
    assert aside.requires_grad == switch["use_reentrant"]


# --- round the model --------------------------------------------------------------------------------------------------


def test_the_cache_left_on():
    plain = step_of(tiny(), BATCH)
    silent = step_of(wrapped(tiny(use_cache=True), REENTRANT), BATCH)
    assert silent.loss == plain.loss and plain.off(silent) > 0.1
    for switch in (REENTRANT, SAFE):
        assert attempt(lambda s=switch: step_of(wrapped(tiny(use_cache=True, attention="eager"), s), BATCH)).failed
        assert plain.same_bits(step_of(wrapped(tiny(), switch), BATCH))


def test_policies_turn_the_cache_off():
    model = tiny(use_cache=True)
    plain = step_of(model, BATCH)
    with parse("block+reentrant").applied(model):
        assert plain.same_bits(step_of(model, BATCH))
    assert model.config.use_cache


@pytest.mark.parametrize(("switch", "backward"), [(SAFE, 82), (REENTRANT, 114)])
def test_double_wrapping(switch, backward):
    model = wrapped(wrapped(tiny(), switch), switch)
    assert sum(type(module).__name__ == "CheckpointWrapper" for module in model.modules()) == 8
    assert attempt(lambda: matmuls(model, BATCH)).value == (29, backward)
    with pytest.raises(PolicyError, match="already checkpointed"), parse("block").applied(model):
        pass


def test_eval_mode_recomputes_nothing():
    model = tiny(SAFE)
    assert matmuls(model.eval(), BATCH) == (29, 58)
    assert matmuls(model.train(), BATCH) == (29, 82)


# --- bf16 -------------------------------------------------------------------------------------------------------------


def keep(*operators):
    return functools.partial(create_selective_checkpoint_contexts, list(operators))


@pytest.mark.parametrize(("inplace", "worst"), [(True, (0.02, 2.0)), (False, (0.0, 0.0))])
def test_an_in_place_activation_under_selective_checkpointing(inplace, worst):
    def step(switch=None):
        model = tiny(switch)
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.SiLU(inplace=inplace)
        return step_of(model, BATCH)

    kept = step({**SAFE, "context_fn": keep(torch.ops.aten.mm.default)})
    assert worst[0] <= step().off(kept) <= worst[1]
    assert kept.loss == step().loss
    assert step().same_bits(step(SAFE))


@pytest.mark.parametrize(
    ("cache_enabled", "policy", "fails"), [(True, "ops:mm", True), (False, "ops:mm", False), (True, "block", False)]
)
def test_a_warm_cast_cache_stops_selective_checkpointing(cache_enabled, policy, fails):
    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            with torch.no_grad():
                model(**BATCH)
            loss = model(**BATCH).loss
        loss.backward()

    model = tiny()
    with parse(policy).applied(model):
        assert attempt(step).failed == fails


def test_a_region_that_changes_its_autocast_is_noticed():
    decisions, linear = iter([True, False]), nn.Linear(8, 8)

    def undecided(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=next(decisions)):
            return linear(x)

    assert "metadata" in (attempt(lambda: checkpoint(undecided, torch.ones(2, 8), **SAFE).sum().backward()).error or "")


def test_the_printed_way_to_switch_autocast_off_does_not_run():
    with pytest.raises(TypeError, match="device_type"):
        torch.autocast(enabled=False)
    linear, x = nn.Linear(8, 8), torch.ones(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert linear(x).dtype == torch.float32


def test_a_router_flips_in_the_replay_unless_its_choice_is_kept():
    torch.manual_seed(0)
    router, x = nn.Linear(16, 2, bias=False), torch.randn(64, 16)
    choices: list[torch.Tensor] = []

    def region(x):
        rounding = 0.1 * (-1) ** len(choices)  # exaggerated, and of another sign in the replay
        scores = router(x) + rounding * torch.tensor([1.0, -1.0])
        index = scores.topk(1, -1)[1]
        choices.append(index)
        return torch.where(index == 0, x.exp(), -x)

    def flips(**options):
        choices.clear()
        checkpoint(region, x.clone().requires_grad_(), **SAFE, **options).sum().backward()
        return int((choices[0] != choices[1]).sum())

    assert flips() > 0
    assert flips(context_fn=keep(torch.ops.aten.topk.default)) == 0
