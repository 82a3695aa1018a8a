"""`compile`, `compile:0.5`: `torch.compile` per layer, whose partitioner keeps or recomputes under a memory budget.

The budget is `torch._functorch.config.activation_memory_budget`: 1 keeps what compiled `none` keeps, 0 recomputes all
it can. It acts when a layer is compiled, which happens lazily in the first step, so it is set for the whole block.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gctutor.policies.core import Mechanism, PolicyError, attributes
from gctutor.workload import Workload


@dataclass(frozen=True)
class Compiled(Mechanism):
    """Compile each layer with an activation memory `budget` between 0 and 1, relative to what compiled `none` keeps.

    Compiled layers fall back to eager under a dispatch mode or saved-tensor hooks, hence not `traceable`.
    """

    budget: float = 1.0

    traceable = False

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        return self.budget < 1

    def __str__(self) -> str:
        return "compile" if self.budget == 1 else f"compile:{self.budget:g}"

    def refuse(self, workload: Workload, device_kind: str) -> None:
        if device_kind == "cpu" and workload.liger_parts:
            raise PolicyError(f"'{self}' cannot compile Liger's Triton kernels for a CPU: use kernels='hf'.")

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise PolicyError(f"'compile:{self.budget:g}': the budget is a share between 0 and 1, as in 'compile:0.5'.")

    @contextlib.contextmanager
    def on(self, model: nn.Module, layers: Sequence[nn.Module], hits: Counter[str]) -> Iterator[None]:
        from torch._functorch import config

        _require_compiler(str(self))
        compiler = self._compiler(hits)
        with contextlib.ExitStack() as undo:
            undo.enter_context(config.patch(activation_memory_budget=self.budget))
            torch._dynamo.reset()
            undo.callback(torch._dynamo.reset)
            for layer in layers:
                compiled = torch.compile(layer._call_impl, backend=compiler)
                undo.enter_context(attributes(layer, _compiled_call_impl=compiled))
            yield

    def _compiler(self, hits: Counter[str]) -> Callable:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        def compiler(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            hits["budget"] += config.activation_memory_budget == self.budget
            return compile_fx(graph, example_inputs)

        return compiler

    def unmatched(self, hits: Counter[str]) -> list[str]:
        """`budget` when no layer was compiled under it."""
        return [] if hits["budget"] else ["budget"]


def _require_compiler(policy: str) -> None:
    """Inductor compiles C++ on a CPU, and Triton a C launcher on a GPU."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise PolicyError(f"'{policy}' needs a C++ compiler, and none is here: install g++ or set CXX.") from error
