"""The notebooks as a series: run them anywhere, refresh their committed outputs, and tell when those no longer hold.

`notebooks/src/NN_topic.py` (jupytext, py:percent) is the source of a lesson and `notebooks/NN_topic.ipynb` its executed
pair. Runs write under `build/`; the environment variable `GCTUTOR_OUT` tells the notebooks where that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from gctutor.claims import collect
from gctutor.errors import UserError, unknown
from gctutor.pairs import (
    KERNEL,
    NOTEBOOKS,
    Lesson,
    check_pair,
    clean,
    disagreements,
    hollow,
    lessons,
    parameters_of,
    text_to_notebook,
)
from gctutor.results import provenance, source_hash

OLDER_PACKAGE = "the package has changed since it was executed"


@dataclass(frozen=True)
class Outcome:
    """How the run of one notebook ended: `status` is `ok` or `failed`, `error` a sentence that names the cell."""

    name: str
    status: str
    seconds: float
    device: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"


Report = Callable[[Outcome], None]


def run(
    names: Sequence[str] | None = None,
    out: Path | str = "build",
    parameters: Mapping[str, Any] | None = None,
    *,
    folder: Path = NOTEBOOKS,
    report: Report | None = None,
) -> list[Outcome]:
    """Execute lessons on the hardware here, each in its own kernel; one that fails does not stop the rest.

    Executed copies go to `out/notebooks`, pages to `out/html`, figures to `out/figures`; `report` is called after each.
    A lesson takes those `parameters` that it has; one that no chosen lesson has raises `UserError`.
    """
    chosen = lessons(names, folder=folder)
    given = dict(parameters or {})
    own = {lesson: parameters_of(text_to_notebook(lesson.source)) for lesson in chosen}
    valid = {name for values in own.values() for name in values}
    if given and not valid:
        raise UserError("These notebooks take no parameters.")
    for name in given:
        if name not in valid:
            raise unknown("parameter", name, sorted(valid))

    def work(lesson: Lesson) -> Outcome:
        return execute(lesson, Path(out), {name: given[name] for name in given.keys() & own[lesson].keys()})

    return _each(chosen, work, report)


def _each(chosen: Sequence[Lesson], work: Callable[[Lesson], Outcome], report: Report | None) -> list[Outcome]:
    outcomes = []
    for lesson in chosen:
        outcomes.append(work(lesson))
        if report:
            report(outcomes[-1])
    return outcomes


def execute(lesson: Lesson, out: Path, parameters: Mapping[str, Any]) -> Outcome:
    """Run one lesson into `out`. Never raises for what its cells do: a dead kernel is a failure like any other."""
    out, device = out.resolve(), device_here()
    target, page = _executed(lesson, out), out / "html" / f"{lesson.name}.html"
    for path in (target, page):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    shutil.rmtree(out / "verdicts" / lesson.name, ignore_errors=True)
    started = time.perf_counter()
    with _environment(GCTUTOR_OUT=str(out), PYDEVD_DISABLE_FILE_VALIDATION="1"):
        error = _run_cells(lesson, target, dict(parameters))
    seconds = time.perf_counter() - started
    if target.exists():
        _describe_images(target, out / "figures")
        page.write_text(HTMLExporter(embed_images=True).from_filename(str(target))[0], encoding="utf-8")
    return Outcome(lesson.name, "failed" if error else "ok", seconds, device, error)


def _executed(lesson: Lesson, out: Path) -> Path:
    return out / "notebooks" / f"{lesson.name}.ipynb"


def _run_cells(lesson: Lesson, target: Path, parameters: dict[str, Any]) -> str | None:
    """Execute into `target`; what went wrong, in one sentence, or None."""
    try:
        notebook = papermill.execute_notebook(
            text_to_notebook(lesson.source),
            target,
            parameters,
            kernel_name=KERNEL["name"],
            progress_bar=False,
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            cwd=lesson.notebook.parent,
        )
    except PapermillExecutionError as error:
        first_line = (error.evalue or "no message").strip().splitlines()[0]
        return f"cell [{error.exec_count}] raised {error.ename}: {first_line}"
    except DeadKernelError:
        return f"the kernel died in cell [{_cells_started(target)}]; was it out of memory?"
    except Exception as error:
        return f"it could not be run: {type(error).__name__}: {error}"
    return next(iter(hollow(notebook)), None)


def _cells_started(target: Path) -> int:
    """Code cells that papermill has begun: after a dead kernel neither their status nor their count can be trusted."""
    cells = nbformat.read(target, as_version=4).cells
    return sum(cell.cell_type == "code" and bool(cell.metadata.papermill.start_time) for cell in cells)


def _describe_images(target: Path, figures: Path) -> None:
    """Give each picture of the executed notebook the alt text that its cell passed to `save_figure`."""
    notebook = nbformat.read(target, as_version=4)
    for cell in notebook.cells:
        named = re.search(r'save_figure\(.*?"([\w-]+)"', cell.source, re.DOTALL) if cell.cell_type == "code" else None
        sidecar = figures / f"{named[1]}.json" if named else None
        if sidecar is None or not sidecar.exists():
            continue
        alt = json.loads(sidecar.read_text(encoding="utf-8"))["alt"]
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.metadata["image/png"] = {"alt": alt}
    nbformat.write(notebook, target)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Environment variables that the kernels started inside inherit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def device_here() -> str:
    """The GPU's name, or `CPU`; asked in a process of its own, so that this one holds no CUDA context."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU')"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def slides(
    names: Sequence[str] | None = None, out: Path | str = "build/slides", *, report: Report | None = None
) -> Path:
    """Run the series with figures in the slide style, and make a deck of them; returns the deck's path.

    Raises `UserError` when a notebook fails, for then figures are missing.
    """
    from gctutor.deck import build_deck

    out = Path(out)
    shutil.rmtree(out / "figures", ignore_errors=True)
    with _environment(GCTUTOR_STYLE="slide"):
        failed = [outcome.name for outcome in run(names, out, report=report) if not outcome.ok]
    if failed:
        raise UserError(f"{', '.join(failed)} did not run, so there is no deck: 'gctutor notebooks run' says why.")
    return build_deck(out / "figures", out / "gctutor.pptx", recommendation=recommendation())


