"""What the command shows: tables and JSON on stdout, a progress bar on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from gctutor.results import StepCost
    from gctutor.series import Outcome

HEADS = ("policy", "kept GB", "peak GB", "forward ms", "backward ms", "step ms", "run again", "status")
WIDTH_IN_FILES = 120

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def show_rows(rows: Sequence[StepCost], as_json: bool) -> None:
    """Costs as a table, or as a JSON list with one object a row."""
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=1, ensure_ascii=False))
    elif rows:
        first = rows[0]
        where = "for" if first.source == "estimated" else "on"
        show_table(f"{first.workload.label}, {first.source} {where} {first.device}", HEADS, map(_cells, rows))


def _cells(row: StepCost) -> Iterable[str]:
    yield row.policy if row.resolved in ("", row.policy) else f"{row.policy} = {row.resolved}"
    yield from (scaled(value, 1e-9, 3) for value in (row.activation_bytes, row.peak_bytes))
    yield from (scaled(value, 1e3, 1) for value in (row.forward_s, row.backward_s, row.step_s))
    yield f"{row.recompute_flop / row.flop:.1%}" if row.flop and row.recompute_flop is not None else "–"
    yield row.status if row.error is None else f"{row.status}: {row.error}"


def scaled(value: float | None, scale: float, digits: int) -> str:
    """`value * scale` for reading; a dash for what is not known."""
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def show_outcomes(outcomes: Sequence[Outcome], as_json: bool) -> None:
    """How each notebook went, as a table or as a JSON list."""
    if as_json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False))
    elif outcomes:
        rows = ((o.name, o.status, f"{o.seconds:.0f}", o.device, o.error or "") for o in outcomes)
        show_table("Notebooks", ("notebook", "status", "seconds", "device", "what happened"), rows)
    else:
        print("There was nothing to run.")


def show_table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table on stdout; cells are plain text, whatever brackets they hold."""
    table = Table(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    console.print(table)


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call the function it gives with what starts now."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps, completed=-1)

        def step(text: str) -> None:
            bar.update(task, advance=1, description=text)

        yield step


@contextlib.contextmanager
def showing(show: Callable[[], None]) -> Iterator[None]:
    """Show what the block has done, also when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        show()
        raise
    show()
