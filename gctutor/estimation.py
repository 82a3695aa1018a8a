"""A `StepCost` without the hardware: exact bytes from the model's own code on fake tensors, time from the roofline.

Bytes are additive over layers, so a trace of the first layer, one of each kind between, and the last is stretched to
full depth; `exact=True` traces every layer instead, and the tests show that both agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gctutor import tracing, workload as workloads
from gctutor.devices import Device, find_device
from gctutor.policies import Mechanism, Policy, PolicyError, Request, concrete as named, parse
from gctutor.results import Results, StepCost, provenance
from gctutor.roofline import ELEMENTWISE, Work
from gctutor.simulation import Timeline, simulate
from gctutor.steptrace import BACKWARD, FORWARD, HEAD, MOVING, OPTIMIZER, RECOMPUTE, Kernel, Run, Segment, StepTrace
from gctutor.tracecache import cache_folder, fingerprint, load, store
from gctutor.workload import Workload

METER = "fake tensors"
Prepare = Callable[[Any, dict[str, Any]], None]


def estimate(
    workload: Workload,
    policy: str | Policy = "none",
    device: str | Device = "H100",
    *,
    exact: bool = False,
    cache: bool = True,
) -> StepCost:
    """What a step of `workload` under `policy` costs on `device`: bytes exact, time from the roofline.

    A policy that cannot work is a row with `status="refused"` and the reason. Raises `UserError` for an unknown
    policy, device or model. `exact` traces every layer; `cache=False` neither reads nor writes the disk cache.
    """
    device = find_device(device) if isinstance(device, str) else device
    parsed = parse(policy) if isinstance(policy, str) else policy
    if isinstance(parsed, Request):
        from gctutor.planner import resolve

        concrete = resolve(parsed, workload, device)
    else:
        concrete = parsed
    row = StepCost(workload, str(parsed), device.name, "estimated", METER, resolved=str(concrete))
    try:
        step = trace(workload, concrete, kind=device.kind, exact=exact, cache=cache)
    except PolicyError as error:
        return dataclasses.replace(row, status="refused", error=str(error), provenance=_origin(device))
    run = simulate(step, concrete, device)
    origin = _origin(device, busy_share=run.busy_s / run.step_s, attention_kernels=step.attention_kernels)
    return dataclasses.replace(row, **_costs(step, run, device), provenance=origin)


def sweep(
    workloads: Iterable[Workload],
    policies: Sequence[str],
    device: str | Device = "H100",
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> Results:
    """The estimates of every policy for every workload, policies fastest; `progress` hears of each before it starts.

    A step that was traced before, in this process or another, comes from the cache in milliseconds.
    """
    rows = []
    for workload, policy in itertools.product(workloads, policies):
        progress(f"estimating {workload.label}, {policy}")
        rows.append(estimate(workload, policy, device))
    return Results(rows)


def _origin(device: Device, **more: Any) -> dict[str, Any]:
    return provenance(time="roofline", profile=device.profile, launch_s=device.launch_s, **more)


def _costs(step: StepTrace, run: Timeline, device: Device) -> dict[str, Any]:
    fits = step.peak_bytes <= device.usable_bytes
    return {
        "status": "ok" if fits else "oom",
        "error": None if fits else too_big(step.peak_bytes, device),
        "static_bytes": step.static_bytes,
        "activation_bytes": step.activation_bytes,
        "peak_bytes": step.peak_bytes,
        "host_bytes": step.host_bytes,
        "forward_s": run.forward_s,
        "backward_s": run.step_s - run.forward_s,
        "step_s": run.step_s,
        "flop": step.flop(),
        "recompute_flop": step.flop(RECOMPUTE),
        "model_flop": step.flop(FORWARD, BACKWARD, OPTIMIZER),
        "breakdown": step.breakdown(),
    }


def too_big(peak: int, device: Device) -> str:
    return f"The step's peak is {peak / 1e9:.1f} GB; {device.name} has {device.usable_bytes / 1e9:.1f} GB."


def trace(
    workload: Workload,
    policy: str | Policy,
    *,
    kind: str = "cuda",
    exact: bool = False,
    cache: bool = True,
    prepare: Prepare | None = None,
    prepared: str = "",
) -> StepTrace:
    """The traced step of `workload` under a concrete `policy` on a device of `kind` (`cuda`, `rocm`, `cpu`).

    `prepare(model, batch)` changes the fake model before it is traced, and `prepared` names the change for the cache.
    Raises `PolicyError` when the policy cannot work here or had no effect.
    """
    policy = named(policy) if isinstance(policy, str) else policy
    policy.refuse(workload, kind)
    kinds = policy.layers(workload.n_layers)
    shape, representatives = (kinds, range(len(kinds))) if exact else shorten(kinds)
    setting = Setting(kind, prepare, prepared)
    short = traced(workload.replace(layers=len(shape)), policy, tuple(shape), setting, cache)
    return short.stretched(representatives)


def shorten(kinds: Sequence[Mechanism]) -> tuple[tuple[Mechanism, ...], list[int]]:
    """A short row of layers that behaves like `kinds`, and for each layer of the long one its place in the short.

    The first and the last layer stand for themselves, and one layer between for each kind: a layer's bytes depend on
    its own kind, and at either end on the embedding and the loss.
    """
    if len(kinds) <= 3:
        return tuple(kinds), list(range(len(kinds)))
    middles = list(dict.fromkeys(kinds[1:-1]))
    short = (kinds[0], *middles, kinds[-1])
    places = [0, *(1 + middles.index(kind) for kind in kinds[1:-1]), len(short) - 1]
    return short, places


class Setting(NamedTuple):
    """Where a step is traced: the kind of device, and what is done to the model before (with a name for the cache)."""

    kind: str
    prepare: Prepare | None = None
    prepared: str = ""


def traced(
    workload: Workload, policy: Policy, kinds: tuple[Mechanism, ...], setting: Setting, cache: bool
) -> StepTrace:
    """Trace the model of `workload` with these mechanisms, one a layer; from the cache when it is there."""
    if not cache:
        return _trace_now(workload, policy, kinds, setting)
    return _remembered(workload, policy, kinds, setting, cache_folder())


@functools.lru_cache(maxsize=256)
def _remembered(
    workload: Workload, policy: Policy, kinds: tuple[Mechanism, ...], setting: Setting, folder: Path
) -> StepTrace:
    """The trace from this process's memory, else from `folder`, else made now and stored there."""
    config = workload.config().to_json_string() if workload.model not in workloads.SIZES else ""
    name = fingerprint(workload.to_dict(), [str(k) for k in kinds], setting.kind, setting.prepared, config)
    path = folder / f"{name}.json.gz"
    stored = load(path)
    if stored is None:
        stored = _trace_now(workload, policy, kinds, setting)
        store(stored, path)
    return stored


