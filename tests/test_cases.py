"""Public bug reports about checkpointing, reproduced on torch and transformers, then run through the package."""

import functools

import numpy as np
import pytest
import torch
from conftest import activation_bytes, build_tiny, token_ids, training_step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import GradientCheckpointingLayer

from gctutor import measure, parse
from gctutor.diagnosis import doctor
from gctutor.policies import PolicyError
from gctutor.steptrace import FORWARD
from gctutor.tracing import trace_step
from gctutor.workload import Workload

MM = torch.ops.aten.mm
CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def answering(operator, answer=CheckpointPolicy.MUST_SAVE):
    return lambda context, op, *args, **kwargs: answer if op == operator else CheckpointPolicy.PREFER_RECOMPUTE


def switched(model, **kwargs):
    model.activation_checkpointing_enable({"use_reentrant": False, **kwargs})
    return model


def wrapped(model, **options):
    wrap = functools.partial(checkpoint_wrapper, **options)
    is_layer = functools.partial(_isinstance, GradientCheckpointingLayer)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_layer)
    return model


def _isinstance(kind, module):
    return isinstance(module, kind)


def batch(ids):
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def gradients_off_by(model, reference, **inputs):
    """Worst relative gradient error of a step, wrappers' names taken out."""
    done = training_step(model, **inputs)
    grads = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in done.grads.items()}
    return done._replace(grads=grads).worst(reference)


# --- 01: pytorch/pytorch#155171, an outside wrapper with the KV cache on ------------------------------------------


@pytest.mark.parametrize(
    ("attention", "options", "outcome"),
    [
        ("sdpa", {"context_fn": selective([MM.default])}, "slice.Tensor"),
        ("eager", {}, "size of tensor|different metadata|must match"),
        ("sdpa", {}, 0.0),
        ("sdpa", {"checkpoint_impl": CheckpointImpl.REENTRANT}, 1.0),
    ],
    ids=["sac", "eager", "luck", "reentrant"],
)
def test_case_01(attention, options, outcome):
    reference = training_step(build_tiny(attention=attention), use_cache=False)
    model = wrapped(build_tiny(attention=attention), **options)
    report = doctor(model)
    assert "cache_on" in report.codes and not report.ok
    if isinstance(outcome, str):
        with pytest.raises(RuntimeError, match=outcome):
            training_step(model)
        assert not report.gradients
    else:
        off = gradients_off_by(model, reference)
        assert off == 0 if outcome == 0 else off >= outcome
        assert ("gradients_differ" in report.codes) == (outcome > 0)
    assert gradients_off_by(model, reference, use_cache=False) == 0
    assert doctor(build_tiny(attention=attention, use_cache=False), "block").codes == ()


# --- 05: huggingface/optimum-benchmark#289, a misspelt option ------------------------------------------------------


def test_case_05():
    model = switched(build_tiny(use_cache=False), determinism_chek="none")
    assert training_step(model).mm == (29, 82)
    assert doctor(model).codes == ("unknown_kwarg",)
    with pytest.raises(PolicyError, match="did you mean 'block'"):
        parse("blok")


# --- 07: modelscope/ms-swift PR #10214, the hook that stays --------------------------------------------------------


def saved_bytes(model, ids, *, unique=True, without=()):
    """What a meter on saved-tensor hooks reads in one forward; `without` are tensors it leaves out."""
    sizes, total = {}, 0

    def pack(tensor):
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch(ids)).loss
    for tensor in without:
        sizes.pop(tensor.untyped_storage()._cdata, None)
    del loss
    return sum(sizes.values()) if unique else total


def test_case_07():
    def frozen_prefix():
        model = build_tiny(use_cache=False)
        for module in (model.model.embed_tokens, *model.model.layers[:3]):
            module.requires_grad_(False)
        return model

    def look(model):
        return saved_bytes(model, token_ids()), training_step(model).mm[1]

    model = frozen_prefix()
    assert look(model) == (162_884, 16)
    switched(model)
    assert look(model) == (61_956, 61)
    with_hook = activation_bytes(model, token_ids())
    model.activation_checkpointing_disable()
    assert look(model) == (436_996, 37)
    assert doctor(model).codes == ("input_hook",)
    model.disable_input_require_grads()
    assert look(model) == (162_884, 16)
    with parse("block").applied(model):
        assert training_step(model).mm[1] == 22  # the other 39 run backward through frozen layers
        assert activation_bytes(model, token_ids()) < with_hook
    assert look(model) == (162_884, 16)
    assert doctor(model, "block").ok


