"""The series run for real, on toy notebooks: one works, one raises, one kills its kernel, one leaves early."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("papermill")

from gctutor import series
from gctutor.errors import UserError

pytestmark = pytest.mark.slow

WORKS = """\
# %% tags=["parameters"]
steps = 3

# %% tags=["exact"]
print(sum(range(steps)))

# %%
import os
from pathlib import Path

folder = Path(os.environ["GCTUTOR_OUT"]) / "figures"
folder.mkdir(exist_ok=True)
(folder / "count.svg").write_text("<svg/>");
"""
RAISES = """\
# %%
print("before")

# %%
raise ValueError("boom\\nand more")

# %%
print("after")
"""
DIES = """\
# %%
print("before")

# %%
import os

os._exit(1)

# %%
print("after")
"""
LEAVES = """\
# %%
print("before")

# %%
import sys

sys.exit(0)

# %%
print("after")
"""


def write(folder: Path, **sources: str) -> Path:
    (folder / "src").mkdir(parents=True, exist_ok=True)
    for name, text in sources.items():
        (folder / "src" / f"{name.removeprefix('n')}.py").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def no_device_question(monkeypatch):
    monkeypatch.setattr(series, "device_here", lambda: "CPU")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """`(outcomes by name, the out folder, the notebooks' folder)` of one run of all four."""
    base = tmp_path_factory.mktemp("series")
    folder = write(base / "notebooks", n01_works=WORKS, n02_raises=RAISES, n03_dies=DIES, n04_leaves=LEAVES)
    reported: list[series.Outcome] = []
    outcomes = series.run(None, base / "out", {"steps": 4}, folder=folder, report=reported.append)
    assert reported == outcomes
    return {outcome.name: outcome for outcome in outcomes}, base / "out", folder


def test_a_run_executes_with_its_parameters(ran):
    outcomes, out, _ = ran
    assert outcomes["01_works"].ok and outcomes["01_works"].error is None
    cells = json.loads((out / "notebooks" / "01_works.ipynb").read_text())["cells"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, 3, 4]
    assert cells[2]["outputs"][0]["text"] == ["6\n"]


def test_a_run_leaves_pages_and_figures_under_out_and_nothing_else(ran):
    _, out, folder = ran
    assert (out / "figures" / "count.svg").exists()
    assert "boom" in (out / "html" / "02_raises.html").read_text()
    assert {path.name for path in folder.iterdir()} == {"src"}
    assert "GCTUTOR_OUT" not in os.environ


def test_a_failing_cell_is_named_and_the_rest_still_runs(ran):
    outcomes, _, _ = ran
    assert outcomes["02_raises"].error == "cell [2] raised ValueError: boom"
    assert list(outcomes) == ["01_works", "02_raises", "03_dies", "04_leaves"]


def test_a_dead_kernel_is_a_failure(ran):
    assert ran[0]["03_dies"].error == "the kernel died in cell [2]; was it out of memory?"


def test_a_notebook_that_leaves_early_is_a_failure(ran):
    assert ran[0]["04_leaves"].error == "code cell 3 of 3 has the execution count None"


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    folder = write(tmp_path / "notebooks", n01_works=WORKS, n02_raises=RAISES)
    with pytest.raises(UserError, match="did you mean 'steps'"):
        series.run(None, tmp_path / "out", {"stepz": 4}, folder=folder)
    with pytest.raises(UserError, match="no parameters"):
        series.run(["02"], tmp_path / "out", {"steps": 4}, folder=folder)
    assert not (tmp_path / "out").exists()


def test_refresh_stamps_cleans_and_knows_what_is_stale(tmp_path, monkeypatch):
    folder, out = write(tmp_path / "notebooks", n01_works=WORKS), tmp_path / "out"
    assert series.stale(folder=folder) == [("01_works", "it was never executed")]

    (outcome,) = series.refresh(out=out, folder=folder)
    assert outcome.ok
    notebook = json.loads((folder / "01_works.ipynb").read_text())
    stamp = notebook["metadata"]["gctutor"]
    assert stamp["parameters"] == {"steps": 3} and stamp["device"] == "CPU"
    assert {"notebook_hash", "source_hash", "torch", "date"} <= stamp.keys()
    assert series.problems(folder=folder) == [] == series.stale(package=True, folder=folder)
    assert series.refresh(out=out, folder=folder) == []

    monkeypatch.setattr(series, "source_hash", lambda: "another")
    assert series.stale(folder=folder) == []
    assert series.stale(package=True, folder=folder) == [("01_works", series.OLDER_PACKAGE)]
    (again,) = series.recompute(out=out, folder=folder)
    assert again.ok

    notebook["cells"][1]["outputs"][0]["text"] = ["4\n"]
    (folder / "01_works.ipynb").write_text(json.dumps(notebook))
    (again,) = series.recompute(out=out, folder=folder)
    assert again.error == "cell [2] shows other figures than the committed pair"

    notebook["cells"][1]["source"] = ["print(7)"]
    (folder / "01_works.ipynb").write_text(json.dumps(notebook))
    assert series.stale(folder=folder) == [("01_works", "its cells are not those of its source")]

    (folder / "src" / "01_works.py").write_text(WORKS + "\n")
    assert series.stale(folder=folder) == [("01_works", "its source has changed since it was executed")]


def test_refresh_leaves_a_pair_that_would_not_pass(tmp_path):
    noisy = "# %%\nimport sys\n\nprint('to the wrong place', file=sys.stderr)\n"
    folder = write(tmp_path / "notebooks", n01_noisy=noisy)
    (outcome,) = series.refresh(out=tmp_path / "out", folder=folder)
    assert outcome.error == "cell [1] writes to stderr: to the wrong place"
    assert not (folder / "01_noisy.ipynb").exists()
