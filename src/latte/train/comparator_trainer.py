"""Training a model of another library exactly as our own: the same loss over the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from latte.train.trainer import LatteTrainer


class ComparatorTrainer(LatteTrainer):
    """The trainer of a comparator, which is only asked for its logits.

    Libraries differ in whether their loss is a mean over the batch or over all micro-batches, and
    some accept `num_items_in_batch` without using it: the loss is therefore computed here.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False
        self.compute_loss_func = next_token_loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": False}, *rest, **options)


def next_token_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed NLL of the next tokens over their number in the whole step, as of our own models."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    vocab_size = outputs.logits.shape[-1]
    return ForCausalLMLoss(outputs.logits, labels, vocab_size, num_items_in_batch)
