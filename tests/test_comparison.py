"""Prediction against measurement: bytes to the byte on a CPU, errors, order beyond the spread, the additive rule."""

import dataclasses

import pytest

from gctutor.comparison import at_depth, errors, order_agreement, pairs
from gctutor.errors import UserError
from gctutor.estimation import estimate
from gctutor.measurement import measure
from gctutor.results import StepCost
from gctutor.workload import Workload

TINY = Workload("nano@1", 1, 16, precision="fp32")


def row(policy, seconds, source="measured", workload=TINY, **fields):
    samples = {"step_s": list(seconds)} if source == "measured" else {}
    middle = sorted(seconds)[len(seconds) // 2]
    return StepCost(workload, policy, "NVIDIA H200", source, "", samples=samples, step_s=middle, **fields)


def pair(policy, guess, seconds, **fields):
    return row(policy, [guess], "estimated", **fields), row(policy, seconds, **fields)


def test_on_a_cpu_the_bytes_are_exact_for_what_ran():
    measured = measure(TINY, ["none", "block", "budget:0.6", "block+offload"], device="cpu", rounds=1, steps=2)
    compared = pairs(measured)
    assert [found.policy for _, found in compared] == [guess.policy for guess, _ in compared]
    assert [found.policy for _, found in compared] == ["none", "block", "budget:0.6"]  # what was refused did not run
    frame = errors(compared)
    assert (frame["activation_bytes_error"] == 0).all() and (frame["peak_bytes_error"] == 0).all()
    assert frame["step_s_error"].notna().all()


def test_errors_are_relative_to_what_was_measured():
    guess, found = pair("none", 1.1, [1.0, 1.0])
    guess = dataclasses.replace(guess, activation_bytes=90)
    found = dataclasses.replace(found, activation_bytes=100)
    (record,) = errors([(guess, found)]).to_dict("records")
    assert record["activation_bytes_error"] == pytest.approx(-0.1)
    assert record["step_s_error"] == pytest.approx(0.1)
    assert record["peak_bytes_error"] is None


def test_compiled_rows_have_no_estimate():
    assert pairs([row("compile", [1.0, 1.0])]) == []


def test_order_counts_only_what_differs_beyond_the_spread():
    none = pair("none", 1.0, [1.0, 1.01, 1.02])
    block = pair("block", 1.3, [1.4, 1.41, 1.42])
    wrong = pair("sub:mlp", 0.9, [1.2, 1.21, 1.22])  # estimated faster than none, measured slower
    near = pair("modules:all", 0.95, [0.99, 1.01, 1.03])  # within the spread of none
    elsewhere = pair("block", 0.1, [9.0, 9.0], workload=TINY.replace(batch=2))
    assert order_agreement([none, block]) == (1, 1)
    assert order_agreement([none, block, wrong]) == (2, 3)
    assert order_agreement([none, near]) == (0, 0)
    assert order_agreement([none, elsewhere]) == (0, 0)


def test_a_spread_needs_two_samples():
    with pytest.raises(UserError, match="measure more rounds"):
        order_agreement([pair("none", 1.0, [1.0]), pair("block", 1.0, [2.0])])


@pytest.mark.parametrize("policy", ["none", "block", "modules:all"])
def test_the_additive_rule_is_exact_in_bytes_and_work(policy):
    shallow, deep, full = (estimate(TINY.replace(layers=n), policy, "cpu") for n in (3, 4, 6))
    found = at_depth(shallow, deep, 6)
    for name in ("static_bytes", "activation_bytes", "peak_bytes", "flop", "recompute_flop"):
        assert getattr(found, name) == getattr(full, name), name
    assert found.workload.n_layers == 6 and found.step_s > deep.step_s
    assert "from 3 and 4" in found.provenance["note"] and not found.samples


def test_the_additive_rule_refuses_rows_that_differ_in_more_than_depth():
    none = row("none", [1.0, 1.0])
    for other in (
        row("block", [1.0], workload=TINY.replace(layers=2)),
        none,
        row("none", [1.0], workload=TINY.replace(batch=2)),
    ):
        with pytest.raises(UserError, match="depth"):
            at_depth(none, other, 6)
