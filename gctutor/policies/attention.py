"""Hugging Face's attention call, intercepted: the function that a model's attention module looks up by name."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_lock = threading.Lock()
_originals: dict[Callable, list[Callable]] = {}


@contextlib.contextmanager
def attention_through(wrapper: Callable) -> Iterator[None]:
    """For the block, every attention call is `wrapper(function, *args, **kwargs)`, `function` being the model's own.

    Serves `eager`, `sdpa`, flash and registered functions alike, for every model of the process: the wrapper decides
    by what runs in its own thread. Blocks may overlap in any order; the last to leave restores the look-up.
    """
    from transformers.modeling_utils import AttentionInterface

    interface: Any = AttentionInterface
    with _lock:
        stack = _originals.setdefault(wrapper, [])
        stack.append(interface.get_interface)
        if len(stack) == 1:
            interface.get_interface = _looking_up(interface.get_interface, wrapper)
    try:
        yield
    finally:
        with _lock:
            if len(stack) == 1:
                interface.get_interface = stack[0]
                del _originals[wrapper]
            else:
                stack.pop()


def _looking_up(original: Callable, wrapper: Callable) -> Callable:
    @functools.wraps(original)
    def get_interface(self: Any, implementation: str, default: Callable) -> Callable:
        return functools.partial(wrapper, original(self, implementation, default))

    return get_interface
