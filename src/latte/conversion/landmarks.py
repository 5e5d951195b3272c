"""Landmarks: initial latents that already approximate the base's own attention.

Beyond the window the weights of a head of the base are ``a_ts ~ exp(scale q_t' R(s - t) k_s)``,
with q and k before their rotation, and R the rotary matrix. Divide the queries into L clusters with
means c_l. Then

    p(s|l,t) ~ exp(k_s[l]),   k_s[l] = scale c_l' D k_s,   D = mean of R(-d), d from W to T - 1

and p(l|t) is a soft assignment of the query to the clusters:
``q_t[l] = beta (u_l - mean u)' q_t / E|q|``, with u_l the clusters' directions. This is clustered
attention (arXiv 2007.04825), made causal and linear in time. The mean D weighs the offset d by
T - d, the number of pairs of tokens at this distance. D multiplies each pair of rotary coordinates
by ``(mean cos, mean sin)`` of its frequency. The mean of a fast frequency is close to 0.

Both logits are linear in the layer's input x, so landmarks are initial values of
``latents.q_proj`` and ``latents.k_proj``. Nothing else in the model changes. The window's bias is
set so that p(l=0) is, on average, the mass of the base's attention within the window.

There are three special cases. If the base normalises its queries and keys, k_s is not linear in x;
the norm is then replaced by its mean scale. If the projection of the queries has a bias, queries
are clustered without it, because q_t[l] has none, but c_l is the mean of whole queries. A bias of
the keys' projection cancels in p(s|l,t). A soft cap of the base is ignored in k_s.

Shape suffixes: B batch, T tokens, E hidden size, S sampled tokens, H query heads, G key/value
heads, K head width, L latents per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.conversion.attention import MacchiatoAttention
from latte.conversion.attention_distillation import (
    SAMPLE_EVERY,
    base_output,
    sampled_masses,
    watch,
)
from latte.conversion.step import RotaryTable
from latte.errors import LatteError
from latte.layers import Context, Projected
from latte.models.hub import quiet_transformers

SHARPNESS = 4.0  # beta: logit of a query of mean length in the direction of a cluster
CLUSTER_STEPS = 15
CALIBRATION_TOKENS, CALIBRATION_LENGTH = 8192, 1024  # number of tokens of the text, and of a row
CALIBRATION_LETTERS = 200_000


class Sample(NamedTuple):
    """The sampled tokens of one layer.

    Attributes:
        x: Inputs of the layer, (S, E).
        q: Queries before the rotation, (S, H, K).
        mass: Share of the base's attention within the window, (S, H).
        near: Logsumexp of the window's logits, (S, H).
    """

    x: Tensor
    q: Tensor
    mass: Tensor
    near: Tensor


class Survey:
    """Collects the samples of every converted layer while the base runs."""

    def __init__(self) -> None:
        self.samples: dict[int, list[Sample]] = {}

    def __call__(
        self, layer: MacchiatoAttention, x_BTE: Tensor, near: Projected, context: Context
    ) -> Tensor:
        """The base's output of a layer, (B, T, E)."""
        T = x_BTE.shape[1]
        first = layer.window if T > layer.window + SAMPLE_EVERY else 0
        places = torch.arange(first, T, SAMPLE_EVERY, device=x_BTE.device)
        mass, log_near = sampled_masses(layer, near, places, context)
        x_BSE = x_BTE[:, places]
        q_BSHK, _, _ = layer.heads(x_BSE)
        found = (x.flatten(0, 1).float().cpu() for x in (x_BSE, q_BSHK, mass, log_near))
        self.samples.setdefault(layer.layer_idx, []).append(Sample(*found))
        return base_output(layer, near, context)


def rotary_mean(model: Any, layer: MacchiatoAttention, length: int) -> tuple[Tensor, Tensor]:
    """Mean cosines and sines (R / 2,) of the layer's rotary angles over offsets in [W, T)."""
    first = min(layer.window, length - 1)
    device: torch.device = model.device
    offsets = torch.arange(first, length, device=device)[None]
    rotary = RotaryTable(model.model, layer.layer_kind)
    probe = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
    cos, sin = (x[0].double().cpu() for x in rotary(probe, offsets))
    pairs = (length - offsets[0]).double().cpu()  # number of pairs of tokens at each distance
    weights = pairs[:, None] / pairs.sum()
    half = cos.shape[-1] // 2
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    scale = rotary(probe, zero)[0][0, 0, :half].double().cpu()  # for long ranges
    return (weights * cos[:, :half]).sum(0) * scale, (weights * sin[:, :half]).sum(0) * scale


