"""The doctor: every finding is shown failing on a sick model and passing on a sound one, and nothing is left behind."""

import contextlib
import copy
import functools
import inspect
import json
import random
import types

import numpy as np
import pytest
import torch
from conftest import build_tiny, token_ids
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gctutor import cli, parse
from gctutor.diagnosis import check_checkpoint_kwargs, check_sac_policy, doctor, explain
from gctutor.errors import UserError
from gctutor.gradients import compare_gradients, gradients_of
from gctutor.policies import ops
from gctutor.policies.block import checkpointed
from gctutor.policies.submodule import Sub
from gctutor.workload import Workload

MM = torch.ops.aten.mm
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LAYER_BYTES = 2 * 16 * 4  # bytes of one fp32 column of the doctor's own batch, 2 × 16 tokens


def sound(kind: str = "qwen3", **options):
    """A tiny model with its KV cache off."""
    return build_tiny(kind, use_cache=False, **options)


def switched(model, **kwargs):
    """Hugging Face's switch on, non-reentrant unless told otherwise, its input hook removed."""
    model.activation_checkpointing_enable({"use_reentrant": False, **kwargs})
    model.disable_input_require_grads()
    return model


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def saving(*operators, answer=CheckpointPolicy.MUST_SAVE):
    return lambda context, op, *args, **kwargs: answer if op in operators else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(model, times: int = 1, impl=CheckpointImpl.NO_REENTRANT):
    for _ in range(times):
        model.model.layers = nn.ModuleList(CheckpointWrapper(layer, impl) for layer in model.model.layers)
    return model


# --- sound models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
@pytest.mark.parametrize("policy", ["none", "block", "sub:mlp", "ops:core_attn", "modules:all"])
def test_a_sound_policy_has_no_fault_and_no_warning(kind, policy):
    report = doctor(sound(kind), policy)
    assert report.ok
    assert report.codes == ()
    assert all(row.worst == 0 and row.cosine == pytest.approx(1) for row in report.gradients)


def test_the_figures_are_those_of_the_trace():
    report = doctor(sound(), "modules:all@0-1;block@2-3")
    assert report.matched["q_proj"] == 2
    mlp = next(site for site in report.call_sites if site.site == "mlp.gate_proj")
    assert (mlp.forward, mlp.replayed, mlp.replayed_flop) == (4, 2, 2 * 2 * 32 * 32 * 64)
    assert mlp.kept_bytes == 2 * 64 * LAYER_BYTES
    assert report.activation_bytes < report.none_activation_bytes


def test_a_model_with_the_switch_on_is_diagnosed_as_it_stands():
    report = doctor(switched(sound()))
    assert report.ok and report.codes == ()
    assert report.recompute_flop > 0
    assert doctor(sound()).recompute_flop == 0


def test_everything_is_put_back():
    model = switched(sound())
    model.zero_grad()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    model.eval()
    model.model.layers[1].train()
    before = {
        "gradients": gradients_of(model),
        "modes": [module.training for module in model.modules()],
        "switch": [dict(vars(layer)) for layer in model.model.layers],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        "cache": model.config.use_cache,
    }
    held = [p.grad for p in model.parameters()]
    doctor(model)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))
    assert all(row.worst == 0 for row in compare_gradients(before["gradients"], gradients_of(model)))
    assert [module.training for module in model.modules()] == before["modes"]
    assert [dict(vars(layer)) for layer in model.model.layers] == before["switch"]
    assert torch.equal(torch.get_rng_state(), before["random"][0])
    assert np.array_equal(np.random.get_state()[1], before["random"][1])
    assert random.getstate() == before["random"][2]
    assert model.config.use_cache == before["cache"]


def test_an_active_policy_and_a_request_are_refused():
    model = sound()
    with parse("block").applied(model), pytest.raises(UserError, match="active"):
        doctor(model)
    with pytest.raises(UserError, match="Workload"):
        doctor(model, "auto")
    with pytest.raises(UserError, match="labels"):
        doctor(model, "block", {"input_ids": token_ids()})


# --- state of the model ------------------------------------------------------------------------------------------


def test_eval_mode():
    report = doctor(sound().eval(), "block")
    assert report.codes == ("eval_mode",)
    assert not report.ok and report.recompute_flop > 0


def test_cache_left_on():
    assert doctor(build_tiny(), "block").codes == ("cache_on",)
    assert doctor(build_tiny(), "block", {"input_ids": token_ids(), "labels": token_ids(), "use_cache": False}).ok
    assert "cache_on" in doctor(wrapped(build_tiny())).codes
    assert not doctor(wrapped(build_tiny())).ok
    assert doctor(wrapped(sound())).ok


