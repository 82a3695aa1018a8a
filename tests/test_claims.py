"""Checks that can fail, and verdicts that follow from the figures."""

import json

import pytest

from gctutor import claims
from gctutor.claims import check, check_close, collect, decide, judge, list_claims, scorecard, verdict_of, verdicts
from gctutor.errors import UserError

IDS = [
    *["T01", "T02", "T03", "T04", "T05", "T06", "H01", "H02", "H03", "H04", "G01", "G02", "G03", "G04", "G05"],
    *["S01", "S02", "S03", "F01", "F02", "F03", "F04", "P01", "P02", "P03", "P04", "P05", "P06"],
    *["R01", "R02", "R03", "B01", "B02", "B03", "D01", "D02"],
]
P02 = {"memory_bytes": 14e9, "step_s": 0.801}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty run folder, no committed verdicts, and one notebook source."""
    monkeypatch.setenv("GCTUTOR_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    source = tmp_path / "notebooks" / "src" / "02_block_checkpointing.py"
    source.parent.mkdir(parents=True)
    source.write_text("# first\n")
    return tmp_path


def row(frame, claim_id):
    return frame.set_index("id").loc[claim_id]


def test_check_passes_and_fails_with_its_message(capsys):
    check(1 < 2, "one is less than two")
    assert capsys.readouterr().out == "✓ one is less than two\n"
    with pytest.raises(AssertionError, match=r"^two is less than one$"):
        check(2 < 1, "two is less than one")


def test_check_close_shows_both_numbers(capsys):
    check_close(101, 100, rel=0.01, what="bytes")
    assert capsys.readouterr().out == "✓ bytes: 101 against 100, 1.00% off (1.00% allowed)\n"
    with pytest.raises(AssertionError, match=r"bytes: 102 against 100, 2\.00% off"):
        check_close(102, 100, rel=0.01, what="bytes")


@pytest.mark.parametrize(("value", "passes"), [(0, True), (1e-9, False)])
def test_check_close_to_zero_is_exact(value, passes):
    if passes:
        check_close(value, 0, rel=0.5, what="rest")
    else:
        with pytest.raises(AssertionError):
            check_close(value, 0, rel=0.5, what="rest")


def test_check_close_fails_on_nan():
    with pytest.raises(AssertionError):
        check_close(float("nan"), 1, rel=0.5, what="time")


def test_every_claim_is_there_once_in_order():
    assert [claim.id for claim in list_claims()] == IDS


def test_every_claim_is_judged_by_a_notebook_of_the_series():
    assert {claim.notebook[:2] for claim in list_claims()} <= {f"{n:02}" for n in range(1, 11)}


def test_named_figures_end_in_their_unit():
    for claim in list_claims():
        if isinstance(claim.value, dict):
            assert all(name.endswith(tuple(claims.UNITS)) for name in claim.value), claim.id


@pytest.mark.parametrize(
    ("value", "claimed", "rel", "outcome"),
    [
        (15.3, 14.0, 0.10, "holds"),
        (15.5, 14.0, 0.10, "does not hold"),
        (0.5, (0.3, 0.7), 0.0, "holds"),
        (0.29, (0.3, 0.7), 0.0, "does not hold"),
        (0.29, (0.3, 0.7), 0.1, "holds"),
        (float("nan"), 14.0, 1.0, "does not hold"),
    ],
)
def test_verdict_follows_from_value_and_tolerance(value, claimed, rel, outcome):
    assert verdict_of(value, claimed, rel) == outcome


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({}, "holds"), ({"step_s": 1.9}, "does not hold"), ({"memory_bytes": 60e9}, "does not hold")],
)
def test_all_figures_of_a_claim_must_match(changes, outcome):
    assert decide("P02", value=P02 | changes, tolerance=0.1, because="so").verdict == outcome


def test_a_condition_is_named_only_when_the_claim_holds():
    assert decide("T06", holds=True, when="it does not fit", because="so").headline == "holds when it does not fit"
    refused = decide("T06", holds=False, when="it does not fit", because="so")
    assert (refused.headline, refused.when) == ("does not hold", None)


@pytest.mark.parametrize(
    ("claim_id", "given", "message"),
    [
        ("P2", {"holds": True}, "Unknown claim 'P2': did you mean"),
        ("T01", {}, "T01 needs holds=True or False"),
        ("T01", {"value": 1.0, "tolerance": 0.1}, "T01 needs holds=True or False"),
        ("F02", {"value": 5e9}, "or value=… and tolerance=…"),
        ("P02", {"value": 14e9, "tolerance": 0.1}, "claims memory_bytes, step_s, so value must have the same"),
        ("F02", {"value": P02, "tolerance": 0.1}, "claims one number"),
    ],
)
def test_a_verdict_that_cannot_be_derived_is_refused(claim_id, given, message):
    with pytest.raises(UserError, match=message):
        decide(claim_id, because="so", **given)


def test_judge_shows_and_stores(house, capsys):
    judge("F02", value=4.98e9, tolerance=0.1, because="the shape says so", source="estimated", device="H100 SXM")
    shown = capsys.readouterr().out
    assert shown.startswith("F02 does not hold: ")
    assert "Claimed 80 GB; found 4.98 GB. the shape says so. (estimated for H100 SXM)" in shown
    assert (house / "out" / "verdicts" / "02_block_checkpointing" / "F02.json").exists()
    (verdict,) = verdicts(committed=house / "none.json")
    assert (verdict.id, verdict.value, verdict.device) == ("F02", 4.98e9, "H100 SXM")


def test_html_is_escaped():
    shown = decide("T01", holds=True, because="1 < 2 & so")._repr_html_()
    assert "1 &lt; 2 &amp; so" in shown


def test_scorecard_says_what_is_missing(house):
    frame = scorecard(committed=house / "none.json")
    assert list(frame["id"]) == IDS
    assert set(frame["verdict"]) == {"not judged here"}
    assert row(frame, "G03")["status"] == "notebook 04 has not been run"
    assert row(frame, "P02")["status"] == "needs a GPU"


def test_scorecard_marks_estimates_where_a_gpu_is_needed(house):
    judge("P02", value=P02, tolerance=0.1, because="so")
    judge("H01", holds=True, because="so")
    frame = scorecard(committed=house / "none.json")
    assert row(frame, "P02")["status"] == "judged from an estimate: needs a GPU to be measured"
    assert row(frame, "P02")["claimed"] == "memory 14 GB, step 801 ms"
    assert row(frame, "H01")["status"] == "judged"


def test_scorecard_prefers_the_measured_verdict(house):
    judge("P02", value=P02, tolerance=0.1, because="roofline")
    judge("P02", value=P02, tolerance=0.1, because="ran it", source="measured", device="H100 SXM", notebook="07_pareto")
    assert len(verdicts(committed=house / "none.json")) == 2
    found = row(scorecard(committed=house / "none.json"), "P02")
    assert (found["because"], found["notebook"], found["source"]) == ("ran it", "07_pareto", "measured on H100 SXM")
    judge("P02", value=P02, tolerance=0.1, because="roofline again")
    assert row(scorecard(committed=house / "none.json"), "P02")["because"] == "ran it"


def test_scorecard_marks_a_verdict_older_than_its_notebook(house):
    judge("H01", holds=True, because="so")
    (house / "notebooks" / "src" / "02_block_checkpointing.py").write_text("# second\n")
    assert row(scorecard(committed=house / "none.json"), "H01")["status"] == claims.STALE


def test_committed_verdicts_stand_in_for_notebooks_not_run(house):
    path = house / "verdicts.json"
    judge("H01", holds=True, because="first")
    judge("H02", holds=True, because="second")
    collect(path=path)
    (house / "out" / "verdicts" / "02_block_checkpointing" / "H01.json").unlink()
    judge("H02", holds=False, because="changed")
    frame = scorecard(committed=path)
    assert row(frame, "H01")["because"] == "first"
    assert row(frame, "H02")["because"] == "changed"


def test_collect_is_deterministic_and_keeps_dates_of_what_has_not_changed(house):
    path = house / "verdicts.json"
    judge("H02", holds=True, because="so")
    judge("H01", holds=True, because="so")
    collect(path=path)
    old = path.read_text().replace(decide("H01", holds=True, because="so").date, "2001-01-01")
    path.write_text(old)
    collect(path=path)
    assert path.read_text() == old
    assert [entry["id"] for entry in json.loads(old)] == ["H01", "H02"]
    judge("H01", holds=False, because="changed")
    collect(path=path)
    assert path.read_text().count("2001-01-01") == 1


@pytest.mark.parametrize("text", ["{", '{"id": "H01"}', "[]", '"H01"'])
def test_a_corrupt_verdict_is_one_sentence(house, text):
    path = house / "out" / "verdicts" / "02_block_checkpointing" / "H01.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(UserError, match=r"^H01\.json is not") as caught:
        verdicts(committed=house / "none.json")
    assert "\n" not in str(caught.value)
    assert path.read_text() == text


def test_corrupt_committed_verdicts_are_refused(house):
    path = house / "verdicts.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"verdicts\.json is not a list"):
        verdicts(committed=path)


def test_a_verdict_on_an_unknown_claim_is_refused(house):
    judge("H01", holds=True, because="so")
    path = house / "out" / "verdicts" / "02_block_checkpointing" / "H01.json"
    path.write_text(path.read_text().replace('"H01"', '"H99"'))
    with pytest.raises(UserError, match="Unknown claim 'H99'"):
        verdicts(committed=house / "none.json")
