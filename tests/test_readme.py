"""What the README promises: its figures are those of the package, its links lead somewhere, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest

from gctutor.estimation import estimate
from gctutor.pairs import lessons
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


def test_the_series_table_gives_each_lessons_title_number_and_minutes():
    rows = re.findall(r"^\| \[(\d+)\. [^\]]+\]\(notebooks/(\w+)\.ipynb\) \| (\d+) \|", README, re.MULTILINE)
    assert [name for _, name, _ in rows] == [lesson.name for lesson in lessons()]
    for (number, name, minutes), lesson in zip(rows, lessons(), strict=True):
        assert name.startswith(f"{int(number):02}_")
        assert f"**Time:** {minutes} minutes of reading" in lesson.source.read_text(encoding="utf-8")


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
