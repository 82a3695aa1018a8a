"""What a training step keeps alive and what it runs, followed operator by operator, on fake or on real tensors.

A `TorchDispatchMode` sees every operator below autograd, forward, recompute and backward alike; a weak reference on
each new *storage* tells when its bytes are freed. Saved tensors, SAC's own store and whatever else keeps a tensor alive
are therefore counted, each storage once, views never.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gctutor import workload
from gctutor.roofline import ELEMENTWISE, VIEW, Work, bytes_of, flatten, work_of, workspace_bytes
from gctutor.steptrace import (
    BACKWARD,
    FORWARD,
    HEAD,
    MOVING,
    OPTIMIZER,
    RECOMPUTE,
    START,
    Kernel,
    Run,
    Segment,
    Sizes,
    StepTrace,
    is_loss,
)
from gctutor.workload import decoder_layers

GATHERED = "gathered weights"  # the call site of a storage refilled in place, as FSDP2 does with weights


@dataclass
class _Storage:
    bytes: int
    born: int
    layer: int | str
    site: str
    died: int | None = None
    kept: bool = False
    used: bool = False
    gradient: bool = False


@dataclass
class _Call:
    name: str
    site: str
    phase: str
    segment: int
    work: Work


class Tracer(TorchDispatchMode):
    """Records a step. Use through `trace_step`; `answer` is what a data-dependent yes/no on fake tensors returns."""

    def __init__(self, model: nn.Module, known: Sequence[torch.Tensor], answer: bool = True) -> None:
        super().__init__()
        self._answer = answer
        self._names = {id(module): name for name, module in model.named_modules()}
        self._layers = {name: i for i, layer in enumerate(decoder_layers(model)) if (name := self._names[id(layer)])}
        self._root = _root_prefix(model)
        self._places: dict[str, tuple[int | None, str]] = {}
        self._stack: list[str] = []
        self._owner: dict[int, str] = {}
        self._last = self._replayed = ""
        self._alive: dict[int, tuple[Any, _Storage]] = {}
        self._static = {_key(t): _raw(t) for t in known}
        self._home = next(model.parameters()).device.type
        self.on_host: Sizes = defaultdict(int)
        self.calls: list[_Call] = []
        self.storages: list[_Storage] = []
        self.segments: list[tuple[int | str, str]] = []
        self.returned = self.optimizing = False

    # --- where we are -------------------------------------------------------------------------------------------

    def place(self, path: str) -> tuple[int | None, str]:
        """(layer or None, call site) of a module path."""
        if path not in self._places:
            found = next((n for n in self._layers if path == n or path.startswith(n + ".")), None)
            layer = None if found is None else self._layers[found]
            site = path[len(found) + 1 :] if found is not None else f"{path}.".removeprefix(self._root).rstrip(".")
            self._places[path] = (layer, site)
        return self._places[path]

    def enter(self, module: nn.Module, args: tuple) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if self.returned and not self._stack:
            self._replayed = name.rpartition(".")[0]
        self._stack.append(name)
        if name in self._layers and args and isinstance(args[0], torch.Tensor) and _key(args[0]) in self._alive:
            storage = self._alive[_key(args[0])][1]
            storage.layer, storage.site = self._layers[name], "input"

    def leave(self, module: nn.Module) -> None:
        if id(module) in self._names and self._stack:
            self._stack.pop()

    def _whereabouts(self) -> tuple[str, str]:
        """(phase, module path) of the operator about to run."""
        if self.optimizing:
            return OPTIMIZER, ""
        node = torch._C._current_autograd_node()
        if node is None and self.returned:  # a callback at the end of backward, such as FSDP2's
            return BACKWARD, ""
        if node is None:
            self._last = self._stack[-1] if self._stack else ""
            self._owner.setdefault(_sequence_number() - 1, self._last)
            return FORWARD, self._last
        if self._stack or torch.is_grad_enabled():
            path = self._stack[-1] if self._stack else self._in_replay(self._owner.get(node._sequence_nr(), self._last))
            self._owner.setdefault(_sequence_number() - 1, path)
            return RECOMPUTE, path
        self._last = self._owner.get(node._sequence_nr(), self._last)
        return BACKWARD, self._last

    def _in_replay(self, cause: str) -> str:
        """The module whose forward a checkpoint runs again, without its hooks: the parent of whatever it called last.

        `cause` is the call site whose backward asked for the replay; it lies inside, or is that module itself.
        """
        inside = self._replayed and f"{cause}.".startswith(f"{self._replayed}.")
        return self._replayed if inside else cause

    def _segment(self, phase: str, layer: int | None) -> int:
        half = phase if phase in (FORWARD, OPTIMIZER) else BACKWARD
        where: int | str = layer if layer is not None else self._outside(half)
        if not self.segments or self.segments[-1] != (where, half):
            self.segments.append((where, half))
        return len(self.segments) - 1

    def _outside(self, half: str) -> str:
        """Before or after the layers? Forward runs start, layers, head; backward the other way."""
        if not self.segments or self.segments[-1][1] != half:
            return START if half == FORWARD else HEAD
        last = self.segments[-1][0]
        if isinstance(last, str):
            return last
        return HEAD if half == FORWARD else START

    # --- operators and storages ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func in _DATA_DEPENDENT and any(isinstance(a, torch._subclasses.FakeTensor) for a in args):
            return self._answer_to(func, args[0])
        phase, path = self._whereabouts()
        layer, site = self.place(path)
        segment = self._segment(phase, layer)
        out = func(*args, **kwargs)
        outputs = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        new = [t for t in outputs if _key(t) not in self._alive and _key(t) not in self._static]
        work = work_of(func, args, kwargs, outputs, makes_new=bool(new))
        if work.kind == "attention":
            site = f"{site}.core_attn" if site else "core_attn"
        self.calls.append(_Call(func._schema.name.split("::")[1], site, phase, segment, work))
        if phase != FORWARD and work.kind != VIEW:
            self._mark_used(flatten([*args, *kwargs.values()]))
        for tensor in new:
            self._follow(tensor, self.segments[segment][0], site)
        if inside := workspace_bytes(func, args):
            now = len(self.calls) - 1
            self.storages.append(_Storage(inside, now, self.segments[segment][0], site, died=now))
        return out

    def _mark_used(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and _key(argument) in self._alive:
                self._alive[_key(argument)][1].used = True

    def _answer_to(self, func: Any, tensor: torch.Tensor) -> Any:
        """What a read of a fake tensor's value gives: comparisons hold, a yes/no is `answer`, a count is one."""
        if func is torch.ops.aten.equal.default:
            return True
        return self._answer if tensor.dtype == torch.bool else 1

    def _follow(self, tensor: torch.Tensor, layer: int | str, site: str) -> None:
        raw, key = _raw(tensor), _key(tensor)
        if key in self._alive or raw.nbytes() == 0:
            return
        if tensor.device.type != self._home:
            if self.calls[-1].phase == FORWARD:
                self.on_host[layer, site] += raw.nbytes()
            return
        self._born(raw, _Storage(raw.nbytes(), len(self.calls) - 1, layer, site))

    def _born(self, raw: torch.UntypedStorage, record: _Storage) -> None:
        self.storages.append(record)

        def died(_: Any) -> None:
            self._died(raw_key, record)

        raw_key = raw._cdata
        self._alive[raw_key] = (weakref.ref(raw, died), record)

    def _died(self, key: int, record: _Storage) -> None:
        if record.died is None:
            record.died = len(self.calls) - 1
            self._alive.pop(key, None)

    def resized(self, raw: torch.UntypedStorage) -> None:
        """A storage has changed its size in place: FSDP2 frees and refills its unsharded weights in this way."""
        if raw._cdata in self._static or raw.device.type not in (self._home, "meta"):
            return
        if raw._cdata in self._alive:
            record = self._alive[raw._cdata][1]
            record.site = GATHERED
            self._died(raw._cdata, record)
        if raw.nbytes():
            phase, path = self._whereabouts()
            layer, _ = self.place(path)
            where = self.segments[self._segment(phase, layer)][0]
            self._born(raw, _Storage(raw.nbytes(), len(self.calls), where, GATHERED))

    def record_launch(self, name: str, tensors: Sequence[torch.Tensor], passes: int = 1) -> None:
        """Note a custom kernel that the dispatcher does not see: it goes over each tensor `passes` times."""
        phase, path = self._whereabouts()
        layer, site = self.place(path)
        work = Work(ELEMENTWISE, max(t.numel() for t in tensors), passes * sum(map(bytes_of, tensors)), False)
        self.calls.append(_Call(name, site, phase, self._segment(phase, layer), work))
        if phase != FORWARD:
            self._mark_used(tensors)

    def mark_kept(self) -> None:
        """Call when the forward has returned: what lives now is an activation."""
        self.returned = True
        for _, record in self._alive.values():
            record.kept = True

    def mark_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and _key(parameter.grad) in self._alive:
                self._alive[_key(parameter.grad)][1].gradient = True

    def recorded(self) -> tuple[tuple[Segment, ...], Sizes, Sizes]:
        """The segments, and by (layer, call site) the bytes kept and those of them that were not read again."""
        born = [[0] * len(MOVING) for _ in self.calls]
        freed = [[0] * len(MOVING) for _ in self.calls]
        freed_of: list[dict[int, list[int]]] = [{} for _ in self.calls]
        kept: Sizes = defaultdict(int)
        unused: Sizes = defaultdict(int)
        for storage in self.storages:
            column = _column(storage)
            born[storage.born][column] += storage.bytes
            if storage.died is not None:
                freed[storage.died][column] += storage.bytes
                maker, place = self._layer_of(storage.born), self._layer_of(storage.died)
                if isinstance(maker, int) and isinstance(place, str):
                    freed_of[storage.died].setdefault(maker, [0] * len(MOVING))[column] += storage.bytes
            if storage.kept:
                kept[storage.layer, storage.site] += storage.bytes
                if not storage.used:
                    unused[storage.layer, storage.site] += storage.bytes
        groups: list[list[Kernel]] = [[] for _ in self.segments]
        for call, made, gone, parts in zip(self.calls, born, freed, freed_of, strict=True):
            if call.work.kind != VIEW or any(made) or any(gone):
                of = tuple((layer, tuple(part)) for layer, part in sorted(parts.items()))
                kernel = Kernel(call.name, call.site, call.phase, call.work, tuple(made), tuple(gone), of)
                groups[call.segment].append(kernel)
        segments = tuple(Segment(layer, half, Run(g)) for (layer, half), g in zip(self.segments, groups, strict=True))
        return segments, dict(kept), dict(unused)

    def _layer_of(self, call: int) -> int | str:
        return self.segments[self.calls[call].segment][0]


