"""Rows to JSON lines and back, folding of rounds, and files that are not ours."""

import json
import math
import statistics

import pytest
from hypothesis import given, strategies as st

from gctutor.errors import UserError
from gctutor.results import SCHEMA, Results, StepCost, provenance, source_hash
from gctutor.workload import Workload

NANO = Workload("nano", seqlen=256)


def cost(policy="none", **changes):
    fields = {"workload": NANO, "policy": policy, "device": "cpu", "source": "measured", "meter": "tracer"} | changes
    return StepCost(**fields)


def timed(*seconds, policy="none", **changes):
    return cost(policy, **changes).with_samples({"step_s": list(seconds)})


numbers = st.none() | st.integers(0, 2**60)
seconds = st.lists(st.floats(1e-6, 1e3), max_size=4)
rows = st.builds(
    StepCost,
    workload=st.sampled_from([NANO, Workload(), Workload("Qwen3-8B@8", trainable="lora:16", optimizer="adamw")]),
    policy=st.text(max_size=12),
    device=st.text(max_size=8),
    source=st.sampled_from(["measured", "recorded", "estimated"]),
    meter=st.text(max_size=8),
    status=st.sampled_from(["ok", "oom", "refused", "error"]),
    error=st.none() | st.text(max_size=20),
    static_bytes=numbers,
    peak_bytes=numbers,
    flop=numbers,
    samples=st.dictionaries(st.sampled_from(["step_s", "forward_s"]), seconds),
    breakdown=st.dictionaries(st.text(max_size=5), st.integers(0, 2**50), max_size=3),
)


@given(row=rows)
def test_a_row_survives_its_dictionary(row):
    assert StepCost.from_dict(json.loads(json.dumps(row.to_dict()))) == row


@given(taken=st.lists(rows, max_size=5, unique_by=lambda row: row.key))
def test_rows_survive_a_file(tmp_path_factory, taken):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    Results(taken).append_to(path)
    for row, back in zip(taken, Results.read(path), strict=True):
        if row.ok and any(row.samples.values()):
            row = row.with_samples({name: values for name, values in row.samples.items() if values})
        assert {**back.to_dict(), "samples": {}} == {**row.to_dict(), "samples": {}}