def test_another_tools_checkpointing_is_refused_with_a_policy_and_diagnosed_without():
    assert doctor(switched(sound()), "block").codes == ("foreign",)
    assert doctor(wrapped(sound()), "block").codes == ("foreign",)
    assert doctor(wrapped(sound())).codes == ()


def test_nested_wrappers_are_counted():
    report = doctor(wrapped(sound(), times=2))
    assert report.codes == ("nested_wrappers",)
    assert "8 checkpoint wrappers stand round 4 modules" in str(report)


def test_two_mechanisms_at_once():
    assert doctor(switched(wrapped(sound()))).codes == ("two_mechanisms",)


def test_reentrant_is_named_however_it_was_chosen():
    model = sound()
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert doctor(model).codes == ("reentrant",)
    assert doctor(wrapped(sound(), impl=CheckpointImpl.REENTRANT)).codes == ("reentrant",)
    assert "reentrant" in doctor(sound(), "block+reentrant").codes
    omitted = sound()
    omitted.activation_checkpointing_enable({"preserve_rng_state": True})
    assert "omit use_reentrant" in str(doctor(omitted))


def test_leftover_input_hook():
    def frozen():
        model = sound()
        for module in (model.model.embed_tokens, *model.model.layers[:3]):
            module.requires_grad_(False)
        return model

    model = frozen()
    assert "input_hook" not in doctor(model).codes
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert "input_hook" in doctor(model).codes
    model.activation_checkpointing_disable()
    assert doctor(model).codes == ("input_hook",)
    model.disable_input_require_grads()
    assert doctor(model).codes == ()


def test_gradients_lost_under_the_reentrant_checkpoint():
    model = sound()
    model.model.embed_tokens.requires_grad_(False)
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert "missing_gradients" not in doctor(model).codes  # the hook makes the layers' input require gradients
    model.disable_input_require_grads()
    report = doctor(model)
    assert "missing_gradients" in report.codes
    assert "model.layers.0" in str(report)


def test_a_parameter_that_no_step_reaches():
    model = sound()
    model.model.layers[2].spare = nn.Parameter(torch.ones(1))
    assert doctor(model, "block").codes == ("unused_parameters",)


# --- options and SAC policies of one's own -----------------------------------------------------------------------


def test_checkpoint_options():
    def codes(**kwargs):
        return [finding.code for finding in check_checkpoint_kwargs(kwargs)]

    assert codes(use_reentrant=False, determinism_check="none", preserve_rng_state=True, early_stop=False) == []
    assert codes(use_reentrant=False, determinism_chek="none") == ["unknown_kwarg"]
    assert codes(preserve_rng_state=True) == ["reentrant"]
    assert codes(use_reentrant=False, preserve_rng_state=False) == ["rng_not_preserved"]
    assert "determinism_check" in check_checkpoint_kwargs({"use_reentrant": False, "determinism_chek": 1})[0].sentence
    assert codes(use_reentrant=False, context_fn=selective(saving(MM))) == ["packet"]


@pytest.mark.parametrize("form", [lambda p: p, selective], ids=["function", "context_fn"])
def test_sac_policies(form):
    def codes(policy):
        return [finding.code for finding in check_sac_policy(form(policy))]

    assert codes(saving(MM.default)) == []
    assert codes(saving(MM)) == ["packet"]
    assert codes(saving(MM.default, answer=CheckpointPolicy.MUST_CPU_OFFLOAD)) == ["cpu_offload"]
    assert codes(lambda context, op, left, right: True) == []  # asks for arguments: nothing can be said


def test_sac_lists():
    assert [finding.code for finding in check_sac_policy([MM, CPU_FLASH.default])] == ["packet"]
    assert [finding.code for finding in check_sac_policy(selective([MM]))] == ["packet"]
    assert check_sac_policy([MM.default]) == check_sac_policy(selective([MM.default])) == []


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        (saving(MM.default), ("wasted_save",)),
        (saving(MM), ("packet", "matched_nothing")),
        ([MM], ("packet", "packet")),
        (saving(MM.default, answer=CheckpointPolicy.MUST_CPU_OFFLOAD), ("cpu_offload", "matched_nothing")),
        (saving(CPU_FLASH.default), ()),
        (saving(FLASH.default), ("replayed_kept", "matched_nothing")),
    ],
    ids=["right", "packet", "packet in a list", "offload", "attention", "attention of another device"],
)
def test_a_sac_policy_of_ones_own(policy, codes):
    assert doctor(switched(sound(), context_fn=selective(policy))).codes == codes


# --- what the steps show -----------------------------------------------------------------------------------------


def test_wasted_saves_are_named_with_their_bytes_and_a_better_policy():
    report = doctor(sound(), "ops:mm,core_attn")
    assert report.ok and report.codes == ("wasted_save",)
    waste = 4 * 32 * LAYER_BYTES
    assert "16.4 kB of mlp.down_proj" in str(report) and "'ops:mm,core_attn,-down_proj'" in str(report)
    better = doctor(sound(), "ops:mm,core_attn,-down_proj")
    assert better.codes == ()
    assert report.activation_bytes - better.activation_bytes == waste == 16_384
    assert better.recompute_flop == report.recompute_flop == 0


