"""The model that the doctor runs, and how a workload too large for this machine becomes one that is not."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gctutor import estimation, tracing, workload as workloads
from gctutor.errors import UserError
from gctutor.policies import Policy
from gctutor.steptrace import StepTrace
from gctutor.workload import Workload

CPU_FLOP = 1e12  # a step of more takes minutes on a CPU
NARROW = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128}
NARROW_HEADS, NARROW_BATCH, NARROW_TOKENS = 4, 2, 32

Autocast = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Patient:
    """A model with the step to run on it; `how` says in a sentence what is run.

    `traces`, without and with the policy, stand in for those that would be taken of the model.
    """

    model: Any
    batch: dict[str, Any]
    name: str
    how: str
    autocast: Autocast = contextlib.nullcontext
    seed: int = 0
    traces: tuple[StepTrace, StepTrace] | None = None

    def step(self) -> None:
        """One forward and backward from gradients None, every source of random numbers seeded."""
        self._prepare()
        with self.autocast():
            loss = self.model(**self.batch).loss
        if loss is None:
            raise UserError("The model returned no loss: the batch needs labels.")
        loss.backward()

    def trace(self) -> StepTrace:
        """The same step under the tracer."""
        self._prepare()
        return tracing.trace_step(self.model, self.batch, autocast=self.autocast)

    def _prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)
        random.seed(self.seed)
        torch.clear_autocast_cache()


def of_model(model: Any, batch: dict[str, Any] | None, autocast: Autocast, seed: int) -> Patient:
    """A user's own model; without a `batch`, random `input_ids` of shape (2, 16) and equal `labels`."""
    device = next(model.parameters()).device
    if batch is None:
        ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": ids.to(device), "labels": ids.to(device)}
    return Patient(model, batch, type(model).__name__, f"Run here on {device}.", autocast, seed)


def of_workload(workload: Workload, policy: Policy, device: str, seed: int) -> Patient:
    """The workload's model where it fits `device`; else bytes on fake tensors and gradients on a narrow model.

    Raises `PolicyError` when the policy cannot work with the workload.
    """
    policy.refuse(workload, device)
    none = estimation.trace(workload, "none", kind=device)
    if _fits(workload, none, device):
        model, batch = workloads.build(workload, device, seed=seed), workloads.inputs(workload, device, seed=seed)
        how = f"Run here on {device}."
        return Patient(model, batch, workload.label, how, lambda: workload.autocast(device), seed)
    traces = (estimation.trace(workload, "none"), estimation.trace(workload, policy))
    with _narrowed(workload) as narrow:
        model, batch = workloads.build(narrow, device, seed=seed), workloads.inputs(narrow, device, seed=seed)
    how = (
        f"Too large to run on {device}: bytes and operators are of fake tensors, as on a GPU; gradients of a narrow "
        f"random model of its class ({workload.n_layers} layers, hidden {NARROW['hidden_size']}, {narrow.batch} × "
        f"{narrow.seqlen} tokens, kernels hf) run here."
    )
    return Patient(model, batch, workload.label, how, lambda: workload.autocast(device), seed, traces)


def _fits(workload: Workload, step: StepTrace, device: str) -> bool:
    if device == "cuda":
        return step.peak_bytes < torch.cuda.mem_get_info()[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return step.flop() < CPU_FLOP and step.peak_bytes < free and not workload.liger_parts


@contextlib.contextmanager
def _narrowed(workload: Workload) -> Iterator[Workload]:
    """The workload narrow and short, of the same class and depth; its configuration's folder lives for the block."""
    config = workload.config()
    for name, size in NARROW.items():
        if hasattr(config, name):
            setattr(config, name, size)
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    config.num_attention_heads = NARROW_HEADS
    config.num_key_value_heads = max(1, NARROW_HEADS // groups)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        yield workload.replace(
            model=folder,
            batch=min(workload.batch, NARROW_BATCH),
            seqlen=min(workload.seqlen, NARROW_TOKENS),
            kernels="hf",
            attention="sdpa" if workload.attention.startswith("flash") else workload.attention,
        )
