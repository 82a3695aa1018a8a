"""What the README promises: its figures are those of the package, its links lead somewhere, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

from gctutor.estimation import estimate
from gctutor.workload import Workload

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`\w[\w:]*`[^|]*) \| ([\d.]+) GB \| (\d+) ms \|$", README, re.MULTILINE)


def test_the_table_has_its_rows():
    assert len(ROWS) == 4


@pytest.mark.parametrize(("words", "gigabytes", "milliseconds"), ROWS)
def test_the_tables_figures_are_estimates_made_now(words, gigabytes, milliseconds):
    kernels = "liger:rms_norm,rope,swiglu" if "Liger" in words else "hf"
    cost = estimate(Workload(kernels=kernels), words.split("`")[1], "H100")
    assert f"{cost.activation_bytes / 1e9:.1f}" == gigabytes
    assert f"{cost.step_s * 1e3:.0f}" == milliseconds


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_example_commands_parse():
    from gctutor.cli import main

    commands = [line for line in README.splitlines() if line.startswith("gctutor ")]
    assert len(commands) >= 5
    for command in commands:
        name = shlex.split(command)[1]
        assert main([name, "--help"]) == 0
