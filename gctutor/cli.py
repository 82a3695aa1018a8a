"""The `gctutor` command. Each command is a thin function over the package and imports it only when it runs.

Exit codes: 0 done, 1 something failed while running, 2 bad input (one sentence on stderr), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gctutor.cli_campaign import calibrate, campaign
from gctutor.cli_notebooks import notebooks, site, slides
from gctutor.errors import UserError
from gctutor.terminal import AsJson, progress_bar, scaled, show_rows, show_table, showing
from gctutor.workload import Workload

if TYPE_CHECKING:
    from gctutor.results import StepCost

INTERRUPTED = 130
# The parser's own errors, an unknown option or a missing value; typer has no public name for them.
USAGE_ERROR: Any = typer.BadParameter.__base__
WORKLOAD_HELP = {
    "model": "A Qwen3 size, nano, a Hub name or a folder; Qwen3-8B@8 has eight layers.",
    "batch": "Sequences a step.",
    "seqlen": "Tokens a sequence.",
    "attention": "Hugging Face's name of the attention implementation.",
    "kernels": "hf, liger, or Liger's parts as in liger:rms_norm,rope,swiglu.",
    "precision": "bf16, amp (fp32 weights under bf16 autocast) or fp32.",
    "trainable": "full, or lora:RANK.",
    "optimizer": "adamw, adamw8bit, sgd or none.",
    "mask": "none, padding or packed.",
    "layers": "Fewer decoder layers at full width.",
}

Policies = Annotated[list[str], typer.Option("--policy", help="What to keep: none, block, sub:mlp, …; repeatable.")]

Device = Annotated[str, typer.Option(help="A device of `gctutor devices`, matched forgivingly.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.add_typer(notebooks, name="notebooks")
app.command()(campaign)
app.command()(calibrate)
app.command()(slides)
app.command()(site)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, by default those of the process; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="gctutor", standalone_mode=False) or 0
        return _stop("Interrupted; what was done until then is kept.", code) if code == INTERRUPTED else code
    except UserError as error:
        return _stop(str(error), 2)
    except USAGE_ERROR as error:
        return _stop(error.format_message(), 2)
    except ModuleNotFoundError as error:
        return _stop(f"The package {error.name!r} is missing: `make check` installs all that is used.", 1)
    except Exception as error:
        if "--debug" in arguments:
            raise
        return _stop(f"Unexpected {type(error).__name__}: {error} (`gctutor --debug` shows where).", 1)


def _stop(sentence: str, code: int) -> int:
    print(f"gctutor: {sentence}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _gctutor(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected error.")] = False,
) -> None:
    """Measure, predict and choose gradient checkpointing policies for Qwen3-class models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


# Costs of a step


def _with_workload(command: Callable[..., int]) -> Callable[..., int]:
    """`command(given, …)` with one option per field of `Workload`; its first argument holds those that were given."""
    shared = [_workload_option(field) for field in dataclasses.fields(Workload)]
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**options: Any) -> int:
        given = {option.name: options.pop(option.name) for option in shared}
        return command({name: value for name, value in given.items() if value is not None}, **options)

    with_options.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in (*shared, *own)}
    return with_options


def _workload_option(field: dataclasses.Field) -> inspect.Parameter:
    kind: Any = int if "int" in str(field.type) else str
    option = typer.Option(help=WORKLOAD_HELP[field.name], show_default=str(field.default or "none"))
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


@app.command()
@_with_workload
def estimate(
    given: dict[str, Any],
    policy: Policies = ["none", "block"],  # noqa: B006
    device: Device = "H100",
    exact: Annotated[bool, typer.Option("--exact", help="Trace every layer instead of one of each kind.")] = False,
    json_: AsJson = False,
) -> int:
    """Predict a step's memory and time on a named GPU, without that GPU.

    Example: gctutor estimate --model Qwen3-8B --batch 1 --seqlen 4096 --device H100 --policy none --policy block
    """
    workload = Workload(**given)
    from gctutor.devices import find_device
    from gctutor.estimation import estimate
    from gctutor.policies import parse

    card, policies = find_device(device), list(dict.fromkeys(policy))
    for text in policies:
        parse(text)
    rows: list[StepCost] = []
    with showing(lambda: show_rows(rows, json_)), progress_bar(len(policies)) as progress:
        for text in policies:
            progress(f"estimating {text}")
            rows.append(estimate(workload, text, card, exact=exact))
    return 0


