"""`gctutor notebooks`: run the series, refresh its committed outputs, or check them."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gctutor.errors import UserError
from gctutor.terminal import AsJson, progress_bar, show_outcomes, showing

if TYPE_CHECKING:
    from gctutor.series import Outcome, Report

Names = Annotated[list[str] | None, typer.Argument(help="Notebooks by name or number; all by default.")]

notebooks = typer.Typer(help="Run the series, refresh its committed outputs, or check them.")


@notebooks.callback(invoke_without_command=True)
def _notebooks(context: typer.Context) -> None:
    """Run the series (all of it when no command is given), refresh its committed outputs, or check them."""
    if context.invoked_subcommand is None:
        raise typer.Exit(run())


@notebooks.command()
def run(
    names: Names = None,
    out: Annotated[Path, typer.Option(help="Folder of the executed notebooks, pages and figures.")] = Path("build"),
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", help="NAME=VALUE; repeatable."),
    ] = None,
    json_: AsJson = False,
) -> int:
    """Execute notebooks on the hardware here.

    Example: gctutor notebooks run 02 03 -p steps=10
    """
    from gctutor import series

    parameters = dict(map(_assignment, parameter or []))
    return _report(json_, len(series.lessons(names)), lambda report: series.run(names, out, parameters, report=report))


@notebooks.command()
def refresh(
    names: Names = None,
    force: Annotated[bool, typer.Option("--force", help="Execute also what is not stale.")] = False,
    json_: AsJson = False,
) -> int:
    """Execute the stale notebooks, clean them, stamp them and write them where they are committed.

    Example: gctutor notebooks refresh --force 02
    """
    from gctutor import series

    due = len(series.lessons(names) if force else series.stale(names, package=True))
    return _report(json_, due, lambda report: series.refresh(force, names, report=report))


@notebooks.command()
def check(
    names: Names = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Also execute what an older package made.")] = False,
) -> int:
    """Say which committed notebooks are stale, hollow or unclean; exit code 1 when any is.

    Example: gctutor notebooks check --recompute
    """
    from gctutor import series

    problems = series.problems(names)
    for name, problem in problems:
        print(f"{name}: {problem}")
    if not problems:
        print("Every committed notebook shows what its source says.")
    if recompute:
        due = len(series.stale(names, package=True))
        return max(bool(problems), _report(False, due, lambda report: series.recompute(names, report=report)))
    return int(bool(problems))


def slides(
    names: Names = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures and the deck.")] = Path("build/slides"),
) -> int:
    """Run the series with every figure at slide size, and make a PowerPoint deck of the figures.

    Example: gctutor slides 02 07
    """
    from gctutor import series

    with progress_bar(len(series.lessons(names))) as progress:
        deck = series.slides(names, out, report=lambda outcome: progress(f"{outcome.name}: {outcome.status}"))
    print(f"{deck} and its pictures in {deck.parent / 'figures'}")
    return 0


def site(out: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("build/site")) -> int:
    """Make a static site of the committed, executed series.

    Example: gctutor site --out build/site
    """
    from gctutor.site import broken_links, build_site

    index = build_site(out)
    broken = broken_links(out)
    print("\n".join(broken) if broken else f"{index}: open it in a browser.")
    return int(bool(broken))


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"Write a parameter as NAME=VALUE, not {text!r}.")
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


def _report(as_json: bool, count: int, work: Callable[[Report], list[Outcome]]) -> int:
    """Do the work under a progress bar and list how each notebook went; the exit code."""
    outcomes: list[Outcome] = []
    with showing(lambda: show_outcomes(outcomes, as_json)), progress_bar(count) as progress:
        progress("running notebooks")

        def report(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress(f"{outcome.name}: {outcome.status}")

        work(report)
    return int(not all(outcome.ok for outcome in outcomes))
