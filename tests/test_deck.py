"""The deck: one finding a slide, pictures with alt text, notes with the source."""

import matplotlib.pyplot as plt
import pytest
from pptx import Presentation

from gctutor import plots
from gctutor.deck import build_deck
from gctutor.errors import UserError
from gctutor.plots.style import NOTEBOOK, SLIDE
from gctutor.results import Results, StepCost
from gctutor.workload import Workload


@pytest.fixture
def figures(tmp_path):
    def row(policy, kept, step):
        return StepCost(Workload(), policy, "H100 SXM", "estimated", "fake tensors", activation_bytes=kept, step_s=step)

    rows = Results([row("none", 34_000_000_000, 0.43), row("block", 4_000_000_000, 0.53)])
    with plots.slide():
        ax = plots.plot_pareto(rows)
        plots.save_figure(ax.figure, "01_pareto", tmp_path, alt="Two points", caption="block keeps less")
        plt.close(ax.figure)
    return tmp_path


def test_a_deck_has_a_title_each_figure_and_a_recommendation(figures):
    path = build_deck(figures, figures / "deck.pptx", recommendation=["Use block.", "Measure."])
    title, figure, last = Presentation(str(path)).slides
    assert "without guessing" in title.shapes.title.text
    picture = next(shape for shape in figure.shapes if shape.shape_type == 13)
    assert picture._element.nvPicPr.cNvPr.get("descr") == "Two points"
    assert 0.02 < picture.crop_top < 0.3
    assert figure.shapes.title.text
    notes = figure.notes_slide.notes_text_frame.text
    assert "block keeps less" in notes
    assert "estimated for H100 SXM" in notes
    assert any("Measure." in shape.text_frame.text for shape in last.shapes if shape.has_text_frame)


def test_pictures_stay_on_the_page(figures):
    deck = Presentation(str(build_deck(figures, figures / "deck.pptx")))
    for slide in deck.slides:
        for shape in slide.shapes:
            assert shape.left >= 0
            assert shape.left + shape.width <= deck.slide_width + 1
            assert shape.top + shape.height <= deck.slide_height + 1


def test_no_figure_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="no figure"):
        build_deck(tmp_path, tmp_path / "deck.pptx")


def test_the_series_is_redrawn_for_slides_by_an_environment_variable(monkeypatch):
    for value, settings in (("", NOTEBOOK), ("slide", SLIDE)):
        monkeypatch.setenv("GCTUTOR_STYLE", value)
        with plots.notebook():
            assert plt.rcParams["font.size"] == settings["font.size"]
