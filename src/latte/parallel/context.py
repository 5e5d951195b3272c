"""A model whose forward and backward passes go over the tokens of several processes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from latte.errors import LatteError
from latte.models.cache_name import KEYWORDS
from latte.models.loss import IGNORED
from latte.parallel.batch import Group, process_group
from latte.parallel.handover import Shard, Shards, all_gather


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: Group = None) -> Iterator[nn.Module]:
    """Divide each sequence among a group of processes within a ``with`` block; results are exact.

        with context_parallel(model, group):
            loss = model(**shard_batch(batch, group)).loss
            loss.backward()

    Each process holds consecutive tokens of every row, in the order of its rank. The processes may
    have different numbers of tokens. Hidden states, logits and gradients of ``inputs_embeds`` are
    those that a single process with all tokens would compute. On every process the loss is the mean
    over all tokens of the group, or their sum divided by ``num_items_in_batch``. The gradients of
    parameters are also those of a single process: they are summed over the group when the backward
    pass reaches the parameter.

    So the mean over processes of ``DistributedDataParallel`` or ``fully_shard`` is the mean over
    groups, whether these use all processes or the other dimension of a mesh.

    All processes of the group must run the same passes, and the backward passes must be within the
    block too.

    Args:
        model: Causal model of Latte's (also a converted one) or its decoder. It may be wrapped in
            DistributedDataParallel, or sharded by ``fully_shard``.
        group: Process group, ``DeviceMesh`` of one dimension, or None for all processes.

    Raises:
        LatteError: There is no process group; the model cannot be divided, because it keeps all
            tokens (full softmax attention), sees later ones, or is compiled; or the model is
            already in such a block. In a pass: a cache, attention weights or unshifted ``labels``
            are used, or the parts do not fit together.
    """
    group = process_group(group)
    whole = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    decoder = find_decoder(whole)
    handles = [decoder.register_forward_pre_hook(_connect(decoder, group), with_kwargs=True)]
    if whole is not decoder:
        handles.append(whole.register_forward_pre_hook(_count_labels(group), with_kwargs=True))
        handles.append(whole.register_forward_hook(_mean_of_all(group)))
    sharded = [module for module in whole.modules() if isinstance(module, FSDPModule)]
    try:
        for parameter in whole.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                handles.append(parameter.register_hook(_summed(group)))
        for module in sharded:
            _sum_shards(module, group)
        yield model
    finally:
        for handle in handles:
            handle.remove()
        for module in sharded:
            module.set_all_reduce_hook(None)  # type: ignore[arg-type]
        decoder.shards = None


def find_decoder(model: Any) -> Any:
    """The module with the layers. Raises LatteError if its sequences cannot be divided."""
    name = type(model).__name__
    if any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    ):
        raise LatteError(f"context_parallel: {name} is compiled; expected a plain model")
    decoder = getattr(model, getattr(model, "base_model_prefix", ""), model)
    language_model = decoder is model or hasattr(model, "lm_head")
    if not hasattr(decoder, "shards") or not language_model:
        raise LatteError(
            f"context_parallel: expected a language model of Latte's or its decoder, got {name}"
        )
    if not getattr(decoder.config, "is_causal", True):
        raise LatteError(f"context_parallel: {name} sees later tokens; expected is_causal=True")
    if getattr(decoder, "frequencies_by_length", False):
        raise LatteError(
            f"context_parallel: the rotary frequencies of {name} depend on the length of the text,"
            " which no process sees whole; expected another rope_type than longrope and dynamic"
        )
    for layer in decoder.layers:
        mixer = getattr(layer, "mixer", None) or layer.self_attn
        if not getattr(mixer, "splits", False):
            raise LatteError(
                f"context_parallel: {type(mixer).__name__} ({mixer.extra_repr()}) passes no state"
                " of constant size from one process to the next; expected a mixer of Latte's, but"
                " not full softmax attention, without sinks or delayed latents"
            )
    if any(hook.__module__ == __name__ for hook in decoder._forward_pre_hooks.values()):
        raise LatteError(f"context_parallel: {name} is in such a context already")
    return decoder


def _connect(decoder: Any, group: dist.ProcessGroup) -> Callable[..., Any]:
    """A hook before the decoder's pass: earlier tokens are in the other processes."""
    signature = inspect.signature(decoder.forward)

    def connect(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = signature.bind(*args, **kwargs).arguments
        for name in (*KEYWORDS, "use_cache", "output_attentions"):
            if given.get(name):
                raise LatteError(f"context_parallel: {name} goes with whole sequences alone")
        tokens = given["input_ids" if given.get("input_ids") is not None else "inputs_embeds"]
        bounds, mask = given.get("cu_seq_lens_q"), given.get("attention_mask")
        decoder.shards = _look_around(tokens, mask, bounds, group)
        return args, kwargs | {"use_cache": False}

    return connect


def _look_around(
    tokens: Tensor, mask: Tensor | None, bounds: Tensor | None, group: dist.ProcessGroup
) -> Shards:
    """Exchange the numbers of tokens with the other processes, in two small all-gathers."""
    B, T = tokens.shape[:2]
    sequences = 0 if bounds is None else len(bounds) - 1
    own = torch.tensor([B, T, sequences], device=tokens.device)
    rows = all_gather(own, group).tolist()
    alike = len({(batch, bool(packed)) for batch, _, packed in rows}) == 1
    if not alike or not all(length for _, length, _ in rows):
        found = "; ".join(
            f"{batch} x {length}" + f" with {packed} packed" * bool(packed)
            for batch, length, packed in rows
        )
        raise LatteError(
            "context_parallel: expected parts of the same rows, of at least one token, on every"
            f" process, got {found}"
        )
    last = None
    if bounds is not None and sequences > 1:
        last = (torch.arange(T, device=tokens.device) >= bounds[-2])[None]
    real = tokens.new_ones(B, T, dtype=torch.long) if mask is None else mask.long()
    if last is not None:
        real = real * last
    counts = all_gather(real.sum(1), group)
    every = tuple(Shard(length, packed > 1) for _, length, packed in rows)
    position = torch.zeros_like(counts[0])
    for shard, count in zip(every[: dist.get_rank(group)], counts, strict=False):
        position = count if shard.begins else position + count
    if sequences > 1:  # sequences that begin here have position 0
        position = torch.cat([position, position.new_zeros(sequences - 1)])
    return Shards(group, every, position, last)


def _count_labels(group: dist.ProcessGroup) -> Callable[..., Any]:
    """A hook before the language model's pass: its loss is over the labels of all processes."""

    def count(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        labels = kwargs.get("shift_labels")
        if labels is None and kwargs.get("labels") is not None:
            raise LatteError(
                "context_parallel: expected shift_labels, as shard_batch makes them of labels: the"
                " label of a part's last token is with the next process"
            )
        if labels is None:
            return args, kwargs
        # Other libraries' models compute a loss of `shift_labels` only if there are `labels`.
        kwargs = {**kwargs, "labels": labels}
        if kwargs.get("num_items_in_batch") is None:
            items = (labels != IGNORED).sum()
            kwargs["num_items_in_batch"] = collectives.all_reduce(items, "sum", group)
        return args, kwargs

    return count


def _mean_of_all(group: dist.ProcessGroup) -> Callable[..., None]:
    def replace(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple):
            raise LatteError("context_parallel: expected return_dict=True, got a tuple")
        if output.loss is not None:
            output.loss = _SumOfParts.apply(output.loss, group)

    return replace


class _SumOfParts(torch.autograd.Function):
    """The sum over a group, of which each process differentiates its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(part.detach(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# --- gradients of parameters ----------------------------------------------------------------------


def _summed(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def add(gradient: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(gradient, "sum", group))

    return add


def _sum_shards(module: Any, group: dist.ProcessGroup) -> None:
    """Let ``fully_shard`` sum gradients over the group, or undo its mean if that was over it."""
    own = [p for p in module.parameters() if isinstance(p, DTensor)]
    if not own:
        return
    meshed = set(own[0].device_mesh.mesh.flatten().tolist())
    inside = set(dist.get_process_group_ranks(group)) <= meshed

    def sum_(reduced: Tensor) -> None:
        if inside:
            reduced.mul_(dist.get_world_size(group))
        else:
            dist.all_reduce(reduced, group=group)

    module.set_all_reduce_hook(sum_)
