"""Two real processes under gloo, FSDP2 estimated on fake tensors, and the two compared byte by byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from gctutor import Workload
from gctutor.diagnosis import doctor
from gctutor.distributed import WorkerError, estimate_fsdp, measure_fsdp, run_workers, trace_fsdp
from gctutor.errors import UserError

NANO = Workload("nano", seqlen=64, precision="fp32")
POLICIES = ["none", "block", "modules:all"]


def ranks(number):
    import os

    import torch
    import torch.distributed as dist

    total = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(total)
    return [os.getpid(), total.item()]


def one_fails():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()


def hangs(folder):
    import os
    import pathlib
    import threading

    import torch.distributed as dist

    pathlib.Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    threading.Event().wait()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a zombie is dead
        return file.read().rpartition(")")[2].split()[0] != "Z"


def gone(pids, patience_s: float = 30.0) -> bool:
    end = time.monotonic() + patience_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(alive, pids))


def test_results_come_back_in_rank_order():
    answers = run_workers(ranks, number=5)
    assert [total for _, total in answers] == [11, 11]
    assert answers[0][0] != answers[1][0]
    assert gone(pid for pid, _ in answers)


@pytest.mark.slow
def test_a_failing_worker_ends_the_run_with_its_message():
    with pytest.raises(WorkerError, match="rank 1: ValueError: out of luck"):
        run_workers(one_fails)


@pytest.mark.slow
def test_workers_that_hang_are_ended(tmp_path):
    with pytest.raises(WorkerError, match="rank 0 and 1 did not end within 25 s"):
        run_workers(hangs, timeout_s=25, folder=str(tmp_path))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert gone(pids)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks processes up in /proc")
@pytest.mark.slow
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path):
    code = "import test_distributed as tests, sys; tests.run_workers(tests.hangs, folder=sys.argv[1])"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=os.path.dirname(__file__))
    end = time.monotonic() + 90
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(pids)


def reentrant_ddp(options):
    from torch.nn.parallel import DistributedDataParallel as DDP

    import gctutor as gt
    from gctutor import workload as workloads

    workload = gt.Workload("nano@1", seqlen=8, precision="fp32")
    model = workloads.build(workload)
    with gt.parse("block+reentrant").applied(model):
        replica = DDP(model, **options)
        replica(**workloads.inputs(workload)).loss.backward()


@pytest.mark.slow
def test_reentrant_under_ddp_marks_a_variable_twice():
    with pytest.raises(WorkerError, match="mark a variable ready only once"):
        run_workers(reentrant_ddp, options={"find_unused_parameters": True})
    run_workers(reentrant_ddp, options={"static_graph": True})


def sharded(policies, seqlen):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    import gctutor as gt
    from gctutor import tracing, workload as workloads
    from gctutor.distributed import shard

    workload, rank, world = gt.Workload("nano", seqlen=seqlen, precision="fp32"), dist.get_rank(), dist.get_world_size()
    parts = [workloads.inputs(workload, seed=part) for part in range(world)]
    alone = workloads.build(workload)
    sum(alone(**part).loss / world for part in parts).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    model, first, rows = shard(workloads.build(workload)), None, {}
    for policy in policies:
        with gt.parse(policy).applied(model) as state:
            model.zero_grad(set_to_none=True)
            with CommDebugMode() as messages:
                model(**parts[rank]).loss.backward()
            grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            first = first or grads
            traces = [tracing.trace_step(model, parts[rank]) for _ in range(3)]  # gloo's thread may hold a buffer
            trace = min(traces, key=lambda step: step.peak_bytes)
            state.verify(trace.recomputed_layers)
        rows[policy] = {
            "as_none": all(torch.equal(grads[name], first[name]) for name in grads),
            "worst": max(((grads[n] - e).norm() / e.norm()).item() for n, e in expected.items()),
            "gathers": sum(n for op, n in messages.get_comm_counts().items() if "allgather" in str(op)),
            "bytes": [trace.static_bytes, trace.activation_bytes, trace.peak_bytes],
        }
    return rows


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one_and_the_bytes_of_the_estimate():
    by_rank = run_workers(sharded, policies=POLICIES, seqlen=NANO.seqlen)
    for policy in POLICIES:
        estimate = trace_fsdp(NANO, policy, 2, kind="cpu", cache=False)
        bytes_ = [estimate.static_bytes, estimate.activation_bytes, estimate.peak_bytes]
        for rows in by_rank:
            assert rows[policy]["as_none"]
            assert rows[policy]["worst"] < 1e-5
            assert rows[policy]["gathers"] == 1 + 2 * NANO.n_layers
            assert rows[policy]["bytes"] == pytest.approx(bytes_, rel=1e-3)


@pytest.mark.parametrize("policy", [*POLICIES, "block@0-2;none@3-5"])
def test_a_short_model_stretched_is_the_whole(policy):
    short, whole = (trace_fsdp(NANO, policy, 4, exact=exact, cache=False) for exact in (False, True))
    assert short.peak_bytes == whole.peak_bytes
    assert short.activation_bytes == whole.activation_bytes
    assert short.static_bytes == whole.static_bytes


def test_estimate_of_many_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("GCTUTOR_CACHE", str(tmp_path))
    few, many = (estimate_fsdp(NANO, "block", world) for world in (2, 8))
    assert few.static_bytes == pytest.approx(4 * many.static_bytes, rel=1e-3)
    assert few.activation_bytes == many.activation_bytes
    assert many.peak_bytes < few.peak_bytes
    assert sum(many.breakdown.values()) == many.activation_bytes
    assert many.breakdown["gathered"] == (2 * 2048 * 512 + 512) * 4  # embedding, head and final norm, whole
    assert many.step_s is None
    assert estimate_fsdp(NANO, "block", 8).peak_bytes == many.peak_bytes  # from the cache


def test_optimizer_state_is_sharded():
    plain, adam = (trace_fsdp(NANO.replace(optimizer=o), "block", 4, cache=False) for o in (None, "adamw"))
    assert adam.static_bytes == pytest.approx(3 * plain.static_bytes, rel=1e-3)


def test_measuring_needs_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="torchrun"):
        measure_fsdp(NANO, ["none"])


@pytest.mark.slow
def test_the_command_measures_under_torchrun():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gctutor"]
    command = [
        "measure",
        "--fsdp",
        "--model",
        "nano",
        "--seqlen",
        "64",
        "--precision",
        "fp32",
        "--rounds",
        "1",
        "--json",
    ]
    run = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=600, check=True)
    rows = {row["policy"]: row for row in json.loads(run.stdout)}
    assert rows["none"]["provenance"]["world"] == 2
    assert rows["block"]["peak_bytes"] == pytest.approx(trace_fsdp(NANO, "block", 2, kind="cpu").peak_bytes, rel=0.1)
    assert rows["block"]["step_s"] > 0


def test_a_request_is_refused():
    with pytest.raises(UserError, match="resolve it"):
        estimate_fsdp(NANO, "auto", 2)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("searching", "reentrant", "codes"),
    [(False, False, set()), (True, False, {"unused_search"}), (True, True, {"unused_search", "ready_twice"})],
)
def test_the_doctor_knows_ddps_traps(one_process, tiny, searching, reentrant, codes):
    model = tiny()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=searching)
    found = {finding.code for finding in doctor(wrapped).findings}
    assert found & {"unused_search", "ready_twice"} == codes
