"""The decision guide: for this card, batch and length, what to recompute and with which kernels, in three rungs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gctutor.devices import Device, find_device
from gctutor.estimation import estimate, trace
from gctutor.planner import RESERVE_BYTES, Plan, plan
from gctutor.results import StepCost
from gctutor.workload import Workload

# The fastest first: every rung keeps less than the one before and takes longer.
LADDER = ("none", "modules:all", "block")
# Liger's norms, RoPE and SwiGLU with a loss in chunks: less memory *and* less time than Hugging Face's own.
KERNELS = "liger:rms_norm,rope,swiglu+chunked"


@dataclass(frozen=True)
class Advice:
    """What to do for `workload` on `device`: `policy` is the first rung that fits (None: not even `block`).

    `peaks` holds the peak bytes of each rung tried, `reason` says why in a sentence, `notes` what else to know.
    """

    workload: Workload
    device: Device
    policy: str | None
    peaks: dict[str, int]
    reason: str
    notes: tuple[str, ...]

    @property
    def cost(self) -> StepCost | None:
        """The estimate of the recommended policy; None when nothing fits."""
        return None if self.policy is None else estimate(self.workload, self.policy, self.device)

    def plan(self) -> Plan:
        """The planner's answer to the same question: the best mix between two rungs, or what would make it fit."""
        return plan(self.workload, self.device)


def advise(
    device: str,
    batch: int,
    seqlen: int,
    trainable: str = "full",
    *,
    model: str = "Qwen3-8B",
    optimizer: str | None = "adamw8bit",
    kernels: str = KERNELS,
) -> Advice:
    """The fastest rung of the ladder for `batch` × `seqlen` on `device`; `trainable` is `full` or `lora:RANK`.

    The card must hold the whole step, weights, gradients, optimizer state and activations, and the planner's reserve.
    Bytes do not depend on the card, so asking for a second one costs nothing. Raises `UserError` for an unknown device
    or a value that cannot work.
    """
    card = find_device(device)
    workload = Workload(model, batch, seqlen, kernels=kernels, trainable=trainable, optimizer=optimizer)
    limit = card.usable_bytes - RESERVE_BYTES
    peaks: dict[str, int] = {}
    for policy in LADDER:
        peaks[policy] = peak_bytes(workload, policy, card.kind)
        if peaks[policy] <= limit:
            return Advice(workload, card, policy, peaks, _reason(policy, peaks, limit), _notes(workload))
    return Advice(workload, card, None, peaks, _reason(None, peaks, limit), _notes(workload))


@functools.lru_cache(maxsize=4096)
def peak_bytes(workload: Workload, policy: str, kind: str = "cuda") -> int:
    """The peak of a step, weights included, on any device of this kind."""
    return trace(workload, policy, kind=kind).peak_bytes


def _reason(policy: str | None, peaks: dict[str, int], limit: int) -> str:
    over = {rung: (peak - limit) / 1e9 for rung, peak in peaks.items()}
    if policy is None:
        return f"Even replaying every layer takes {over['block']:.1f} GB too much."
    if policy == "none":
        return f"Everything can be kept, with {-over['none']:.1f} GB to spare: recompute would only cost time."
    first = f"Keeping everything takes {over['none']:.1f} GB too much"
    if policy == "block":
        return f"{first} and keeping the dear parts still {over['modules:all']:.1f} GB: every layer is replayed."
    return f"{first}; with the matrix products and attention kept, and only the cheap rest replayed, it fits."


def _notes(workload: Workload) -> tuple[str, ...]:
    notes = []
    if workload.trainable == "full":
        notes.append(
            "Pure bf16 weights round small updates away: for a long run keep them in fp32 under autocast "
            "(precision 'amp'), which doubles weights and gradients, or round stochastically."
        )
    else:
        notes.append("The frozen weights have no gradients, so a replay is a larger share of the step.")
    notes.append(
        "The peak is that of a step that begins without gradients; with gradient accumulation they stay alive through "
        "the next forward, which can raise it by their size."
    )
    if workload.chunked_loss is not None:
        notes.append("The chunked loss needs torch 2.13; with an older one take the kernels 'liger'.")
    return tuple(notes)
