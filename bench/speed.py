"""`make bench`: how fast the package is, and what each mechanism costs where there is nothing but overhead.

Every line of the table is measured here and now; nothing is asserted.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, Qwen3Config, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gctutor import workload as workloads
from gctutor.estimation import estimate, trace
from gctutor.fake import fake_model, fake_tensors
from gctutor.policies import parse
from gctutor.policies.block import checkpointed
from gctutor.policies.modules import ALL
from gctutor.terminal import show_table
from gctutor.workload import Workload, decoder_layers

MECHANISMS = ("none", "block", "modules:all", "ops:mm,core_attn,-down_proj")
ROUNDS = 5


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# --- speed of the package


def import_time() -> Iterator[tuple[str, str]]:
    code = "import time; t = time.perf_counter(); import gctutor; print(time.perf_counter() - t)"
    runs = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    yield "import gctutor", f"{1e3 * min(runs):.0f} ms"


def estimate_time() -> Iterator[tuple[str, str]]:
    workload = Workload("Qwen3-8B", 1, 4096)
    estimate(Workload("nano@1", 1, 16), "none", cache=False)  # imports and first calls
    for policy in ("none", "block", "modules:all"):
        yield (
            f"estimate Qwen3-8B 1 × 4096, {policy}",
            f"{seconds(lambda p=policy: estimate(workload, p, cache=False)):.2f} s",
        )
    estimate(workload, "none")
    yield "the same from the disk cache, none", f"{seconds(lambda: estimate(workload, 'none')):.2f} s"


def memtracker() -> Iterator[tuple[str, str]]:
    """torch's own memory tracker on the same fake step: the same bytes, and how much longer it takes."""
    for layers in (2, 4):
        workload = Workload(f"Qwen3-8B@{layers}", 1, 4096)
        start = time.perf_counter()
        ours = trace(workload, "none", exact=True, cache=False).peak_bytes
        ours_s = time.perf_counter() - start
        with workloads.quiet_transformers(), fake_tensors("cuda") as mode:
            model, batch = fake_model(workload, mode), workloads.inputs(workload)
            tracker = MemTracker()
            tracker.track_external(model)
            start = time.perf_counter()
            with tracker, no_packing():
                model(**batch).loss.backward()
            theirs_s = time.perf_counter() - start
            peak = tracker.get_tracker_snapshot("peak")
        theirs = sum(sizes["Total"] for sizes in peak.values())
        yield f"peak of Qwen3-8B@{layers}: traced, MemTracker", f"{ours:,} and {theirs:,} bytes"
        yield (
            "seconds it takes: traced, MemTracker",
            f"{ours_s:.1f} and {theirs_s:.1f} s, a ratio of {theirs_s / ours_s:.0f}",
        )


def no_packing() -> contextlib.AbstractContextManager:
    """Spare MemTracker the question whether the batch is packed, which fake tensors cannot answer."""
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None)


# --- overhead of the mechanisms


def deep_and_tiny() -> Any:
    """36 layers so small that a step is all overhead."""
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=36, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).train()


@contextlib.contextmanager
def torch_remat(model: Any) -> Iterator[None]:
    """The same modules kept by Meta's torch_remat; every kept output is marked, as torch 2.13 needs it."""
    import torch_remat as remat

    def kept(function: Callable, name: str) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = remat.region(function, name, recompute=False)(*args, **kwargs)
            remat.recompute_needs_tensor(out[0] if isinstance(out, tuple) else out)
            return out

        return run

    def region(forward: Callable, *args: Any, **kwargs: Any) -> Any:
        return remat.checkpoint()(forward)(*args, **kwargs)

    with contextlib.ExitStack() as undo:
        undo.enter_context(checkpointed(decoder_layers(model), region))
        attention = kept(sdpa_attention_forward, "core_attn")
        undo.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": attention}))
        for layer in decoder_layers(model):
            for path, module in layer.named_modules():
                if path.rpartition(".")[2] in ALL:
                    undo.enter_context(mock.patch.object(module, "forward", kept(module.forward, path)))
        yield


def overhead() -> Iterator[tuple[str, str]]:
    small = Workload("nano", 1, 128, precision="fp32")
    models = {
        "36 tiny layers": (deep_and_tiny(), torch.zeros(1, 16, dtype=torch.long)),
        "nano 1 × 128": (workloads.build(small), workloads.inputs(small)["input_ids"]),
    }
    for title, (model, ids) in models.items():
        times = _interleaved(model, {"input_ids": ids, "labels": ids, "use_cache": False})
        base = times["none"]
        for name, step_s in times.items():
            yield f"{title}: {name}", f"{1e3 * step_s:.0f} ms, {step_s / base:.2f} × none"


def _interleaved(model: Any, batch: dict[str, Any]) -> dict[str, float]:
    """Median step seconds of each mechanism, taking turns."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    contexts: dict[str, Callable] = {text: parse(text).applied for text in MECHANISMS}
    with contextlib.suppress(ImportError):
        import torch_remat as _  # noqa: F401

        contexts["torch_remat"] = torch_remat
    samples: dict[str, list[float]] = {name: [] for name in contexts}
    for _round in range(ROUNDS):
        for name, context in contexts.items():
            with context(model):
                step()
                samples[name].append(seconds(step))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def main() -> None:
    rows = [row for part in (import_time, estimate_time, memtracker, overhead) for row in part()]
    show_table(f"On a CPU, {torch.get_num_threads()} threads, torch {torch.__version__}", ("what", "here"), rows)


if __name__ == "__main__":
    main()
