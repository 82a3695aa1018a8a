"""`modules:`: keep the outputs of chosen modules, recompute the rest of the layer, and pay for no dispatch mode."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gctutor.policies.attention import attention_through
from gctutor.policies.block import checkpointed
from gctutor.policies.core import Mechanism, PolicyError, attributes, refuse_overwritten
from gctutor.policies.region import Region, Site, active_region, autocast_dtype, regions

CORE_ATTN = "core_attn"
ALL = ("q_proj", "k_proj", "v_proj", CORE_ATTN, "o_proj", "gate_proj", "up_proj")
SITES = (*ALL, "down_proj")  # early stop never reruns down_proj, unless LoRA makes it more than one operator


@dataclass(frozen=True)
class Modules(Mechanism):
    """Keep the outputs of `sites`: linear layers by name, and `core_attn`, the call of the attention function."""

    sites: tuple[str, ...]

    def __str__(self) -> str:
        return "modules:" + ("all" if self.sites == ALL else ",".join(self.sites))

    @contextlib.contextmanager
    def on(self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]) -> Iterator[None]:
        context_fn = functools.partial(regions, self.sites, hits)
        with contextlib.ExitStack() as undo:
            for layer in layers:
                refuse_overwritten(self, layer, self.sites)
                for name, module in self._modules(layer):
                    undo.enter_context(attributes(module, forward=_through_region(name, module)))
            if CORE_ATTN in self.sites:
                undo.enter_context(attention_through(_attention))
            region = functools.partial(checkpoint, use_reentrant=False, context_fn=context_fn)
            undo.enter_context(checkpointed(layers, region))
            yield

    def unmatched(self, hits: Counter[str]) -> list[str]:
        return [site for site in self.sites if not hits[site]]

    def _modules(self, layer: nn.Module) -> list[tuple[str, nn.Module]]:
        named = [(path.rpartition(".")[2], module) for path, module in layer.named_modules()]
        for site in self.sites:
            if site != CORE_ATTN and site not in dict(named):
                raise PolicyError(f"'{self}' cannot keep {site}: {type(layer).__name__} has no module of that name.")
        return [(name, module) for name, module in named if name in self.sites]


def _through_region(name: str, module: nn.Module) -> Callable:
    """The forward of `module` as a kept call of whatever region is running."""
    forward, inner = module.forward, list(module.modules())
    site = Site(
        name,
        parameters=[m._parameters for m in inner if m._parameters],
        random=any(isinstance(m, _DropoutNd) and m.p > 0 for m in inner),
        composite=len(inner) > 1,
    )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        region = active_region()
        return forward(*args, **kwargs) if region is None else region.call(site, forward, args, kwargs)

    return run


def _attention(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The attention call `function(module, query, key, value, mask, **kwargs)`, kept where the region says so."""
    region = active_region()
    if region is None or CORE_ATTN not in region.sites:
        return function(*args, **kwargs)
    site = Site(CORE_ATTN, random=kwargs.get("dropout", 0.0) > 0)
    mask = args[4] if len(args) > 4 else kwargs.get("attention_mask")
    if mask is not None and getattr(function, "__name__", "") == "sdpa_attention_forward":
        with OpenSdpa(region, site):
            return function(*args, **kwargs)
    return region.call(site, function, args, kwargs)


class OpenSdpa(TorchFunctionMode):
    """Keeps the attention kernel alone: what a mask makes necessary (repeated K/V, a float mask) is made again."""

    def __init__(self, region: Region, site: Site) -> None:
        super().__init__()
        self.region, self.site = region, site

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            kwargs["attn_mask"] = torch.where(mask, 0.0, -math.inf).to(autocast_dtype(args[0]) or args[0].dtype)
        return self.region.call(self.site, func, args, kwargs)