# --- 08: mlx-lm PR #167, wrappers that stack -----------------------------------------------------------------------


def test_case_08():
    def wrappers(model):
        return sum(isinstance(module, CheckpointWrapper) for module in model.modules())

    fresh = build_tiny(use_cache=False)
    twice = build_tiny(use_cache=False)
    for _ in range(2):
        twice.model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in twice.model.layers)
    assert wrappers(twice) == 8
    assert training_step(wrapped(build_tiny())).mm == training_step(twice).mm == training_step(switched(twice)).mm
    assert training_step(twice).mm == (29, 82)
    assert doctor(twice).codes == ("nested_wrappers", "two_mechanisms")
    model = build_tiny(use_cache=False)
    with parse("block").applied(model), parse("block").applied(model):
        assert training_step(model).mm == (29, 82) and wrappers(model) == 0
    assert str(model) == str(fresh)
    assert training_step(model).mm == (29, 58)


# --- 09: pytorch/pytorch#176065, a packet in the list --------------------------------------------------------------


def test_case_09():
    packet = switched(build_tiny(use_cache=False), context_fn=selective(answering(MM)))
    overload = switched(build_tiny(use_cache=False), context_fn=selective(answering(MM.default)))
    assert training_step(packet).mm == (29, 82)
    assert training_step(overload).mm == (29, 58)
    assert doctor(packet).codes == ("packet", "matched_nothing")
    assert doctor(overload).ok
    model = build_tiny()
    with parse("ops:aten.mm").applied(model):
        assert training_step(model).mm == (29, 58)


# --- 10: torchtitan#2091, another backend's attention --------------------------------------------------------------


def test_case_10():
    def attention_runs(model):
        done = training_step(model)
        return tuple(ops["_scaled_dot_product_flash_attention_for_cpu"] for ops in (done.forward, done.backward))

    other = switched(build_tiny(use_cache=False), context_fn=selective([CUDA_FLASH.default]))
    right = switched(build_tiny(use_cache=False), context_fn=selective([CPU_FLASH.default]))
    assert attention_runs(other) == (4, 4)
    assert attention_runs(right) == (4, 0)
    assert doctor(other).codes[0] == "replayed_kept" and doctor(right).codes == ()
    model = build_tiny(use_cache=False)
    with parse("ops:core_attn").applied(model):
        assert attention_runs(model) == (4, 0)
    eager = build_tiny(attention="eager", use_cache=False)
    assert training_step(eager).forward["bmm"] == 4 * 2  # and no attention operator to name
    assert doctor(eager, "ops:core_attn").codes == ("matched_nothing",)


# --- 11: pytorch/pytorch#119590, an in-place operation on what SAC keeps --------------------------------------------


@pytest.mark.filterwarnings("ignore:.*in-place module")
def test_case_11():
    def model(inplace):
        built = build_tiny(use_cache=False)
        for layer in built.model.layers:
            layer.mlp.act_fn = nn.SiLU(inplace=inplace)
        return built

    reference = training_step(model(False))
    assert training_step(model(True)).equals(reference)
    assert training_step(switched(model(True))).equals(reference)
    silent = switched(model(True), context_fn=selective([MM.default]))
    assert training_step(silent).worst(reference) > 0.4
    with pytest.raises(RuntimeError, match="mutated"):
        training_step(switched(model(True), context_fn=selective([torch.ops.aten._unsafe_view.default])))
    for report in (doctor(silent), doctor(model(True), "ops:mm")):
        assert report.codes[0] == "gradients_differ" and "inplace" in report.codes


# --- 12: pytorch/pytorch#193338, autocast's warm cache --------------------------------------------------------------


def test_case_12():
    model = switched(build_tiny(use_cache=False), context_fn=selective([MM.default]))

    def step_after_evaluation(**options):
        with torch.autocast("cpu", torch.bfloat16, **options):
            with torch.no_grad():
                model(input_ids=token_ids())
            loss = model(input_ids=token_ids(), labels=token_ids()).loss
        loss.backward()

    with pytest.raises(RuntimeError, match="_to_copy"):
        step_after_evaluation()
    step_after_evaluation(cache_enabled=False)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    assert doctor(model, autocast=autocast).ok  # a fresh block each step
    amp = Workload("nano@1", seqlen=32, precision="amp")
    assert measure(amp, ["ops:mm,-down_proj"], device="cpu", rounds=1, steps=1)["ops:mm,-down_proj"].status == "ok"


# --- 13 and 20: pytorch/pytorch#191236 and llama-cookbook PR #115, meters -------------------------------------------


