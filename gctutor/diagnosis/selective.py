"""A user's own SAC policy, asked what it would keep, and what the errors of checkpointed steps mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from gctutor.diagnosis.report import FAULT, Finding
from gctutor.policies.ops import attention_operators

SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
OFFLOAD = tuple(policy for policy in CheckpointPolicy if "OFFLOAD" in policy.name)


def check_sac_policy(policy: Any) -> list[Finding]:
    """What is wrong with a SAC policy: a list of operators, a policy function, or a `context_fn`."""
    if isinstance(policy, (list, tuple, set)):
        packets = [str(op) for op in policy if isinstance(op, OpOverloadPacket)]
    else:
        packets = [str(op) for op in _probed() if _says(policy, op) in SAVE and not _saved_overloads(policy, op)]
    findings = [
        Finding(
            FAULT,
            "packet",
            f"The SAC policy names {name}, a packet, but torch asks it about overloads, so it never matches: "
            f"write torch.ops.{name}.default.",
        )
        for name in packets
    ]
    if not packets and callable(policy) and (refusal := _refusal(policy)):
        findings.append(refusal)
    if callable(policy) and any(_says(policy, getattr(op, "default", op)) in OFFLOAD for op in _probed()):
        findings.append(
            Finding(
                FAULT,
                "cpu_offload",
                "The SAC policy answers with a CPU_OFFLOAD value, which eager torch treats as recompute: nothing is "
                "offloaded; answer MUST_SAVE, or use block+offload.",
            )
        )
    return findings


def saved_names(policy: Callable, ran: Iterable[str]) -> set[str]:
    """The `aten` operators that a SAC policy (function or `context_fn`) keeps, of what `ran` and all attention."""
    return {packet.__name__ for packet in {*_packets(ran), *_probed()} if _saved_overloads(policy, packet)}


def keeps_nothing(policy: Callable, ran: Iterable[str]) -> bool:
    """Whether a SAC policy answers about every operator that `ran`, and keeps none."""
    packets = _packets(ran)
    known = all(_says(policy, getattr(packet, each)) is not None for packet in packets for each in packet.overloads())
    return known and not any(_saved_overloads(policy, packet) for packet in packets)


def _packets(names: Iterable[str]) -> list[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet for packet in found if isinstance(packet, OpOverloadPacket)]


def _probed() -> list[Any]:
    """Operators worth asking a policy about: matrix products and every attention kernel."""
    attention = {op.overloadpacket for op in attention_operators() if isinstance(op, OpOverload)}
    return [torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, *attention]


def _saved_overloads(policy: Callable, packet: Any) -> bool:
    return any(_says(policy, getattr(packet, each)) in SAVE for each in packet.overloads())


def _says(policy: Callable, operator: Any) -> Any:
    """What a policy answers about an operator; None when it asks for more than the operator's name."""
    try:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=None)
    except TypeError:  # torch before 2.13
        context = SelectiveCheckpointContext(is_recompute=False)
    try:
        answer = _policy_function(policy)(context, operator)
    except Exception:  # a user's function may ask for the operator's arguments, which are not known here
        return None
    return CheckpointPolicy.MUST_SAVE if answer is True else answer


def _refusal(policy: Callable) -> Finding | None:
    """What a `context_fn` that cannot even be opened says (a list with a packet)."""
    try:
        _policy_function(policy)
    except ValueError as error:
        return explain(error)
    except AttributeError:  # no SAC: a context_fn of another kind
        return None
    return None


def _policy_function(policy: Callable) -> Callable:
    """The policy function itself, of a `context_fn` that one call with no arguments opens."""
    try:
        inspect.signature(policy).bind()
    except TypeError:
        return policy
    return policy()[0].policy_fn


EXPLANATIONS = (
    (
        ("_to_copy", "storage"),
        "autocast_cache",
        "autocast's cache of cast weights was warm in the forward and cold in the replay: open a fresh torch.autocast "
        "block for each step, evaluation included, or pass cache_enabled=False.",
    ),
    (
        ("mutated",),
        "inplace",
        "an in-place operation overwrote a kept output: replace it by one that is not in place.",
    ),
    (
        ("OpOverloadPacket",),
        "packet",
        "the SAC list names a packet: write the overload, such as torch.ops.aten.mm.default.",
    ),
    (
        ("not found in storage",),
        "replay_differs",
        "the replay ran an operator that the forward did not: a KV cache left on (set use_cache=False), "
        "or code that depends on something outside the layer.",
    ),
    (
        ("different metadata",),
        "replay_differs",
        "the replay made tensors of other shapes than the forward: a KV cache left on (set use_cache=False), "
        "or code that depends on something outside the layer.",
    ),
)


def explain(error: Exception) -> Finding:
    """A fault that says what an error of a checkpointed step means and what to do."""
    text = str(error)
    for signs, code, meaning in EXPLANATIONS:
        if all(sign in text for sign in signs):
            return Finding(FAULT, code, f"The step fails with {type(error).__name__}: {meaning}")
    return Finding(FAULT, "step_fails", f"The step fails with {type(error).__name__}: {text.splitlines()[0]}")
