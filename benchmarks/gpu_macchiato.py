"""Latte-Macchiato on a GPU beside softmax attention, 1k to 128k tokens.

B = 1, H = 8, L = 16 latents per head, K = D = 64, window 128, bf16; forward, and forward+backward.

* ``macchiato``: ``latte.ops.macchiato_attention``; ``its latents`` and ``its window``: its two
  branches alone, ``latte_attention`` and ``sliding_window_attention`` on the same inputs.
* ``flash``: ``scaled_dot_product_attention``, causal, held to PyTorch's flash backend, on its
  native (B, H, T, D) layout.
* ``flex window``: FlexAttention, compiled, with a block mask of the same window, made beforehand.

    python benchmarks/gpu_macchiato.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_common import Place, attention_by, compare, expected_ms, normal, options, place, tried
from records import MODES, Goal, Row, call_of, say, worst
from torch import Tensor
from torch.nn import functional as F

from latte.ops import latte_attention, macchiato_attention, sliding_window_attention

H, L, K, WINDOW = 8, 16, 64, 128
LENGTHS = (2048, 32768, 131072, 1024, 4096, 8192, 16384, 65536)  # the goals' lengths first
OURS, FLASH, FLEX, BRANCHES = "macchiato", "flash", "flex window", ("its latents", "its window")


def make_inputs(at: Place, T: int) -> list[Tensor]:
    """latent_q, latent_k, q, k, v, dy."""
    return [normal(at, 1, T, H, n, seed=i) for i, n in enumerate((L + 1, L, K, K, K, K))]


def flex_window(at: Place, T: int) -> Callable[..., Tensor]:
    """FlexAttention over the window, (B, H, T, D), T a multiple of the window."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - WINDOW)

    # A block of 128 queries sees its own keys and the block before: written down, since
    # create_block_mask would form all T x T pairs.
    N = T // WINDOW
    row = torch.arange(N, dtype=torch.int32, device=at.device)
    blocks = torch.zeros(1, 1, N, N, dtype=torch.int32, device=at.device)
    blocks[..., 0] = (row - 1).clamp_min(0)
    if N > 1:
        blocks[..., 1:, 1] = row[1:]
    count = (row + 1).clamp_max(2)[None, None]
    mask = BlockMask.from_kv_blocks(count, blocks, BLOCK_SIZE=WINDOW, mask_mod=seen)
    compiled: Any = torch.compile(flex_attention) if at.cuda else flex_attention
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def sides_of(at: Place, mode: str, T: int) -> dict[str, Callable[[], Any]]:
    """A call of every side."""
    *inputs, dy = make_inputs(at, T)
    latent_q, latent_k, *local = inputs
    heads_first = [x.transpose(1, 2).contiguous() for x in (*local, dy)]

    def macchiato(*xs: Tensor) -> Tensor:
        return macchiato_attention(*xs, window=WINDOW, backend=at.backend)[0]

    def flash(*xs: Tensor) -> Tensor:
        with attention_by(at, "flash"):
            return F.scaled_dot_product_attention(*xs, is_causal=True)

    def latents(*xs: Tensor) -> Tensor:
        return latte_attention(*xs, backend=at.backend)[0]

    def window(*xs: Tensor) -> Tensor:
        return sliding_window_attention(*xs, window=WINDOW, backend=at.backend)[0]

    own = [latent_q[..., 1:].contiguous(), latent_k, local[2]]
    sides = {
        OURS: call_of(mode, macchiato, inputs, dy),
        BRANCHES[0]: call_of(mode, latents, own, dy),
        BRANCHES[1]: call_of(mode, window, local, dy),
        FLASH: call_of(mode, flash, heads_first[:3], heads_first[3]),
    }
    if at.cuda or mode == "forward":  # FlexAttention has no backward on a CPU
        with tried(at, FLEX):
            sides[FLEX] = call_of(mode, flex_window(at, T), heads_first[:3], heads_first[3])
    return sides


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Faster than flash from 2,048 tokens on; close to the slower of its branches."""
    ms = {(r["mode"], r["T"], r["side"]): r["median_ms"] for r in rows}
    goals = []
    for T, target in ((2048, 1.0), (32768, 10.0), (131072, 40.0)):
        for mode in MODES:
            ours, rival = ms.get((mode, T, OURS)), ms.get((mode, T, FLASH))
            if ours and rival:
                name = f"macchiato {mode}, T = {T}: times faster than causal flash"
                goals.append(Goal(name, target, rival / ours, True, f"{ours:.3f} ms"))
    for mode in MODES:
        over = {
            f"T = {T}": ours / max(ms[mode, T, branch] for branch in BRANCHES)
            for (m, T, side), ours in ms.items()
            if m == mode and side == OURS and all((mode, T, b) in ms for b in BRANCHES)
        }
        name = f"macchiato {mode}: time over the slower of its branches, worst length"
        goals += worst(name, 1.15, over, False)
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = place(options(__doc__, 70).parse_args(argv))
    say(f"macchiato: {at.dtype}, H = {H}, L = {L}, K = D = {K}, window {WINDOW}, {at.device}")
    table = at.table("gpu_macchiato.csv")
    lengths = (128, 256) if at.quick else LENGTHS
    for T, mode in at.while_time((T, mode) for T in lengths for mode in MODES):
        sizes = {"mode": mode, "B": 1, "T": T, "H": H, "L": L, "D": K}
        expected = expected_ms(at, f"macchiato, L = {L}, D = {K}", mode, T / 65536)
        run = functools.partial(compare, ratio="times_macchiato", budget=0.3, expected=expected)
        if not run(at, table, OURS, sides_of(at, mode, T), sizes):
            raise RuntimeError("macchiato did not run")
    at.goals("gpu_macchiato", goals_of(table.rows))


if __name__ == "__main__":
    main()
