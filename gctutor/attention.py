"""Which of Hugging Face's attention implementations can run here, and how to get those that cannot."""

from __future__ import annotations

from dataclasses import dataclass

from gctutor.workload import ATTENTIONS


@dataclass(frozen=True)
class Availability:
    """Whether an attention implementation runs here; `reason` says which kernel serves, or how to get it."""

    name: str
    available: bool
    reason: str


_NEEDS = {
    "flash_attention_2": "flash-attn (pip install 'gctutor[flash]', built with nvcc; or `kernels`, prebuilt)",
    "flash_attention_3": "a Hopper GPU and flash-attn 3 (`kernels`, or a build of flash-attn's hopper folder)",
    "flash_attention_4": "a Hopper or Blackwell GPU and flash-attn 4 (pip install flash-attn-4, or `kernels`)",
}


def availability() -> list[Availability]:
    """Each implementation of `ATTENTIONS`, available on this machine or not, with the reason."""
    return [_look(name) for name in ATTENTIONS]


def _look(name: str) -> Availability:
    import torch
    from transformers import utils

    if name == "eager":
        return Availability(name, True, "plain PyTorch: two batched products and a softmax, T × T in memory")
    if name == "sdpa":
        where = "the GPU's flash kernel" if torch.cuda.is_available() else "torch's CPU flash kernel"
        return Availability(name, True, f"scaled_dot_product_attention, here through {where}")
    if not torch.cuda.is_available():
        return Availability(name, False, f"needs a CUDA GPU, and {_NEEDS[name]}; estimates work without")
    found = getattr(utils, f"is_flash_attn_{name[-1]}_available")(kernels_fallback_ok=True)
    return Availability(name, found, "installed" if found else f"needs {_NEEDS[name]}")