def turned(c_LK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``c' D`` for each row c. D rotates and shrinks the pairs of coordinates (i, i + R/2)."""
    half = len(cos)
    a, b, rest = c_LK[:, :half], c_LK[:, half : 2 * half], c_LK[:, 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def clusters(q_SK: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Spherical k-means of queries: directions u (L, K) and the clusters' mean queries c (L, K).

    Raises:
        LatteError: A query is NaN or infinite.
    """
    if not bool(q_SK.isfinite().all()):
        raise LatteError(
            "the base's queries are not finite on the calibration text: its weights are damaged, or"
            " too large for their dtype"
        )
    u_SK = F.normalize(q_SK, dim=-1)
    first = torch.randint(len(u_SK), (1,), generator=generator)
    u_LK = u_SK[first]
    distance_S = (1 - u_SK @ u_LK[0]).clamp_min(1e-9)
    while len(u_LK) < count:  # k-means++: distant queries are more likely to be chosen
        following = u_SK[torch.multinomial(distance_S, 1, generator=generator)]
        u_LK = torch.cat([u_LK, following])
        distance_S = torch.minimum(distance_S, 1 - u_SK @ following[0]).clamp_min(1e-9)
    for _ in range(CLUSTER_STEPS):
        nearest_S = (u_SK @ u_LK.T).argmax(1)
        sums = torch.zeros_like(u_LK).index_add_(0, nearest_S, u_SK)
        filled = torch.bincount(nearest_S, minlength=count)[:, None] > 0
        u_LK = torch.where(filled, F.normalize(sums, dim=-1), u_LK)
    nearest_S = (u_SK @ u_LK.T).argmax(1)
    sizes = torch.bincount(nearest_S, minlength=count)[:, None]
    means = torch.zeros_like(u_LK).index_add_(0, nearest_S, q_SK) / sizes.clamp_min(1)
    return u_LK, torch.where(sizes > 0, means, u_LK * q_SK.norm(dim=-1).mean())


def _linear(layer: MacchiatoAttention, name: str, x_SE: Tensor) -> Tensor:
    """The map (heads, K, E) from x to queries ("q") or keys ("k"), with the norm's mean scale."""
    weight = getattr(layer, f"{name}_proj").weight.float().cpu()
    weight = weight.unflatten(0, (-1, layer.head_dim))
    norm = getattr(layer, f"{name}_norm", None)
    if norm is None:
        return weight
    plain_SHK = torch.einsum("se,hke->shk", x_SE, weight)
    normed_SHK = norm(plain_SHK.to(norm.weight)).float().cpu()
    # Least squares: a factor for each coordinate, the norm's weight times its mean scale.
    factor_HK = (normed_SHK * plain_SHK).sum(0) / plain_SHK.square().sum(0).clamp_min(1e-12)
    return weight * factor_HK[..., None]


def _query_bias(layer: MacchiatoAttention) -> Tensor:
    """The bias of all queries, (H, K): that of the projection, if no norm follows it."""
    bias: Tensor | None = getattr(layer.q_proj, "bias", None)
    if bias is None or hasattr(layer, "q_norm"):
        return torch.zeros(layer.num_heads, layer.head_dim)
    return bias.detach().float().cpu().unflatten(0, (-1, layer.head_dim))


class Landmarks(NamedTuple):
    """Initial values of a layer's latents: logits as maps of x, and the window's bias (H,)."""

    q_HLE: Tensor
    k_HLE: Tensor
    window_bias_H: Tensor


def landmarks(
    layer: MacchiatoAttention,
    sample: Sample,
    mean_rotation: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> Landmarks:
    """The initial values of one layer, from its samples."""
    H, L = layer.num_heads, layer.latents.k_proj.out_features // layer.num_heads
    q_map, k_map = _linear(layer, "q", sample.x), _linear(layer, "k", sample.x)
    repeats = H // len(k_map)
    cos, sin = (x.float() for x in mean_rotation)
    q_HLE, k_HLE, bias_H = [], [], []
    bias_HK = _query_bias(layer)
    for h in range(H):
        q_SK = sample.q[:, h] - bias_HK[h]
        u_LK, c_LK = clusters(q_SK, L, generator)
        key_LK = layer.scale * turned(c_LK + bias_HK[h], cos, sin)
        query_LK = SHARPNESS * (u_LK - u_LK.mean(0)) / q_SK.norm(dim=-1).mean()
        q_HLE.append(query_LK @ q_map[h])
        k_HLE.append(key_LK @ k_map[h // repeats])
        odds_S = -torch.logsumexp(sample.x @ q_HLE[-1].T, -1)
        if layer.joint_softmax:
            odds_S = odds_S + sample.near[:, h]
        bias_H.append(_matching_bias(odds_S, sample.mass[:, h].mean()))
    return Landmarks(torch.stack(q_HLE), torch.stack(k_HLE), torch.stack(bias_H))


def _matching_bias(odds_S: Tensor, share: Tensor) -> Tensor:
    """The b for which ``mean sigmoid(odds + b) = share``, by bisection."""
    low, high = odds_S.new_tensor(-60.0), odds_S.new_tensor(60.0)
    share = share.clamp(1e-3, 1 - 1e-3)
    for _ in range(50):
        middle = (low + high) / 2
        above = torch.sigmoid(odds_S + middle).mean() > share
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def calibration_rows(
    tokenizer: Any, text: str | None, length: int = CALIBRATION_LENGTH
) -> list[Tensor]:
    """Rows of token ids, (1, T), of a text; by default of Python's own help pages.

    Every row begins with the start token, as documents do. If the tokenizer has none, it begins
    with the end token. A text of fewer than ``length`` tokens is one shorter row.
    """
    if text is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    with quiet_transformers():  # the text may be longer than the base's context: it is cut below
        ids = tokenizer(text[:CALIBRATION_LETTERS], add_special_tokens=False).input_ids
    if not ids:
        raise LatteError("calibration: expected some text, got none")
    starts = [x for x in (tokenizer.bos_token_id, tokenizer.eos_token_id) if x is not None][:1]
    pieces = torch.tensor(ids[:CALIBRATION_TOKENS]).split(length - len(starts))
    rows = [torch.cat([torch.tensor(starts, dtype=torch.long), piece])[None] for piece in pieces]
    return [row for row in rows if row.shape[1] == length] or rows


@torch.no_grad()
def set_landmarks(model: Any, rows: Sequence[Tensor], *, seed: int = 0) -> None:
    """Set the latents of a model's converted layers to landmarks, in place.

    Args:
        model: Converted language model whose latents read x (``latent_input="none"``).
        rows: Token ids, (B, T) each, on which the base runs, on its own device. About 8,000 tokens
            are enough.
        seed: Seed of the clusters' first directions.

    Raises:
        ValueError: The latents do not read x.
    """
    if model.config.latent_input != "none":
        raise ValueError(
            f"landmarks need latent_input='none', got {model.config.latent_input!r}: they are "
            "linear in the layer's input"
        )
    survey = Survey()
    for row in rows:
        watch(model, survey, input_ids=row)
    generator = torch.Generator().manual_seed(seed)
    length = max(row.shape[1] for row in rows)
    for index, parts in survey.samples.items():
        layer: MacchiatoAttention = model.model.layers[index].self_attn
        sample = Sample(*(torch.cat(xs) for xs in zip(*parts, strict=True)))
        found = landmarks(layer, sample, rotary_mean(model, layer, length), generator)
        latents: Any = layer.latents
        window_HE = torch.zeros_like(found.q_HLE[:, 0])[:, None]
        latents.q_proj.weight.copy_(torch.cat([window_HE, found.q_HLE], 1).flatten(0, 1))
        latents.k_proj.weight.copy_(found.k_HLE.flatten(0, 1))
        latents.window_bias.copy_(found.window_bias_H)
