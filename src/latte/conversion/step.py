"""A step of a converted decoder: one token per row through the base's layers, in few calls.

    for each layer:  h += post(attention(norm(h))),  h += post(mlp(norm(h)))
    h = norm(h)

The base's own forward computes the same. ``post`` is a norm in Gemma 2 and 3, and the identity in
others. The modules and their weights stay those of the base. Native kernels stand in their place
where :func:`latte.layers.native.native_weights` says so; other modules are called. If a layer is
not the base's own or has hooks (:func:`is_own`), the decoder runs the base's forward.

Shape suffixes: B batch, E hidden size, K head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from latte.conversion.bases import BASES
from latte.layers.native import READ, is_hooked, linear_add, linear_maps, native_weights
from latte.layers.parts import Rotary, of_single_tokens
from latte.layers.step import StepState
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
MLPS = frozenset(_of_bases("MLP").values())
# Gemma's norms multiply by 1 + weight.
NORM_OFFSETS = {
    kind: 1.0 if family.startswith("gemma") else 0.0
    for family, kind in _of_bases("RMSNorm").items()
}
GATES: dict[type[nn.Module], Callable[..., Tensor]] = {
    type(ACT2FN["silu"]): dense.swiglu,
    type(ACT2FN["gelu_pytorch_tanh"]): dense.geglu,
}
READ |= dict.fromkeys(NORM_OFFSETS, ("weight",)) | dict.fromkeys((*MLPS, *GATES), ())


def is_own(layer: nn.Module, ignored: Collection[Any]) -> bool:
    """Whether :func:`run_layer` computes what a call of this decoder layer does.

    It does for a base's layer with Latte's attention in it, without hooks on either.

    Args:
        ignored: Hooks that have no effect in a step.
    """
    own = layer.__dict__
    if type(layer) not in LAYERS or "forward" in own:
        return False
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
        for hook in hooks.values():
            if hook not in ignored:
                return False
    attention = own["_modules"]["self_attn"]
    return getattr(attention, "steps", False) and not is_hooked(attention)


def run_layer(
    layer: Any, x_BE: Tensor, state: StepState, rotations: dict[Table, Rotations], served: bool
) -> Tensor:
    """Hidden states (B, E) after a decoder layer, from those before it. Overwrites the state.

    ``served`` says whether kernels serve x, here and below.
    """
    parts = layer._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    before_mlp = parts.get("pre_feedforward_layernorm")
    normed = norm(parts["input_layernorm"], x_BE, served)
    mixed = attention.step(normed, state, rotations[attention.table], served)
    output = attention._modules["o_proj"]
    if before_mlp is None:
        x_BE = linear_add(mixed, output, x_BE, served)
        inner = norm(parts["post_attention_layernorm"], x_BE, served)
        return _add_mlp(mlp, inner, x_BE, served)
    out = linear_maps(mixed, output, served=served)[0]
    x_BE = x_BE + norm(parts["post_attention_layernorm"], out, served)
    out = _add_mlp(mlp, norm(before_mlp, x_BE, served), None, served)
    return x_BE + norm(parts["post_feedforward_layernorm"], out, served)


def _add_mlp(mlp: Any, x_BE: Tensor, residual_BE: Tensor | None, served: bool) -> Tensor:
    """``residual + down(act(gate(x)) * up(x))``, or the network's output without a residual."""
    parts = mlp._modules
    act, gate, up = (parts.get(name) for name in ("act_fn", "gate_proj", "up_proj"))
    weights: list[Tensor] = []
    if type(mlp) in MLPS and type(act) in GATES:
        kinds = type(mlp), type(act), nn.Linear, nn.Linear
        weights = native_weights(x_BE, (mlp, act, gate, up), kinds, served=served)
    if not weights:
        out = mlp(x_BE)
        return out if residual_BE is None else residual_BE + out
    inner = GATES[type(act)](x_BE, *weights)
    if residual_BE is None:
        return linear_maps(inner, parts["down_proj"], served=served)[0]
    return linear_add(inner, parts["down_proj"], residual_BE, served)


def norm(module: Any, x: Tensor, served: bool) -> Tensor:
    """A base's RMSNorm of single tokens, in one call if possible.

    Like the bases, it computes in fp32 even for fp64 inputs.
    """
    kind = type(module)
    if served and kind in NORM_OFFSETS and x.dtype != torch.float64:
        weights = native_weights(x, (module,), (kind,), served=served)
        if weights:
            own = module.__dict__
            eps: float = own["variance_epsilon"] if "variance_epsilon" in own else own["eps"]
            return dense.rms_norm(x, weights[0], eps, NORM_OFFSETS[kind])
    return module(x)


def rotary_tables(
    rotary: Callable[..., tuple[Tensor, Tensor]],
    x_BTE: Tensor,
    position_ids: Tensor,
    edges: Sequence[int],
    *kind: str,
) -> list[tuple[Tensor, Tensor]]:
    """The base's rotary table of positions (B, T), and for each edge that of ``min(t, edge)``.

    One call of the base's function: frequencies may depend on the largest position of a call
    (``longrope`` and ``dynamic`` scaling), and all tables of a forward have the same ones.
    """
    places = torch.cat([position_ids, *(position_ids.clamp_max(edge) for edge in edges)], 1)
    cos, sin = (x.chunk(1 + len(edges), 1) for x in rotary(x_BTE, places, *kind))
    return list(zip(cos, sin, strict=True))


def tables_of(
    decoder: Any, x_BTE: Tensor, position_ids: Tensor, of: Callable[..., Any] = tuple
) -> dict[Table, list[Any]]:
    """For each kind of layer and width of a window: ``of`` the rotary table of the positions.

    With sinks also of the table by which queries look at them. A query sees the sinks no further
    away than the window's edge.
    """
    config = decoder.config
    tables: list[Any] = []
    edges = [width + config.num_sinks - 1 for width in config.windows if config.num_sinks]
    found: dict[Table, list[Any]] = {}
    for kind in config.layer_kinds:
        own = (kind,) if decoder.rotary_by_kind else ()
        if own or not tables:
            made = rotary_tables(decoder.rotary_emb, x_BTE, position_ids, edges, *own)
            tables = [of(table) for table in made]
        for i, window in enumerate(config.windows, 1):
            found[kind, window] = [tables[0], *tables[i : i + 1]]
    return found


def rotations_of(decoder: Any, x_BE: Tensor, position_ids: Tensor) -> dict[Table, Rotations]:
    """The rotary tables of a step."""
    wide = computation_dtype(x_BE.dtype)

    def single(table: tuple[Tensor, Tensor]) -> Rotary:
        # The base's (B, 1, K) have each angle twice, for the two halves of a head.
        halves = (x[..., None, : x.shape[-1] // 2].to(wide) for x in table)
        return of_single_tokens(Rotary(*halves))

    tables = tables_of(decoder, x_BE[:, None], position_ids, single)
    return {key: Rotations(*own) for key, own in tables.items()}


class Head(nn.Linear):
    """A language model's head. A single token reads its weight, often the largest, only once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and dense.serves(x) and dense.fits(x, self.weight):
            return dense.linear_maps(x, self.weight)[0]
        with widened(x):
            return super().forward(x)
