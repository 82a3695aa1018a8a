"""Figures of gradients: one line a run, the layers on the axis, jumps ringed."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest

from gctutor.plots import plot_gradient_errors, plot_gradient_norms
from gctutor.plots.canvas import headline


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_errors_by_layer():
    curves = {"clean": {"layers.0": 0.01, "lm_head": 0.02}, "bug": {"layers.0": 0.5, "lm_head": 0.02}}
    ax = plot_gradient_errors(curves, subtitle="measured on CPU")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["layers.0", "lm_head"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.01, 0.02], [0.5, 0.02]]
    title, subtitle = headline(ax.figure)
    assert (
        title.replace("\N{NO-BREAK SPACE}", " ") == "2 % off with clean, 50 % with bug"
        and subtitle == "measured on CPU"
    )


def test_norms_with_their_jumps():
    ax = plot_gradient_norms({"a": [1.0, 1.0, 9.0], "b": [1.0, 1.0, 1.0]}, jumps={"a": [2]})
    rings = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [(list(ring.get_xdata()), list(ring.get_ydata())) for ring in rings] == [([2], [9.0])]
    assert headline(ax.figure)[0] == "The norm jumps for a; it stays quiet for b"
