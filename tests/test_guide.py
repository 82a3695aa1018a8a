"""The decision guide: the first rung whose traced peak fits, with the reserve, and the sentence that says why."""

from __future__ import annotations

import pytest

from gctutor import guide
from gctutor.errors import UserError
from gctutor.estimation import trace
from gctutor.planner import RESERVE_BYTES

SMALL = {"model": "Qwen3-8B@4", "kernels": "hf", "optimizer": None}


def ask(device: str, batch: int, seqlen: int = 4096):
    return guide.advise(device, batch, seqlen, "lora:16", **SMALL)


@pytest.fixture
def card_of(monkeypatch):
    """`card_of(bytes)`: an H100 that holds so many bytes besides the reserve."""
    real = guide.find_device("H100")

    def make(usable: int) -> str:
        card = real.model_copy(update={"usable_bytes": usable + RESERVE_BYTES})
        monkeypatch.setattr(guide, "find_device", lambda name: card)
        return card.name

    return make


def peaks() -> dict[str, int]:
    workload = ask("B200", 1).workload
    return {policy: trace(workload, policy).peak_bytes for policy in guide.LADDER}


def test_rungs_go_down_in_memory_and_up_in_time():
    advice = ask("B200", 1)
    costs = [guide.estimate(advice.workload, policy, advice.device) for policy in guide.LADDER]
    assert costs[0].activation_bytes > costs[1].activation_bytes > costs[2].activation_bytes
    assert costs[0].step_s < costs[1].step_s < costs[2].step_s


def test_the_first_rung_that_fits_is_taken_to_the_byte(card_of):
    known = peaks()
    for policy in guide.LADDER:
        advice = ask(card_of(known[policy]), 1)
        assert advice.policy == policy
        assert advice.peaks[policy] == known[policy]
        assert advice.cost is not None and advice.cost.peak_bytes + RESERVE_BYTES <= advice.device.usable_bytes
    assert ask(card_of(known["none"] - 1), 1).policy == "modules:all"


def test_nothing_fits_says_by_how_much(card_of):
    block = peaks()["block"]
    advice = ask(card_of(block - 1_500_000_000), 1)
    assert advice.policy is None and advice.cost is None
    assert advice.reason == "Even replaying every layer takes 1.5 GB too much."


def test_the_reason_names_what_is_over(card_of):
    known = peaks()
    reason = ask(card_of(known["block"]), 1).reason
    assert f"{(known['none'] - known['block']) / 1e9:.1f} GB too much" in reason
    assert "to spare" in ask(card_of(known["none"] + 10**9), 1).reason


def test_the_planner_is_never_slower_than_the_rung():
    advice = ask("RTX 4090", 2)
    planned = advice.plan()
    assert advice.policy in guide.LADDER[1:]
    assert planned.cost.step_s <= advice.cost.step_s


def test_notes_fit_the_question():
    assert "bf16" in guide._notes(ask("B200", 1).workload.replace(trainable="full"))[0]
    lora = guide._notes(ask("B200", 1).workload)
    assert len(lora) == 2 and "frozen" in lora[0] and "accumulation" in lora[1]


def test_bad_input_is_one_sentence():
    with pytest.raises(UserError, match="H100"):
        guide.advise("H1000", 1, 4096)
    with pytest.raises(UserError, match="batch"):
        guide.advise("H100", 0, 4096)
