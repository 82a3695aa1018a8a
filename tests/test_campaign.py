"""The campaign: its plan, the clock, and that nothing is lost or doubled, whatever interrupts it."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from gctutor import campaign, cli, gpu_probe
from gctutor.campaign import COMPILED, NO_LOSS, POLICIES, Turn, deepest, forecast, plan, recorded, run, taken
from gctutor.devices import find_device
from gctutor.errors import UserError
from gctutor.measurement import STEPS_A_ROUND, Bench
from gctutor.policies import parse
from gctutor.results import Results, StepCost
from gctutor.workload import Workload

TINY = Workload("nano@1", 1, 16, precision="fp32")
CPU = find_device("cpu")
TURNS = (
    Turn(TINY, ("none", "block", "block+offload"), rounds=1),
    Turn(TINY.replace(batch=2), ("none",), rounds=2),
    Turn(TINY, ("none", "block", "block+offload"), rounds=2),
)
WHOLE = {("none", 1): 2, ("block", 1): 2, ("block+offload", 1): 1, ("none", 2): 2}  # rounds by (policy, batch)


@pytest.fixture
def predictions(monkeypatch):
    """Estimates by hand: at 1 × 4096 a peak of 10 GB and 1 GB a layer, and a tenth of a second a step."""

    def estimate(workload, policy, device):
        peak = int(10e9 + 1e9 * workload.n_layers * workload.tokens / 4096)
        status = "ok" if peak <= device.usable_bytes else "oom"
        seconds = 0.1 * workload.tokens / 4096
        return StepCost(workload, policy, device.name, "estimated", "", status=status, peak_bytes=peak, step_s=seconds)

    monkeypatch.setattr(campaign, "estimate", estimate)


def taken_rounds(path):
    """Lines of the file by (policy, batch): each is a round."""
    rows = map(json.loads, path.read_text().splitlines())
    return Counter((row["policy"], row["workload"]["batch"]) for row in rows)


def go(path, turns=TURNS, minutes=60, **options):
    return run(turns, CPU, device="cpu", minutes=minutes, save=path, **options)


# --- the plan


def test_a_large_gpu_runs_the_full_model_in_the_order_of_the_plan(predictions):
    turns = plan("Qwen3-8B", find_device("H200"))
    assert {turn.workload.name for turn in turns} == {"Qwen3-8B"}
    shapes = [(t.workload.batch, t.workload.seqlen) for t in turns]
    assert list(dict.fromkeys(shapes[:-1])) == [(1, 4096), (4, 4096), (1, 16384)]
    assert [t.workload.kernels for t in turns[:3]] == ["hf", NO_LOSS, "liger"]
    assert turns[0].policies == POLICIES
    assert turns[-1].policies == COMPILED and turns[-1].cap_s < 600


def test_every_policy_of_a_plan_is_one(predictions):
    for model, device in (("Qwen3-8B", "H200"), ("nano", "cpu")):
        for turn in plan(model, find_device(device)):
            assert all(str(parse(text)) == text for text in turn.policies)


def test_a_cpu_runs_nano_without_liger_and_compiles_once_at_two_layers():
    turns = plan("nano", CPU)
    assert {(t.workload.batch, t.workload.seqlen) for t in turns} == {(1, 256), (2, 256)}
    assert all(t.workload.kernels == "hf" and t.workload.precision == "fp32" for t in turns)
    compiled = [t for t in turns if "compile" in t.policies]
    assert [(t.workload.name, t.policies) for t in compiled] == [("nano@2", ("compile",))]
    first = [turn for turn in turns if turn.rounds == 1]
    assert turns[: len(first)] == tuple(first) and {t.workload for t in first} == {t.workload for t in turns}


def test_a_cpu_refuses_a_large_model():
    with pytest.raises(UserError, match="nano"):
        plan("Qwen3-8B", CPU)


def test_a_smaller_card_gets_as_many_layers_as_fit(predictions):
    card = find_device("L4").model_copy(update={"usable_bytes": int(23.5e9)})  # 2 GB are the reserve
    assert deepest(Workload(), card) == Workload("Qwen3-8B@11")
    turns = plan("Qwen3-8B", card)
    assert {t.workload.name for t in turns} == {"Qwen3-8B@11", "Qwen3-8B@5"}  # two depths, for the additive rule
    assert deepest(Workload(), find_device("H200")) == Workload()
    with pytest.raises(UserError, match="Not one layer"):
        deepest(Workload(), card.model_copy(update={"usable_bytes": 10_000_000_000}))


@pytest.mark.slow
def test_the_depth_that_is_cut_fits_by_the_true_estimate():
    cut = deepest(Workload(), card := find_device("L4"))
    peaks = [campaign.estimate(cut.replace(layers=n), "none", card).peak_bytes for n in (cut.layers, cut.layers + 1)]
    assert peaks[0] <= card.usable_bytes - campaign.RESERVE_BYTES < peaks[1]


def test_the_forecast_stays_within_the_time_and_the_cap(predictions):
    turns = plan("Qwen3-8B", card := find_device("H200"))
    rows = list(forecast(turns, card, 8))
    assert [row.priority for row in rows] == list(range(sum(len(t.policies) for t in turns)))
    assert 0 < sum(row.seconds for row in rows if row.in_time) <= 8 * 60
    assert not any(row.in_time for row in forecast(turns, card, 0))
    ample = [row for row in forecast(turns, card, 1000) if not row.in_time]
    assert {row.policy for row in ample} <= set(COMPILED)  # their cap is their own
    assert ample == [] or sum(r.seconds for r in rows if r.policy in COMPILED) > turns[-1].cap_s


def test_a_row_that_will_not_fit_is_still_tried_once(predictions):
    card = find_device("H200").model_copy(update={"usable_bytes": 50_000_000_000})
    rows = list(forecast(plan("Qwen3-8B", card), card, 60))
    assert {row.rounds for row in rows if row.cost.status == "oom"} == {1}
    assert all(row.seconds == row.cost.step_s for row in rows if row.cost.status == "oom")


def test_rounds_of_a_later_turn_come_on_top(predictions):
    rows = list(forecast(TURNS, find_device("H200"), 60))
    assert [(row.group, row.policy, row.rounds) for row in rows[:4]] == [
        (0, "none", 1),
        (0, "block", 1),
        (0, "block+offload", 1),
        (1, "none", 2),
    ]
    assert sum(row.rounds for row in rows) == campaign.rounds(TURNS) == 8
    assert [row.rounds for row in forecast(TURNS, CPU, 60)] == [1, 1, 1, 1]  # by these estimates nothing fits the CPU


# --- the run


def test_all_rows_are_taken_and_a_second_run_takes_none(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = go(file)
    assert taken_rounds(file) == WHOLE
    assert [(row.policy, row.workload.batch, row.status) for row in rows] == [
        ("none", 1, "ok"),
        ("block", 1, "ok"),
        ("block+offload", 1, "refused"),
        ("none", 2, "ok"),
    ]
    assert {len(row.samples["step_s"]) for row in rows if row.ok} == {2 * STEPS_A_ROUND}
    content = file.read_bytes()
    assert go(file) == rows and file.read_bytes() == content


def test_interrupted_before_any_round_it_goes_on_without_loss_or_doubling(tmp_path):
    file = tmp_path / "rows.jsonl"
    for _ in range(sum(WHOLE.values())):
        calls = []

        def interrupt(text, calls=calls):
            calls.append(text)
            if len(calls) == 2:  # one round a visit
                raise KeyboardInterrupt

        try:
            go(file, progress=interrupt)
        except KeyboardInterrupt:
            continue
        break
    assert taken_rounds(file) == WHOLE
    assert taken(TURNS, "cpu", file) == go(file)


def test_a_torn_line_costs_that_round_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    go(file, TURNS[:1])
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rindex(b"block+offload")])
    assert len(go(file, TURNS[:1])) == 3
    assert taken_rounds(file) == {("none", 1): 1, ("block", 1): 1, ("block+offload", 1): 1}


def test_rows_of_other_code_are_left_alone_and_taken_again(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    go(file, TURNS[1:2])
    monkeypatch.setattr("gctutor.results.source_hash", lambda: "other code")
    go(file, TURNS[1:2])
    assert taken_rounds(file) == {("none", 2): 4}
    assert len(Results.read(file)) == 2


def test_without_time_nothing_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "Bench", None)
    assert len(go(tmp_path / "rows.jsonl", minutes=0)) == 0
    assert len(go(tmp_path / "rows.jsonl", [Turn(TINY, ("none",), cap_s=0)])) == 0
    assert not list(tmp_path.iterdir())


def test_a_row_too_long_for_the_time_left_makes_way_for_a_shorter_one(tmp_path, monkeypatch):
    def predicted(workload, policy, device):
        seconds = 1e6 if policy == "none" else 1e-3
        return StepCost(workload, policy, device.name, "estimated", "", step_s=seconds)

    monkeypatch.setattr(campaign, "predicted", predicted)
    assert [row.policy for row in go(tmp_path / "rows.jsonl", TURNS[:1])] == ["block", "block+offload"]


def test_an_error_is_a_row_and_the_next_run_tries_it_again(tmp_path, monkeypatch):
    file, whole = tmp_path / "rows.jsonl", Bench.round

    def fragile(self, text, *rest):
        if text == "none":
            raise RuntimeError("an illegal memory access\nand its details")
        return whole(self, text, *rest)

    monkeypatch.setattr(Bench, "round", fragile)
    none, block, _ = go(file, TURNS[:1])
    assert (none.status, none.error) == ("error", "RuntimeError: an illegal memory access") and block.ok
    monkeypatch.setattr(Bench, "round", whole)
    none, _, _ = go(file, TURNS[:1])
    assert none.ok and taken_rounds(file)["none", 1] == 2


def test_out_of_memory_is_final(tmp_path, monkeypatch):
    def too_big(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Bench, "_step", too_big)
    file = tmp_path / "rows.jsonl"
    assert [row.status for row in go(file, TURNS[1:2])] == ["oom"]
    monkeypatch.undo()
    go(file, TURNS[1:2])
    assert taken_rounds(file) == {("none", 2): 1}


ENDLESS = """
import sys
from gctutor import Workload, campaign
from gctutor.devices import find_device
turn = campaign.Turn(Workload("nano@1", 1, 16, precision="fp32"), ("none", "block"), rounds=10**6)
campaign.run([turn], find_device("cpu"), device="cpu", minutes=60, save=campaign.Path(sys.argv[1]))
"""


def test_killed_in_another_process_it_goes_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(file)])
    try:
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 3):
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = {row.policy: len(row.samples["step_s"]) // STEPS_A_ROUND for row in Results.read(file)}
    target = max(done.values()) + 1
    go(file, [Turn(TINY, ("none", "block"), rounds=target)])
    assert taken_rounds(file) == {("none", 1): target, ("block", 1): target}


# --- what a GPU's allocator says


def test_levels_follow_allocations_and_requests_to_free():
    events = [
        {"action": "segment_alloc", "size": 999, "time_us": 1_000_000},
        {"action": "alloc", "size": 10, "time_us": 1_000_100},
        {"action": "alloc", "size": 5, "time_us": 1_000_200},
        {"action": "free_requested", "size": 10, "time_us": 1_000_400},
        {"action": "free_completed", "size": 10, "time_us": 1_000_500},
    ]
    seconds, sizes = gpu_probe.levels(events, before=100)
    assert sizes == [110, 115, 105]
    assert seconds == pytest.approx([0, 1e-4, 3e-4])
    assert gpu_probe.levels([], 7) == ([], [])


def test_thinning_keeps_the_peak_and_the_order():
    sizes = [abs(500 - i) for i in range(1000)]
    thin = gpu_probe.thinned([float(i) for i in range(1000)], sizes, points=64)
    assert len(thin["bytes"]) == len(thin["seconds"]) <= 64
    assert max(thin["bytes"]) == 500 and thin["seconds"] == sorted(thin["seconds"])
    assert gpu_probe.thinned([0.0, 1.0], [3, 4]) == {"seconds": [0.0, 1.0], "bytes": [3, 4]}


def test_a_failing_instrument_does_not_lose_the_row(monkeypatch):
    bench = Bench(TINY, "cpu")
    row = bench.round("none", parse("none"), None, 1)

    def broken(step):
        raise RuntimeError("no profiler")

    monkeypatch.setattr(gpu_probe, "busy_seconds", broken)
    probed = campaign._probed(bench, row, None)
    assert probed.samples == row.samples and probed.provenance["probe"] == "RuntimeError: no profiler"
    monkeypatch.setattr(gpu_probe, "busy_seconds", lambda step: row.step_s / 2)
    assert campaign._probed(bench, row, None).provenance["gpu_busy_share"] == 0.5


def test_a_timeline_lies_beside_the_rows(tmp_path, monkeypatch):
    bench = Bench(TINY, "cpu")
    row = bench.round("none", parse("none"), None, 1)
    monkeypatch.setattr(gpu_probe, "busy_seconds", lambda step: 0.0)
    monkeypatch.setattr(gpu_probe, "memory_history", lambda step: {"seconds": [0.0], "bytes": [len(step())]})
    campaign._probed(bench, row, tmp_path / "h200.jsonl")
    data = json.loads((tmp_path / "h200.none.memory.json").read_text())
    assert data["workload"] == TINY.to_dict() and data["policy"] == "none" and data["bytes"] == [3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its allocator's history, its profiler")
def test_the_history_reaches_the_allocators_own_peak():
    bench = Bench(Workload("nano", 1, 256), "cuda")
    bench.round("none", parse("none"), None, 1)
    torch.cuda.reset_peak_memory_stats()
    history = bench.probed(parse("none"), gpu_probe.memory_history)
    assert max(history["bytes"]) == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
    assert 0 < bench.probed(parse("none"), gpu_probe.busy_seconds) < 10


# --- recorded rows and the command


def test_recorded_rows_are_the_newest_that_ran(tmp_path):
    def row(policy, date, step_s, **fields):
        origin = {"date": date, "source_hash": date}
        return StepCost(TINY, policy, "NVIDIA H200", "measured", "", provenance=origin, step_s=step_s, **fields)

    old, new = row("none", "2026-01-01", 2.0), row("none", "2026-02-01", 1.0)
    failed = row("none", "2026-03-01", None, status="error", error="x")
    Results([new, old, failed]).append_to(tmp_path / "a.jsonl")
    Results([row("block", "2026-01-01", 3.0)]).append_to(tmp_path / "b.jsonl")
    found = {r.policy: (r.source, r.step_s) for r in recorded(tmp_path)}
    assert found == {"none": ("recorded", 1.0), "block": ("recorded", 3.0)}
    assert len(recorded(tmp_path / "absent")) == 0


def test_the_dry_run_lists_rows_fit_and_minutes(predictions, capsys):
    assert cli.main(["campaign", "--dry-run", "--device", "H200", "--minutes", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["workload"]["model"] == "Qwen3-8B" and rows[0]["policy"] == "none"
    assert {"priority", "rounds", "seconds", "in_time", "cost"} <= rows[0].keys()
    assert cli.main(["campaign", "--dry-run", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "nano, 2 × 256" in out and "in time" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "H200"], "this machine's"),
        (["--device", "cpu", "--model", "Qwen3-8B"], "nano"),
        (["--dry-run", "--device", "abacus"], "Unknown device"),
        (["--minutes", "0"], "--minutes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert cli.main(["campaign", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in err and len(err.strip().splitlines()) == 1


def test_the_command_saves_shows_and_survives_ctrl_c(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(campaign, "plan", lambda *_: TURNS[:1])
    whole = Bench.round

    def stopped(self, text, *rest):
        if text == "block":
            raise KeyboardInterrupt
        return whole(self, text, *rest)

    monkeypatch.setattr(Bench, "round", stopped)
    arguments = ["campaign", "--device", "cpu", "--save", str(file), "--json"]
    assert cli.main(arguments) == 130
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == ["none"]
    monkeypatch.setattr(Bench, "round", whole)
    assert cli.main(arguments) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == ["none", "block", "block+offload"]
