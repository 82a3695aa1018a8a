"""Lessons as files: names, parameters, and what `check_pair` refuses."""

import copy
from pathlib import Path

import pytest

from gctutor.errors import UserError
from gctutor.pairs import check_pair, clean, disagreements, lessons, parameters_of, text_to_notebook

nbformat = pytest.importorskip("nbformat")

SOURCE = """\
# %% [markdown]
# # Count

# %% tags=["parameters"]
steps = 3
name: str = "nano"

# %% tags=["exact"]
sum(range(steps))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    for name in ("01_count", "02_other"):
        (tmp_path / "src" / f"{name}.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def executed(folder: Path):
    """The pair as a run would leave it, written by hand."""
    notebook = text_to_notebook(folder / "src" / "01_count.py")
    for number, cell in enumerate(notebook.cells[1:], start=1):
        cell.execution_count = number
    output = nbformat.v4.new_output("execute_result", {"text/plain": "3"}, execution_count=2)
    notebook.cells[2].outputs = [output]
    return notebook


def test_lessons_by_number_name_or_path(folder):
    assert [lesson.name for lesson in lessons(folder=folder)] == ["01_count", "02_other"]
    for name in ("2", "02", "02_other", "notebooks/02_other.ipynb"):
        assert [lesson.name for lesson in lessons([name], folder=folder)] == ["02_other"]


def test_unknown_lesson_names_the_nearest(folder):
    with pytest.raises(UserError, match="did you mean '01_count'"):
        lessons(["01_cuont"], folder=folder)


def test_no_notebooks_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no notebooks"):
        lessons(folder=tmp_path)


def test_text_to_notebook_is_reproducible(folder):
    first, second = (text_to_notebook(folder / "src" / "01_count.py") for _ in range(2))
    assert first == second
    assert [cell.cell_type for cell in first.cells] == ["markdown", "code", "code"]


def test_parameters_are_the_tagged_cells_literals(folder):
    assert parameters_of(text_to_notebook(folder / "src" / "01_count.py")) == {"steps": 3, "name": "nano"}


def test_a_derived_parameter_is_refused(folder):
    source = folder / "src" / "01_count.py"
    source.write_text(SOURCE.replace('"nano"', '"nano" * steps'))
    with pytest.raises(UserError, match="literals only"):
        parameters_of(text_to_notebook(source))


def test_a_complete_clean_pair_passes(executed):
    assert check_pair(executed) == []


def _stream(name: str, text: str):
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (_stream("stderr", "Traceback\nUserWarning: old"), "writes to stderr: UserWarning: old"),
        (_stream("stdout", "saved /home/someone/figure.svg"), "an absolute path"),
        (_stream("stdout", "<object at 0x7f3a5c0d1e50>"), "a memory address"),
        (_stream("stdout", " 10%|█         | 1/10"), "a progress bar"),
        (_stream("stdout", "step 1\rstep 2"), "a progress bar"),
        (nbformat.v4.new_output("display_data", {"text/html": "<a href='/tmp/x'>x</a>"}), "an absolute path"),
        (nbformat.v4.new_output("error", ename="ValueError", evalue="boom", traceback=[]), "ends in an error"),
    ],
)
def test_debris_is_refused(executed, output, problem):
    executed.cells[1].outputs = [output]
    (found,) = check_pair(executed)
    assert problem in found and "cell [1]" in found


@pytest.mark.parametrize(
    "text",
    ["https://example.org/home/page", "12 GB/s", "forward/backward", "50 % kept", "a\r\nb", "notebooks/src/x.py"],
)
def test_innocent_text_passes(executed, text):
    executed.cells[1].outputs = [_stream("stdout", text)]
    assert check_pair(executed) == []


def test_inlined_pictures_are_not_read_as_text(executed):
    picture = "<img alt='a curve' src='data:image/png;base64,AAAA/tmp/AAAA0x7f3a5c0d1e50=='>"
    executed.cells[1].outputs = [nbformat.v4.new_output("display_data", {"text/html": picture})]
    assert check_pair(executed) == []


def test_a_cell_that_saves_a_figure_must_show_it(executed):
    executed.cells[1].source = '_ = plots.save_figure(ax.figure, "01_x")'
    executed.cells[1].outputs = []
    assert "code cell 1 of 2 saves a figure and shows none" in check_pair(executed)
    picture = nbformat.v4.new_output("display_data", {"image/png": "AAAA"})
    executed.cells[1].outputs = [picture]
    assert check_pair(executed) == ["cell [1] shows a picture without alt text"]
    picture.metadata["image/png"] = {"alt": "a curve"}
    assert check_pair(executed) == []


def test_hollow_pairs_are_refused(executed):
    silent = copy.deepcopy(executed)
    silent.cells[2].outputs = []
    assert check_pair(silent) == ["no cell has an output"]
    executed.cells[2].execution_count = None
    assert check_pair(executed) == ["code cell 2 of 2 has the execution count None"]
    executed.cells[1].execution_count, executed.cells[2].execution_count = 5, 6
    assert len(check_pair(executed)) == 2


def test_metadata_of_runs_is_refused_and_cleaned(folder, executed):
    executed.metadata["papermill"] = {"duration": 1.0}
    executed.metadata["widgets"] = {}
    executed.cells[1].metadata["execution"] = {"iopub.status.busy": "now"}
    executed.cells[2].outputs[0].data["application/vnd.jupyter.widget-view+json"] = {"model_id": "7"}
    assert len(check_pair(executed)) == 3
    cleaned = clean(executed, text_to_notebook(folder / "src" / "01_count.py"))
    assert check_pair(cleaned) == []
    assert cleaned.cells[1].metadata == {"tags": ["parameters"]}
    assert cleaned.cells[2].outputs[0].data == {"text/plain": "3"}


def test_only_exact_cells_must_agree(executed):
    again = copy.deepcopy(executed)
    again.cells[1].outputs = [_stream("stdout", "took 3 ms")]
    assert disagreements(executed, again) == []
    again.cells[2].outputs[0].data["text/plain"] = "4"
    assert disagreements(executed, again) == ["cell [2] shows other figures than the committed pair"]
