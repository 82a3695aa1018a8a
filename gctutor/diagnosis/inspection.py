"""What can be seen wrong with a model's checkpointing without running a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from gctutor.diagnosis.report import FAULT, WARNING, Finding
from gctutor.diagnosis.selective import check_sac_policy
from gctutor.errors import unknown
from gctutor.workload import causal_model, decoder_layers

_OWN = [name for name, p in inspect.signature(checkpoint).parameters.items() if p.kind is p.KEYWORD_ONLY]
CHECKPOINT_KWARGS = (*_OWN, "preserve_rng_state")


def inspect_model(model: Any, batch: dict[str, Any]) -> list[Finding]:
    """Findings about `model` as it stands, before a step on `batch`."""
    return [*_mode(model), *_wrappers(model), *_switch(model), *_input_hooks(model), *_cache(model, batch)]


def _mode(model: Any) -> Iterator[Finding]:
    if not all(layer.training for layer in decoder_layers(model)):
        yield Finding(
            FAULT,
            "eval_mode",
            "The model is in eval mode, where Hugging Face checkpoints nothing: call model.train(). "
            "The rest of this report is for train mode.",
        )


# --- other tools' checkpointing -------------------------------------------------------------------------------------


def wrappers(model: nn.Module) -> list[Any]:
    """The modules that torch's `checkpoint_wrapper` made, nested ones included."""
    return [module for module in model.modules() if type(module).__name__ == "CheckpointWrapper"]


def switched_on(model: nn.Module) -> list[Any]:
    """The decoder layers whose Hugging Face switch is on."""
    return [layer for layer in decoder_layers(model) if layer.gradient_checkpointing]


def _wrappers(model: nn.Module) -> Iterator[Finding]:
    found = wrappers(model)
    if not found:
        return
    inside = [w for w in found if type(w._checkpoint_wrapped_module).__name__ == "CheckpointWrapper"]
    if inside:
        yield Finding(
            FAULT,
            "nested_wrappers",
            f"{len(found)} checkpoint wrappers stand round {len(found) - len(inside)} modules: "
            "the wrapping was applied more than once, so build the model anew and wrap it once.",
        )
    if switched_on(model):
        yield Finding(
            FAULT,
            "two_mechanisms",
            "Hugging Face's switch is on and torch's checkpoint_wrapper is there too: use one of them.",
        )
    if any(getattr(w.checkpoint_impl, "name", "") == "REENTRANT" for w in found):
        yield reentrant("torch's checkpoint_wrapper is reentrant")


def inspect_parallel(model: nn.parallel.DistributedDataParallel) -> Iterator[Finding]:
    """Findings about a DDP wrapper and the checkpointing of the model in it."""
    searching = model.find_unused_parameters
    if searching and not model.static_graph:
        yield Finding(
            WARNING,
            "unused_search",
            "DDP walks the graph of every step in search of unused parameters: a dense decoder has none, so leave "
            "find_unused_parameters off.",
        )
    kwargs = [getattr(layer._gradient_checkpointing_func, "keywords", {}) for layer in switched_on(model)[:1]]
    if searching and any(given.get("use_reentrant", True) for given in kwargs):
        yield Finding(
            FAULT,
            "ready_twice",
            "Reentrant checkpointing runs a backward inside the backward: with find_unused_parameters DDP sees its "
            "parameters become ready twice and stops. Use use_reentrant=False.",
        )


def _switch(model: nn.Module) -> Iterator[Finding]:
    layers = switched_on(model)
    if layers:
        kwargs = getattr(layers[0]._gradient_checkpointing_func, "keywords", {})
        yield from check_checkpoint_kwargs(kwargs, dropout=has_dropout(model))


def sac_policy(model: nn.Module) -> Callable | None:
    """The `context_fn` given to Hugging Face's switch on `model`, if any."""
    for layer in switched_on(model)[:1]:
        return getattr(layer._gradient_checkpointing_func, "keywords", {}).get("context_fn")
    return None


def check_checkpoint_kwargs(kwargs: dict[str, Any], *, dropout: bool = True) -> list[Finding]:
    """What is wrong with the keyword arguments given to `activation_checkpointing_enable` or `checkpoint`.

    torch hands unknown ones on to the layer, which swallows them. `dropout` says whether the model draws numbers.
    """
    findings = [
        Finding(
            FAULT,
            "unknown_kwarg",
            f"{unknown('checkpoint option', name, CHECKPOINT_KWARGS)} It reaches the layer and changes nothing.",
        )
        for name in kwargs
        if name not in CHECKPOINT_KWARGS
    ]
    if kwargs.get("use_reentrant") is None:
        findings.append(reentrant("The checkpoint options omit use_reentrant, which selects the reentrant variant"))
    elif kwargs["use_reentrant"]:
        findings.append(reentrant("use_reentrant is True"))
    if kwargs.get("preserve_rng_state") is False and dropout:
        findings.append(
            Finding(
                FAULT,
                "rng_not_preserved",
                "preserve_rng_state is False and the model has dropout: the replay draws another mask, so gradients "
                "belong to another loss.",
            )
        )
    if kwargs.get("context_fn") is not None:
        findings += check_sac_policy(kwargs["context_fn"])
    return findings


def reentrant(what: str) -> Finding:
    """A warning of the reentrant checkpoint; `what` says where it was chosen."""
    return Finding(
        WARNING,
        "reentrant",
        f"{what}: it needs inputs that require gradients and fails silently; pass use_reentrant=False.",
    )


def has_dropout(model: nn.Module) -> bool:
    """Whether any module of `model` drops out in training."""
    chances = ("p", "attention_dropout", "dropout", "dropout_p")
    values = (getattr(module, name, 0) for module in model.modules() for name in chances)
    return any(isinstance(value, float) and value > 0 for value in values)


def _input_hooks(model: Any) -> Iterator[Finding]:
    """The hook that makes embeddings require gradients: reentrant checkpointing needs it, anything else pays for it."""
    owner = causal_model(model)
    if not getattr(owner, "_require_grads_hooks", None) or owner.get_input_embeddings().weight.requires_grad:
        return
    layers = switched_on(model)
    if not any(
        getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True) for layer in layers
    ):
        yield Finding(
            WARNING,
            "input_hook",
            "The embeddings are frozen, but a hook of Hugging Face's switch makes their output require gradients: "
            "backward runs through frozen layers for nothing; call model.disable_input_require_grads().",
        )


def _cache(model: Any, batch: dict[str, Any]) -> Iterator[Finding]:
    if not batch.get("use_cache", getattr(model.config, "use_cache", False)):
        return
    fixed = not wrappers(model)
    yield Finding(
        WARNING if fixed else FAULT,
        "cache_on",
        "The KV cache is on in training: a replayed layer appends its keys and values a second time; "
        "set model.config.use_cache = False." + (" (Hugging Face's switch and gctutor turn it off.)" if fixed else ""),
    )