def test_wasted_module():
    report = doctor(sound(), "modules:core_attn,down_proj")
    assert report.codes == ("wasted_save",)
    assert "'modules:core_attn' does without" in str(report)


def test_a_policy_that_matches_nothing_or_a_part():
    assert doctor(sound(attention="eager"), "ops:core_attn").codes == ("matched_nothing",)
    report = doctor(sound(attention="eager"), "ops:mm,core_attn,-down_proj")
    assert report.codes == ("matched_partly",)
    assert "names core_attn" in str(report) and "did match mm, -down_proj" in str(report)


def test_expensive_operators_that_run_again_though_named_as_kept(monkeypatch):
    def forgetful(names, hits):
        """Counts what it should keep, and keeps nothing."""

        def policy(context, op, *args, **kwargs):
            if op in names:
                hits[names[op]] += 1
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    assert doctor(sound(), "ops:core_attn").codes == ()
    monkeypatch.setattr(ops, "_contexts", forgetful)
    report = doctor(sound(), "ops:core_attn")
    assert report.codes == ("replayed_kept",)
    assert "self_attn.core_attn runs again in backward, 4 times a step, although core_attn is named" in str(report)


def test_a_policy_that_changes_nothing(monkeypatch):
    def idle(self, model, layers, hits):
        hits["mlp"] += 1
        return contextlib.nullcontext()

    assert doctor(sound(), "sub:mlp").codes == ()
    monkeypatch.setattr(Sub, "on", idle)
    assert doctor(sound(), "sub:mlp").codes == ("no_effect",)


def test_a_layer_left_out(monkeypatch):
    on = Sub.on
    monkeypatch.setattr(Sub, "on", lambda self, model, layers, hits: on(self, model, layers[:-1], hits))
    report = doctor(sound(), "sub:mlp")
    assert report.codes == ("idle_layers",) and "in layers 3." in str(report)


def test_a_policy_that_frees_nothing(monkeypatch):
    def everything(self, model, layers, hits):
        hits["mlp"] += 1
        contexts = selective(lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        return checkpointed(layers, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))

    monkeypatch.setattr(Sub, "on", everything)
    assert "frees_nothing" in doctor(sound(), "sub:mlp").codes


def test_in_place_activation_under_sac_is_warned_of_and_its_gradients_differ():
    def model(inplace):
        built = sound()
        for layer in built.model.layers:
            layer.mlp.act_fn = nn.SiLU(inplace=inplace)
        return built

    with pytest.warns(UserWarning, match="in-place"):
        report = doctor(model(True), "ops:mm,-down_proj")
    assert report.codes == ("gradients_differ", "inplace")
    assert max(row.worst for row in report.gradients) > 0.3
    assert "backward meets the difference first in layers.3" in str(report)
    assert doctor(model(False), "ops:mm,-down_proj").codes == ()
    assert doctor(model(True), "block").codes == ()


def test_ligers_rotary_kernel_on_kept_projections():
    def rotating(model):
        def liger_like(*args, **kwargs):
            return plain(*args, **kwargs)

        liger_like.__module__ = "liger_kernel.transformers.rope"
        for layer in model.model.layers:
            forward = inspect.unwrap(type(layer.self_attn).forward)
            plain = forward.__globals__["apply_rotary_pos_emb"]
            names = {**forward.__globals__, "apply_rotary_pos_emb": liger_like}
            patched = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
            layer.self_attn.forward = types.MethodType(patched, layer.self_attn)
        return model

    def kept_by_hand(kind, change=rotating):
        return doctor(switched(change(sound(kind)), context_fn=selective(saving(MM.default)))).codes

    assert kept_by_hand("llama") == ("inplace_kernel", "wasted_save")
    assert kept_by_hand("qwen3") == ("wasted_save",)  # its q and k norms stand between
    assert kept_by_hand("llama", lambda model: model) == ("wasted_save",)
    policy = "ops:mm,-down_proj"
    assert doctor(rotating(sound("llama")), policy).codes == ("refused",)
    assert doctor(rotating(sound("qwen3")), policy).codes == ()
    assert doctor(sound("llama"), policy).codes == ()


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_without_its_random_state(preserve):
    model = switched(sound(attention="eager", attention_dropout=0.3), preserve_rng_state=preserve)
    assert doctor(model).codes == (() if preserve else ("rng_not_preserved", "gradients_differ"))
    assert doctor(switched(sound(), preserve_rng_state=preserve)).ok


