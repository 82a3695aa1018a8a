"""The policy strings: `parse` reads one, `catalogue` lists those a lesson shows, `family` groups them for colours."""

from __future__ import annotations

import re
from collections.abc import Callable

from gctutor.errors import unknown
from gctutor.policies.block import Block, Keep
from gctutor.policies.compiled import Compiled
from gctutor.policies.core import Mechanism, Part, Policy, PolicyError, Request
from gctutor.policies.modules import ALL, SITES, Modules
from gctutor.policies.ops import read_ops
from gctutor.policies.submodule import PARTS, Sub

CATALOGUE = {
    "none": "keep everything",
    "block": "Hugging Face's switch: replay whole decoder layers",
    "block/2": "the switch on every second layer",
    "block+offload": "the switch, layer inputs held on the host",
    "block+reentrant": "the switch with the reentrant checkpoint (for the pitfalls only)",
    "sub:mlp": "replay each layer's MLP",
    "sub:attn": "replay each layer's attention module",
    "sub:attn,mlp": "replay both",
    "sub:norms": "replay the norms",
    "ops:core_attn": "SAC: keep the attention kernel's output",
    "ops:mm,core_attn": "SAC: keep every matrix product and attention",
    "ops:mm,core_attn,-down_proj": "the same without the product that early stop never reruns",
    "ops:every2mm,core_attn": "torchtitan's rule: keep every second matrix product, and attention",
    "modules:core_attn": "keep the attention kernel's output, replay the rest",
    "modules:all": "keep the outputs of the linear layers (but down_proj) and of the attention kernel",
    "compile": "torch.compile per layer",
    "compile:0.5": "the same, its partitioner given half of the activation memory",
}


def catalogue() -> dict[str, str]:
    """Policies worth knowing by name, each with one line of what it does."""
    return dict(CATALOGUE)


FAMILIES = ("none", "block", "sub", "ops", "modules", "compile", "mix", "auto", "budget")


def family(text: str) -> str:
    """The family of a policy string, by which figures choose colour and marker: one of `FAMILIES`."""
    if ";" in text:
        return "mix"
    return re.split(r"[:/+@]", text.strip(), maxsplit=1)[0]


def parse(text: str) -> Policy | Request:
    """The policy that `text` names. Raises `PolicyError` with the nearest valid name for anything unknown.

    `str(parse(text))` is the canonical spelling and parses to an equal value.
    """
    text = re.sub(r"\s+", "", text)
    request = _request(text)
    if request is not None:
        return request
    pieces = [piece for piece in text.split(";") if piece]
    if not pieces:
        raise PolicyError(f"An empty policy: choose from {', '.join(CATALOGUE)}.")
    parts = tuple(_part(piece) for piece in pieces)
    if len(parts) > 1 and any(part.first is None for part in parts):
        raise PolicyError(f"{text!r} mixes policies: give each its layers, as in 'none@0-3;block@4-35'.")
    if len({part.mechanism for part in parts if isinstance(part.mechanism, Compiled)}) > 1:
        raise PolicyError(f"{text!r} names two compile budgets, but layers share their compiled code: choose one.")
    return Policy(parts, rest=Block(), skipped=Keep())


def concrete(text: str) -> Policy:
    """The concrete policy that `text` names. Raises `PolicyError` for a request (`auto`, `budget:…`) as well."""
    policy = parse(text)
    if isinstance(policy, Request):
        raise PolicyError(f"'{policy}' is a request: resolve it for a workload and a device first.")
    return policy


def _request(text: str) -> Request | None:
    if text == "auto":
        return Request("auto")
    match = re.fullmatch(r"budget:(\d*\.?\d+)", text)
    if match:
        share = float(match[1])
        if not 0 < share <= 1:
            raise PolicyError(f"{text!r}: the budget is a share of none's activation bytes, above 0 and at most 1.")
        return Request("budget", share)
    return None


def _part(piece: str) -> Part:
    match = re.fullmatch(r"(?P<name>[^@/]+)(?:/(?P<every>\d+))?(?:@(?P<first>\d+)(?:-(?P<last>\d+))?)?", piece)
    if match is None:
        raise PolicyError(f"{piece!r} is not a policy: write NAME, NAME@FIRST-LAST or block/N.")
    every = int(match["every"] or 1)
    mechanism = _mechanism(match["name"])
    if match["every"] and (every < 2 or not isinstance(mechanism, Block)):
        raise PolicyError(f"{piece!r}: '/N' is for block, with N of at least 2, as in 'block/2'.")
    if match["first"] is None:
        return Part(mechanism, every=every)
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise PolicyError(f"{piece!r}: the layer range runs backwards.")
    return Part(mechanism, first, last, every)


def _mechanism(name: str) -> Mechanism:
    head, colon, rest = name.partition(":")
    if head in READERS and (colon or head == "compile"):
        return READERS[head](rest)
    if name in PLAIN:
        return PLAIN[name]
    raise _as_policy_error(unknown("policy", name, [*CATALOGUE, "auto", "budget:0.4"]))


def _as_policy_error(error: ValueError) -> PolicyError:
    return PolicyError(str(error))


def _names(rest: str, valid: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The listed names in the fixed order of `valid`, each once."""
    given = [name for name in rest.split(",") if name]
    if not given:
        raise PolicyError(f"{what} needs at least one of {', '.join(valid)}.")
    for name in given:
        if name not in valid:
            raise _as_policy_error(unknown(what, name, valid))
    return tuple(name for name in valid if name in given)


def _read_modules(rest: str) -> Mechanism:
    return Modules(ALL if rest == "all" else _names(rest, SITES, "module to keep"))


def _read_compiled(rest: str) -> Mechanism:
    if not re.fullmatch(r"(\d*\.?\d+)?", rest):
        raise PolicyError(f"'compile:{rest}': write a share between 0 and 1 after the colon, as in 'compile:0.5'.")
    return Compiled(float(rest or 1))


PLAIN: dict[str, Mechanism] = {
    "none": Keep(),
    "block": Block(),
    "block+offload": Block(offload=True),
    "block+reentrant": Block(reentrant=True),
}
READERS: dict[str, Callable[[str], Mechanism]] = {
    "sub": lambda rest: Sub(_names(rest, PARTS, "part of a layer")),
    "ops": read_ops,
    "modules": _read_modules,
    "compile": _read_compiled,
}
