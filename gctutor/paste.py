"""A policy as lines to paste into a training script, and what the same choice is called elsewhere."""

from __future__ import annotations

from gctutor.policies import Policy, parse


def lines_to_paste(policy: str | Policy) -> dict[str, str]:
    """The same choice for plain transformers, `Trainer`/TRL, and torchtitan, Axolotl and Megatron where it exists."""
    text = str(parse(policy) if isinstance(policy, str) else policy)
    applied = f'from gctutor import parse\n\nwith parse("{text}").applied(model):\n    '
    lines = {
        "transformers": applied + "train(model)  # your loop",
        "Trainer / TRL": applied + "trainer.train()  # leave gradient_checkpointing=False in the arguments",
    }
    return {**lines, **NATIVE.get(text, {})}


_SWITCH = 'model.activation_checkpointing_enable({"use_reentrant": False}'
_ARGUMENTS = 'gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}'
NATIVE: dict[str, dict[str, str]] = {
    "none": {
        "transformers": "model.activation_checkpointing_disable()",
        "Trainer / TRL": "gradient_checkpointing=False",
        "torchtitan": '[activation_checkpoint]\nmode = "none"',
        "Axolotl": "gradient_checkpointing: false",
        "Megatron": "(leave --recompute-granularity out)",
    },
    "block": {
        "transformers": f"{_SWITCH})",
        "Trainer / TRL": _ARGUMENTS,
        "torchtitan": '[activation_checkpoint]\nmode = "full"',
        "Axolotl": "gradient_checkpointing: true\ngradient_checkpointing_kwargs:\n  use_reentrant: false",
        "Megatron": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    },
    "block/2": {
        "transformers": f"{_SWITCH}, every_n_layers=2)",
        "torchtitan": '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"',
    },
    "block+offload": {
        "transformers": f"{_SWITCH}, offload=True)",
        "Axolotl": "gradient_checkpointing: offload",
    },
    "sub:mlp": {"Megatron": "--recompute-granularity selective --recompute-modules mlp"},
    "ops:every2mm,core_attn": {"torchtitan": '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"'},
}
