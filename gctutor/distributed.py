"""DDP and FSDP2: real worker processes through torchrun, and FSDP2 on any number of GPUs estimated without one.

A job is a self-contained function. Its source is sent to the workers, so it can be written in a notebook cell.
The estimate runs the model's own code and FSDP2's on fake tensors, as rank 0 of a `fake` process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gctutor import estimation, workload as workloads
from gctutor.devices import Device, find_device
from gctutor.distributed_worker import local_device, process_group
from gctutor.errors import UserError
from gctutor.measurement import measure
from gctutor.policies import Policy, PolicyError, Request, parse
from gctutor.results import Results, StepCost, provenance
from gctutor.steptrace import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, StepTrace
from gctutor.tracing import GATHERED
from gctutor.workload import Workload

POLL_S = 0.05


class WorkerError(RuntimeError):
    """A job that failed or did not end in time; the message is the workers' own."""


# --- real processes ---


def run_workers(job: Callable[..., Any], *, world: int = 2, timeout_s: float = 240.0, **arguments: Any) -> list[Any]:
    """Run `job(**arguments)` in `world` processes of one process group; returns what each rank returned, in order.

    torchrun starts them on a free port: NCCL where there is a GPU for each, else gloo on the CPU with one thread each.
    `job` must import what it uses (only its source is sent); arguments and results are JSON. Raises `WorkerError`, with
    the worker's message, as soon as one fails or when they have not ended after `timeout_s` seconds. No process is
    left behind, not even when this one is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sent = {"source": textwrap.dedent(inspect.getsource(job)), "name": job.__name__, "arguments": arguments}
        (folder / "job.json").write_text(json.dumps(sent), encoding="utf-8")
        with _torchrun(folder, world) as process:
            late = not _ended(process, folder, time.monotonic() + timeout_s)
        answers = [_answer(folder, rank) for rank in range(world)]
        failed = [(answer["at"], rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            _, rank, error = min(failed)  # the first is the cause: the others lost a partner
            raise WorkerError(f"rank {rank}: {error}")
        missing = [str(rank) for rank, answer in enumerate(answers) if not answer]
        if missing:
            what = f"did not end within {timeout_s:g} s" if late else f"ended without a result: {_tail(folder)}"
            raise WorkerError(f"rank {' and '.join(missing)} {what}")
        return [answer["result"] for answer in answers]


@contextlib.contextmanager
def _torchrun(folder: Path, world: int) -> Iterator[subprocess.Popen]:
    """torchrun with `world` workers for the block. It and they are killed at its end; a closed stdin ends workers."""
    options = ["--nnodes=1", f"--nproc-per-node={world}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "gctutor.distributed_worker", str(folder)]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        for group in [process.pid, *(int(path.read_text() or 0) for path in folder.glob("rank*.pid"))]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        process.wait()


def _ended(process: subprocess.Popen, folder: Path, deadline: float) -> bool:
    """Wait until torchrun ends or a worker reports an error; False when the deadline came first."""
    while time.monotonic() < deadline:
        if process.poll() is not None or any("error" in _answer(folder, path) for path in folder.glob("rank*.json")):
            return True
        time.sleep(POLL_S)
    return False


def _answer(folder: Path, rank: int | Path) -> dict[str, Any]:
    path = folder / f"rank{rank}.json" if isinstance(rank, int) else rank
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _tail(folder: Path) -> str:
    lines = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def shard(model: Any, precision: str = "fp32", mesh: Any = None) -> Any:
    """`model` under FSDP2, in place: each decoder layer is a group, the rest belongs to the root.

    `amp` shards fp32 weights, gathers them as bf16 and reduces gradients in fp32 (FSDP2's own mixed precision).
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": mixed if precision == "amp" else MixedPrecisionPolicy()}
    for layer in workloads.decoder_layers(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def measure_fsdp(
    workload: Workload, policies: Sequence[str], *, rounds: int = 3, save: Path | str | None = None
) -> Results:
    """`measure` under FSDP2, called by every rank that torchrun started, on any number of machines.

    Rank 0 returns (and saves) its rows, the others none; `workload.batch` is what each rank gets. Raises `UserError`.
    """
    if "RANK" not in os.environ:
        raise UserError(
            "FSDP runs one process a GPU: start it with torchrun --nproc-per-node=N -m gctutor measure --fsdp …"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = local_device().partition(":")[0]
    with process_group():
        taken = measure(
            workload, policies, device=device, rounds=rounds, prepare=lambda model: shard(model, workload.precision)
        )
    if rank:
        return Results()
    rows = Results(
        dataclasses.replace(row, provenance={**row.provenance, "parallel": "FSDP2", "world": world}) for row in taken
    )
    if save is not None:
        rows.append_to(save)
    return rows


def estimate_fsdp(
    workload: Workload,
    policy: str | Policy = "block",
    world: int = 8,
    device: str | Device = "H100",
    *,
    exact: bool = False,
    cache: bool = True,
) -> StepCost:
    """What a step of `workload` costs each of `world` GPUs under FSDP2; `workload.batch` is what each GPU gets.

    Bytes are of rank 0, which has the largest shards; `breakdown["gathered"]` is the part of `activation_bytes` that
    gathered weights take. Times are None: the network between the GPUs is not modelled. Raises `UserError`.
    """
    device = find_device(device) if isinstance(device, str) else device
    parsed = parse(policy) if isinstance(policy, str) else policy
    if isinstance(parsed, Request):
        raise UserError(f"'{parsed}' is a request: resolve it for a device first.")
    row = StepCost(
        workload,
        str(parsed),
        device.name,
        "estimated",
        estimation.METER,
        resolved=str(parsed),
        provenance=provenance(parallel="FSDP2", world=world, time="none: the network is not modelled"),
    )
    try:
        step = trace_fsdp(workload, parsed, world, kind=device.kind, exact=exact, cache=cache)
    except PolicyError as error:
        return dataclasses.replace(row, status="refused", error=str(error))
    fits = step.peak_bytes <= device.usable_bytes
    return dataclasses.replace(
        row,
        status="ok" if fits else "oom",
        error=None if fits else estimation.too_big(step.peak_bytes, device),
        **costs(step),
    )


def costs(step: StepTrace) -> dict[str, Any]:
    """The bytes and FLOPs of a traced step as the fields of a `StepCost`."""
    gathered = sum(size for (_, site), size in step.kept.items() if site == GATHERED)
    parts = step.breakdown()
    return {
        "static_bytes": step.static_bytes,
        "activation_bytes": step.activation_bytes,
        "peak_bytes": step.peak_bytes,
        "flop": step.flop(),
        "recompute_flop": step.flop(RECOMPUTE),
        "model_flop": step.flop(FORWARD, BACKWARD, OPTIMIZER),
        "breakdown": {**parts, "other": parts["other"] - gathered, "gathered": gathered},
    }


def trace_fsdp(
    workload: Workload, policy: str | Policy, world: int, *, kind: str = "cuda", exact: bool = False, cache: bool = True
) -> StepTrace:
    """The traced step of rank 0 of `world` under FSDP2, on fake tensors; otherwise as `estimation.trace`."""

    def prepare(model: Any, batch: dict[str, Any]) -> None:
        shard(model, workload.precision, mesh)

    with _fake_group(world) as mesh:
        prepared = f"FSDP2 over {world}"
        return estimation.trace(
            workload, policy, kind=kind, exact=exact, cache=cache, prepare=prepare, prepared=prepared
        )


@contextlib.contextmanager
def _fake_group(world: int) -> Iterator[Any]:
    """A one-dimensional mesh of `world` ranks of which only this process exists; collectives do nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError("estimate_fsdp makes a process group of its own: call it outside of torchrun's workers.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


__all__ = ["WorkerError", "estimate_fsdp", "local_device", "measure_fsdp", "run_workers", "shard", "trace_fsdp"]
