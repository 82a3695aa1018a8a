"""Gradients of two steps compared, layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

Gradients = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True)
class LayerGradient:
    """How the gradients of one layer (or of one module outside the layers) agree with the reference.

    `relative` is |other − reference| / |reference| over all parameters of the layer, `worst` the same for the parameter
    `worst_name` where it is largest; `cosine` is of the two gradients as vectors. `missing` are the parameters that
    have a gradient in the reference only.
    """

    layer: str
    relative: float
    cosine: float
    worst: float
    worst_name: str
    missing: tuple[str, ...] = ()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of each trainable parameter by name, copied to the host."""
    return {
        name: None if gradient is None else gradient.detach().to("cpu", copy=True)
        for name, gradient in live_gradients(model).items()
    }


def live_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradient of each trainable parameter by name, not copied."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def compare_gradients(reference: Gradients, other: Gradients) -> list[LayerGradient]:
    """Compare two sets of gradients by parameter name, in the order of the reference, one row a layer.

    Sums are taken in float32 on the device of `other`, a parameter at a time, so no second copy of a model is held.
    """
    groups: dict[str, list[str]] = {}
    for name in reference:
        groups.setdefault(layer_of(name), []).append(name)
    return [_compared(layer, names, reference, other) for layer, names in groups.items()]


def layer_of(parameter: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` belongs to `layers.3`, `lm_head.weight` to `lm_head`."""
    found = re.search(r"\w+\.\d+(?=\.)", parameter)
    return found[0] if found else parameter.rpartition(".")[0].rpartition(".")[2]


def _compared(layer: str, names: list[str], reference: Gradients, other: Gradients) -> LayerGradient:
    sums: dict[str, _Sums] = {}
    missing = []
    for name in names:
        expected, found = reference[name], other.get(name)
        if expected is not None and found is not None:
            sums[name] = _sums(expected, found)
        elif expected is not None:
            missing.append(name)
    errors = {name: s.relative for name, s in sums.items()}
    worst_name = max(errors, key=errors.__getitem__, default="")
    whole = _Sums(*map(sum, zip(*sums.values(), strict=True))) if sums else _Sums(0.0, 0.0, 0.0, 0.0)
    return LayerGradient(
        layer, whole.relative, whole.cosine, errors.get(worst_name, 0.0), worst_name, missing=tuple(missing)
    )


class _Sums(NamedTuple):
    """Sums of squares of a difference, of the reference and of the other, and the product of the two."""

    difference: float
    reference: float
    other: float
    product: float

    @property
    def relative(self) -> float:
        if math.isnan(self.difference):
            return math.inf
        if self.reference:
            return math.sqrt(self.difference / self.reference)
        return math.inf if self.difference else 0.0

    @property
    def cosine(self) -> float:
        norms = math.sqrt(self.reference * self.other)
        return self.product / norms if norms else float(self.reference == self.other)


def _sums(reference: torch.Tensor, other: torch.Tensor) -> _Sums:
    expected, found = reference.to(other.device).float().flatten(), other.detach().float().flatten()
    difference = found - expected
    pairs = ((difference, difference), (expected, expected), (found, found), (expected, found))
    return _Sums(*(float(left @ right) for left, right in pairs))
