"""Dropout of the libraries' models, which have none between their layers."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn import functional as F

# What a block adds to its input, by the libraries' names.
BRANCHES = {"mixer", "temporal_block", "mlp_block", "self_attn", "attention", "attn", "mlp"}
BRANCHES |= {"feed_forward", "ffn"}


def add_dropout(model: Any) -> None:
    """Let a library's model drop out what Latte's own models do, in training.

    That is ``config.embedding_dropout`` of the embeddings and ``config.hidden_dropout`` of what
    each branch of a block adds to its input.
    """
    config = model.config
    wanted = [(config.embedding_dropout, [model.get_input_embeddings()])]
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    children = (child for block in blocks for child in block.named_children())
    branches = [part for name, part in children if name in BRANCHES]
    wanted.append((config.hidden_dropout, branches))
    for rate, modules in wanted:
        for module in modules if rate else []:
            module.register_forward_hook(functools.partial(_drop, rate))


def _drop(rate: float, module: nn.Module, _: Any, output: Any) -> Any:
    if not module.training:
        return output
    if isinstance(output, tuple):
        return F.dropout(output[0], rate), *output[1:]
    return F.dropout(output, rate)
