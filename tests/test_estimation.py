"""Estimates: the reference bytes of Qwen3-8B, the additive rule against full depth, the cache, the refusals."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from gctutor import estimation
from gctutor.errors import UserError
from gctutor.estimation import estimate, shorten, sweep, timeline, trace
from gctutor.policies import concrete
from gctutor.simulation import stream_ends
from gctutor.steptrace import OPTIMIZER
from gctutor.workload import Workload, build

# Full depth, bf16, traced once by an independent prototype on the same versions: activations, peak less static.
REFERENCE = {
    (1, "none"): (34_378_269_552, 39_356_875_624),
    (1, "block"): (3_833_675_792, 16_415_025_160),
    (1, "sub:mlp"): (19_882_754_928, 24_861_360_996),
    (1, "ops:mm,core_attn"): (16_536_126_320, 21_514_732_392),
    (1, "ops:mm,core_attn,-down_proj"): (15_328_166_768, None),
    (1, "modules:all"): (15_328_166_768, None),
    (4, "none"): (137_507_000_000, 157_421_000_000),
}


@pytest.mark.parametrize(("batch", "policy"), REFERENCE)
def test_reproduces_the_reference_bytes_of_qwen3_8b(batch, policy):
    cost = estimate(Workload(batch=batch), policy, "H100")
    activations, above_static = REFERENCE[batch, policy]
    tolerance = 1e-5 if batch == 4 else 64 / activations
    assert cost.activation_bytes == pytest.approx(activations, rel=tolerance)
    assert cost.static_bytes == pytest.approx(16.381e9, rel=1e-4)
    if above_static is not None:
        assert cost.peak_bytes - cost.static_bytes == pytest.approx(above_static, rel=tolerance)


@pytest.mark.parametrize("policy", ["ops:mm,core_attn,-down_proj", "modules:all"])
def test_keeping_every_product_but_the_last_recomputes_none(policy):
    assert estimate(Workload(), policy, "H100").recompute_flop == 0


def test_block_recomputes_the_forward_less_what_early_stop_leaves_out():
    """Everything of the layers but `down_proj`: 2·T·(q, k, v, o, gate, up) and the causal attention, 36 times."""
    tokens, width, kv, mlp = 4096, 4096, 1024, 12288
    weights = 2 * width * width + 2 * width * kv + 2 * width * mlp
    attention = 2 * tokens * tokens * width
    assert estimate(Workload(), "block", "H100").recompute_flop == 36 * (2 * tokens * weights + attention)


SHALLOW = [
    (dict(), "none@0-1;block@2-4;sub:mlp@5-6"),
    (dict(), "modules:core_attn@0-3;modules:all@4-5;none@6-7"),
    (dict(), "block/2"),
    (dict(), "block+offload"),
    (dict(), "sub:norms"),
    (dict(precision="amp"), "block"),
    (dict(precision="amp"), "none"),
    (dict(trainable="lora:8"), "block"),
    (dict(optimizer="adamw"), "sub:attn"),
    (dict(mask="padding"), "block"),
    (dict(mask="packed"), "none"),
    (dict(attention="eager"), "block"),
    (dict(kernels="hf+chunked"), "block"),
]


@pytest.mark.parametrize(("options", "policy"), SHALLOW, ids=lambda value: str(value))
def test_a_short_trace_stretched_equals_a_trace_of_every_layer(options, policy):
    workload = Workload("Qwen3-0.6B", seqlen=128, layers=8, **options)
    short, exact = (trace(workload, policy, exact=exact, cache=False) for exact in (False, True))
    for name in ("activation_bytes", "static_bytes", "host_bytes", "attention_kernels"):
        assert getattr(short, name) == getattr(exact, name), name
    norm_gradient = 2 * 1024  # where two kinds of layer meet, one norm's gradient may be counted with either
    assert abs(short.peak_bytes - exact.peak_bytes) <= norm_gradient
    assert short.flop() == exact.flop()
    assert short.flop("recompute") == exact.flop("recompute")
    assert short.breakdown() == exact.breakdown()


@pytest.mark.slow
def test_full_depth_of_qwen3_8b_agrees_with_the_short_trace():
    for policy in ("none", "block", "modules:core_attn@0-17;none@18-35"):
        short, exact = (trace(Workload(), policy, exact=exact, cache=False) for exact in (False, True))
        assert (short.activation_bytes, short.peak_bytes) == (exact.activation_bytes, exact.peak_bytes)


def test_shorten_keeps_both_ends_and_one_layer_of_each_kind():
    kinds = concrete("block/2").layers(9)
    short, places = shorten(kinds)
    assert [str(kind) for kind in short] == ["block", "none", "block", "block"]
    assert [short[place] for place in places] == list(kinds)


def test_a_second_estimate_comes_from_the_cache_and_a_corrupt_entry_is_traced_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GCTUTOR_CACHE", str(tmp_path))
    workload = Workload("nano", seqlen=64)
    first = trace(workload, "block")
    (entry,) = tmp_path.iterdir()
    estimation._remembered.cache_clear()
    monkeypatch.setattr(estimation, "_trace_now", None)
    assert trace(workload, "block") == first
    monkeypatch.undo()
    monkeypatch.setenv("GCTUTOR_CACHE", str(tmp_path))
    entry.write_bytes(b"not gzip")
    estimation._remembered.cache_clear()
    assert trace(workload, "block") == first


def test_a_sweep_of_the_full_model_comes_from_the_cache_at_once():
    """15 policies at six lengths: about a second from memory; four leave room for a busy machine."""
    policies = ["none", "block", "modules:all"]
    workloads = [Workload(seqlen=length) for length in (1024, 2048)]
    heard = []
    cold = sweep(workloads, policies, "H100", progress=heard.append)
    started = time.perf_counter()
    warm = sweep(workloads, policies, "H100")
    seconds = time.perf_counter() - started
    assert [(row.workload.seqlen, row.policy) for row in warm] == [(w.seqlen, p) for w in workloads for p in policies]
    assert [row.peak_bytes for row in warm] == [row.peak_bytes for row in cold]
    assert heard[0].endswith("none") and len(heard) == len(cold)
    assert seconds / len(warm) < 4 / 90


def test_the_stream_formula_is_the_recurrence():
    seconds, host_s = np.random.default_rng(0).random((2, 50))
    launched = end = 0.0
    for kernel, (length, gap) in enumerate(zip(seconds, host_s, strict=True)):
        launched += gap
        end = max(end, launched) + length
        assert stream_ends(seconds, host_s)[kernel] == pytest.approx(end)


def test_offload_moves_the_layer_inputs_to_the_host_and_takes_time_for_it():
    block, offload = (estimate(Workload(), policy, "H100") for policy in ("block", "block+offload"))
    inputs = 36 * 4096 * 4096 * 2
    assert offload.host_bytes == inputs == block.activation_bytes - offload.activation_bytes
    assert offload.step_s - block.step_s == pytest.approx(2 * inputs / 50.4e9, rel=0.05)


def test_a_policy_that_cannot_work_is_a_row_with_its_reason():
    cost = estimate(Workload("nano", seqlen=64), "block+offload", "cpu")
    assert cost.status == "refused"
    assert "CPU" in cost.error
    assert cost.activation_bytes is None


def test_more_than_the_card_has_is_a_row_that_says_so():
    cost = estimate(Workload(), "none", "RTX 4090")
    assert cost.status == "oom"
    assert "55.7 GB" in cost.error


def test_unknown_names_are_refused_in_one_sentence():
    with pytest.raises(UserError, match="did you mean"):
        estimate(Workload(), "blok", "H100")
    with pytest.raises(UserError, match="Unknown device"):
        estimate(Workload(), "block", "Voodoo 3")


def test_adamw_state_is_static_and_its_8_bit_form_is_a_quarter():
    optimizers = (None, "adamw", "adamw8bit")
    plain, full, small = (estimate(Workload(optimizer=o), "block", "H200").static_bytes for o in optimizers)
    assert full - plain == pytest.approx(2 * plain, rel=1e-3)
    assert small - plain == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
@pytest.mark.parametrize("trainable", ["full", "lora:8"])
def test_the_optimizers_work_is_that_of_every_layer(optimizer, trainable):
    workload = Workload("nano", seqlen=32, optimizer=optimizer, trainable=trainable)

    def moved(step):
        return sum(k.work.bytes for s in step.segments if s.phase == OPTIMIZER for k in s.kernels)

    short, full = trace(workload, "none"), trace(workload, "none", exact=True)
    assert moved(short) == pytest.approx(moved(full), rel=1e-3)
    parameters = sum(p.numel() for p in build(workload, "meta").parameters() if p.requires_grad)
    assert moved(full) >= 6 * parameters  # bf16: the gradient read, the weight read and written, and state on top


def test_timeline_peaks_where_the_trace_does_and_names_the_owner():
    line = timeline(Workload(), "none", "H100")
    total = sum(line.live.values())
    assert total.max() == total[line.peak_index] == trace(Workload(), "none").peak_bytes
    assert line.peak_owner == "loss (backward)"
    assert timeline(Workload(), "block", "H100").peak_owner == "model.embed_tokens (backward)"
    assert all(a.end_s <= b.end_s for a, b in zip(line.spans, line.spans[1:], strict=False))


def test_the_command_prints_the_same_bytes():
    command = "estimate --model Qwen3-8B --batch 1 --seqlen 4096 --kernels hf --device H100 --policy none --json"
    line = [sys.executable, "-m", "gctutor", *command.split()]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    (row,) = json.loads(ran.stdout)
    assert row["activation_bytes"] == pytest.approx(34_378_269_552, abs=64)
    assert (row["status"], row["source"], row["device"]) == ("ok", "estimated", "H100 SXM")
