"""A policy as lines to paste into a training script, and what the same choice is called elsewhere."""

from __future__ import annotations

from gctutor.policies import Policy, parse
from gctutor.workload import Workload


def lines_to_paste(policy: str | Policy, workload: Workload | None = None) -> dict[str, str]:
    """The same choice for plain transformers, `Trainer`/TRL, and torchtitan, Axolotl and Megatron where it exists.

    With a `workload`, what else its cost depends on comes first, under `setting`: kernels, LoRA and the optimizer.
    """
    text = str(parse(policy) if isinstance(policy, str) else policy)
    applied = f'from gctutor import parse\n\nwith parse("{text}").applied(model):\n    '
    lines = {
        "transformers": applied + "train(model)  # your loop",
        "Trainer / TRL": applied + "trainer.train()  # leave gradient_checkpointing=False in the arguments",
    }
    setting = "" if workload is None else _setting(workload)
    return {**({"setting": setting} if setting else {}), **lines, **NATIVE.get(text, {})}


def _setting(workload: Workload) -> str:
    """Python lines that make a loaded `model` that of `workload`, in the order in which they must run."""
    lines = []
    if workload.liger_parts:
        lines.append(f"from gctutor import liger\nliger.patch(model, {workload.liger_parts!r})")
    if workload.chunked_loss is not None:
        tokens = f", {workload.chunked_loss}" if workload.chunked_loss else ""
        lines.append(f"from gctutor import chunked_loss\nchunked_loss.patch(model{tokens})  # torch 2.13 or newer")
    if workload.trainable != "full":
        rank = workload.trainable.partition(":")[2]
        lines.append(
            "from peft import LoraConfig, get_peft_model\n"
            f'config = LoraConfig(r={rank}, target_modules="all-linear", task_type="CAUSAL_LM")\n'
            "model = get_peft_model(model, config)"
        )
    if workload.optimizer is not None:
        lines.append(f"import {OPTIMIZERS[workload.optimizer].split('.')[0]}")
        lines.append(
            f"optimizer = {OPTIMIZERS[workload.optimizer]}  # Trainer: optim={TRAINER_OPTIMIZERS[workload.optimizer]!r}"
        )
    return "\n".join(lines)


OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), fused=True)",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit(model.parameters())",
    "sgd": "torch.optim.SGD(model.parameters())",
}
TRAINER_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd"}
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
