"""`explore`: a grid of pictures without a front end, controls with one; and the pictures it draws."""

from __future__ import annotations

import functools
import time

import ipywidgets
import matplotlib.pyplot as plt
import pytest

from gctutor import explorers


def draw(*, size, ax):
    ax.set_title(str(size), loc="left")
    return ax


@pytest.fixture(autouse=True)
def no_figure_left():
    before = plt.get_fignums()
    yield
    assert plt.get_fignums() == before


def test_without_a_front_end_the_static_cases_stand_in_a_grid(monkeypatch):
    monkeypatch.setattr(explorers, "has_front_end", lambda: False)
    drawn = []
    monkeypatch.setattr(explorers, "_picture", lambda figure: drawn.append(figure) or "picture")
    picture = explorers.explore(draw, {"size": [1, 2]}, static=[{"size": 1}, {"size": 2}, {"size": 7}])
    assert picture == "picture"
    assert [ax.get_title("left") for ax in drawn[0].axes] == ["1", "2", "7", ""]
    assert not drawn[0].axes[3].axison


def test_a_picture_is_a_png_with_its_findings_as_alt_text():
    picture = explorers._grid(draw, [{"size": 1}, {"size": 2}])
    assert picture.data.startswith(b"\x89PNG") and picture.metadata == {"alt": "1; 2"}


@pytest.mark.parametrize(
    ("picture", "values"),
    [
        (functools.partial(explorers.draw_costs, ["none", "sub:mlp", "modules:all", "block"]), {"batch": 1}),
        (explorers.draw_timeline, {"policy": "block"}),
        (explorers.draw_roofline, {}),
    ],
)
def test_an_answer_of_the_full_model_takes_tens_of_milliseconds(picture, values):
    """Under 100 ms on a quiet machine; three times that leaves room for a busy one."""
    figure, ax = plt.subplots(layout="constrained")
    seconds = []
    try:
        for _ in range(4):  # the first fills the caches
            ax.clear()
            started = time.perf_counter()
            picture(seqlen=4096, device="H100", ax=ax, **values)
            seconds.append(time.perf_counter() - started)
    finally:
        plt.close(figure)
    assert min(seconds[1:]) < 0.3


def test_with_a_front_end_each_choice_has_a_control(monkeypatch):
    monkeypatch.setattr(explorers, "has_front_end", lambda: True)
    seen = []

    def note(*, size, card, ax):
        seen.append((size, card))
        return ax

    box = explorers.explore(note, {"size": [1, 2], "card": ["H100", "L4"]}, static=[])
    size, card = box.children[0].children
    assert isinstance(size, ipywidgets.SelectionSlider)
    assert isinstance(card, ipywidgets.Dropdown)
    size.value, card.value = 2, "L4"
    assert seen[0] == (1, "H100") and seen[-1] == (2, "L4")


def test_a_progress_bar_moves_with_a_front_end_and_is_silent_without(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setattr(explorers, "has_front_end", lambda: True)
    with explorers.progress_bar(2) as progress:
        progress("first")
        progress("second")
    bar, label = shown[0].children
    assert (bar.value, bar.max, label.value) == (1, 2, "second")
    monkeypatch.setattr(explorers, "has_front_end", lambda: False)
    with explorers.progress_bar(2) as progress:
        progress("first")
    assert len(shown) == 1 and capsys.readouterr() == ("", "")


def test_a_run_of_the_series_has_no_front_end(monkeypatch):
    monkeypatch.setitem(explorers.sys.modules, "ipykernel", explorers)
    monkeypatch.delenv("GCTUTOR_OUT", raising=False)
    assert explorers.has_front_end()
    monkeypatch.setenv("GCTUTOR_OUT", "build")
    assert not explorers.has_front_end()


@pytest.mark.parametrize(
    ("picture", "values", "words"),
    [
        (functools.partial(explorers.draw_costs, ["none", "block"]), {"batch": 1, "seqlen": 1024}, "1 × 1024"),
        (explorers.draw_timeline, {"policy": "block", "seqlen": 1024}, ""),
        (explorers.draw_roofline, {"seqlen": 1024}, ""),
        (explorers.draw_plan, {"budget": 0.5}, "50% of none's bytes"),
        (explorers.draw_plan, {"budget": 0.01}, "less than block needs"),
    ],
)
def test_pictures_draw_on_the_axes_given(picture, values, words):
    figure, ax = plt.subplots(layout="constrained")
    try:
        assert picture(device="H100", ax=ax, **values) is ax
        text = " ".join(t.get_text().replace("\n", " ") for t in figure.findobj(plt.Text))
        assert words in text
    finally:
        plt.close(figure)


def test_the_choice_drawn_keeps_its_budget():
    figure, ax = plt.subplots(layout="constrained")
    try:
        explorers.draw_plan(budget=0.5, device="H100", ax=ax)
        (point,) = [line for line in ax.lines if len(line.get_xdata()) == 1]
        costs = explorers.layer_costs(explorers.Workload(), explorers.find_device("H100"))
        assert point.get_xdata()[0] * 1e9 <= 0.5 * costs.most_bytes
    finally:
        plt.close(figure)