def recommendation() -> list[str]:
    """The closing slide: what the planner advises for Qwen3-8B on an H100 at three sizes, beside `block`; estimates."""
    from gctutor.estimation import estimate
    from gctutor.guide import KERNELS
    from gctutor.planner import plan
    from gctutor.workload import Workload

    lines = ["Qwen3-8B in full with 8-bit AdamW, estimated for an H100:", f"First, better kernels: {KERNELS}."]
    for batch, seqlen in ((1, 4096), (4, 4096), (1, 32768)):
        best = plan(Workload(batch=batch, seqlen=seqlen, kernels=KERNELS, optimizer="adamw8bit"), "H100")
        block = estimate(best.workload, "block", "H100")
        if best.cost is None or not best.cost.step_s or not best.cost.peak_bytes or not block.step_s:
            lines += best.advice
            continue
        name = str(best.policy) if "@" not in str(best.policy) else "the planner's mix of kept modules"
        lines.append(
            f"{batch} × {seqlen:,}: {name}, a peak of {best.cost.peak_bytes / 1e9:.0f} GB and "
            f"{1e3 * best.cost.step_s:,.0f} ms a step, where block takes {1e3 * block.step_s:,.0f}."
        )
    return [*lines, "Your own case: gctutor plan. Before a long run: gctutor doctor."]


# Committed pairs