@given(rounds=st.lists(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_a_row_is_the_fold_of_its_rounds(rounds):
    (row,) = Results(timed(*samples) for samples in rounds).folded()
    joined = [sample for samples in rounds for sample in samples]
    assert row.samples["step_s"] == joined
    assert row.step_s == statistics.median(joined)


def test_folding_twice_changes_nothing():
    once = Results([timed(1.0), timed(3.0), timed(2.0, policy="block")]).folded()
    assert once.folded() == once


def test_rows_fold_only_within_one_configuration_and_code():
    kept = [
        timed(1.0),
        timed(1.0, policy="block"),
        timed(1.0, device="gpu"),
        timed(1.0, workload=NANO.replace(batch=2)),
        timed(1.0, provenance={"source_hash": "new"}),
    ]
    assert len(Results(kept + kept).folded()) == len(kept)


def test_a_failed_round_does_not_hide_one_that_succeeded():
    (row,) = Results([timed(1.0, peak_bytes=7), cost(status="oom", error="no memory")]).folded()
    assert (row.status, row.step_s, row.peak_bytes) == ("ok", 1.0, 7)


def test_a_row_that_only_failed_stays_failed():
    (row,) = Results([cost(status="error"), cost(status="oom")]).folded()
    assert row.status == "oom"


def test_appending_adds_one_line_a_row_and_keeps_what_is_there(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    Results([timed(1.0)]).append_to(path)
    first = path.read_bytes()
    Results([timed(2.0), timed(3.0, policy="block")]).append_to(path)
    assert path.read_bytes().startswith(first)
    assert path.read_text().count("\n") == 3
    assert Results.read(path)["none"].samples["step_s"] == [1.0, 2.0]


def torn_file(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    Results([timed(1.0), timed(2.0, device="NVIDIA × GPU")]).append_to(path)
    path.write_bytes(path.read_bytes()[:cut])
    return path


def line_ends(tmp_path):
    content = torn_file(tmp_path, None).read_bytes()
    return content.index(b"\n") + 1, len(content)


def test_a_kill_at_any_byte_loses_only_the_row_being_written(tmp_path):
    start, end = line_ends(tmp_path)
    for cut in range(start, end + 1):
        path = torn_file(tmp_path, cut)
        complete = 2 if cut >= end - 1 else 1
        assert len(Results.read(path)) == complete
        Results([timed(3.0, policy="block")]).append_to(path)
        assert len(Results.read(path)) == complete + 1
        path.unlink()


@pytest.mark.parametrize(
    "bad",
    [
        b"{torn",
        b"\xff\xfe",
        b"[1, 2]",
        b"{}",
        json.dumps({"schema": SCHEMA + 1, **cost().to_dict()}).encode(),
        json.dumps({"schema": SCHEMA, "policy": "none"}).encode(),
        json.dumps({"schema": SCHEMA, **cost().to_dict(), "colour": "green"}).encode(),
        json.dumps({"schema": SCHEMA, **cost().to_dict(), "peak_bytes": "many"}).encode(),
        json.dumps({"schema": SCHEMA, **cost().to_dict(), "workload": {"model": "nano", "batch": 0}}).encode(),
    ],
)
def test_a_line_that_is_not_a_row_is_refused_by_number_and_left_alone(tmp_path, bad):
    path = tmp_path / "rows.jsonl"
    Results([timed(1.0)]).append_to(path)
    content = path.read_bytes() + bad + b"\n" + path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 ") as caught:
        Results.read(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("text", ["policy,step_s", '{"other": "tool"}'])
def test_rows_are_not_appended_to_a_foreign_file(tmp_path, text):
    path = tmp_path / "foreign.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"foreign\.txt, line 1"):
        Results.read(path)
    with pytest.raises(UserError, match=r"foreign\.txt, last line"):
        Results([timed(1.0)]).append_to(path)
    assert path.read_text() == text


def test_an_empty_file_has_no_rows_and_a_missing_one_is_named(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert len(Results.read(empty)) == 0
    with pytest.raises(UserError, match="no results file"):
        Results.read(tmp_path / "absent.jsonl")


def test_rows_are_selected_by_their_own_and_the_workloads_fields():
    results = Results([timed(1.0), timed(2.0, policy="block"), timed(3.0, workload=NANO.replace(batch=2))])
    assert [row.step_s for row in results.where(batch=1)] == [1.0, 2.0]
    assert [row.step_s for row in results.where(lambda row: row.step_s > 1, policy="none")] == [3.0]
    assert results.where(batch=1)["block"].step_s == 2.0
    with pytest.raises(KeyError):
        results["sub:mlp"]
    with pytest.raises(UserError, match="2 rows have the policy 'none'"):
        results["none"]


def test_frame_has_one_row_a_step_with_units_in_the_names():
    frame = (Results([timed(1.0, peak_bytes=5)]) + Results([cost("block", status="oom")])).to_frame()
    assert list(frame["policy"]) == ["none", "block"]
    assert frame.loc[0, ["model", "seqlen", "peak_bytes", "step_s"]].tolist() == ["nano", 256, 5, 1.0]
    assert math.isnan(frame.loc[1, "step_s"])


def test_throughput_and_mfu():
    row = timed(0.5, model_flop=10**12)
    assert row.tokens_per_s == 256 / 0.5
    assert row.mfu(4e12) == 0.5
    assert cost().tokens_per_s is None
    assert cost().mfu(4e12) is None


def test_provenance_names_versions_and_the_source():
    found = provenance(hardware="two cores")
    assert found["source_hash"] == source_hash()
    assert len(source_hash()) == 12
    assert found["hardware"] == "two cores"
    assert found["torch"]
