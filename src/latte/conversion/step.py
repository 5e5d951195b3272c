"""A step of a converted decoder: one token per row through the base's layers, in few calls.

The base's own forward computes the same as :func:`latte.layers.step.run_layers`. The modules and
their weights stay those of the base. This file says which they are, and makes the rotary tables.

Shape suffixes: B batch, E hidden size, K head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from latte.conversion.bases import BASES
from latte.layers.native import ACTIVATIONS, GATED, NORMS, READ, NormKind
from latte.layers.parts import Rotary, of_single_tokens
from latte.layers.plan import LayerParts
from latte.layers.rollback import map_tensors
from latte.layers.step import StepContext
from latte.ops import decoding
from latte.ops.tensors import computation_dtype
from latte.ops.widened import widened

AHEAD = 64  # positions whose rotary tables are computed at once
# A layer's rotation depends on its kind and on the position from which queries look at sinks.
Table = tuple[str | None, int | None]


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
    type(ACT2FN["silu"]): decoding.swiglu,
    type(ACT2FN["gelu_pytorch_tanh"]): decoding.geglu,
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


class RotaryTable:
    """The base's rotary tables for a kind of layer, by positions. It can go to another process."""

    def __init__(self, decoder: Any, kind: str | None) -> None:
        self.rotary = decoder.rotary_emb
        self.kind = (kind,) if decoder.rotary_by_kind else ()

    def __call__(self, x_BTE: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (B, T, K) each, of positions (B, T), in the dtype of x."""
        return self.rotary(x_BTE, positions, *self.kind)  # type: ignore[no-any-return]


def rotary_tables(
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    x_BTE: Tensor,
    position_ids: Tensor,
    edges: Sequence[int],
) -> list[tuple[Tensor, Tensor]]:
    """The base's rotary table of positions (B, T), and for each edge that of ``min(t, edge)``.

    One call of the base's function: frequencies may depend on the largest position of a call
    (``longrope`` and ``dynamic`` scaling), and all tables of a forward have the same ones.
    """
    places = torch.cat([position_ids, *(position_ids.clamp_max(edge) for edge in edges)], 1)
    cos, sin = (x.chunk(1 + len(edges), 1) for x in rotary(x_BTE, places))
    return list(zip(cos, sin, strict=True))


def tables_of(
    decoder: Any, x_BTE: Tensor, position_ids: Tensor, of: Callable[..., Any] = tuple
) -> dict[Table, list[Any]]:
    """For each kind of layer and edge of its sinks: ``of`` the rotary table of the positions.

    With sinks also of the table by which queries look at them.
    """
    config = decoder.config
    tables: list[Any] = []
    each = dict.fromkeys(layer.self_attn.sink_edge for layer in decoder.layers)
    edges = [edge for edge in each if edge is not None]
    found: dict[Table, list[Any]] = {}
    for kind in config.layer_kinds:
        if decoder.rotary_by_kind or not tables:
            made = rotary_tables(RotaryTable(decoder, kind), x_BTE, position_ids, edges)
            tables = [of(table) for table in made]
        of_edges: dict[int | None, list[Any]] = dict(zip(edges, tables[1:], strict=True))
        for edge in each:
            found[kind, edge] = [tables[0], *([of_edges[edge]] if edge is not None else [])]
    return found


def turns_of(
    decoder: Any, positions: int, device: torch.device
) -> dict[str | None, tuple[Tensor, Tensor]]:
    """For each kind of layer: cosines and sines (K/2,) of the rotation by a number of positions."""
    place = torch.full((1, 1), positions, device=device)
    found = {}
    for kind in decoder.config.layer_kinds:
        table = RotaryTable(decoder, kind)(torch.zeros(1, 1, 1, device=device), place)
        cos, sin = (x[0, 0, : x.shape[-1] // 2] for x in table)
        factor = torch.hypot(cos, sin)  # the base's rotation, once for each key
        found[kind] = cos / factor, sin / factor
    return found


def rotations_of(
    decoder: Any, x_BE: Tensor, position_ids: Tensor, context: StepContext
) -> dict[Table, Rotary]:
    """The rotary tables of a step. Those of a single row are computed for some tokens at once."""
    alone = len(x_BE) == 1 and x_BE.is_cpu and not torch.compiler.is_compiling()
    if not alone or decoder.frequencies_by_length:
        return _rotations(decoder, x_BE, position_ids)
    place = int(position_ids)
    first, dtype, tables = context.ahead or (place, None, {})
    if dtype != x_BE.dtype or not first <= place < first + AHEAD:
        places = torch.arange(place, place + AHEAD)[:, None]
        tables = _rotations(decoder, x_BE.expand(AHEAD, -1), places)
        first, context.ahead = place, (place, x_BE.dtype, tables)
    at = slice(place - first, place - first + 1)
    return {key: map_tensors(lambda x: x[at], table) for key, table in tables.items()}


def _rotations(decoder: Any, x_BE: Tensor, position_ids: Tensor) -> dict[Table, Rotary]:
    wide = computation_dtype(x_BE.dtype)

    def single(table: tuple[Tensor, Tensor]) -> Rotary:
        # The base's (B, 1, K) have each angle twice, for the two halves of a head.
        halves = (x[..., None, : x.shape[-1] // 2].to(wide) for x in table)
        return of_single_tokens(Rotary(*halves))

    tables = tables_of(decoder, x_BE[:, None], position_ids, single)
    return {key: own[0]._replace(sinks=own[1] if own[1:] else None) for key, own in tables.items()}


class Head(nn.Linear):
    """A language model's head. A single token reads its weight, often the largest, only once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and decoding.serves(x) and decoding.fits(x, self.weight):
            return decoding.linear_maps(x, self.weight)[0]
        with widened(x):
            return super().forward(x)