def refresh(
    force: bool = False,
    names: Sequence[str] | None = None,
    *,
    out: Path | str = "build/refresh",
    folder: Path = NOTEBOOKS,
    report: Report | None = None,
) -> list[Outcome]:
    """Execute the stale pairs (all with `force`) with the parameters of their sources; clean, stamp and write them.

    Their verdicts go to `data/verdicts.json`. A pair whose run fails, or would not pass `check_pair`, stays as it was.
    """
    chosen = lessons(names, folder=folder)
    due = [lesson for lesson in chosen if force or _stale_reason(lesson, package=True)]
    return _each(due, lambda lesson: _refresh(lesson, Path(out)), report)


def _refresh(lesson: Lesson, out: Path) -> Outcome:
    shutil.rmtree(out / "verdicts", ignore_errors=True)
    outcome = execute(lesson, out, {})
    if not outcome.ok:
        return outcome
    executed = nbformat.read(_executed(lesson, out), as_version=4)
    notebook = clean(executed, text_to_notebook(lesson.source))
    unfit = check_pair(notebook)
    if unfit:
        return dataclasses.replace(outcome, status="failed", error=unfit[0])
    notebook.metadata["gctutor"] = {
        "notebook_hash": lesson.source_hash,
        "parameters": parameters_of(notebook),
        "device": outcome.device,
        **provenance(),
    }
    nbformat.write(notebook, lesson.notebook)
    if (out / "verdicts").exists():
        collect(out / "verdicts", lesson.notebook.parent.parent / "data" / "verdicts.json")
    return outcome


def recompute(
    names: Sequence[str] | None = None,
    *,
    out: Path | str = "build/recompute",
    folder: Path = NOTEBOOKS,
    report: Report | None = None,
) -> list[Outcome]:
    """Execute again the pairs that an older version of the package made: outputs of cells tagged `exact` must agree.

    Bytes and FLOPs are such figures; timings are not compared. The committed pairs stay as they are.
    """
    chosen = lessons(names, folder=folder)
    due = [lesson for lesson in chosen if _stale_reason(lesson, package=True) == OLDER_PACKAGE]
    return _each(due, lambda lesson: _recompute(lesson, Path(out)), report)


def _recompute(lesson: Lesson, out: Path) -> Outcome:
    outcome = execute(lesson, out, {})
    if not outcome.ok:
        return outcome
    committed, again = (nbformat.read(path, as_version=4) for path in (lesson.notebook, _executed(lesson, out)))
    different = disagreements(committed, again)
    return dataclasses.replace(outcome, status="failed", error=different[0]) if different else outcome


def stale(
    names: Sequence[str] | None = None, *, package: bool = False, folder: Path = NOTEBOOKS
) -> list[tuple[str, str]]:
    """`(name, reason)` of every pair that does not show what its source says.

    With `package`, also of those executed by another version of the package's source, whose figures may still hold.
    """
    reasons = [(lesson.name, _stale_reason(lesson, package)) for lesson in lessons(names, folder=folder)]
    return [(name, reason) for name, reason in reasons if reason]


def problems(names: Sequence[str] | None = None, *, folder: Path = NOTEBOOKS) -> list[tuple[str, str]]:
    """`(name, problem)` of every committed pair that is stale, hollow or unclean."""
    found = stale(names, folder=folder)
    for lesson in lessons(names, folder=folder):
        if lesson.notebook.exists():
            found += [(lesson.name, problem) for problem in check_pair(nbformat.read(lesson.notebook, as_version=4))]
    return found


def _stale_reason(lesson: Lesson, package: bool) -> str | None:
    if not lesson.notebook.exists():
        return "it was never executed"
    notebook = nbformat.read(lesson.notebook, as_version=4)
    stamp = notebook.metadata.get("gctutor", {})
    if stamp.get("notebook_hash") != lesson.source_hash:
        return "its source has changed since it was executed"
    if _sources(notebook) != _sources(text_to_notebook(lesson.source)):
        return "its cells are not those of its source"
    if package and stamp.get("source_hash") != source_hash():
        return OLDER_PACKAGE
    return None


def _sources(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]
