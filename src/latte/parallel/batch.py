"""A batch of whole sequences, cut into consecutive tokens, a part for each process of a group.

Shape suffixes: B batch, T tokens, E hidden size, N packed sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from latte.errors import LatteError
from latte.models.cache_name import KEYWORDS
from latte.models.inputs import packed_bounds
from latte.models.loss import labels_within, next_labels

# The tensors of a batch with an entry for each token, (B, T, ...), and the bounds, (N + 1,).
OF_TOKENS = (
    *("input_ids", "inputs_embeds", "attention_mask"),
    *("position_ids", "labels", "shift_labels"),
)
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")

Group = dist.ProcessGroup | DeviceMesh | None


def process_group(group: Group) -> dist.ProcessGroup:
    """The processes among which sequences are cut: a group, a mesh of one dimension, or all.

    Raises:
        LatteError: There is no process group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise LatteError(
            "context parallelism needs a process group: start the program with torchrun and call"
            " torch.distributed.init_process_group()"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise LatteError(
                "context parallelism needs one dimension of a mesh, such as mesh['cp'], got"
                f" {group.ndim} dimensions"
            )
        group = group.get_group()
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise LatteError(
            "context parallelism needs a ProcessGroup that holds this process, or a DeviceMesh,"
            f" got {found!r}"
        )
    return found


def context_group(device: torch.device, together: int) -> dist.ProcessGroup:
    """This process's group of ``together`` processes with consecutive ranks."""
    shape = dist.get_world_size() // together, together
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
    return mesh["context"].get_group()


def shard_batch(batch: Mapping[str, Any], group: Group = None) -> dict[str, Any]:
    """This process's part of a batch of whole sequences. All processes pass the same batch.

    Process p of P gets tokens ``p T / P`` to ``(p + 1) T / P`` (rounded down) of every row.
    ``labels`` become ``shift_labels``, the label of the token after each, before they are
    divided. Positions are those in the whole sequence.

    Bounds of packed sequences become those within the part. Its first sequence always continues
    the part before. If a sequence begins with the part, that first sequence is empty:
    ``[0, 0, ...]``. If only positions or ``seq_idx`` show that a row is packed, the bounds are
    added. ``seq_idx`` is removed.

    Args:
        batch: Arguments of a model, with ``input_ids`` or ``inputs_embeds``. Values that are not
            tensors of tokens or bounds are returned unchanged.
        group: Process group, ``DeviceMesh`` of one dimension, or None for all processes.

    Raises:
        LatteError: There is no process group, it has more processes than the rows have tokens, or
            a tensor of tokens has an unknown name.
    """
    group = process_group(group)
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise LatteError(
            "shard_batch: expected a batch with input_ids (B, T) or inputs_embeds (B, T, E), got"
            f" {', '.join(batch) or 'nothing'}"
        )
    whole = dict(batch)
    B, T = tokens.shape[:2]
    if processes > T:
        raise LatteError(
            f"shard_batch: {processes} processes cannot share {T} tokens; expected at least one"
            " token each"
        )
    seq_idx = whole.pop("seq_idx", None)
    bounds = next((whole[name] for name in BOUNDS if whole.get(name) is not None), None)
    if bounds is None and all(whole.get(name) is None for name in KEYWORDS):
        given = whole.get("position_ids"), whole.get("attention_mask"), None, seq_idx
        bounds = packed_bounds(*given)
        if bounds is not None:
            whole["cu_seq_lens_q"] = bounds
    if (labels := whole.pop("labels", None)) is not None and whole.get("shift_labels") is None:
        if bounds is not None:  # the first token of a sequence is not predicted
            labels = labels_within(labels, bounds)
        whole["shift_labels"] = next_labels(labels)
    start, end = (T * p // processes for p in (rank, rank + 1))
    for name, value in whole.items():
        if not isinstance(value, Tensor):
            continue
        if name in BOUNDS:
            whole[name] = _bounds_within(value, start, end)
        elif name in OF_TOKENS:
            if value.ndim < 2 or value.shape[1] != T:
                raise LatteError(
                    f"shard_batch: {name} must be (B={B}, T={T}, ...), got {tuple(value.shape)}"
                )
            whole[name] = value[:, start:end].contiguous()
        elif value.shape[:2] == (B, T):
            raise LatteError(
                f"shard_batch: cannot tell whether {name} {tuple(value.shape)} is to be cut;"
                f" expected one of {', '.join(OF_TOKENS)}"
            )
    return whole


def _bounds_within(bounds: Tensor, start: int, end: int) -> Tensor:
    """The bounds of the sequences in tokens ``start`` to ``end``: (M + 1,), from 0 to the end."""
    inner = bounds[1:-1]
    inner = inner[(inner >= start) & (inner < end)] - start
    if start == 0:
        inner = inner[inner > 0]
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([end - start])])
