"""A `StepCost` on the hardware here: real steps, warmed up, interleaved, synchronised, every round of samples saved."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gctutor import tracing, workload as workloads
from gctutor.errors import UserError
from gctutor.policies import Policy, Request, parse
from gctutor.results import Results, StepCost, provenance
from gctutor.steptrace import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from gctutor.workload import Workload

WARM_UP_STEPS = 2
STEPS_A_ROUND = 3


def measure(
    workload: Workload,
    policies: Sequence[str],
    *,
    device: str | None = None,
    rounds: int = 3,
    steps: int = STEPS_A_ROUND,
    save: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
    seed: int = 0,
    pretrained: bool = False,
    prepare: Callable[[Any], object] | None = None,
) -> Results:
    """Run `workload` under each policy on `device` (`cuda` where there is one, else `cpu`) and return one row a policy.

    Each policy is warmed up, forward and backward; then the policies take turns, `steps` timed steps at a time, for
    `rounds` rounds. With `save`, each round's samples are appended to that JSON-lines file when they are taken. Bytes
    come from the CUDA allocator, or on a CPU from a traced step that is not timed. Out of memory is a row, and so is a
    policy that is refused. `prepare(model)` changes the model first, as sharding does. Raises `UserError` for an
    unknown policy, a device that is not there or kernels that it cannot run.
    """
    device = default_device() if device is None else check_device(device)
    if device == "cpu" and workload.liger_parts:
        raise UserError("Liger's kernels run on a GPU only: measure kernels='hf' here, or use estimate.")
    parsed = [(text, parse(text)) for text in dict.fromkeys(policies)]
    bench = Bench(workload, device, seed, pretrained, prepare)
    latest: dict[str, StepCost] = {}
    rows: list[StepCost] = []
    for number in range(rounds):
        for text, policy in parsed:
            if text in latest and not latest[text].ok:
                continue
            if progress is not None:
                progress(f"{text}, round {number + 1} of {rounds}")
            row = bench.round(text, policy, latest.get(text), steps)
            latest[text] = row
            rows.append(row)
            if save is not None:
                Results([row]).append_to(save)
    return flagged(Results(rows).folded())


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> str:
    """`device` if it can run here. Raises `UserError` otherwise."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here: leave --device out to measure on the CPU, or use estimate.")
    if device not in ("cuda", "cpu"):
        raise UserError(
            f"measure runs on this machine's 'cuda' or 'cpu', not on {device!r}: use estimate for another card."
        )
    return device


