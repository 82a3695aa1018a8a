"""What the steps of an examination show: findings drawn from traces, counts and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from gctutor.diagnosis import inspection, saves
from gctutor.diagnosis.patients import Patient
from gctutor.diagnosis.report import FAULT, OK, WARNING, Finding, readable
from gctutor.policies import Policy
from gctutor.policies.block import Block
from gctutor.roofline import VIEW
from gctutor.steptrace import BACKWARD, RECOMPUTE, StepTrace

if TYPE_CHECKING:
    from gctutor.diagnosis.examination import With, Without

EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 5e-2  # worst relative error of a parameter, in fp32 and in bf16 or amp


def found(patient: Patient, policy: Policy | None, without: Without, treated: With) -> list[Finding]:
    """Every finding of an examination."""
    findings = [*_missing(without, treated), *saves.in_place(patient, without, treated)]
    if treated.error:
        return [treated.error, *findings]
    findings += [*_gradients(patient, without, treated), *_matches(treated)]
    if treated.trace is not None:
        findings += [*_effect(patient, policy, without.trace, treated), *saves.replayed(patient, treated)]
        findings += saves.wasted(patient, policy, treated)
    return findings


# --- gradients ------------------------------------------------------------------------------------------------------


def _missing(without: Without, treated: With) -> Iterator[Finding]:
    lost = [name for row in treated.rows for name in row.missing]
    if lost:
        yield Finding(
            FAULT,
            "missing_gradients",
            f"{len(lost)} trainable parameters lose their gradient when checkpointing is on, first {lost[0]}.",
        )
    never = [name for name, gradient in without.gradients.items() if gradient is None]
    if never:
        yield Finding(
            WARNING,
            "unused_parameters",
            f"{len(never)} trainable parameters get no gradient, with or without checkpointing, first {never[0]}.",
        )


def _gradients(patient: Patient, without: Without, treated: With) -> Iterator[Finding]:
    worst = max(treated.rows, key=lambda row: row.worst)
    allowed = max(tolerance(patient), 3 * without.noise)
    if without.noise > tolerance(patient):
        yield Finding(
            WARNING,
            "not_reproducible",
            f"Two steps without checkpointing and with one seed differ by up to {without.noise:.0%}: something "
            "changes from step to step, a hook or buffer with state or random numbers outside torch, numpy and Python, "
            "so a difference proves nothing here.",
        )
    elif worst.worst <= allowed:
        how = f"up to rounding: {worst.worst:.1e} at worst" if worst.worst else "to the last bit"
        if not any(row.missing for row in treated.rows):
            yield Finding(OK, "gradients", f"Gradients are those of the step without checkpointing, {how}.")
    else:
        first = [row for row in treated.rows if row.worst > allowed][-1]
        yield Finding(
            FAULT,
            "gradients_differ",
            f"Gradients differ from those without checkpointing by up to {worst.worst:.2%} ({worst.worst_name}); "
            f"backward meets the difference first in {first.layer}. The replay is not the forward: look for in-place "
            "operations, a KV cache, and random numbers that torch does not restore (numpy, Python).",
        )


def tolerance(patient: Patient) -> float:
    """The relative error of a parameter's gradient that rounding explains."""
    with patient.autocast():
        rounded = torch.is_autocast_enabled(next(patient.model.parameters()).device.type)
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in patient.model.parameters())
    return ROUNDED_TOLERANCE if rounded or half else EXACT_TOLERANCE


# --- what matched, what was replayed --------------------------------------------------------------------------------


def _matches(treated: With) -> Iterator[Finding]:
    if any(isinstance(kind, Block) and kind.reentrant for kind in treated.kinds):
        yield inspection.reentrant("The policy is reentrant")
    for mechanism, hits in treated.hits.items():
        missing = mechanism.unmatched(hits)
        if missing:
            matched = [name for name in hits if hits[name]]
            rest = f"; it did match {', '.join(matched)}" if matched else ", and nothing else either"
            yield Finding(
                FAULT,
                "matched_partly" if matched else "matched_nothing",
                f"'{mechanism}' names {', '.join(missing)}, which no call in this step matched{rest}.",
            )


def _effect(patient: Patient, policy: Policy | None, without: StepTrace, treated: With) -> Iterator[Finding]:
    trace = treated.trace
    assert trace is not None
    freed, again = without.activation_bytes - trace.activation_bytes, trace.flop(RECOMPUTE)
    if not _recomputes(patient, policy, treated):
        yield Finding(OK, "effect", "Nothing is checkpointed.")
    elif freed == 0 and _operator_counts(trace) == _operator_counts(without):
        yield Finding(
            FAULT,
            "no_effect",
            "The policy changed nothing: bytes kept and operators run are those of the step without it.",
        )
    elif freed <= 0:
        yield Finding(
            WARNING,
            "frees_nothing",
            f"The policy recomputes but frees no memory: it keeps {readable(trace.activation_bytes)}, the step "
            f"without it {readable(without.activation_bytes)}.",
        )
    else:
        yield Finding(
            OK,
            "effect",
            f"It keeps {readable(trace.activation_bytes)} of activations instead of "
            f"{readable(without.activation_bytes)}, and runs {again / trace.flop():.1%} of the step's FLOPs again.",
        )
    yield from _idle_layers(without, treated)


def _recomputes(patient: Patient, policy: Policy | None, treated: With) -> bool:
    if policy is None:
        return bool(inspection.switched_on(patient.model) or inspection.wrappers(patient.model))
    return any(kind.recomputes for kind in treated.kinds)


def _idle_layers(without: StepTrace, treated: With) -> Iterator[Finding]:
    """Layers that backward reaches and should replay and does not, where others are."""
    assert treated.trace is not None
    reached = {s.layer for s in without.segments if any(kernel.phase == BACKWARD for kernel in s.kernels)}
    idle = reached - treated.trace.recomputed_layers
    named = [i for i, kind in enumerate(treated.kinds) if kind.recomputes and kind.traceable and i in idle]
    if named and treated.trace.recomputed_layers:
        yield Finding(FAULT, "idle_layers", f"Backward replays nothing in layers {', '.join(map(str, named))}.")


def _operator_counts(trace: StepTrace) -> Counter[str]:
    return Counter(k.name for s in trace.segments for k in s.kernels if k.work.kind != VIEW)
