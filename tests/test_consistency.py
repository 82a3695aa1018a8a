"""One number, one value: the key figures that lessons, scorecard and README print are those of the package now."""

import html
import json
import re

import nbformat
import pytest

from gctutor.claims import COMMITTED
from gctutor.estimation import estimate
from gctutor.guide import KERNELS
from gctutor.pairs import lessons
from gctutor.workload import Workload


def gigabytes(policy: str, digits: int = 1) -> str:
    return f"{estimate(Workload(), policy).activation_bytes / 1e9:.{digits}f}"


def milliseconds(policy: str, kernels: str = "hf") -> str:
    return f"{1e3 * estimate(Workload(kernels=kernels), policy).step_s:.0f}"


def extra_percent(policy: str) -> str:
    return f"{estimate(Workload(), policy).step_s / estimate(Workload(), 'none').step_s - 1:.0%}"


# What a lesson prints (its groups), and the figures that must stand there.
PRINTED = {
    "01": (
        r"makes ([\d.]+) GB of activations.*keeps ([\d.]+) GB instead of ([\d.]+); `block` keeps ([\d.]+\d)",
        lambda: [gigabytes("none"), gigabytes("modules:all"), gigabytes("none"), gigabytes("block")],
    ),
    "02": (
        r"`block` kept ([\d.]+) GB.*takes (\d+%) more: (\d+) ms instead of (\d+)",
        lambda: [gigabytes("block", 2), extra_percent("block"), milliseconds("block"), milliseconds("none")],
    ),
    "06": (
        r"Kernels bring the step from (\d+) to (\d+) ms.*Activations fall from ([\d.]+) to",
        lambda: [milliseconds("none"), milliseconds("none", KERNELS), gigabytes("none")],
    ),
    "07": (r"where we count ([\d.]+)\.", lambda: [gigabytes("none")]),
}


def printed(number: str) -> str:
    """All text that the executed lesson shows."""
    (lesson,) = lessons([number])
    cells = nbformat.read(lesson.notebook, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(o.get("text", "") + o.get("data", {}).get("text/markdown", "") for o in outputs)


@pytest.mark.parametrize("number", PRINTED)
def test_lessons_print_the_packages_figures(number):
    pattern, figures = PRINTED[number]
    found = re.search(pattern, printed(number), re.DOTALL)
    assert found, f"lesson {number} no longer prints {pattern!r}"
    assert list(found.groups()) == figures()


TABLE = {
    "P01": (4, "none", "hf"),
    "P02": (4, "block", "hf"),
    "P03": (4, "sub:mlp", "hf"),
    "P04": (4, "ops:mm,core_attn", "hf"),
    "P05": (4, "ops:mm,core_attn", "liger"),
}


@pytest.mark.parametrize("claim", TABLE)
def test_every_verdict_on_the_articles_table_has_the_packages_figures(claim):
    batch, policy, kernels = TABLE[claim]
    cost = estimate(Workload(batch=batch, kernels=kernels), policy)
    verdicts = [v for v in json.loads(COMMITTED.read_text()) if v["id"] == claim and v["source"] == "estimated"]
    assert verdicts
    for verdict in verdicts:
        assert verdict["value"]["memory_bytes"] == cost.activation_bytes
        assert verdict["value"]["step_s"] == pytest.approx(cost.step_s, rel=1e-6)


def test_the_readmes_figure_is_the_one_that_lesson_5_drew():
    """Its title is the caption, figures included, that the executed lesson prints under the same picture."""
    svg = (lessons(["05"])[0].notebook.parent / "figures" / "pareto.svg").read_text(encoding="utf-8")
    (title,) = re.findall(r"<dc:title>([^<]+)</dc:title>", svg)
    assert f"*{html.unescape(title)}*" in printed("05")
