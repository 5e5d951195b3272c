"""A step of a converted decoder: one token per row through the base's layers, in few calls.

The base's own forward computes the same as :func:`latte.layers.step.run_layers`. The modules and
their weights stay those of the base. This file says which they are, and makes the rotary tables.

Shape suffixes: B batch, E hidden size, K head width.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from latte.conversion.bases import BASES
from latte.layers.native import ACTIVATIONS, GATED, NORMS, READ, NormKind
from latte.layers.parts import Rotary, of_single_tokens
from latte.layers.plan import LayerParts
from latte.ops import dense
from latte.ops.tensors import computation_dtype
from latte.ops.widened import widened

# What a layer's rotation depends on: its kind, and the width of its window.
Table = tuple[str | None, int]


class Rotations(NamedTuple):
    """The rotary tables of a step: for queries and keys, and for queries towards the sinks."""

    local: Rotary
    sinks: Rotary | None = None


def _of_bases(name: str) -> dict[str, type[nn.Module]]:
    """The class with this name of every family, by the family."""
    kinds = {}
    for family, prefix in BASES.items():
        module = sys.modules[getattr(transformers, f"{prefix}Model").__module__]
        kinds[family] = getattr(module, f"{prefix.removesuffix('Text')}{name}")
    return kinds


LAYERS = frozenset(_of_bases("DecoderLayer").values())
# Gemma's norms multiply by 1 + weight. Like the others, they compute in fp32 even for fp64 inputs.
NORMS |= {
    kind: NormKind(1.0 if family.startswith("gemma") else 0.0, in_fp32=True)
    for family, kind in _of_bases("RMSNorm").items()
}
GATED |= dict.fromkeys(_of_bases("MLP").values())
ACTIVATIONS |= {
    type(ACT2FN["silu"]): dense.swiglu,
    type(ACT2FN["gelu_pytorch_tanh"]): dense.geglu,
}
READ |= dict.fromkeys(_of_bases("RMSNorm").values(), ("weight",))
READ |= dict.fromkeys((*_of_bases("MLP").values(), *ACTIVATIONS), ())


def parts_of(layer: Any) -> LayerParts:
    """The modules of a base's decoder layer, for a step.

    Gemma 2 and 3 have a norm after the attention and after the feed-forward network, too.
    """
    attention, mlp = layer.self_attn, layer.mlp
    after = layer.post_attention_layernorm
    names: Any = {"table": attention.table, "block": layer}
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return LayerParts(layer.input_layernorm, attention, after, mlp, **names)
    norms = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return LayerParts(layer.input_layernorm, attention, norms[0], mlp, after, norms[1], **names)


def sink_positions(config: Any, position_ids: Tensor) -> list[Tensor]:
    """For each width of a window, the positions by which queries look at the sinks, (B, T).

    A query sees the sinks no further away than the window's edge.
    """
    return [position_ids.clamp_max(width + config.num_sinks - 1) for width in config.windows]


def rotations_of(decoder: Any, x_BE: Tensor, position_ids: Tensor) -> dict[Table, Rotations]:
    """The rotary tables of each kind of layer and width, from the base's own function."""
    config, x_B1E = decoder.config, x_BE[:, None]
    windows = config.windows
    if config.num_sinks:  # all tables in one call
        position_ids = torch.cat([position_ids, *sink_positions(config, position_ids)], 1)
    wide = computation_dtype(x_BE.dtype)

    def tables(*kind: str) -> list[Rotations]:
        # The base's (B, 1 or more, K) have each angle twice, for the two halves of a head.
        halves = [
            x[..., None, : x.shape[-1] // 2].to(wide)
            for x in decoder.rotary_emb(x_B1E, position_ids, *kind)
        ]
        local, *sinks = (
            of_single_tokens(Rotary(*(x[:, p : p + 1] for x in halves)))
            for p in range(position_ids.shape[1])
        )
        return [Rotations(local, *own) for own in (zip(sinks) if sinks else [()] * len(windows))]

    shared = None if decoder.rotary_by_kind else tables()
    found: dict[Table, Rotations] = {}
    for kind in config.layer_kinds:
        each = tables(kind) if shared is None else shared
        found |= {(kind, window): own for window, own in zip(windows, each, strict=True)}
    return found


class Head(nn.Linear):
    """A language model's head. A single token reads its weight, often the largest, only once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and dense.serves(x) and dense.fits(x, self.weight):
            return dense.linear_maps(x, self.weight)[0]
        with widened(x):
            return super().forward(x)
