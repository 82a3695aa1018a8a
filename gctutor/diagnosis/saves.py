"""What a step keeps and runs again against what its policy names: replays, wasted saves, and what overwrites them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gctutor import liger
from gctutor.diagnosis import inspection, selective
from gctutor.diagnosis.patients import Patient
from gctutor.diagnosis.report import FAULT, WARNING, CallSite, Finding, readable
from gctutor.policies import Mechanism, Policy
from gctutor.policies.modules import Modules
from gctutor.policies.ops import EVERY_SECOND_MM, Ops, operators
from gctutor.roofline import ATTENTION, GEMM
from gctutor.steptrace import FORWARD, RECOMPUTE, Kernel, StepTrace
from gctutor.workload import decoder_layers

if TYPE_CHECKING:
    from gctutor.diagnosis.examination import With, Without

WASTE_SHARE = 1e-3  # of the activation bytes, below which an unread save is not worth a word
FRESH = ("zero_", "fill_", "copy_", "masked_fill_", "detach_")  # in place on what was just made


def call_sites(trace: StepTrace) -> list[CallSite]:
    """The matrix products and attention kernels of the decoder layers, forward ones first met first."""
    forward: Counter[tuple[str, str]] = Counter()
    replayed: Counter[tuple[str, str]] = Counter()
    flop: Counter[tuple[str, str]] = Counter()
    for _, kernel in _expensive(trace):
        key = kernel.site, kernel.name
        if kernel.phase == FORWARD:
            forward[key] += 1
        elif kernel.phase == RECOMPUTE:
            replayed[key] += 1
            flop[key] += kernel.work.flop
    kept: Counter[str] = Counter()
    for (layer, site), size in trace.kept.items():
        kept[site] += size if isinstance(layer, int) else 0
    return [CallSite(*key, forward[key], replayed[key], flop[key], kept[key[0]]) for key in forward | replayed]


def _expensive(trace: StepTrace) -> Iterator[tuple[int, Kernel]]:
    for segment in trace.segments:
        if isinstance(segment.layer, int):
            for kernel in segment.kernels:
                if kernel.work.kind in (GEMM, ATTENTION):
                    yield segment.layer, kernel


def replayed(patient: Patient, treated: With) -> Iterator[Finding]:
    """Expensive operators that run again although they are named as kept."""
    assert treated.trace is not None
    sac = inspection.sac_policy(patient.model) if not treated.kinds else None
    promises: dict[Mechanism | None, Promise] = {kind: _promise(kind) for kind in treated.kinds}
    if sac is not None:
        promises[None] = _promise_of_sac(sac, treated.trace)
    again: Counter[tuple[str, str, str]] = Counter()
    for layer, kernel in _expensive(treated.trace):
        promise = promises.get(treated.kinds[layer] if treated.kinds else None)
        if promise and kernel.phase == RECOMPUTE and (name := promise(kernel)):
            again[name, kernel.name, kernel.site] += 1
    for (name, operator, site), count in again.items():
        yield Finding(
            FAULT,
            "replayed_kept",
            f"{operator} of {site} runs again in backward, {count} times a step, although {name} is named as kept.",
        )
    if sac is not None and selective.keeps_nothing(sac, _names(treated.trace)):
        yield Finding(FAULT, "matched_nothing", "The SAC policy keeps none of the operators that this step ran.")


Promise = Callable[[Kernel], str | None]  # the name by which a kernel's output should have been kept


def _promise(mechanism: Mechanism) -> Promise:
    if isinstance(mechanism, Modules):
        return lambda kernel: next((site for site in mechanism.sites if site in kernel.site.split(".")), None)
    if isinstance(mechanism, Ops):
        named = {_packet(op): name for name in mechanism.kept if name != EVERY_SECOND_MM for op in operators(name)}
        excluded = set(mechanism.excluded)
        return lambda kernel: None if excluded & set(kernel.site.split(".")) else named.get(kernel.name)
    return lambda kernel: None


def _packet(operator: Any) -> str:
    return operator.name().split("::")[-1].split(".")[0]


def _promise_of_sac(policy: Callable, trace: StepTrace) -> Promise:
    """A SAC policy that names an attention kernel means attention, whatever backend the step ran."""
    saved = selective.saved_names(policy, _names(trace))
    attention = next((name for name in saved if "attention" in name), None)
    return lambda kernel: kernel.name if kernel.name in saved else attention if kernel.work.kind == ATTENTION else None


def _names(trace: StepTrace) -> set[str]:
    return {kernel.name for segment in trace.segments for kernel in segment.kernels if kernel.phase == FORWARD}


def wasted(patient: Patient, policy: Policy | None, treated: With) -> Iterator[Finding]:
    """Kept bytes of replayed layers that backward never reads, with the policy that would not keep them."""
    trace = treated.trace
    assert trace is not None
    sizes: dict[tuple[Mechanism | None, str], int] = defaultdict(int)
    for (layer, site), size in trace.unused.items():
        if isinstance(layer, int) and layer in trace.recomputed_layers:
            sizes[treated.kinds[layer] if treated.kinds else None, site] += size
    for (mechanism, site), size in sizes.items():
        if size < WASTE_SHARE * trace.activation_bytes:
            continue
        better = mechanism and _without_site(mechanism, site, decoder_layers(patient.model)[0])
        hint = f": '{str(policy).replace(str(mechanism), str(better))}' does without" if better else ""
        yield Finding(
            WARNING,
            "wasted_save",
            f"{readable(size)} of {site} are kept and never read in backward{hint}.",
        )


def _without_site(mechanism: Mechanism, site: str, layer: Any) -> Mechanism | None:
    """The same mechanism that does not keep what module `site` of `layer` makes; None where no name says that."""
    name = site.rpartition(".")[2]
    if isinstance(mechanism, Modules) and name in mechanism.sites and len(mechanism.sites) > 1:
        return Modules(tuple(each for each in mechanism.sites if each != name))
    leaf = any(path == site and not list(module.children()) for path, module in layer.named_modules())
    if isinstance(mechanism, Ops) and leaf:
        return Ops(mechanism.kept, tuple(sorted({*mechanism.excluded, name})))
    return None


def in_place(patient: Patient, without: Without, treated: With) -> Iterator[Finding]:
    """In-place operators and kernels under SAC, whose version check a view defeats (pytorch/pytorch#119590)."""
    sac = any(isinstance(kind, Ops) for kind in treated.kinds) or inspection.sac_policy(patient.model)
    if not sac:
        return
    sites = {
        (kernel.name, kernel.site)
        for segment in without.trace.segments
        for kernel in segment.kernels
        if isinstance(segment.layer, int) and kernel.phase == FORWARD and _overwrites(kernel.name)
    }
    for operator, site in sorted(sites):
        yield Finding(
            WARNING,
            "inplace",
            f"{operator} of {site} works in place: it may overwrite an output that SAC keeps, and no error tells.",
        )
    if inspection.sac_policy(patient.model) and "q_proj" in liger.overwritten(decoder_layers(patient.model)[0]):
        yield Finding(
            WARNING,
            "inplace_kernel",
            "Liger's rotary kernel works in place on the outputs of q_proj and k_proj: where SAC keeps those, "
            "gradients go wrong silently; do not keep them, or leave Liger's rope off.",
        )


def _overwrites(operator: str) -> bool:
    return operator.endswith("_") and not operator.endswith("__") and operator not in FRESH
