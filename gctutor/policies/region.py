"""A checkpoint region that keeps chosen calls: what `modules:` rests on.

In the forward a kept call runs as it is; for each tensor it saves for backward a *note* is taken: a view of an argument
or parameter is noted by its geometry, anything else (attention's logsumexp) by value. In the replay the call is not
run: its output comes from the region, and what it saved is rebuilt from the replayed arguments and handed to the
checkpoint in the same order. Backward then walks the original graph: gradients are bitwise those without a checkpoint,
nothing is pinned that the replay makes again, and early stop still works. No dispatch mode is involved.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import get_device_states, set_device_states

from gctutor.policies.core import PolicyError


class Rebuilt(NamedTuple):
    """Note of a saved tensor: a view of source number `source`, cast to `dtype` where autocast or PEFT did so."""

    source: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def get(self, sources: Sequence[Tensor]) -> Tensor:
        source = sources[self.source]
        source = source if source.dtype == self.dtype else source.to(self.dtype)
        return source.as_strided(self.size, self.stride, self.offset)


class Held:
    """A tensor that call site `name` keeps by value, with the version that tells whether it was overwritten since."""

    __slots__ = ("name", "requires_grad", "tensor", "version")

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.requires_grad = name, tensor.requires_grad
        self.tensor, self.version = tensor.detach(), tensor._version

    def get(self, sources: Sequence[Tensor] = ()) -> Tensor:
        if self.tensor._version != self.version:
            raise PolicyError(
                f"An in-place operation overwrote what {self.name} kept: replace it, or do not keep {self.name}."
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


class Kept(NamedTuple):
    """One kept call: its output, notes of what it saved for backward, and the RNG state it left if it drew numbers."""

    name: str
    output: Any
    notes: list[Rebuilt | Held]
    rng: tuple[Tensor, tuple] | None


class Site(NamedTuple):
    """A kept call site: its name, the dictionaries of its parameters, and what to expect inside.

    `random`: it draws random numbers. `composite`: a module of modules, such as PEFT's, which may cast its input.
    """

    name: str
    parameters: Sequence[dict[str, Any]] = ()
    random: bool = False
    composite: bool = False

    def sources(self, args: Sequence, kwargs: dict) -> list[Tensor]:
        """The tensors that saved tensors may be views of. Parameters are looked up anew: FSDP2 swaps them."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return given + [p for owner in self.parameters for p in owner.values() if p is not None]


class Region:
    """One layer's forward or its replay, as the context manager that the checkpoint enters.

    `kept` is shared by the two. `sites` names what is kept, `hits` counts it.
    """

    def __init__(self, sites: Sequence[str], kept: list[Kept | None], hits: Counter[str]) -> None:
        self.sites, self.kept, self.hits = sites, kept, hits

    def __enter__(self) -> None:
        # The checkpoint pushes its hooks just before it enters this context; torch has no public way to reach them.
        self.pack, self.unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.outer, _active.region = _active.region, self

    def __exit__(self, *error: object) -> None:
        _active.region = self.outer

    def call(self, site: Site, function: Callable, args: Sequence, kwargs: dict) -> Any:
        """Run, or in the replay answer for, the kept call `function(*args, **kwargs)`."""
        raise NotImplementedError


class _Active(threading.local):
    region: Region | None = None


_active = _Active()


def active_region() -> Region | None:
    """The region that is running in this thread."""
    return _active.region


def regions(sites: Sequence[str], hits: Counter[str]) -> tuple[Recording, Replaying]:
    """The `context_fn` of `torch.utils.checkpoint`: the forward's and the replay's side of a new region."""
    kept: list[Kept | None] = []
    return Recording(sites, kept, hits), Replaying(sites, kept, hits)


