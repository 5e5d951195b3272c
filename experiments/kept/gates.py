"""Scores of tokens trained end to end: a gate in the attention of a pretrained decoder.

    python -m experiments.kept train BASE --text books=FILE --weights BEFORE --trained AFTER

The scores r in `--weights` go on. In each layer a source that has left the window has the gate

    g_s = sigmoid((r_s - c) / tau),  with c such that the gates of all of them sum to N,

and log g_s is added to its logit (the retention gate of TRIM-KV, arXiv 2512.03324, without its
decay: the choice of N tokens must not depend on the query). So the scores have gradients. The loss
is the KL of next tokens from the base, at the questions and their answers, and elsewhere. `tau`
falls from 1 to 0.25. The base's weights stay.

Shape suffixes as in `attention.py`; S sources.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from experiments.kept.attention import blocks, grouped, projected
from latte.conversion.attention import MacchiatoAttention
from latte.conversion.attention_distillation import base_output
from latte.conversion.recording import set_learning_rate
from latte.layers.mixer import Projected

PLACES = 256  # outside the questions, at most, whose next tokens are compared
SOFTEST, SHARPEST = 1.0, 0.25  # tau at the first and the last step


def log_gates(r_GS: Tensor, count: int, tau: float) -> Tensor:
    """log g (G, S) of sources, whose gates sum to `count`; 0 for all if there are no more.

    The gradient is that of the sum that stays: a source that gains takes it from the others.
    """
    if r_GS.shape[1] <= count:
        return torch.zeros_like(r_GS)
    with torch.no_grad():
        low, high = (r_GS.amin(1) - 20 * tau, r_GS.amax(1) + 20 * tau)
        for _ in range(60):
            middle = (low + high) / 2
            many = ((r_GS - middle[:, None]) / tau).sigmoid().sum(1) > count
            low, high = torch.where(many, middle, low), torch.where(many, high, middle)
        gate = ((r_GS - high[:, None]) / tau).sigmoid()
        share = gate * (1 - gate)
        share /= share.sum(1, keepdim=True).clamp_min(1e-20)
        fixed = high - (share * r_GS).sum(1)
    threshold = fixed + (share * r_GS).sum(1)
    return F.logsigmoid((r_GS - threshold[:, None]) / tau)


def gated_attention(
    layer: MacchiatoAttention, near: Projected, r_GT: Tensor, count: int, block: int, tau: float
) -> Tensor:
    """Outputs (1, T, E) of the base's attention with gates of all sources beyond the window."""
    (q, k, v), found = grouped(layer, near), []
    for first, stop, left in blocks(layer, block, r_GT.shape[1]):
        later = torch.arange(stop) > torch.arange(first, stop)[:, None]
        logits = (q[:, :, first:stop] @ k[:, None, :stop].mT).masked_fill(later, -torch.inf)
        far = log_gates(r_GT[:, layer.num_sinks : left], count, tau)
        gates = F.pad(far, (layer.num_sinks, stop - left)) if far.shape[1] else None
        logits = logits if gates is None else logits + gates[:, None, None]
        found.append(logits.softmax(-1) @ v[:, None, :stop])
    return projected(layer, found)


def train_gates(
    model: Any, rows: list[Any], scores: nn.ModuleDict, options: argparse.Namespace
) -> None:
    """Train the scores of each layer, by its number, on rows of `kept_rows`."""
    model.requires_grad_(False)
    parameters = list(scores.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, options.learning_rate, weight_decay=0.0)
    count, block = options.kept[0], options.block
    for step in range(options.steps):
        row, done = rows[step % len(rows)], step / max(1, options.steps - 1)
        tau = SOFTEST * (SHARPEST / SOFTEST) ** done
        set_learning_rate(optimizer, options.learning_rate, step, options.steps)
        asked, ids = min(row.asked, len(row.ids) - 1), row.ids[None]
        generator = torch.Generator().manual_seed(options.seed * 1000 + step)
        text = torch.randperm(max(1, asked - options.window), generator=generator)[:PLACES]
        places = torch.cat([options.window + text - 1, torch.arange(asked - 1, len(row.ids) - 1)])

        def attend(layer: Any, x_BTE: Tensor, near: Any, context: Any, tau: float = tau) -> Tensor:
            r_GT = scores[str(layer.layer_idx)](x_BTE)[0].mT
            given = layer, near, r_GT, count, block, tau
            return checkpoint(gated_attention, *given, use_reentrant=False)

        def log_p(attend: Any, ids: Tensor = ids, places: Tensor = places) -> Tensor:
            states = model.model(input_ids=ids, teacher=attend, use_cache=False).last_hidden_state
            return model.lm_head(states[0, places]).log_softmax(-1)

        with torch.no_grad():
            target = log_p(lambda layer, _, near, context: base_output(layer, near, context))
        loss = (target.exp() * (target - log_p(attend))).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        print(f"step {step + 1}: tau {tau:.2f}, KL {loss.item():.4f}", flush=True)
