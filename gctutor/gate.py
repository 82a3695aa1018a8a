"""The gate before a training job's first real step: did recompute change the gradients, and is that rounding or a bug?

The yardstick is computed, not chosen. Where the bits differ, the step is run once more in a wider precision, and each
layer may be as far from that reference as two roundings take it: twice as far as the same step without recompute. The
factor is the triangle inequality's: as a rule a replay that differs adds about one more rounding of the same forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import torch
from torch import nn

from gctutor.errors import UserError
from gctutor.gradients import Gradients, LayerGradient, compare_gradients, gradients_of
from gctutor.policies import Policy, parse
from gctutor.policies.core import refuse_foreign_checkpointing

Autocast = Callable[[], contextlib.AbstractContextManager]
Switch = Callable[[Any], contextlib.AbstractContextManager]

WRAPPERS = re.compile(r"_(checkpoint_wrapped_module|orig_mod|fsdp_wrapped_module)\.")
LOST = 0.5  # a reference farther off than half the gradient is another function, and no yardstick


@dataclass(frozen=True)
class Step:
    """The loss of one training step, and its gradients by parameter name on the host."""

    loss: float
    gradients: Gradients

    @property
    def norm(self) -> float:
        """The norm of all gradients together, as `clip_grad_norm_` returns it."""
        return math.sqrt(sum(g.double().square().sum().item() for g in self.gradients.values() if g is not None))

    def same_bits(self, other: Step) -> bool:
        """Whether both steps gave the same gradients, bit for bit."""
        mine, theirs = ({n: g for n, g in step.gradients.items() if g is not None} for step in (self, other))
        return mine.keys() == theirs.keys() and all(torch.equal(g, theirs[name]) for name, g in mine.items())

    def off(self, other: Step) -> float:
        """The relative difference of `other`'s gradient as a whole from this one; a missing gradient counts as zero."""
        zero = torch.zeros(())
        pairs = [(g, other.gradients.get(n)) for n, g in self.gradients.items() if g is not None]
        apart = sum((g.double() - (zero if o is None else o).double()).square().sum().item() for g, o in pairs)
        return math.sqrt(apart) / self.norm


def step_of(
    model: Any, batch: Mapping[str, Any], *, seed: int = 0, autocast: Autocast = contextlib.nullcontext
) -> Step:
    """One forward and backward from gradients None, every random generator seeded; nothing of it outlasts the call.

    Afterwards the gradients are None, and the generators of torch, numpy and Python stand where they stood.
    """
    model.zero_grad(set_to_none=True)
    with seeded(seed):
        with autocast():
            loss = model(**batch).loss
        loss.backward()
    gradients = {WRAPPERS.sub("", name): gradient for name, gradient in gradients_of(model).items()}
    model.zero_grad(set_to_none=True)
    return Step(loss.item(), gradients)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch (all devices), numpy and Python for the block, and restore their states afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


@dataclass(frozen=True)
class GateReport:
    """What `compare_recompute` found; `str()` is one sentence.

    `table` is None where the bits are equal. Else it has a row a layer: the relative errors `without` and `with`
    recompute against `reference`, what is `allowed` (twice the former), and the `cosine` of the two gradients.
    `repeatable` says whether the step without recompute gives its own bits again.
    """

    policy: str
    repeatable: bool
    same_loss: bool
    reference: str
    table: pandas.DataFrame | None = None

    @property
    def exact(self) -> bool:
        return self.table is None

    @property
    def passed(self) -> bool:
        return self.table is None or bool((self.table["with"] <= self.table["allowed"]).all())

    @property
    def worst_layer(self) -> str | None:
        """The layer farthest out, by what it is allowed."""
        return None if self.table is None else str((self.table["with"] / self.table["allowed"]).idxmax())

    def __str__(self) -> str:
        if self.table is None:
            return f"'{self.policy}' passes: bit for bit the gradients without recompute."
        row = self.table.loc[self.worst_layer]
        figures = (
            f"the error in `{self.worst_layer}` against {self.reference} is {row['with']:.1e}, "
            f"and {row['without']:.1e} without recompute"
        )
        if self.passed:
            shaky = "" if self.repeatable else ", as in the plain step from run to run"
            return f"'{self.policy}' passes: other bits{shaky}, but rounding only; at worst, {figures}."
        loss = "the loss is the same and shows nothing" if self.same_loss else "the loss differs too"
        return f"'{self.policy}' gives wrong gradients: {figures}; {loss}."