@pytest.mark.parametrize(
    ("policy", "live"), [("none", 11_802_024), ("block", 1_644_968), ("ops:mm", 1_644_968 + 1024 * 256 * 4 * 4)]
)
def test_case_13(policy, live):
    ids, model = token_ids(8, 128), build_tiny()
    with parse(policy).applied(model):
        trace = trace_step(model, batch(ids))
        hook_meter = saved_bytes(model, ids)
        assert trace.activation_bytes == activation_bytes(model, ids)
    assert trace.activation_bytes + trace.static_bytes == live
    if policy != "none":
        assert hook_meter == 1_478_788  # blind to what SAC keeps


def test_case_20():
    ids, model = token_ids(8, 128), build_tiny()
    parameters = list(model.parameters())
    assert saved_bytes(model, ids, unique=False) == 16_573_828
    assert saved_bytes(model, ids) == 11_793_796
    saved = saved_bytes(model, ids, without=parameters)
    assert saved == 11_628_548
    ids_bytes, loss_bytes = 8 * 128 * 8, 4  # the hooks see the ids and not the loss
    assert trace_step(model, batch(ids)).activation_bytes == saved - ids_bytes + loss_bytes
    with parse("block").applied(model):
        assert saved_bytes(model, ids, unique=False) == 2_138_244
        assert saved_bytes(model, ids, without=parameters) == 1_462_276


# --- 14: pytorch/pytorch PR #180874, offload in name only -----------------------------------------------------------


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_case_14(answer):
    model = switched(build_tiny(use_cache=False), context_fn=selective(answering(MM.default, answer)))
    assert training_step(model).mm == (29, 82)
    assert doctor(model).codes == ("cpu_offload", "matched_nothing")


# --- 15: OLMo-core PR #828, random numbers in the replay ------------------------------------------------------------


def test_case_15():
    def dropping(**kwargs):
        model = build_tiny(attention="eager", attention_dropout=0.3, use_cache=False)
        return switched(model, **kwargs) if kwargs else model

    reference = training_step(dropping())
    assert training_step(dropping(preserve_rng_state=True)).equals(reference)
    drawn_afresh = training_step(dropping(preserve_rng_state=False))
    assert torch.equal(drawn_afresh.loss, reference.loss)
    assert drawn_afresh.worst(reference) > 0.01
    assert doctor(dropping(preserve_rng_state=True)).codes == ()
    assert doctor(dropping(preserve_rng_state=False)).codes == ("rng_not_preserved", "gradients_differ")
    assert doctor(dropping(), "block").codes == ()


def test_case_15_numpy():
    class NumpyDropout(nn.Module):
        def forward(self, x):
            return x * torch.from_numpy(np.random.binomial(1, 0.7, tuple(x.shape))).to(x) / 0.7

    model = build_tiny(use_cache=False)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), NumpyDropout())
    report = doctor(model, "block")
    assert report.codes == ("gradients_differ",)
    assert max(row.worst for row in report.gradients) > 0.5


# --- 17: pytorch/pytorch#195460, attention that counts zero ---------------------------------------------------------


def test_case_17():
    def counted_by_torch(attention):
        with FlopCounterMode(display=False) as counter:
            build_tiny(attention=attention)(**batch(token_ids())).loss.backward()
        return counter.get_total_flops()

    assert counted_by_torch("eager") == 8_650_752
    if counted_by_torch("sdpa") != counted_by_torch("eager"):  # until torch has the formula
        assert counted_by_torch("sdpa") == 8_650_752 - 4 * (65_536 + 131_072)
    eager, sdpa = (trace_step(build_tiny(attention=name), batch(token_ids())) for name in ("eager", "sdpa"))
    causal = 4 * 65_536 // 2
    assert eager.flop(FORWARD) - sdpa.flop(FORWARD) == causal  # eager computes the masked half too
    assert sum(k.work.flop for s in sdpa.segments for k in s.kernels if k.work.kind == "attention") > causal


# --- 19: karpathy/nanochat#838, a peak of zero off the GPU ----------------------------------------------------------


def test_case_19():
    rows = measure(Workload("nano@2", seqlen=512, precision="fp32"), ["none", "block"], device="cpu", rounds=1, steps=1)
    none, block = rows
    assert 0 < block.activation_bytes < none.activation_bytes / 2
    assert 0 < block.peak_bytes < none.peak_bytes
    assert none.meter == block.meter == "traced tensors"
    assert none.reserved_bytes is None and block.reserved_bytes is None
