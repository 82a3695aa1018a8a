"""Every lesson, executed by papermill as its reader would run it: checks pass, solutions solve, stubs do not."""

import json
import re
import shutil

import pytest

from gctutor import series
from gctutor.pairs import NOTEBOOKS, lessons

NAMES = [lesson.name for lesson in lessons()]
PROBE = """
# %% tags=["remove-cell"]
try:
    check_exercise_{number}(None)
except Exception:
    pass
else:
    raise RuntimeError("exercise {number} passes its check without an answer")

"""


def with_probes(source: str) -> str:
    """The source of a lesson with a cell before each solution that feeds the stub to the exercise's check."""
    cells = re.split(r"(?m)^(?=# %%)", source)
    number, out = 0, []
    for cell in cells:
        if '"solution"' in cell.partition("\n")[0]:
            number += 1
            out.append(PROBE.format(number=number).lstrip())
        out.append(cell)
    return "".join(out)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lesson_runs_to_its_end(name, tmp_path):
    shutil.copytree(NOTEBOOKS / "src", tmp_path / "src")
    source = tmp_path / "src" / f"{name}.py"
    source.write_text(with_probes(source.read_text(encoding="utf-8")), encoding="utf-8")
    (outcome,) = series.run([name], tmp_path / "out", folder=tmp_path)
    assert outcome.ok, outcome.error
    for figure in (tmp_path / "out" / "figures").glob("*.json"):
        assert json.loads(figure.read_text(encoding="utf-8"))["alt"]


@pytest.mark.parametrize("name", NAMES)
def test_lesson_has_exercises_with_solutions(name):
    source = (NOTEBOOKS / "src" / f"{name}.py").read_text(encoding="utf-8")
    exercises, solutions = source.count('tags=["exercise"'), source.count('tags=["solution"')
    assert exercises == solutions
    assert name.startswith("11") or exercises > 0
    assert all(f"check_exercise_{number + 1}" in source for number in range(exercises))


def test_committed_pairs_are_fresh_whole_and_clean():
    assert series.problems() == []
