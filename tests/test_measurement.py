"""Measured rows: bytes equal to the estimate's, failures as rows, rounds on disk as they are taken."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from gctutor import measurement
from gctutor.errors import UserError
from gctutor.estimation import estimate
from gctutor.measurement import STEPS_A_ROUND, WARM_UP_STEPS, Bench, check_device, flagged, measure, out_of_memory
from gctutor.policies import parse
from gctutor.results import Results, StepCost
from gctutor.workload import Workload, decoder_layers

TINY = Workload("nano@2", 1, 16, precision="fp32")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def quick(workload=TINY, policies=("none", "block"), **options):
    return measure(workload, policies, **{"device": "cpu", "rounds": 1, "steps": 1, **options})


# --- bytes and work


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 2},
        {"precision": "amp"},
        {"precision": "bf16"},
        {"trainable": "lora:4"},
        {"optimizer": "adamw"},
        {"optimizer": "sgd"},
        {"mask": "padding"},
        {"attention": "eager"},
        {"trainable": "lora:4", "optimizer": "adamw", "precision": "amp"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()) or "plain",
)
def test_measured_bytes_and_work_are_those_of_the_estimate(changes):
    if "trainable" in changes:
        pytest.importorskip("peft", reason="LoRA is applied by PEFT")
    workload = TINY.replace(**changes)
    for row in quick(workload, ("none", "block", "modules:all")):
        guess = estimate(workload, row.policy, "cpu")
        assert row.status == "ok", row.error
        for name in ("static_bytes", "activation_bytes", "peak_bytes", "flop", "recompute_flop", "model_flop"):
            assert getattr(row, name) == getattr(guess, name), (row.policy, name)
        assert row.breakdown == guess.breakdown


def test_what_cannot_be_traced_is_read_from_the_profiler():
    bench = Bench(TINY, "cpu")
    assert bench._profiled_bytes() == estimate(TINY, "none", "cpu").activation_bytes


@pytest.mark.slow
def test_a_compiled_row_has_bytes_and_time():
    (row,) = quick(policies=["compile"])
    assert row.ok and row.meter == "profiler" and row.step_s > 0
    assert 0 < row.activation_bytes < estimate(TINY, "none", "cpu").activation_bytes


def test_a_row_says_where_it_comes_from():
    (row,) = quick(policies=["none"])
    assert (row.source, row.meter) == ("measured", "traced tensors")
    assert row.device == row.provenance["hardware"] == f"CPU, {os.cpu_count()} cores"
    assert row.provenance["threads"] == torch.get_num_threads() and row.provenance["seed"] == 0


def test_forward_and_backward_add_up_to_a_step_without_an_optimizer():
    (row,) = quick(policies=["none"], steps=3)
    for forward, backward, step in zip(*(row.samples[n] for n in ("forward_s", "backward_s", "step_s")), strict=True):
        assert forward > 0 < backward and forward + backward <= step


def test_a_request_is_resolved_for_this_device():
    (row,) = quick(policies=["budget:0.6"])
    assert row.policy == "budget:0.6" and row.ok and str(parse(row.resolved)) == row.resolved != "budget:0.6"
    assert row.activation_bytes <= 0.6 * estimate(TINY, "none", "cpu").activation_bytes


# --- rounds


def test_each_round_is_a_line_when_it_is_taken(tmp_path):
    file = tmp_path / "rows.jsonl"
    folded = quick(rounds=3, steps=2, save=file)
    assert [line["policy"] for line in lines(file)] == ["none", "block"] * 3
    assert {len(line["samples"]["step_s"]) for line in lines(file)} == {2}
    assert [len(row.samples["step_s"]) for row in folded] == [6, 6]
    assert [row.samples for row in Results.read(file)] == [row.samples for row in folded]


def test_a_policy_named_twice_is_measured_once():
    assert [row.policy for row in quick(policies=["none", "none"])] == ["none"]


def test_only_the_first_round_on_a_bench_warms_up_fully(monkeypatch):
    bench, taken = Bench(TINY, "cpu"), []
    step = bench._step
    monkeypatch.setattr(bench, "_step", lambda: taken.append(1) or step())
    first = bench.round("none", parse("none"), None, STEPS_A_ROUND)
    assert len(taken) == WARM_UP_STEPS + STEPS_A_ROUND
    bench.round("none", parse("none"), first, STEPS_A_ROUND)
    assert len(taken) == WARM_UP_STEPS + STEPS_A_ROUND + 1 + STEPS_A_ROUND
    later = Bench(TINY, "cpu")  # a new process would go on from `first` with cold kernels
    taken.clear()
    step = later._step
    monkeypatch.setattr(later, "_step", lambda: taken.append(1) or step())
    row = later.round("none", parse("none"), first, STEPS_A_ROUND)
    assert len(taken) == WARM_UP_STEPS + STEPS_A_ROUND
    assert row.activation_bytes == first.activation_bytes and row.samples != first.samples


def test_a_bench_leaves_the_model_as_it_was_and_closes():
    bench = Bench(TINY, "cpu")
    bench.round("block", parse("block"), None, 1)
    assert not any(layer.gradient_checkpointing for layer in decoder_layers(bench.model))
    assert all(p.grad is None for p in bench.model.parameters())
    assert bench.probed(parse("block"), lambda step: len(step())) == 3
    bench.close()
    assert bench.model is None and bench.round("none", parse("none"), None, 1).status == "oom"


@pytest.mark.slow
@pytest.mark.parametrize("order", [("none", "block"), ("block", "none")], ids=" then ".join)
def test_block_is_slower_than_none_in_either_order(order):
    rows = quick(Workload("nano@4", 1, 128, precision="fp32"), order, rounds=3, steps=3)
    assert min(rows["block"].samples["backward_s"]) > min(rows["none"].samples["backward_s"])


# --- failures


def test_out_of_memory_is_a_row_and_the_others_go_on(monkeypatch, tmp_path):
    step = Bench._step

    def too_big_without_checkpointing(self):
        if not decoder_layers(self.model)[0].gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
        return step(self)

    monkeypatch.setattr(Bench, "_step", too_big_without_checkpointing)
    file = tmp_path / "rows.jsonl"
    none, block = quick(rounds=2, save=file)
    assert (none.status, none.error, none.step_s) == ("oom", "CUDA out of memory.", None)
    assert none.resolved == "none" and none.activation_bytes == estimate(TINY, "none", "cpu").activation_bytes
    assert block.ok and len(block.samples["step_s"]) == 2
    assert [line["policy"] for line in lines(file)] == ["none", "block", "block"]


def test_a_model_that_does_not_fit_gives_rows_too(monkeypatch):
    def build(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measurement.workloads, "build", build)
    assert [(row.status, row.error) for row in quick()] == [("oom", "The model itself does not fit.")] * 2


def test_any_other_error_is_not_hidden(monkeypatch):
    def broken(self):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Bench, "_step", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        quick()


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_memory):
    assert out_of_memory(error) is is_memory


def test_a_refused_policy_is_one_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    none, offload = quick(policies=["none", "block+offload"], rounds=2, save=file)
    assert none.ok and offload.status == "refused" and "CPU" in offload.error
    assert [line["policy"] for line in lines(file)] == ["none", "block+offload", "none"]


def test_a_budget_that_cannot_be_kept_is_refused_not_raised():
    (row,) = quick(policies=["budget:0.01"])
    assert row.status == "refused" and "block" in row.error


def test_a_policy_without_effect_is_refused(monkeypatch):
    monkeypatch.setattr("gctutor.policies.core.Applied.verify", lambda *_: parse("blok"))
    (row,) = quick(policies=["block"])
    assert row.status == "refused" and not row.samples


def test_an_unknown_policy_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="did you mean 'block'"):
        quick(policies=["none", "blok"], save=tmp_path / "rows.jsonl")
    assert not list(tmp_path.iterdir())


def test_devices_that_are_not_here():
    assert check_device("cpu") == "cpu"
    with pytest.raises(UserError, match="this machine's"):
        check_device("H100")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            check_device("cuda")


# --- interruptions


def test_ctrl_c_keeps_the_rounds_taken(tmp_path):
    begun = []

    def interrupt(text):
        begun.append(text)
        if len(begun) == 4:
            raise KeyboardInterrupt

    file = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        quick(rounds=3, save=file, progress=interrupt)
    assert [line["policy"] for line in lines(file)] == ["none", "block", "none"]
    assert begun[-1] == "block, round 2 of 3"


ENDLESS = """
import sys
from pathlib import Path
from gctutor import Workload, measure
begun = Path(sys.argv[2]).open("a")
note = lambda text: print(text, file=begun, flush=True)
tiny = Workload("nano@1", 1, 16, precision="fp32")
measure(tiny, ["none", "block"], device="cpu", rounds=10**6, save=sys.argv[1], progress=note)
"""


def test_a_kill_loses_at_most_the_round_that_was_running(tmp_path):
    file, begun = tmp_path / "rows.jsonl", tmp_path / "begun"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(file), str(begun)])
    try:
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 5):
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = Results.read(file)
    kept = sum(len(row.samples["step_s"]) for row in rows) // STEPS_A_ROUND
    assert kept >= 5 and kept >= len(begun.read_text().splitlines()) - 1
    again = quick(Workload("nano@1", 1, 16, precision="fp32"), save=file, steps=STEPS_A_ROUND)
    assert all(row.ok for row in again)
    assert sum(len(row.samples["step_s"]) for row in Results.read(file)) == (kept + 2) * STEPS_A_ROUND


# --- notes


def cost(policy, step_s, **fields):
    return StepCost(TINY, policy, "H100", "measured", "cuda allocator", step_s=step_s, **fields)


def test_a_row_faster_than_none_though_it_recomputes_is_marked():
    rows = [
        cost("none", 1.0, recompute_flop=0),
        cost("block", 0.9, recompute_flop=5),
        cost("sub:mlp", 1.1, recompute_flop=3),
    ]
    none, block, mlp = flagged(Results(rows))
    assert "faster than none" in block.provenance["note"]
    assert "note" not in none.provenance and "note" not in mlp.provenance


def test_nothing_is_marked_without_a_none_of_the_same_workload():
    other = cost("none", 1.0)
    rows = Results(
        [cost("block", 0.9, recompute_flop=5), StepCost(TINY.replace(batch=2), *list(vars(other).values())[1:5])]
    )
    assert all("note" not in row.provenance for row in flagged(rows))


# --- a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the allocator's bytes and its timings")
def test_on_cuda_the_allocator_agrees_with_the_estimate():
    workload = Workload("nano", 1, 256)
    for row in measure(workload, ["none", "block", "modules:all"], device="cuda", rounds=1):
        guess = estimate(workload, row.policy, "H100")
        assert row.ok and row.meter == "cuda allocator"
        assert row.activation_bytes == pytest.approx(guess.activation_bytes, rel=0.02)
        assert row.reserved_bytes >= row.peak_bytes > row.static_bytes


def test_ligers_kernels_are_refused_on_a_cpu_in_one_sentence():
    with pytest.raises(UserError, match="GPU only"):
        measure(Workload("nano", seqlen=16, kernels="liger:rope"), ["none"], device="cpu")
