"""What is trained: the `Workload` value, the Qwen3 size table, and building the real Hugging Face model from it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gctutor.errors import UserError, unknown

if TYPE_CHECKING:
    import torch

# hidden, MLP, layers, heads, K/V heads, head dimension, vocabulary, longest sequence, tied embeddings:
# the `config.json` published with each Qwen3 model (https://huggingface.co/Qwen); `nano` is this project's own.
SIZES: dict[str, tuple[int, int, int, int, int, int, int, int, bool]] = {
    "nano": (512, 1536, 6, 8, 2, 64, 2048, 4096, False),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, 40960, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936, 40960, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151936, 40960, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151936, 40960, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151936, 40960, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151936, 40960, False),
}
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
LIGER_PARTS = ("rms_norm", "rope", "swiglu", "fused_linear_cross_entropy", "cross_entropy")
PRECISIONS = ("bf16", "amp", "fp32")
OPTIMIZERS = (None, "adamw", "adamw8bit", "sgd")
MASKS = ("none", "padding", "packed")


@dataclass(frozen=True)
class Workload:
    """A training step, fully named.

    `model` is a size of the table, a Hub name or a folder with a `config.json`; `Qwen3-8B@8` cuts the depth to eight
    layers at full width. `kernels` is `hf`, `liger`, or Liger's parts (`liger:rms_norm,rope,swiglu`). `precision` is
    `bf16` (pure), `amp` (fp32 weights under bf16 autocast, as `Trainer(bf16=True)` does) or `fp32`. `trainable` is
    `full` or `lora:RANK`. Raises `UserError` for a value that cannot work.
    """

    model: str = "Qwen3-8B"
    batch: int = 1
    seqlen: int = 4096
    attention: str = "sdpa"
    kernels: str = "hf"
    precision: str = "bf16"
    trainable: str = "full"
    optimizer: str | None = None
    mask: str = "none"
    layers: int | None = None

    def __post_init__(self) -> None:
        name, at, depth = self.model.partition("@")
        if at:
            if not depth.isdigit():
                raise UserError(f"{self.model!r}: write the number of layers after '@', as in 'Qwen3-8B@8'.")
            object.__setattr__(self, "layers", int(depth))
        size_name = name.removeprefix("Qwen/")  # the Hub's name of a size of the table
        object.__setattr__(self, "model", size_name if size_name in SIZES else name)
        for size, least in (("batch", 1), ("seqlen", 2)):
            value = getattr(self, size)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{size} must be a whole number of at least {least}, not {value!r}.")
        if self.layers is not None and self.layers < 1:
            raise UserError(f"layers must be at least 1, not {self.layers}.")
        if self.model in SIZES and self.layers is not None and self.layers > SIZES[self.model][2]:
            raise UserError(f"{self.model} has {SIZES[self.model][2]} layers, not {self.layers}.")
        choices = {"attention": ATTENTIONS, "precision": PRECISIONS, "mask": MASKS}
        for field, valid in choices.items():
            if getattr(self, field) not in valid:
                raise unknown(field, str(getattr(self, field)), valid)
        if self.optimizer in ("none", ""):
            object.__setattr__(self, "optimizer", None)
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", str(self.optimizer), [o for o in OPTIMIZERS if o] + ["none"])
        if self.trainable != "full" and not re.fullmatch(r"lora:[1-9]\d*", self.trainable):
            raise UserError(f"trainable must be 'full' or 'lora:RANK' (as in 'lora:16'), not {self.trainable!r}.")
        self.chunked_loss  # noqa: B018  (validates kernels)
        self.liger_parts  # noqa: B018
        if self.model in SIZES and self.seqlen > SIZES[self.model][7]:
            raise UserError(f"{self.model} was made for at most {SIZES[self.model][7]} tokens, not {self.seqlen}.")

    @property
    def liger_parts(self) -> tuple[str, ...]:
        """The Liger kernels switched on, in a fixed order; empty for `hf`."""
        kernels = self.kernels.partition("+")[0]
        if kernels == "hf":
            return ()
        if kernels == "liger":
            return LIGER_PARTS[:4]
        name, _, listed = kernels.partition(":")
        if name != "liger" or not listed:
            raise unknown("kernels", self.kernels, ("hf", "liger", "liger:rms_norm,rope,swiglu", "hf+chunked"))
        parts = [part.strip() for part in listed.split(",")]
        for part in parts:
            if part not in LIGER_PARTS:
                raise unknown("Liger part", part, LIGER_PARTS)
        if "cross_entropy" in parts and "fused_linear_cross_entropy" in parts:
            raise UserError("Choose one of Liger's cross_entropy and fused_linear_cross_entropy, not both.")
        return tuple(part for part in LIGER_PARTS if part in parts)

    @property
    def chunked_loss(self) -> int | None:
        """Tokens a chunk of torch's chunked loss (`hf+chunked:2048`), 0 for its default size, None without it."""
        _, plus, loss = self.kernels.partition("+")
        if not plus:
            return None
        match = re.fullmatch(r"chunked(?::([1-9]\d*))?", loss)
        if match is None:
            raise unknown("loss", loss, ("chunked", "chunked:2048"))
        if any("cross_entropy" in part for part in self.liger_parts):
            raise UserError("Choose one loss: Liger's, or the chunked one ('liger:rms_norm,rope,swiglu+chunked').")
        return int(match[1] or 0)

    @property
    def name(self) -> str:
        """The model with its depth: `Qwen3-8B` or `Qwen3-8B@8`."""
        return self.model if self.layers is None else f"{self.model}@{self.layers}"

    @property
    def label(self) -> str:
        """One line for a figure's subtitle: what differs from the default is named."""
        parts = [self.name, f"{self.batch} × {self.seqlen}", self.kernels, self.precision]
        for field in ("attention", "trainable", "optimizer", "mask"):
            default = type(self).__dataclass_fields__[field].default
            if getattr(self, field) != default:
                parts.append(str(getattr(self, field)))
        return ", ".join(parts)

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    def replace(self, **changes: Any) -> Workload:
        """A copy with some fields changed."""
        if "model" in changes and "layers" not in changes:
            changes["layers"] = None
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        return cls(**data)

    @property
    def n_layers(self) -> int:
        """Decoder layers of this workload's model."""
        if self.layers is not None:
            return self.layers
        return SIZES[self.model][2] if self.model in SIZES else self.config().num_hidden_layers

    def config(self) -> Any:
        """The Hugging Face configuration: from the table, a folder, or the Hub's cache."""
        return _table_config(self) if self.model in SIZES else _read_config(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights (`amp` keeps fp32 weights)."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager:
        """A *fresh* autocast block for one step; nothing unless `precision` is `amp`.

        One block a step keeps autocast's cast cache from outliving the step (pytorch/pytorch#193338).
        """
        import torch

        if self.precision != "amp":
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=torch.bfloat16)


