"""Two instruments for a step on a CUDA device: the allocator's own history, and the time that kernels were running."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

MAX_EVENTS = 1_000_000
POINTS = 2_000


def memory_history(step: Callable[[], Any]) -> dict[str, list]:
    """Allocated bytes over `step`, by the CUDA allocator's record of every allocation and free.

    Returns `seconds` (from the first event) and `bytes` (allocated after it), at most `POINTS` of each.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS, clear_history=True)
    try:
        step()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return thinned(*levels(events, before))


def levels(events: Iterable[dict[str, Any]], before: int) -> tuple[list[float], list[int]]:
    """Seconds and allocated bytes after each allocation and free in an allocator trace that began at `before` bytes."""
    signs = {"alloc": 1, "free_requested": -1}
    seconds, sizes, level = [], [], before
    for event in events:
        if event["action"] in signs:
            level += signs[event["action"]] * event["size"]
            seconds.append(event["time_us"] / 1e6)
            sizes.append(level)
    return [moment - seconds[0] for moment in seconds], sizes


def thinned(seconds: list[float], sizes: list[int], points: int = POINTS) -> dict[str, list]:
    """At most `points` of the events, the highest of each stretch, so that the peak survives."""
    stretch = -(-len(sizes) // points) or 1
    highest = [
        max(range(start, min(start + stretch, len(sizes))), key=sizes.__getitem__)
        for start in range(0, len(sizes), stretch)
    ]
    return {"seconds": [seconds[i] for i in highest], "bytes": [sizes[i] for i in highest]}


def busy_seconds(step: Callable[[], Any]) -> float:
    """Time that kernels and copies ran in one `step`, by torch's profiler (one stream: no overlap)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
