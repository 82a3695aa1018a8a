"""`gctutor campaign` and `gctutor calibrate`: the rows and the ceilings of the device here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gctutor.terminal import AsJson, progress_bar, scaled, show_rows, show_table, showing

if TYPE_CHECKING:
    from gctutor.campaign import Planned
    from gctutor.results import StepCost

HEADS = ("", "workload", "policy", "kept GB", "peak GB", "fits", "rounds", "minutes", "in time")


def campaign(
    minutes: Annotated[float, typer.Option(min=0.1, help="Begin no round that would end later.")] = 8,
    model: Annotated[str | None, typer.Option(help="A Qwen3 size; by default Qwen3-8B, and nano on a CPU.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; with --dry-run any device.")] = None,
    save: Annotated[Path | None, typer.Option(help="The rows' file instead of one in data/recorded/.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the rows with their predicted fit and time.")
    ] = False,
    json_: AsJson = False,
) -> int:
    """Measure the fixed rows of one device, most telling first, within a time; run it again and it goes on.

    Example: gctutor campaign --dry-run --device H200 --minutes 8
    """
    from gctutor import campaign as campaigns
    from gctutor.calibration import card_of
    from gctutor.devices import find_device
    from gctutor.measurement import check_device, default_device, hardware_name

    if dry_run:
        card = find_device(device) if device not in (None, "cuda") else card_of(default_device())
        turns = campaigns.plan(model or _usual_model(card.kind), card)
        with progress_bar(sum(len(turn.policies) for turn in turns)) as progress:
            planned = []
            for row in campaigns.forecast(turns, card, minutes):
                planned.append(row)
                progress(f"predicting {row.workload.label}")
        _show_plan(planned, card.name, minutes, json_)
        return 0
    device = check_device(device) if device else default_device()
    card = card_of(device)
    turns = campaigns.plan(model or _usual_model(card.kind), card)
    file = save or campaigns.default_file(hardware_name(device))
    rows: list[StepCost] = []
    with showing(lambda: _show_by_workload(rows, json_)), progress_bar(campaigns.rounds(turns)) as progress:
        try:
            rows += campaigns.run(turns, card, device=device, minutes=minutes, save=file, progress=progress)
        except KeyboardInterrupt:
            rows += campaigns.taken(turns, device, file)
            raise
    return 0


def _usual_model(kind: str) -> str:
    return "nano" if kind == "cpu" else "Qwen3-8B"


def _show_plan(planned: Sequence[Planned], device: str, minutes: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps([row.to_dict() for row in planned], indent=1, ensure_ascii=False))
    else:
        title = f"The campaign of {minutes:g} minutes on {device}: rows in order, as estimated"
        show_table(title, HEADS, map(_cells, planned))


def _cells(row: Planned) -> Iterable[str]:
    fit = {"ok": "yes", "oom": "no"}.get(row.cost.status, row.cost.status)
    yield from (str(row.priority + 1), row.workload.label, row.policy)
    yield from (scaled(value, 1e-9, 2) for value in (row.cost.activation_bytes, row.cost.peak_bytes))
    yield from (fit, str(row.rounds), f"{row.seconds / 60:.2f}", "yes" if row.in_time else "no")


def _show_by_workload(rows: Sequence[StepCost], as_json: bool) -> None:
    if as_json:
        show_rows(rows, as_json)
        return
    for workload in dict.fromkeys(row.workload for row in rows):
        show_rows([row for row in rows if row.workload == workload], as_json)


def calibrate(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = None,
    save: Annotated[Path | None, typer.Option(help="A folder instead of data/profiles/, where estimates look.")] = None,
    json_: AsJson = False,
) -> int:
    """Measure the device's ceilings, in under a minute, so that estimates use them instead of assumed shares.

    Example: gctutor calibrate
    """
    from gctutor import calibration
    from gctutor.measurement import check_device, default_device

    device = check_device(device) if device else default_device()
    with progress_bar(len(calibration.STAGES)) as progress:
        profile = calibration.calibrate(device, progress)
    path = calibration.save(profile, device, save)
    print(json.dumps(profile, indent=1, ensure_ascii=False) if json_ else path.read_text(encoding="utf-8").rstrip())
    return 0
