"""gctutor: measure, predict and choose gradient checkpointing policies for Qwen3-class models.

Attributes are imported on first use, so ``import gctutor`` loads neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Workload": "workload",
    "StepCost": "results",
    "Results": "results",
    "colophon": "results",
    "find_device": "devices",
    "list_devices": "devices",
    "parse": "policies",
    "catalogue": "policies",
    "trace": "estimation",
    "estimate": "estimation",
    "sweep": "estimation",
    "timeline": "estimation",
    "layer_operators": "operators",
    "measure": "measurement",
    "plan": "planner",
    "resolve": "planner",
    "frontier": "optimum",
    "lines_to_paste": "paste",
    "availability": "attention",
    "doctor": "diagnosis",
    "compare_gradients": "gradients",
    "explore": "explorers",
    "check": "claims",
    "check_close": "claims",
    "judge": "claims",
    "scorecard": "claims",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'gctutor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gctutor.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