def _column(storage: _Storage) -> int:
    if storage.gradient:
        return MOVING.index("gradients")
    if not storage.kept:
        return MOVING.index("temporary")
    return MOVING.index("loss" if storage.layer == HEAD and is_loss(storage.site) else "activations")


_DATA_DEPENDENT = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def _raw(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage behind a tensor; behind a sharded one (`DTensor`), this rank's."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _key(tensor: torch.Tensor) -> int:
    return _raw(tensor)._cdata


def _root_prefix(model: nn.Module) -> str:
    """The path that leads to the causal model itself (PEFT wraps it), removed from call sites."""
    base = workload.causal_model(model)
    return next((name + "." for name, module in model.named_modules() if module is base and name), "")


@contextlib.contextmanager
def tracing(model: nn.Module, known: Sequence[torch.Tensor], answer: bool = True) -> Iterator[Tracer]:
    """A `Tracer` in force, told which module is running by global hooks that are removed afterwards."""
    tracer = Tracer(model, known, answer)
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: tracer.enter(module, args)),
        nn.modules.module.register_module_forward_hook(lambda module, *_: tracer.leave(module), always_call=True),
    ]
    try:
        with tracer, _resizes_to(tracer):
            yield tracer
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _resizes_to(tracer: Tracer) -> Iterator[None]:
    """Tell `tracer` of storages that are resized in place, which is no operator."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> None:
        resize(self, size)
        tracer.resized(self)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def static_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Parameters and buffers of `model` and their optimizer state: what exists between steps."""
    states = [] if optimizer is None else [optimizer.state.get(p, {}) for p in model.parameters()]
    state = [value for each in states for value in each.values()]
    return [*model.parameters(), *model.buffers(), *(v for v in state if isinstance(v, torch.Tensor))]


def storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({_key(t): _raw(t).nbytes() for t in tensors}.values())


def trace_step(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
    answer: bool = True,
    meter: str = "traced tensors",
    hits: Callable[[], dict[str, dict[str, int]]] = dict,
    around: Callable[[Tracer], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> StepTrace:
    """Run one training step of `model` on `batch` under the tracer; gradients are None before and after.

    `around` makes a context for the step from the tracer (Liger's launches are recorded through it).
    """
    static = static_tensors(model, optimizer)
    known = static + [v for v in batch.values() if isinstance(v, torch.Tensor)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    with tracing(model, known, answer) as tracer, around(tracer):
        with autocast():
            loss = model(**batch).loss
        tracer.mark_kept()
        loss.backward()
        del loss
        tracer.mark_gradients(parameters)
        if optimizer is not None:
            tracer.optimizing = True
            optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    segments, kept, unused = tracer.recorded()
    layers = decoder_layers(model)
    one_layer = storage_bytes(static_tensors(layers[0], optimizer))
    sizes = {"unused": unused, "on_host": dict(tracer.on_host)}
    return StepTrace(segments, storage_bytes(static), one_layer, kept, len(layers), meter, hits=hits(), **sizes)