def _table_config(workload: Workload) -> Any:
    from transformers import Qwen3Config

    hidden, mlp, layers, heads, kv_heads, head_dim, vocab, longest, tied = SIZES[workload.model]
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=workload.layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
        use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def _read_config(workload: Workload) -> Any:
    """The configuration in a folder or of a Hub name, cut to the workload's depth; `UserError` when it cannot work."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    name = workload.model
    here = Path(name).exists()
    if not here and "/" not in name:  # no Hub name: spare the attempts to reach it
        raise unknown("model", name, SIZES)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, StrictDataclassError) as error:
        if here:
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
            raise UserError(f"{name!r} has no usable config.json: {reason}.") from error
        raise unknown("model", name, SIZES) from error
    if workload.layers is not None:
        if workload.layers > config.num_hidden_layers:
            raise UserError(f"{name} has {config.num_hidden_layers} layers, not {workload.layers}.")
        config.num_hidden_layers = workload.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: workload.layers]
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        raise UserError(f"{name} has {heads} attention heads, which {kv_heads} K/V heads do not divide.")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and workload.seqlen > longest:
        raise UserError(f"{name} was made for at most {longest} tokens, not {workload.seqlen}.")
    config.use_cache = False
    return config


def build(workload: Workload, device: str = "cpu", *, seed: int = 0, pretrained: bool = False) -> Any:
    """The real Hugging Face model of `workload`, in train mode, weights random (seeded) or from `from_pretrained`.

    `device="meta"` gives meta tensors, by which the estimates are made. LoRA is applied by PEFT.
    Raises `UserError` when an attention implementation or an extra package is missing.
    """
    import torch

    config = workload.config()
    meta = device == "meta"
    attention = "sdpa" if meta and workload.attention.startswith("flash") else workload.attention
    options = {"dtype": workload.dtype, "attn_implementation": attention}
    with torch.random.fork_rng(devices=[] if device in ("cpu", "meta") else [device]):
        torch.manual_seed(seed)
        try:
            if pretrained:
                model = _pretrained(workload, config, options).to(device)
            else:
                model = _random(config, options, device, initialize=not meta)
        except ImportError as error:
            raise UserError(f"attention={workload.attention!r} is not available here: {error}") from error
        model.config.use_cache = False
        _patch_kernels(model, workload)
        if workload.trainable != "full":
            model = _with_lora(model, int(workload.trainable.split(":")[1]))
    return model.train()


def _patch_kernels(model: Any, workload: Workload) -> None:
    if workload.liger_parts:
        from gctutor import liger

        liger.patch(model, workload.liger_parts)
    if workload.chunked_loss is not None:
        from gctutor import chunked_loss

        chunked_loss.patch(model, workload.chunked_loss or None)


def _random(config: Any, options: dict[str, Any], device: str, *, initialize: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, initialization

    with torch.device(device), contextlib.nullcontext() if initialize else initialization.no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()  # no_init_weights skips it
    return model


def _pretrained(workload: Workload, config: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    if workload.model == "nano":
        raise UserError("nano has no published weights: leave pretrained off, or name a model or folder that has some.")
    name = f"Qwen/{workload.model}" if workload.model in SIZES else workload.model
    try:
        return AutoModelForCausalLM.from_pretrained(name, config=config, **options)
    except OSError as error:
        raise UserError(f"No weights of {name!r} can be loaded: download them, or name a folder with them.") from error


def _with_lora(model: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError("trainable='lora:…' needs PEFT: pip install 'gctutor[peft]'.") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT asks by it
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def inputs(workload: Workload, device: str = "cpu", *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Keyword arguments of one training forward: random `input_ids` of shape (batch, seqlen), equal `labels`, a mask.

    `padding` masks the first eighth of the last row (left padding); `packed` puts two documents in each row,
    by `position_ids`.
    """
    import torch

    shape = (workload.batch, workload.seqlen)
    generator = torch.Generator().manual_seed(seed)
    if torch._guards.detect_fake_mode() is None and device != "meta":
        vocab = workload.config().vocab_size
        ids = torch.randint(0, vocab, shape, generator=generator).to(device)
    else:
        ids = torch.zeros(shape, dtype=torch.long, device=device)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if workload.mask == "padding":
        mask = torch.ones(shape, dtype=torch.long, device=device)
        mask[-1, : max(1, workload.seqlen // 8)] = 0
        batch["attention_mask"] = mask
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif workload.mask == "packed":
        half = workload.seqlen // 2
        positions = torch.cat([torch.arange(half), torch.arange(workload.seqlen - half)])
        batch["position_ids"] = positions.to(device).expand(shape).contiguous()
    return batch


def causal_model(model: Any) -> Any:
    """The causal model itself, out of PEFT's wrapper where there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: Any) -> list[Any]:
    """The model's `GradientCheckpointingLayer`s in order. Raises `UserError` when it has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no Hugging Face decoder layers (GradientCheckpointingLayer).")
    return layers


def make_optimizer(workload: Workload, model: Any) -> torch.optim.Optimizer | None:
    """The optimizer of `workload` over the trainable parameters, or None.

    AdamW is torch's fused one, the default of Hugging Face's `Trainer`; `adamw8bit` is bitsandbytes'.
    """
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    if workload.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5, foreach=True)
    if workload.optimizer == "adamw8bit":
        try:
            import bitsandbytes
        except ImportError as error:
            raise UserError("optimizer='adamw8bit' runs with bitsandbytes only: pip install bitsandbytes.") from error
        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-5)
    return None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence Hugging Face's loggers for the block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