def test_random_numbers_of_numpy_show_in_the_gradients():
    class Noise(nn.Module):
        def forward(self, x):
            return x * float(np.random.rand())

    model = sound()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), Noise())
    assert doctor(model, "none").ok
    assert doctor(model, "block").codes == ("gradients_differ",)


def test_a_model_that_is_not_reproducible_proves_nothing():
    class Drift(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    model = sound()
    model.model.layers[0].mlp.act_fn = Drift()
    assert "not_reproducible" in doctor(model, "block").codes


def test_autocasts_cache_of_shared_layers():
    model = sound()
    model.model.layers[1] = model.model.layers[0]
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    report = doctor(model, "ops:mm", autocast=autocast)
    assert report.codes[0] == "autocast_cache"
    assert "cache_enabled=False" in str(report)
    assert doctor(model, "block", autocast=autocast).ok
    assert doctor(model, "ops:mm", autocast=functools.partial(autocast, cache_enabled=False)).ok


def test_a_warm_autocast_cache_of_the_caller_does_no_harm():
    model = sound()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(input_ids=token_ids())
        assert doctor(model, "ops:mm,-down_proj").ok


def test_errors_are_explained():
    assert explain(RuntimeError("aten.slice.Tensor encountered but not found in storage")).code == "replay_differs"
    assert explain(RuntimeError("a cached tensor has been mutated")).code == "inplace"
    assert explain(RuntimeError("something\nelse")).sentence.endswith("RuntimeError: something")


def test_a_policy_that_cannot_be_applied():
    report = doctor(sound(), "none@0-8")
    assert report.codes == ("refused",)
    assert "layer 8" in str(report)


# --- workloads, tables and the command ---------------------------------------------------------------------------

NANO = Workload("nano@2", batch=1, seqlen=32, precision="fp32")


def test_a_workload_that_fits_is_run():
    report = doctor(NANO, "modules:all")
    assert report.ok and report.how == "Run here on cpu."


@pytest.mark.parametrize("changes", [{}, {"trainable": "lora:4"}, {"precision": "amp"}, {"mask": "padding"}], ids=str)
def test_a_large_workload_is_examined_on_fake_tensors_and_a_narrow_model(changes):
    report = doctor(Workload("Qwen3-8B@3", seqlen=4096, **changes), "modules:all@0-1;block@2")
    assert report.ok, str(report)
    assert len([row for row in report.gradients if "layers" in row.layer]) == 3
    assert report.none_activation_bytes > 3e9
    assert "fake tensors" in report.how and "hidden 64" in report.how


def test_the_full_model_wastes_what_it_is_known_to_waste():
    report = doctor(Workload("Qwen3-8B"), "ops:mm,core_attn")
    assert report.activation_bytes == 16_536_126_320
    assert "1.21 GB of mlp.down_proj" in str(report)


def test_a_request_is_resolved_for_a_workload():
    assert doctor(NANO, "budget:0.5").policy not in ("budget:0.5", "")


def test_report_is_readable_everywhere():
    report = doctor(sound(), "ops:mm,core_attn")
    assert json.loads(json.dumps(report.to_dict()))["findings"][0]["code"] == "wasted_save"
    assert "<table>" in report._repr_html_() and "mlp.down_proj" in report._repr_html_()
    with pytest.raises(AttributeError):
        copy.copy(report).policy = "block"


def test_the_command(capsys):
    arguments = ["doctor", "--model", "nano@2", "--seqlen", "32", "--precision", "fp32", "--policy", "ops:mm,core_attn"]
    assert cli.main(arguments) == 0
    assert "down_proj" in capsys.readouterr().out
    assert cli.main([*arguments, "--attention", "eager", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert cli.main(["doctor", "--policy", "blok"]) == 2


# --- comparing gradients -----------------------------------------------------------------------------------------


def test_compare_gradients():
    same = {"layers.0.b.weight": torch.ones(1), "lm_head.weight": None}
    reference = {"layers.0.a.weight": torch.tensor([3.0, 4.0]), **same}
    other = {"layers.0.a.weight": torch.tensor([3.0, -4.0]), **same}
    row, head = compare_gradients(reference, other)
    assert (row.layer, row.worst_name, head.layer) == ("layers.0", "layers.0.a.weight", "lm_head")
    assert row.worst == pytest.approx(8 / 5)
    assert row.relative == pytest.approx(8 / 26**0.5)
    assert row.cosine == pytest.approx((9 - 16 + 1) / 26)
    assert (head.relative, head.cosine, head.missing) == (0, 1, ())
    assert compare_gradients(reference, {})[0].missing == ("layers.0.a.weight", "layers.0.b.weight")
    broken = {"lm_head.weight": torch.tensor([float("nan")])}
    assert compare_gradients({"lm_head.weight": torch.ones(1)}, broken)[0].relative == float("inf")
