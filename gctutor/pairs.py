"""A lesson's two files: its source as text, and the executed notebook, complete and clean of debris."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from gctutor.errors import UserError, unknown

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# What a committed output must not hold.
DEBRIS = {
    "an absolute path": re.compile(r"(?<![\w.:/-])/(?:root|work|home|Users|tmp|opt|mnt|private|var)/\w"),
    "a memory address": re.compile(r"\b0x[0-9a-fA-F]{6,}\b"),
    "a progress bar": re.compile(r"\r(?!\n)|\d%\|"),
}


@dataclass(frozen=True)
class Lesson:
    """One notebook of the series, known by its source file."""

    source: Path

    @property
    def name(self) -> str:
        return self.source.stem

    @property
    def notebook(self) -> Path:
        """The committed pair, beside the `src` folder."""
        return self.source.parent.parent / f"{self.name}.ipynb"

    @property
    def source_hash(self) -> str:
        return hashlib.sha256(self.source.read_bytes()).hexdigest()[:12]


def lessons(names: Sequence[str] | None = None, *, folder: Path = NOTEBOOKS) -> list[Lesson]:
    """The series in order, or the lessons meant by `names`: `02_block_checkpointing`, or just `02`.

    Raises `UserError` for an unknown name, or when there are no notebooks here.
    """
    every = [Lesson(path) for path in sorted((folder / "src").glob("[0-9]*.py"))]
    if not every:
        raise UserError("There are no notebooks beside the package: install it from a clone, with pip install -e.")
    return [_named(name, every) for name in names] if names else every


def _named(name: str, every: Sequence[Lesson]) -> Lesson:
    wanted = Path(name).stem
    for lesson in every:
        if lesson.name == wanted or lesson.name.split("_")[0] == wanted.zfill(2):
            return lesson
    raise unknown("notebook", name, [lesson.name for lesson in every])


def text_to_notebook(source: Path) -> NotebookNode:
    """The notebook of a py:percent file, not executed, with the same cell ids every time."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"
    return notebook


def parameters_of(notebook: NotebookNode) -> dict[str, Any]:
    """Names and values of the cell tagged `parameters`.

    Raises `UserError` when that cell derives a value: papermill injects below it, so the value would stay the old one.
    """
    sources = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return dict(_literal(statement) for source in sources for statement in ast.parse(source).body)


def _literal(statement: ast.stmt) -> tuple[str, Any]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            with contextlib.suppress(ValueError):
                return name, ast.literal_eval(value)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            with contextlib.suppress(ValueError):
                return name, ast.literal_eval(value)
    raise UserError(f"The parameters cell holds literals only: move '{ast.unparse(statement)}' to the cell below it.")


def check_pair(notebook: NotebookNode) -> list[str]:
    """What is wrong with an executed notebook that is to be committed, one sentence each; empty when nothing is."""
    return [*hollow(notebook), *_unclean(notebook)]


def hollow(notebook: NotebookNode) -> Iterator[str]:
    """What shows that not every cell was run: in order, on a fresh kernel, with something to see."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        if cell.execution_count != number:
            yield f"code cell {number} of {len(code)} has the execution count {cell.execution_count}"
        shown = any("image/png" in output.get("data", {}) for output in cell.outputs)
        if "save_figure(" in cell.source and not shown:
            yield f"code cell {number} of {len(code)} saves a figure and shows none"
    if not any(cell.outputs for cell in code):
        yield "no cell has an output"


def clean(executed: NotebookNode, blank: NotebookNode) -> NotebookNode:
    """`blank` with the outputs and counts of `executed`: no timings, no papermill metadata, no widget state."""
    for cell, ran in zip(blank.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.execution_count = ran.execution_count
            cell.outputs = ran.outputs
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET_VIEW, None)
    return blank


def disagreements(committed: NotebookNode, again: NotebookNode) -> list[str]:
    """Where two executions of one source differ though they must not: in the outputs of cells tagged `exact`."""
    return [
        f"cell [{cell.execution_count}] shows other figures than the committed pair"
        for before, cell in zip(committed.cells, again.cells, strict=True)
        if "exact" in cell.metadata.get("tags", [])
        and list(map(_text, before.outputs)) != list(map(_text, cell.outputs))
    ]


def _unclean(notebook: NotebookNode) -> Iterator[str]:
    for name in notebook.metadata.keys() & {"papermill", "widgets"}:
        yield f"the notebook's metadata holds {name}"
    for cell in notebook.cells:
        where = f"cell [{cell.get('execution_count')}]"
        for name in cell.metadata.keys() & {"papermill", "execution"}:
            yield f"the metadata of {where} holds {name}"
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"{where} ends in an error"
            if "image/png" in output.get("data", {}) and not output.metadata.get("image/png", {}).get("alt"):
                yield f"{where} shows a picture without alt text"
            if output.get("name") == "stderr":
                yield f"{where} writes to stderr: {output.text.strip().splitlines()[-1]}"
            for what, pattern in DEBRIS.items():
                found = pattern.search(_text(output))
                if found:
                    yield f"{where} shows {what}: {found.group()!r}"


def _text(output: NotebookNode) -> str:
    """All that a reader can read in an output; inlined pictures are left out."""
    texts = [str(data) for kind, data in output.get("data", {}).items() if kind not in ("image/png", "image/jpeg")]
    return re.sub(r"base64,[A-Za-z0-9+/=\s]+", "", "\n".join([output.get("text", ""), *texts]))
