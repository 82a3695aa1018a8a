"""The command: exit codes, what goes to stdout and stderr, and that the heavy imports wait."""

import json

import pytest

from gctutor import cli, estimation, measurement, planner
from gctutor.devices import find_device
from gctutor.results import Results, StepCost
from gctutor.workload import Workload

COMMANDS = [
    ["estimate"],
    ["measure"],
    ["plan"],
    ["devices"],
    ["campaign"],
    ["calibrate"],
    ["notebooks", "run"],
    ["notebooks", "refresh"],
    ["notebooks", "check"],
]


def cost(workload: Workload, policy: str, **fields) -> StepCost:
    return StepCost(workload, policy, "H100 SXM", "estimated", "fake tensors", resolved=policy, **fields)


@pytest.fixture
def quick_estimate(monkeypatch):
    """`estimate` answered from the hand: `none` costs, `block+offload` is refused."""

    def estimate(workload, policy, device, *, exact=False):
        if policy == "block+offload":
            return cost(workload, policy, status="refused", error="not [here]")
        return cost(workload, policy, activation_bytes=34_378_269_552, step_s=0.5, flop=10, recompute_flop=2)

    monkeypatch.setattr(estimation, "estimate", estimate)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_in_its_help(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: gctutor {' '.join(command)}" in text


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 0
    assert "estimate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["estimate", "--policy", "blok"], "did you mean 'block'"),
        (["estimate", "--policy", "none", "--policy", "blok"], "did you mean 'block'"),
        (["estimate", "--model", "Qwen3-8G"], "Qwen3-8B"),
        (["estimate", "--batch", "0"], "batch must be"),
        (["estimate", "--batch", "two"], "--batch"),
        (["estimate", "--precision", "fp12"], "precision"),
        (["estimate", "--device", "A100"], "A100 40GB"),
        (["estimate", "--device", "abacus"], "Unknown device"),
        (["estimate", "--polcy", "none"], "--polcy"),
        (["measure", "--device", "H100"], "this machine's"),
        (["measure", "--rounds", "0"], "--rounds"),
        (["plan", "--budget", "2"], "--budget"),
        (["plan", "--fits-in", "abacus"], "Unknown device"),
        (["notebooks", "run", "99"], "notebook"),
        (["notebooks", "run", "--parameter", "steps"], "NAME=VALUE"),
        (["estimat"], "estimat"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_code_2(arguments, sentence, capsys):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_json_is_a_list_with_one_object_a_policy_and_nothing_else(quick_estimate, capsys):
    arguments = ["estimate", "--batch", "4", "--policy", "none", "--policy", "block+offload", "--json"]
    assert cli.main(arguments) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["workload"] == Workload(batch=4).to_dict()
    assert (first["policy"], first["status"], first["activation_bytes"]) == ("none", "ok", 34_378_269_552)
    assert (second["status"], second["error"]) == ("refused", "not [here]")


def test_the_table_names_source_units_and_refusals(quick_estimate, capsys):
    assert cli.main(["estimate", "--policy", "none", "--policy", "block+offload"]) == 0
    out = capsys.readouterr().out
    for text in ("estimated for H100 SXM", "kept GB", "34.378", "500.0", "20.0%", "refused: not [here]"):
        assert text in out


def test_every_field_of_a_workload_is_an_option(quick_estimate, capsys):
    given = {
        "model": "Qwen3-4B", "batch": 2, "seqlen": 64, "attention": "eager", "kernels": "liger", "precision": "amp",
        "trainable": "lora:8", "optimizer": "adamw", "mask": "packed", "layers": 3,
    }  # fmt: skip
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    assert cli.main(["estimate", *options, "--policy", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["workload"] == given


@pytest.mark.slow
def test_a_true_estimate_reaches_the_terminal(capsys):
    assert cli.main(["estimate", "--model", "Qwen3-8B@4", "--policy", "none", "--policy", "block", "--json"]) == 0
    none, block = json.loads(capsys.readouterr().out)
    assert none["source"] == "estimated" and none["device"] == "H100 SXM"
    assert 0 < block["activation_bytes"] < none["activation_bytes"]


def test_measure_on_a_cpu_is_nano_by_default_and_saves(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    arguments = ["measure", "--device", "cpu", "--seqlen", "16", "--layers", "1", "--rounds", "2", "--policy", "none"]
    assert cli.main([*arguments, "--save", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["source"] == "measured" and row["workload"]["model"] == "nano"
    assert len(file.read_text().splitlines()) == 2


def test_interrupt_keeps_the_rows_taken(monkeypatch, capsys):
    def interrupted(workload, policies, *, save, **_):
        Results([cost(workload, "none", step_s=0.5)]).append_to(save)
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "measure", interrupted)
    assert cli.main(["measure", "--device", "cpu", "--json"]) == 130
    out, err = capsys.readouterr()
    assert [row["policy"] for row in json.loads(out)] == ["none"]
    assert err.strip().endswith("what was done until then is kept.")


def test_an_unexpected_error_shows_its_traceback_only_with_debug(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("lost")

    monkeypatch.setattr(estimation, "estimate", broken)
    assert cli.main(["estimate"]) == 1
    assert "Unexpected RuntimeError: lost" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="lost"):
        cli.main(["--debug", "estimate"])


@pytest.fixture
def planned(monkeypatch):
    """`planned(fits)` makes `plan` answer from the hand, and returns the arguments that it then gets."""

    def answer(fits: bool):
        asked = {}

        def plan(workload, device, **options):
            asked.update(options, workload=workload, device=device)
            none, block = cost(workload, "none"), cost(workload, "block")
            best = cost(workload, "modules:all") if fits else None
            return planner.Plan(
                workload, find_device("H100"), 8e9, best, none, block, advice=() if fits else ("Too big.",)
            )

        monkeypatch.setattr(planner, "plan", plan)
        return asked

    return answer


def test_plan_gives_a_policy_and_the_lines_to_paste(planned, capsys):
    asked = planned(fits=True)
    assert cli.main(["plan", "--batch", "4", "--budget", "0.4", "--json"]) == 0
    assert (asked["workload"], asked["budget"], asked["fits_in"]) == (Workload(batch=4), 0.4, None)
    answer = json.loads(capsys.readouterr().out)
    assert answer["policy"] == "modules:all"
    assert [row["policy"] for row in answer["rows"]] == ["none", "block", "modules:all"]
    assert "modules:all" in answer["lines"]["transformers"]


def test_plan_says_what_would_help_when_nothing_fits(planned, capsys):
    asked = planned(fits=False)
    assert cli.main(["plan", "--fits-in", "8e9"]) == 1
    assert asked["fits_in"] == 8e9
    assert "Too big." in capsys.readouterr().out


def test_devices_as_json(capsys):
    assert cli.main(["devices", "--json"]) == 0
    names = [device["name"] for device in json.loads(capsys.readouterr().out)]
    assert "H100 SXM" in names