class Recording(Region):
    """The forward: kept calls run, and what they save is noted on its way to the checkpoint."""

    notes: list[Rebuilt | Held] | None = None
    sources: list[tuple[int, Tensor]]
    name: str

    def __enter__(self) -> None:
        super().__enter__()
        self.noting = saved_tensors_hooks(self._note, self.unpack)
        self.noting.__enter__()

    def __exit__(self, *error: object) -> None:
        self.noting.__exit__(*error)
        del self.noting, self.pack, self.unpack  # cycles, by which the layer's input would outlive backward
        super().__exit__(*error)

    def call(self, site: Site, function: Callable, args: Sequence, kwargs: dict) -> Any:
        if self.notes is not None:  # inside another kept call
            return function(*args, **kwargs)
        tensors = site.sources(args, kwargs)
        self.name, self.sources, self.notes = site.name, list(enumerate(tensors)), []
        try:
            casting = site.composite or autocast_dtype(tensors[0])
            with OpenCasts(self.sources) if casting else contextlib.nullcontext():
                output = function(*args, **kwargs)
            rng = (torch.get_rng_state(), get_device_states(*tensors)) if site.random else None
            held = _map(Tensor, functools.partial(Held, site.name), output)
            self.kept.append(Kept(site.name, held, self.notes, rng))
        finally:
            self.sources, self.notes = [], None
        self.hits[site.name] += 1
        return output

    def _note(self, saved: Tensor) -> Any:
        if self.notes is not None:
            self.notes.append(self._noted(saved))
        return self.pack(saved)

    def _noted(self, saved: Tensor) -> Rebuilt | Held:
        storage = saved.untyped_storage()._cdata
        for index, source in self.sources:
            if source.untyped_storage()._cdata == storage and source.dtype == saved.dtype:
                return Rebuilt(index, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))
        return Held(self.name, saved)


class Replaying(Region):
    """The replay: kept calls answer from the region, in the order of the forward."""

    def __enter__(self) -> None:
        super().__enter__()
        self.next = 0
        self.retain_graph = torch._C._autograd._get_current_graph_task_keep_graph()

    def call(self, site: Site, function: Callable, args: Sequence, kwargs: dict) -> Any:
        index, self.next = self.next, self.next + 1
        kept = self.kept[index] if index < len(self.kept) else None
        if kept is None or kept.name != site.name:
            raise PolicyError(f"The replay of a layer called {site.name} where its forward did not, or a second time.")
        if not self.retain_graph:
            self.kept[index] = None
        tensors = site.sources(args, kwargs)
        output = _map(Held, Held.get, kept.output)
        for note in kept.notes:
            self.pack(note.get(tensors))
        if kept.rng:
            torch.set_rng_state(kept.rng[0])
            set_device_states(*kept.rng[1], device_type=tensors[0].device.type)
        return output


def _map(kind: type, function: Callable, output: Any) -> Any:
    return function(output) if isinstance(output, kind) else tree_map_only(kind, function, output)


class OpenCasts(TorchFunctionMode):
    """Does autocast's casts in the open and sees PEFT's, so that a saved tensor is known as the cast of a source."""

    def __init__(self, sources: list[tuple[int, Tensor]]) -> None:
        super().__init__()
        self.sources = sources

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.to:
            return self._noted(args[0], func(*args, **(kwargs or {})))
        if func in (F.linear, F.scaled_dot_product_attention):
            dtype = autocast_dtype(args[0])
            args = [self._noted(arg, _cast(arg, dtype)) for arg in args] if dtype else args
        return func(*args, **(kwargs or {}))

    def _noted(self, value: Any, cast: Any) -> Any:
        if cast is not value:
            storage = value.untyped_storage()
            whole = value.numel() * value.element_size() == storage.nbytes()  # so a cast keeps the layout
            same = [index for index, source in self.sources if source.untyped_storage()._cdata == storage._cdata]
            self.sources += [(index, cast) for index in same[:1] if whole]
        return cast


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast, if it is on for the device of `tensor`, would cast it to."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if eligible else value