def hardware_name(device: str) -> str:
    """What runs the steps: the GPU's own name, or the CPU with its cores."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} cores"


def unmeasured(workload: Workload, policy: str, device: str, seed: int = 0) -> StepCost:
    """The row of `policy` before its first round; it has the `key` that every round taken here and now will have."""
    hardware, cuda = hardware_name(device), device == "cuda"
    origin = provenance(
        hardware=hardware,
        driver=torch.version.cuda if cuda else None,
        threads=None if cuda else torch.get_num_threads(),
        seed=seed,
    )
    meter = "cuda allocator" if cuda else "traced tensors"
    return StepCost(workload, policy, hardware, "measured", meter, provenance=origin)


def flagged(results: Results) -> Results:
    """The rows, with a note on each that recomputes yet ran faster than `none`: a sign of noise or a cold start."""
    base = {row.workload: row for row in results if row.policy == "none" and row.ok}

    def note(row: StepCost) -> StepCost:
        none = base.get(row.workload)
        if not row.ok or none is None or not row.recompute_flop or row.step_s >= none.step_s:  # type: ignore[operator]
            return row
        return dataclasses.replace(
            row, provenance={**row.provenance, "note": "faster than none: noise or a cold start"}
        )

    return Results(map(note, results))


class Bench:
    """One model on one device, on which policies take turns; call `close` before another is made."""

    model: Any
    batch: Any
    optimizer: Any

    def __init__(
        self,
        workload: Workload,
        device: str,
        seed: int = 0,
        pretrained: bool = False,
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        self.workload, self.device, self.seed = workload, device, seed
        self.failure: str | None = None
        self._warm: set[str] = set()
        try:
            self.model = workloads.build(workload, device, seed=seed, pretrained=pretrained)
            if prepare is not None:
                prepare(self.model)
            self.batch = workloads.inputs(workload, device, seed=seed)
            self.optimizer = workloads.make_optimizer(workload, self.model)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            self.failure = "The model itself does not fit."

    def round(self, text: str, policy: Policy | Request, before: StepCost | None, steps: int) -> StepCost:
        """One round of `policy`, `steps` timed samples; the bytes are those of `before`, an earlier round, if given."""
        row = unmeasured(self.workload, text, self.device, self.seed)
        if before is not None:
            row = dataclasses.replace(before, provenance={**before.provenance, **row.provenance})
        if self.failure:
            return dataclasses.replace(row, status="oom", error=self.failure)
        try:
            concrete = self._resolved(policy)
            concrete.refuse(self.workload, self.device)
            row = dataclasses.replace(row, resolved=str(concrete))
            with concrete.applied(self.model) as state:
                if before is None:
                    row = dataclasses.replace(row, **self._bytes_and_work(state))
                for _ in range(1 if text in self._warm else WARM_UP_STEPS):
                    self._step()
                self._warm.add(text)
                return row.with_samples(self._samples(steps))
        except UserError as error:
            return dataclasses.replace(row, status="refused", error=str(error))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return dataclasses.replace(row, status="oom", error=str(error).split("\n")[0][:200])
        finally:
            self._release()

    def probed(self, policy: Policy | Request, instrument: Callable[[Callable[[], Any]], Any]) -> Any:
        """What `instrument(step)` gives under `policy`, after one step of warm-up."""
        with self._resolved(policy).applied(self.model):
            self._step()
            return instrument(self._step)

    def close(self) -> None:
        """Let go of the model, its gradients and its optimizer."""
        self.model = self.batch = self.optimizer = None
        self.failure = "The bench is closed."
        self._release()

    def _resolved(self, policy: Policy | Request) -> Policy:
        if isinstance(policy, Policy):
            return policy
        from gctutor.devices import find_device
        from gctutor.planner import resolve

        return resolve(
            policy, self.workload, find_device(hardware_name(self.device) if self.device == "cuda" else "cpu")
        )

    def _bytes_and_work(self, state: Any) -> dict[str, Any]:
        """Bytes and FLOPs of a step that is not timed, and the check that the policy took effect."""
        if not all(kind.traceable for kind in state.kinds):
            return self._bytes_of_untraceable()
        if self.optimizer is not None and not self.optimizer.state:
            self._step()  # makes the optimizer's state, which is static
        trace = tracing.trace_step(
            self.model, self.batch, autocast=lambda: self.workload.autocast(self.device), optimizer=self.optimizer
        )
        state.verify(trace.recomputed_layers)
        found = {
            "static_bytes": trace.static_bytes,
            "activation_bytes": trace.activation_bytes,
            "peak_bytes": trace.peak_bytes,
            "flop": trace.flop(),
            "recompute_flop": trace.flop(RECOMPUTE),
            "model_flop": trace.flop(FORWARD, BACKWARD, OPTIMIZER),
            "breakdown": trace.breakdown(),
        }
        return found if self.device == "cpu" else {**found, **self._allocator_bytes()}

    def _bytes_of_untraceable(self) -> dict[str, Any]:
        self._step()  # compiles
        static = tracing.storage_bytes(tracing.static_tensors(self.model, self.optimizer))
        if self.device == "cuda":
            return {"static_bytes": static, **self._allocator_bytes()}
        return {"static_bytes": static, "activation_bytes": self._profiled_bytes(), "meter": "profiler"}

    def _profiled_bytes(self) -> int:
        """Bytes that a forward on the CPU leaves allocated, by the profiler's record of the allocator."""
        self._release()
        recording = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with recording as profile, self.workload.autocast(self.device):
            loss = self.model(**self.batch).loss
        events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
        del loss
        return kept

    def _allocator_bytes(self) -> dict[str, int]:
        """Bytes by the CUDA caching allocator: allocated at the end of forward and at most, and reserved."""
        self._release()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self.workload.autocast(self.device):
            loss = self.model(**self.batch).loss
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        torch.cuda.synchronize()
        return {
            "activation_bytes": kept,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def _samples(self, steps: int) -> dict[str, list[float]]:
        taken = [self._step() for _ in range(steps)]
        forward, backward, step = (list(column) for column in zip(*taken, strict=True))
        return {"forward_s": forward, "backward_s": backward, "step_s": step}

    def _step(self) -> tuple[float, float, float]:
        """One step from gradients None; seconds of forward, of backward, and of all with the optimizer's."""
        self.model.zero_grad(set_to_none=True)
        moments = [self._now()]
        with self.workload.autocast(self.device):
            loss = self.model(**self.batch).loss
        moments.append(self._now())
        loss.backward()
        moments.append(self._now())
        if self.optimizer is not None:
            self.optimizer.step()
        moments.append(self._now())
        return moments[1] - moments[0], moments[2] - moments[1], moments[3] - moments[0]

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _release(self) -> None:
        if self.failure is None:
            self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out (CUDA's, Python's or torch's CPU allocator's)."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