def _trace_now(workload: Workload, policy: Policy, kinds: tuple[Mechanism, ...], setting: Setting) -> StepTrace:
    from gctutor.fake import fake_model, fake_tensors

    if workload.attention.startswith("flash"):  # those kernels take each document's length, never a mask tensor
        workload = workload.replace(mask="none")
    with workloads.quiet_transformers(), fake_tensors(setting.kind) as mode:
        model = fake_model(workload, mode)
        batch = workloads.inputs(workload)
        if setting.prepare is not None:
            setting.prepare(model, batch)
        optimizer = _prepared_optimizer(workload, model)
        with policy.applied(model, kinds) as state:
            step = tracing.trace_step(
                model,
                batch,
                autocast=lambda: workload.autocast("cpu"),
                optimizer=optimizer,
                answer=workload.mask == "none",
                meter=METER,
                hits=lambda: {str(m): dict(c) for m, c in state.hits.items()},
                around=functools.partial(_launches_noted, setting.kind)
                if workload.liger_parts
                else contextlib.nullcontext,
            )
            state.verify(step.recomputed_layers)
        if workload.optimizer == "adamw8bit":
            step = _with_eight_bit_adamw(step, model)
    return step


def _with_eight_bit_adamw(step: StepTrace, model: Any) -> StepTrace:
    """The step with bitsandbytes' state and update, by formula: its kernels need a GPU and cannot be traced.

    The update reads the gradients and reads and writes weights and state.
    """
    extra, layer = (eight_bit_state_bytes(part) for part in (model, workloads.decoder_layers(model)[0]))
    trained = [p for p in model.parameters() if p.requires_grad]
    numel, sizes = sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)
    work = Work(ELEMENTWISE, numel, 3 * sizes + 2 * extra, False)
    update = Kernel("adamw8bit", "", OPTIMIZER, work, (0,) * len(MOVING), (0,) * len(MOVING))
    return dataclasses.replace(
        step,
        segments=(*step.segments, Segment(HEAD, OPTIMIZER, Run([update]))),
        static_bytes=step.static_bytes + extra,
        layer_static_bytes=step.layer_static_bytes + layer,
    )


def eight_bit_state_bytes(module: Any) -> int:
    """Bytes of bitsandbytes' 8-bit AdamW state.

    Two bytes a parameter and two fp32 scales a block of 256; tensors under 4096 elements keep fp32 state
    (T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, and the library's defaults).
    """
    sizes = [p.numel() for p in module.parameters() if p.requires_grad]
    return sum(8 * n if n < 4096 else 2 * n + 8 * -(-n // 256) for n in sizes)


def _launches_noted(kind: str, tracer: tracing.Tracer) -> contextlib.AbstractContextManager:
    from gctutor import liger

    def note(name: str, tensors: Sequence[Any]) -> None:
        tracer.record_launch(name, tensors, liger.PASSES.get(name, 1))

    return liger.launches(note, as_cuda=kind != "cpu")


def _prepared_optimizer(workload: Workload, model: Any) -> Any:
    """The optimizer with its state made by one step on empty gradients; none for 8-bit AdamW (see below)."""
    if workload.optimizer == "adamw8bit":
        return None
    import torch

    optimizer = workloads.make_optimizer(workload, model)
    if optimizer is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def timeline(workload: Workload, policy: str, device: str | Device = "H100") -> Timeline:
    """The estimated memory timeline of a step, for `plot_memory_timeline` and `plot_gantt`."""
    device = find_device(device) if isinstance(device, str) else device
    concrete = parse(policy)
    if isinstance(concrete, Request):
        from gctutor.planner import resolve

        concrete = resolve(concrete, workload, device)
    step = trace(workload, concrete, kind=device.kind)
    return simulate(step, concrete, device, f"{workload.label}, {policy}, estimated for {device.name}")
