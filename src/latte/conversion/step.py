"""A step of a converted decoder: one token per row through the base's layers, in few calls.

    for each layer:  h += post(attention(norm(h))),  h += post(mlp(norm(h)))
    h = norm(h)

The base's own forward computes the same. ``post`` is a norm in Gemma 2 and 3, and the identity in
others. The modules and their weights stay those of the base. If a module has the base's own class,
without a hook or an adapter, one native kernel of :mod:`latte.ops.dense` replaces it. Other modules
are called. :func:`serves` checks that all layers are the base's own and have no hooks. If not, the
decoder runs the base's forward, whose attention takes the same step.

Shape suffixes: B batch, E hidden size, K head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from latte.conversion.bases import BASES
from latte.layers.parts import Rotary, is_plain, linear_maps, of_single_tokens, plain_weights
from latte.layers.step import StepState
from latte.ops import dense
from latte.ops.tensors import computation_dtype


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


def serves(decoder: Any, ignored: Collection[Any], asked: dict[str, Any]) -> bool:
    """Whether :func:`run` gives the results of the base's forward.

    Args:
        ignored: Hooks of layers that have no effect in a step.
        asked: Further arguments of the forward. None of them may be set.
    """
    config = decoder.config
    if config.output_hidden_states or config.output_attentions or not config.return_dict:
        return False
    # Any set argument, such as a mask, ids or return_dict=False, must be read by the base.
    if any(value or name == "return_dict" for name, value in asked.items() if value is not None):
        return False
    return all(_is_own(layer, ignored) for layer in decoder.layers)


def _is_own(layer: nn.Module, ignored: Collection[Any]) -> bool:
    """Whether a decoder layer is the base's, with Latte's attention in it, and without hooks."""
    own = layer.__dict__
    if type(layer) not in LAYERS or "forward" in own:
        return False
    for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
        for hook in hooks.values():
            if hook not in ignored:
                return False
    attention = own["_modules"]["self_attn"]
    return hasattr(attention, "step") and is_plain(attention, type(attention))


def run(decoder: Any, x_BE: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
    """The decoder's last hidden states (B, E) of one token per row.

    Args:
        x_BE: Embeddings of the tokens, (B, E), contiguous.
        position_ids: Positions, (B, 1).
        cache: :class:`latte.models.LatteCache` that has begun the step. Its states are overwritten.
    """
    native: bool = cache.step.native
    rotations = _rotations(decoder, x_BE, position_ids)
    # The configuration's number of layers. ``generate`` lowers it for a draft that exits early.
    for index, layer in enumerate(islice(decoder.layers, decoder.config.num_hidden_layers)):
        x_BE = _layer(layer, x_BE, cache.state(index), rotations, native)
    return norm(decoder.norm, x_BE, native)


def _layer(
    layer: Any, x_BE: Tensor, state: StepState, rotations: dict[str | None, Rotations], native: bool
) -> Tensor:
    """A decoder layer: attention and feed-forward network, each added to its input."""
    parts = layer._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    before_mlp = parts.get("pre_feedforward_layernorm")
    mixed = attention.step(
        norm(parts["input_layernorm"], x_BE, native), state, rotations[attention.layer_kind]
    )
    if before_mlp is None:
        x_BE = add_map(attention.o_proj, mixed, x_BE, native)
        inner = norm(parts["post_attention_layernorm"], x_BE, native)
        return _add_mlp(mlp, inner, x_BE, native)
    out = linear_maps(mixed, attention.o_proj, native=native)[0]
    x_BE = x_BE + norm(parts["post_attention_layernorm"], out, native)
    out = _add_mlp(mlp, norm(before_mlp, x_BE, native), None, native)
    return x_BE + norm(parts["post_feedforward_layernorm"], out, native)


def _add_mlp(mlp: Any, x_BE: Tensor, residual_BE: Tensor | None, native: bool) -> Tensor:
    """``residual + down(act(gate(x)) * up(x))``, or the network's output without a residual."""
    if native and type(mlp) in MLPS and is_plain(mlp, type(mlp)):
        parts = mlp._modules
        act, down = parts["act_fn"], parts["down_proj"]
        gate = GATES.get(type(act)) if is_plain(act, type(act)) else None
        weights = plain_weights(x_BE, parts["gate_proj"], parts["up_proj"]) if gate else []
        if gate is not None and weights:
            inner = gate(x_BE, *weights)
            if residual_BE is None:
                return linear_maps(inner, down, native=native)[0]
            return add_map(down, inner, residual_BE, native)
    out = mlp(x_BE)
    return out if residual_BE is None else residual_BE + out


def add_map(linear: nn.Module, x: Tensor, residual: Tensor, native: bool) -> Tensor:
    """``residual + linear(x)`` of single tokens, in one call if possible."""
    weights = plain_weights(x, linear) if native else []
    if weights and residual.dtype == x.dtype and residual.is_contiguous():
        return dense.linear_add(x, weights[0], residual)
    return residual + linear(x)


def norm(module: nn.Module, x: Tensor, native: bool) -> Tensor:
    """A base's RMSNorm of single tokens, in one call if possible.

    Like the bases, it computes in fp32 even for fp64 inputs.
    """
    kind = type(module)
    offset = NORM_OFFSETS.get(kind) if native and x.dtype != torch.float64 else None
    if offset is not None and is_plain(module, kind):
        weight: Any = module._parameters["weight"]
        if dense.fits(x, weight):
            own = module.__dict__
            eps: float = own["variance_epsilon"] if "variance_epsilon" in own else own["eps"]
            return dense.rms_norm(x, weight, eps, offset)
    return module(x)


def rotations_of(
    embeddings: tuple[Tensor, Tensor], sinks: tuple[Tensor, Tensor] | None, dtype: torch.dtype
) -> Rotations:
    """The base's tables (B, 1, K) of single tokens, for heads of ``dtype``."""
    return Rotations(_table(*embeddings, dtype), None if sinks is None else _table(*sinks, dtype))


def _table(cos_B1K: Tensor, sin_B1K: Tensor, dtype: torch.dtype) -> Rotary:
    # They have each angle twice, for the two halves of a head.
    half = cos_B1K.shape[-1] // 2
    wide = computation_dtype(dtype)
    return of_single_tokens(Rotary(*(x[..., None, :half].to(wide) for x in (cos_B1K, sin_B1K))))


def _rotations(decoder: Any, x_BE: Tensor, position_ids: Tensor) -> dict[str | None, Rotations]:
    """The rotary tables of each kind of layer, from the base's own function."""
    config, x_B1E = decoder.config, x_BE[:, None]
    if config.num_sinks:  # both tables in one call
        far = position_ids.clamp_max(config.local_window + config.num_sinks - 1)
        position_ids = torch.cat([position_ids, far], 1)

    def table(*kind: str) -> Rotations:
        embeddings = decoder.rotary_emb(x_B1E, position_ids, *kind)
        near = tuple(x[:, :1] for x in embeddings)
        sinks = tuple(x[:, 1:] for x in embeddings) if config.num_sinks else None
        return rotations_of(near, sinks, x_BE.dtype)  # type: ignore[arg-type]

    kinds: list[Any] = list(dict.fromkeys(getattr(config, "layer_types", None) or [None]))
    if decoder.rotary_by_kind:
        return {kind: table(kind) for kind in kinds}
    return dict.fromkeys(kinds, table())


class Head(nn.Linear):
    """A language model's head. A single token reads its weight, often the largest, only once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None and dense.serves(x) and dense.fits(x, self.weight):
            return dense.linear_maps(x, self.weight)[0]
        return super().forward(x)
