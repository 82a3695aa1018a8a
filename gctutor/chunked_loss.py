"""The loss in chunks of tokens by torch's own `linear_cross_entropy`: the logits of a whole batch never exist.

torch ≥ 2.13 only (`torch.nn.LinearCrossEntropyOptions`). Like Liger's fused loss it computes the gradients of the head
in the forward and keeps them until backward.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.nn import functional

from gctutor.errors import UserError

DEFAULT_TOKENS = 1024


def patch(model: Any, tokens: int | None = None) -> None:
    """Let the training forward of `model` compute its loss `tokens` at a time. Raises `UserError` on an older torch."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise UserError(
            f"The chunked loss needs torch 2.13 or newer (linear_cross_entropy); this is {torch.__version__}."
        )
    options = torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=tokens or DEFAULT_TOKENS,
        chunking_method=None,
        acc_policy="compact",  # torch's own choice for CUDA, made for every device
    )
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(
        self: Any, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if labels is None:
            return plain(self, input_ids=input_ids, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        targets = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        reduction = "mean" if num_items_in_batch is None else "sum"  # Trainer gives it when it accumulates gradients
        loss = functional.linear_cross_entropy(rows, self.lm_head.weight, targets, reduction=reduction, options=options)
        return CausalLMOutputWithPast(loss=loss if num_items_in_batch is None else loss / num_items_in_batch)

    model.forward = types.MethodType(forward, model)