@app.command()
@_with_workload
def measure(
    given: dict[str, Any],
    policy: Policies = ["none", "block"],  # noqa: B006
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that the policies take turns.")] = 3,
    save: Annotated[Path | None, typer.Option(help="Append every round to this JSON-lines file.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard over the processes of torchrun; rank 0 reports.")] = False,
    json_: AsJson = False,
) -> int:
    """Run real steps on the hardware here. On a CPU the default is nano at 1 × 256.

    Example: gctutor measure --model nano --batch 2 --seqlen 256 --policy none --policy block --save rows.jsonl

    Example: torchrun --nproc-per-node=8 -m gctutor measure --fsdp --model Qwen3-8B
    """
    from gctutor.measurement import check_device, default_device, measure
    from gctutor.results import Results

    device = check_device(device) if device else default_device()
    small = {"model": "nano", "seqlen": 256} if device == "cpu" else {}
    workload = Workload(**{**small, **given})
    rows: list[StepCost] = []
    if fsdp:
        from gctutor.distributed import measure_fsdp

        rows += measure_fsdp(workload, policy, rounds=rounds, save=save)
        if rows:
            show_rows(rows, json_)
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        showing(lambda: show_rows(rows, json_)),
        progress_bar(rounds * len(set(policy))) as progress,
    ):
        file = save or Path(folder) / "rows.jsonl"
        try:
            rows += measure(workload, policy, device=device, rounds=rounds, save=file, progress=progress)
        except KeyboardInterrupt:
            rows += Results.read(file).where(workload=workload) if file.exists() else []
            raise
    return 0


@app.command()
@_with_workload
def plan(
    given: dict[str, Any],
    device: Device = "H100",
    budget: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of none's activation bytes that may be kept.")
    ] = None,
    fits_in: Annotated[
        str | None, typer.Option(help="A device or a number of bytes for the whole step's peak; by default --device.")
    ] = None,
    json_: AsJson = False,
) -> int:
    """Find the fastest policy that fits, and the lines to paste; exit code 1 when nothing fits.

    Example: gctutor plan --model Qwen3-8B --batch 4 --device H200 --fits-in "A100 80GB"
    """
    workload = Workload(**given)
    from gctutor.paste import lines_to_paste
    from gctutor.planner import plan

    limit = _limit_bytes(fits_in)
    with progress_bar(1) as progress:
        progress("planning")
        found = plan(workload, device, budget=budget, fits_in=limit)
    rows = [row for row in (found.none, found.block, found.cost) if row is not None]
    lines = lines_to_paste(found.policy, found.workload) if found.fits else {}
    if json_:
        answer = {"policy": found.policy if found.fits else None, "advice": found.advice, "lines": lines}
        print(json.dumps({**answer, "rows": [row.to_dict() for row in rows]}, indent=1, ensure_ascii=False))
    else:
        show_rows(rows, as_json=False)
        print(*found.advice or [f"Take {found.policy}."], sep="\n")
        print(*(f"\n{where}:\n{text}" for where, text in lines.items()), sep="\n")
    return 0 if found.fits else 1


def _limit_bytes(text: str | None) -> float | None:
    """Bytes written as a number, or what a named device can hold."""
    from gctutor.devices import find_device

    if text is None:
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return find_device(text).usable_bytes


@app.command()
def devices(json_: AsJson = False) -> int:
    """List the GPUs that estimates know, with the figures they use.

    Example: gctutor devices --json
    """
    from gctutor.devices import list_devices

    if json_:
        print(json.dumps([device.model_dump(mode="json") for device in list_devices()], indent=1, ensure_ascii=False))
        return 0
    heads = ("device", "usable GB", "bf16 TFLOP/s", "GB/s", "ridge FLOP/byte", "profile")
    show_table(
        "Devices: dense rates of data sheets, or of a calibrated profile",
        heads,
        (
            (
                device.name,
                scaled(device.usable_bytes, 1e-9, 1),
                scaled(device.bf16_flop_per_s, 1e-12, 1),
                scaled(device.bandwidth_bytes_per_s, 1e-9, 0),
                f"{device.ridge():,.0f}",
                device.profile,
            )
            for device in list_devices()
        ),
    )
    return 0


@app.command()
@_with_workload
def doctor(
    given: dict[str, Any],
    policy: Annotated[str, typer.Option(help="The policy to diagnose.")] = "block",
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = None,
    json_: AsJson = False,
) -> int:
    """Check that a policy does what its name says, gradients included; exit code 1 when it does not.

    What is too large to run here is examined on fake tensors, its gradients on a narrow model of its class.
    Example: gctutor doctor --model nano --policy ops:mm,core_attn
    """
    workload = Workload(
        **{**({"model": "nano", "seqlen": 128} if given.get("model", "nano") == "nano" else {}), **given}
    )
    from gctutor.diagnosis import STAGES, doctor

    with progress_bar(STAGES) as progress:
        report = doctor(workload, policy, device=device, progress=progress)
    if json_:
        print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
        return int(not report.ok)
    print(f"{report.subject}: {report.policy}", report.how, sep="\n")
    for title, heads, rows in report.tables():
        show_table(title, heads, rows)
    print(*report.findings, sep="\n")
    return int(not report.ok)