def compare_recompute(
    model: nn.Module,
    policy: str | Policy | Switch,
    batch: Mapping[str, Any],
    *,
    autocast: Autocast = contextlib.nullcontext,
    seed: int = 0,
) -> GateReport:
    """Compare one step of `model` under `policy` with the same step without recompute.

    `policy` is a concrete policy or its name, or, for checkpointing by other means, a function that takes the model and
    returns a context manager. Equal bits settle it; otherwise the model in the next wider precision (float32 for bf16
    weights and under `autocast`, else float64) is the reference, and only then is memory needed for wider weights.
    Raises `UserError` for a request such as `auto`, and where the wider step is another function.
    """
    applied = _switch(policy)
    refuse_foreign_checkpointing(model)
    plain, again = (step_of(model, batch, seed=seed, autocast=autocast) for _ in range(2))
    with applied(model):
        replayed = step_of(model, batch, seed=seed, autocast=autocast)
    name = str(policy) if isinstance(policy, str | Policy) else policy.__name__
    dtype = _wider(model, autocast)
    reference_name = f"the {str(dtype).removeprefix('torch.')} reference"
    report = GateReport(name, plain.same_bits(again), plain.loss == replayed.loss, reference_name)
    if plain.same_bits(replayed):
        return report
    with widened(model, dtype):
        reference = step_of(model, batch, seed=seed)
    return dataclasses.replace(report, table=_errors(reference, plain, replayed))


def recompute_gate(
    model: nn.Module, policy: str | Policy | Switch, batch: Mapping[str, Any], **options: Any
) -> GateReport:
    """`compare_recompute` for a training job: call it before the first real step, with a small real batch.

    Returns the report, or raises `UserError` with its sentence when the gradients under `policy` are wrong.
    """
    report = compare_recompute(model, policy, batch, **options)
    if not report.passed:
        raise UserError(str(report))
    return report


def _switch(policy: str | Policy | Switch) -> Switch:
    if callable(policy):
        return policy
    concrete = parse(policy) if isinstance(policy, str) else policy
    if not isinstance(concrete, Policy):
        raise UserError(f"'{concrete}' is a request: resolve it for your workload and device first.")
    return concrete.applied


def _wider(model: nn.Module, autocast: Autocast) -> torch.dtype:
    weights = next(model.parameters())
    with autocast():
        casts = torch.is_autocast_enabled(weights.device.type)
    return torch.float64 if weights.dtype == torch.float32 and not casts else torch.float32


@contextlib.contextmanager
def widened(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The same model with narrower weights and buffers cast to `dtype` for the block; then the same bits again.

    In place, because a deep copy would still call the original through any `forward` that was replaced on an instance.
    """
    narrow = [
        (tensor, tensor.data)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.is_floating_point() and tensor.itemsize < dtype.itemsize
    ]
    try:
        for tensor, data in narrow:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in narrow:
            tensor.data = data


def _errors(reference: Step, plain: Step, replayed: Step) -> pandas.DataFrame:
    without = _relative(compare_gradients(reference.gradients, plain.gradients))
    if max(without.values()) > LOST:
        raise UserError(
            f"The reference is {max(without.values()):.0%} off without recompute: it is another function. "
            "Set dropout to 0 for the gate."
        )
    table = pandas.DataFrame(
        {
            "without": without,
            "with": _relative(compare_gradients(reference.gradients, replayed.gradients)),
            "allowed": {layer: 2 * error for layer, error in without.items()},
            "cosine": {row.layer: row.cosine for row in compare_gradients(plain.gradients, replayed.gradients)},
        }
    )
    return table.rename_axis("layer")


def _relative(rows: Sequence[LayerGradient]) -> dict[str, float]:
    """The relative error of each layer; a layer without some of its gradients is infinitely wrong."""
    return {row.layer: math.inf if row.missing else row.relative for row in rows}


def norm_jumps(norms: Sequence[float], *, window: int = 20, sigmas: float = 6.0, factor: float = 2.0) -> list[int]:
    """The steps at which the gradient norm leaves what the `window` steps before it (at least five) lead to expect.

    A jump is farther from their median than `sigmas` robust standard deviations (1.4826 × the median absolute
    deviation), on a log scale, and by more than `factor`. A norm that is zero or not finite is one too.
    """
    jumps = []
    logs: list[float] = []
    for step, norm in enumerate(norms):
        if not (math.isfinite(norm) and norm > 0):
            jumps.append(step)
            continue
        before = logs[-window:]
        logs.append(math.log(norm))
        if len(before) < 5:
            continue
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in before)
        if abs(logs[-1] - middle) > max(sigmas * spread, math.log(factor)):
            jumps.append(step)
    return jumps
