"""The tracer against independent oracles, on real and on fake tensors, and what it says of where and when."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from gctutor.estimation import trace
from gctutor.fake import fake_model, fake_tensors
from gctutor.policies import concrete
from gctutor.steptrace import BACKWARD, FORWARD, RECOMPUTE
from gctutor.tracing import Tracer, static_tensors, trace_step
from gctutor.workload import Workload, build, decoder_layers, inputs

NANO = Workload("nano", seqlen=64, precision="fp32")


def traced(workload, policy):
    model = build(workload)
    with concrete(policy).applied(model) as state:
        step = trace_step(model, inputs(workload), autocast=lambda: workload.autocast("cpu"))
        state.verify(step.recomputed_layers)
    return step


WORKLOADS = [
    NANO,
    NANO.replace(precision="bf16"),
    NANO.replace(precision="amp"),
    NANO.replace(trainable="lora:4"),
    NANO.replace(mask="padding", batch=2),
    NANO.replace(mask="packed"),
    NANO.replace(attention="eager"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.label)
@pytest.mark.parametrize("policy", ["none", "block", "block/2", "sub:attn,mlp", "modules:all", "ops:mm,core_attn"])
def test_fake_and_real_tensors_give_the_same_bytes_and_flops(workload, policy):
    if workload.attention == "eager":
        policy = policy.replace(",core_attn", "")  # eager attention has no operator of its own to keep
    real, fake = traced(workload, policy), trace(workload, policy, kind="cpu", cache=False)
    for name in ("static_bytes", "activation_bytes", "peak_bytes"):
        assert getattr(real, name) == getattr(fake, name), name
    assert real.flop() == fake.flop()
    assert real.flop(RECOMPUTE) == fake.flop(RECOMPUTE)


@pytest.mark.parametrize("policy", ["none", "block", "sub:mlp", "ops:mm,core_attn", "modules:all"])
def test_agrees_with_the_profilers_memory_events(policy):
    """The running sum of torch's own allocation events at the end of forward.

    The profiler also sees the 5,056 bytes of CPU generator state that a checkpoint stashes, which no operator makes.
    """
    step = traced(NANO, policy)
    model, batch = build(NANO), inputs(NANO)
    with concrete(policy).applied(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(**batch).loss
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    kept = sum(event.nbytes() for event in events)
    del loss
    regions = 0 if policy == "none" else len(decoder_layers(model))
    assert 0 <= kept - step.activation_bytes - regions * 5056 <= 4096


def test_agrees_with_mem_tracker():
    step = traced(NANO, "none")
    model, batch = build(NANO), inputs(NANO)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(**batch).loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peak == pytest.approx(step.peak_bytes, rel=1e-4)


def test_counts_each_storage_once_and_never_a_parameter(tiny):
    """Three readings of what autograd saves; the tracer agrees with the strictest (batch 8 × 128)."""
    model = tiny()
    ids = torch.randint(0, 128, (8, 128))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(**batch).loss
    own = {t.untyped_storage()._cdata for t in static_tensors(model)} | {ids.untyped_storage()._cdata}
    naive = sum(t.numel() * t.element_size() for t in saved)
    unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
    strict = sum(size for key, size in unique.items() if key not in own)
    assert naive > sum(unique.values()) > strict
    del loss
    saved.clear()
    step = trace_step(model, batch)
    assert strict <= step.activation_bytes <= strict * 1.01


def test_phases_are_told_apart():
    step = traced(NANO, "block")
    kernels = [(s, k) for s in step.segments for k in s.kernels]
    assert {k.phase for s, k in kernels if s.phase == FORWARD} == {FORWARD}
    assert {k.phase for s, k in kernels if s.phase == BACKWARD} == {RECOMPUTE, BACKWARD}
    assert step.recomputed_layers == set(range(6))
    replayed = [k.site for s, k in kernels if k.phase == RECOMPUTE and k.work.kind == "gemm" and s.layer == 2]
    assert replayed == [f"self_attn.{n}_proj" for n in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj"]


def test_backward_work_is_attributed_to_the_module_that_caused_it():
    step = traced(NANO, "none")
    layer = next(s for s in step.segments if s.layer == 3 and s.phase == BACKWARD)
    products = [k.site for k in layer.kernels if k.work.kind == "gemm"]
    assert products.count("mlp.down_proj") == products.count("self_attn.q_proj") == 2
    flash = next(k for k in layer.kernels if k.work.kind == "attention")
    assert flash.site == "self_attn.core_attn"


def test_breakdown_adds_up_and_names_the_loss():
    step = trace(Workload(), "none")
    parts = step.breakdown()
    assert sum(parts.values()) == step.activation_bytes
    assert parts["loss"] == pytest.approx(4096 * 151_936 * 4, rel=1e-3)
    assert sum(step.kept.values()) == step.activation_bytes


def test_holding_the_output_keeps_the_bf16_logits_alive():
    """`out.loss` lets go of what `out` would hold: 4096 × 151,936 bf16 logits."""
    with fake_tensors("cuda") as mode:
        workload = Workload(layers=1)
        model, batch = fake_model(workload, mode), inputs(workload)
        known = [*static_tensors(model), batch["input_ids"]]
        kept = []
        for field in (lambda out: out, lambda out: out.loss):
            with Tracer(model, known) as tracer:
                held = field(model(**batch))
            kept.append(sum(record.bytes for _, record in tracer._alive.values()))
            del held
    assert kept[0] - kept[1] == 4096 * 151_936 * 2


def test_attention_is_counted_on_every_backend_and_the_conventions_agree():
    """pytorch/pytorch#195460: torch's counter gives 0 for the CPU's flash kernel."""
    by = {}
    for attention in ("eager", "sdpa"):
        step = traced(NANO.replace(attention=attention), "none")
        kinds = {"attention"} if attention == "sdpa" else {"gemm"}
        kernels = [k for s in step.segments for k in s.kernels if k.work.kind in kinds]
        kernels = [k for k in kernels if attention == "sdpa" or k.name == "bmm"]
        by[attention] = {p: sum(k.work.flop for k in kernels if k.phase == p) for p in (FORWARD, BACKWARD)}
    assert by["sdpa"][FORWARD] > 0
    assert by["eager"][FORWARD] == 2 * by["sdpa"][FORWARD]  # T × T against its causal half
    assert by["eager"][BACKWARD] == 2 * by["eager"][FORWARD]
    assert by["sdpa"][BACKWARD] == 2.5 * by["sdpa"][FORWARD]
