"""The next-token loss from logits that are never all in memory.

Shape suffixes: B batch, T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from latte.errors import LatteError
from latte.ops.tensors import on_cpu

IGNORED = -100  # Hugging Face's label of a token that is not to be predicted


def check_chunked_loss() -> None:
    """Raise LatteError where PyTorch has no ``linear_cross_entropy`` that works in chunks."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise LatteError(
            f"training.chunked_loss needs PyTorch 2.13 or newer, this is {torch.__version__};"
            " leave it out"
        )


def check_labels(labels: Any, vocabulary: int) -> None:
    """Raise ValueError unless labels are an int64 tensor of token ids and :data:`IGNORED`.

    The ids are looked at on a CPU only: on a GPU that would wait for the device.
    """
    dtype = getattr(labels, "dtype", None)
    if dtype != torch.int64:
        found = type(labels).__name__ if dtype is None else dtype
        raise ValueError(f"labels must be a tensor of int64, got {found}")
    if on_cpu(labels):
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))]
        if wrong.numel():
            raise LatteError(
                f"labels: expected ids from 0 to {vocabulary - 1} (a vocabulary of"
                f" {vocabulary:,}), or {IGNORED}, got {int(wrong[0])}"
            )


def next_labels(labels_BT: Tensor | None) -> Tensor:
    """The label of the token after each, (B, T); the last one's is not to be predicted."""
    assert labels_BT is not None
    return F.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:]


def labels_within(labels_BT: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Labels (1, T) without those of the packed sequences' first tokens. A copy."""
    T = labels_BT.shape[1]
    starts = labels_BT.new_zeros(T + 1, dtype=torch.bool)  # an empty sequence may start at T
    starts = starts.index_fill(0, cu_seq_lens.to(labels_BT.device).long(), True)
    return labels_BT.masked_fill(starts[:T], IGNORED)


def next_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Transformers' own, which rounds logits to fp32; in fp64 where they are fp64."""
    check_labels(labels if shift_labels is None else shift_labels, logits.shape[-1])
    if logits.dtype != torch.float64:
        given: dict[str, Any] = {
            "num_items_in_batch": num_items_in_batch,
            "shift_labels": shift_labels,
        }
        return ForCausalLMLoss(logits, labels, vocab_size, **given, **options)
    targets = next_labels(labels) if shift_labels is None else shift_labels
    targets = targets.to(logits.device).flatten()
    total = F.cross_entropy(logits.flatten(0, -2), targets, ignore_index=IGNORED, reduction="sum")
    return total / (
        (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    )


def chunked_loss(
    hidden_BTE: Tensor,
    weight_VE: Tensor,
    target_BT: Tensor,
    num_items: Tensor | int | None,
) -> Tensor:
    """``cross_entropy(hidden W^T, targets)``, over chunks of the tokens.

    The sum over ``num_items``, or over the labels that are predicted where that is None. Under
    autocast the products are in its dtype; sums are fp32.
    """
    check_labels(target_BT, len(weight_VE))
    kind = hidden_BTE.device.type
    dtype = hidden_BTE.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    total = F.linear_cross_entropy(
        hidden_BTE.flatten(0, 1).to(dtype),
        weight_VE.to(dtype),
        target_BT.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    if num_items is None:
        return total.float() / (target_BT != IGNORED).sum()
    items = num_items.to(total.device) if isinstance(num_items, Tensor) else num_items
    return total.float() / items
