"""The examination: the same step without checkpointing and with it, every trace of which is put back afterwards."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gctutor.diagnosis import inspection, saves, selective, symptoms
from gctutor.diagnosis.patients import Autocast, Patient, of_model, of_workload
from gctutor.diagnosis.report import FAULT, Finding, Report
from gctutor.errors import UserError
from gctutor.gradients import Gradients, LayerGradient, compare_gradients, gradients_of, live_gradients
from gctutor.policies import Mechanism, Policy, PolicyError, Request, parse
from gctutor.policies.core import ACTIVE, attributes, foreign_checkpointing
from gctutor.steptrace import RECOMPUTE, StepTrace
from gctutor.workload import Workload, decoder_layers, quiet_transformers

STAGES = 5  # that `progress` is told of


def doctor(
    subject: Any,
    policy: str | Policy | None = None,
    batch: dict[str, Any] | None = None,
    *,
    autocast: Autocast = contextlib.nullcontext,
    device: str | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Diagnose `policy` on `subject`: a `Workload`, or any Hugging Face decoder (in DDP too), left as it was.

    `policy=None` diagnoses a model as it stands, whatever checkpointing its owner switched on. `batch` are the keyword
    arguments of a forward that returns a loss (small random ids by default); `autocast` makes a fresh block a step. A
    workload too large for `device` is examined in two parts: bytes on fake tensors, gradients on a narrow model.
    Raises `UserError` for input that cannot work.
    """
    parsed = parse(policy) if isinstance(policy, str) else policy
    if isinstance(subject, torch.nn.parallel.DistributedDataParallel):
        report = doctor(subject.module, policy, batch, autocast=autocast, device=device, seed=seed, progress=progress)
        return dataclasses.replace(report, findings=(*inspection.inspect_parallel(subject), *report.findings))
    with quiet_transformers():
        if isinstance(subject, Workload):
            return _of_workload(subject, parsed, device, seed, progress)
        if isinstance(parsed, Request):
            raise UserError(f"'{parsed}' is resolved for a workload: give the doctor a Workload or a concrete policy.")
        if getattr(decoder_layers(subject)[0], ACTIVE, None) is not None:
            raise UserError("A policy of gctutor is active on this model: leave its block first.")
        return examine(of_model(subject, batch, autocast, seed), parsed, progress)


def _of_workload(
    workload: Workload, policy: Policy | Request | None, device: str | None, seed: int, progress: Callable[[str], None]
) -> Report:
    from gctutor.measurement import check_device, default_device

    device = check_device(device) if device else default_device()
    progress("building the model")
    concrete = _concrete(policy, workload, device)
    try:
        patient = of_workload(workload, concrete, device, seed)
    except PolicyError as error:
        finding = Finding(FAULT, "refused", str(error))
        return Report(workload.label, str(concrete), "Refused before the first step.", (finding,))
    return examine(patient, concrete, progress)


def _concrete(policy: Policy | Request | None, workload: Workload, device: str) -> Policy:
    from gctutor.devices import find_device
    from gctutor.measurement import hardware_name
    from gctutor.planner import resolve

    if policy is None:
        raise UserError("A workload has no checkpointing of its own: name the policy to diagnose.")
    if isinstance(policy, Policy):
        return policy
    return resolve(policy, workload, find_device(hardware_name(device) if device == "cuda" else "cpu"))


@dataclass(frozen=True)
class Without:
    """The reference: a step without checkpointing. `noise` is how much two such steps differ, at worst."""

    trace: StepTrace
    gradients: Gradients
    noise: float


@dataclass(frozen=True)
class With:
    """The step with the policy: `error` where it failed, else its gradients by layer; the trace where it can be had."""

    trace: StepTrace | None = None
    rows: tuple[LayerGradient, ...] = ()
    kinds: tuple[Mechanism, ...] = ()
    hits: dict[Mechanism, Counter[str]] = field(default_factory=dict)
    error: Finding | None = None


def examine(patient: Patient, policy: Policy | None, progress: Callable[[str], None]) -> Report:
    """Look at the patient, run the steps, and report."""
    model = patient.model
    name = "as it stands" if policy is None else str(policy)
    findings = inspection.inspect_model(model, patient.batch)
    foreign = foreign_checkpointing(model) if policy is not None else None
    if foreign:
        sentence = f"The model is already checkpointed by {foreign}: switch that off, or diagnose it without a policy."
        findings.append(Finding(FAULT, "foreign", sentence))
        return Report(patient.name, name, "Not run.", tuple(findings))
    with restored(model):
        if any(finding.code == "eval_mode" for finding in findings):
            model.train()
        without = _without(patient, policy, progress)
        treated = _with(patient, policy, without, progress)
        findings += symptoms.found(patient, policy, without, treated)
    trace = treated.trace
    return Report(
        patient.name,
        name,
        patient.how,
        tuple(sorted(findings, key=lambda finding: finding.rank)),
        treated.rows,
        tuple(saves.call_sites(trace)) if trace else (),
        {name: count for hits in treated.hits.values() for name, count in hits.items()},
        activation_bytes=trace.activation_bytes if trace else None,
        none_activation_bytes=without.trace.activation_bytes,
        recompute_flop=trace.flop(RECOMPUTE) if trace else None,
        flop=trace.flop() if trace else None,
    )


def _without(patient: Patient, policy: Policy | None, progress: Callable[[str], None]) -> Without:
    none = parse("none")
    with unchecked(patient.model) if policy is None else none.applied(patient.model):  # type: ignore[union-attr]
        progress("gradients without checkpointing")
        patient.step()
        gradients = gradients_of(patient.model)
        patient.step()
        noise = max(row.worst for row in compare_gradients(gradients, live_gradients(patient.model)))
        progress("tracing without checkpointing")
        trace = patient.traces[0] if patient.traces else patient.trace()
    return Without(trace, gradients, noise)


def _with(patient: Patient, policy: Policy | None, without: Without, progress: Callable[[str], None]) -> With:
    kinds: tuple[Mechanism, ...] = ()
    try:
        kinds = policy.layers(len(decoder_layers(patient.model))) if policy else ()
        with contextlib.nullcontext() if policy is None else policy.applied(patient.model) as state:
            trace = patient.traces[1] if patient.traces else None
            progress("tracing with the policy")
            if trace is None and all(kind.traceable for kind in kinds):
                trace = patient.trace()
            else:
                patient.step()
            hits = copy.deepcopy(state.hits) if state else {}
            progress("gradients with the policy")
            patient.step()
            rows = compare_gradients(without.gradients, live_gradients(patient.model))
            return With(trace, tuple(rows), kinds, hits)
    except PolicyError as error:
        return With(kinds=kinds, error=Finding(FAULT, "refused", str(error)))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        return With(kinds=kinds, error=selective.explain(error))


@contextlib.contextmanager
def unchecked(model: Any) -> Iterator[None]:
    """Hugging Face's switch, torch's wrappers and the KV cache off for the block."""
    with contextlib.ExitStack() as undo:
        for layer in decoder_layers(model):
            undo.enter_context(attributes(layer, gradient_checkpointing=False))
        for wrapper in inspection.wrappers(model):
            undo.enter_context(attributes(wrapper, forward=wrapper._checkpoint_wrapped_module.__call__))
        before, model.config.use_cache = model.config.use_cache, False
        try:
            yield
        finally:
            model.config.use_cache = before


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Gradients, buffers, modes and the random states of torch, numpy and Python are afterwards as before."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    modes = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    devices = {p.device for p in gradients if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers.items():
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
            for module, mode in modes.items():
                module.training = mode
            random.setstate(states[0])
            np.random.set_state(states[1])
