"""Draw p(s|t) of a Latte-Macchiato head: the mixture, the whole, its window and its latents.

    python docs/figures/weights.py [weights.png]

The logits are smooth random functions of time (seeded), the probabilities are the library's:
an op whose values are the identity matrix returns its weights.

Shape suffixes: B batch, T tokens, H heads, L latents, K key width, S sources.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import to_rgb

from latte.ops import attention_weights, latte_attention, sliding_window_attention

T, L, K, WINDOW = 112, 5, 6, 16
INK, MUTED = "#1f2430", "#6b7280"
STYLE = {
    "font.size": 11,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
# State 0 is the window; the latents are 1 to L.
COLOURS = ("#30343f", "#0072b2", "#e69f00", "#009e73", "#cc3f77", "#7b5cd6")


def smooth(generator: torch.Generator, channels: int, length: float) -> torch.Tensor:
    """(T, channels): independent random functions of unit variance, smooth over ``length``."""
    time = torch.arange(T, dtype=torch.float64)
    covariance = torch.exp(-0.5 * ((time[:, None] - time[None]) / length) ** 2)
    root = torch.linalg.cholesky(covariance + 1e-6 * torch.eye(T, dtype=torch.float64))
    return root @ torch.randn(T, channels, generator=generator, dtype=torch.float64)


def probabilities() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p(l|t) (T, L+1), and the parts of p(s|t): the window's (T, S), the latents' (T, L, S)."""
    generator = torch.Generator().manual_seed(130)
    latent_q = 1.9 * smooth(generator, L + 1, 9.0)
    latent_q[:, 0] += 1.5
    latent_k = 2.8 * smooth(generator, L, 3.0)
    q, k = smooth(generator, K, 8.0), 1.7 * smooth(generator, K, 1.5)

    p_TL = latent_q.softmax(-1)
    values = torch.eye(T, dtype=torch.float64)[None, :, None]  # (B, T, H, S)
    window, _ = sliding_window_attention(q[None, :, None], k[None, :, None], values, window=WINDOW)
    window_TS = p_TL[:, :1] * window[0, :, 0]
    parts = []
    for latent in range(L):
        one = torch.zeros(1, T, 1, 1, dtype=torch.float64)  # p(l|t) = 1 for a single latent
        mean, _ = latte_attention(one, latent_k[None, :, None, latent, None], values)
        parts.append(p_TL[:, 1 + latent, None] * mean[0, :, 0])
    latents_TLS = torch.stack(parts, 1)

    whole_TS = attention_weights(
        *(x[None, :, None] for x in (latent_q, latent_k, q, k)), window=WINDOW
    )[0, 0]
    torch.testing.assert_close(window_TS + latents_TLS.sum(1), whole_TS)
    return p_TL, window_TS, latents_TLS


def coloured(weights_TXS: np.ndarray, colours: tuple[str, ...], top: float) -> np.ndarray:
    """(T, S, 3): hue by the states that a weight comes from, depth by how large it is."""
    total_TS = weights_TXS.sum(1)
    rgb = np.array([to_rgb(colour) for colour in colours])
    shares = weights_TXS / np.maximum(total_TS, 1e-300)[:, None]
    hue = np.einsum("txs,xc->tsc", shares, rgb)
    depth = np.clip(total_TS / top, 0.0, 1.0)[..., None] ** 0.5
    picture = 1.0 - depth * (1.0 - hue)
    picture[np.triu_indices(T, 1)] = np.array(to_rgb("#f3f4f6"))
    return picture


@plt.rc_context(STYLE)
def draw(path: Path) -> None:
    """Write the picture as PNG."""
    p_TL, window_TS, latents_TLS = (x.numpy() for x in probabilities())
    everything = np.concatenate([window_TS[:, None], latents_TLS], 1)
    figure, axes = plt.subplots(
        1,
        4,
        figsize=(13.2, 4.3),
        sharey=True,
        gridspec_kw={"width_ratios": [0.62, 1, 1, 1], "wspace": 0.16},
        constrained_layout=False,
    )
    figure.subplots_adjust(left=0.05, right=0.99, top=0.83, bottom=0.235)
    mixture, *maps = axes
    time = np.concatenate([[-0.5], np.arange(T), [T - 0.5]])  # to the rows' outer edges
    p_TL = np.concatenate([p_TL[:1], p_TL, p_TL[-1:]])
    edge = np.zeros(len(time))
    for state, colour in enumerate(COLOURS):
        mixture.fill_betweenx(time, edge, edge + p_TL[:, state], color=colour, linewidth=0)
        edge = edge + p_TL[:, state]
    mixture.set(xlim=(0, 1), ylim=(T - 0.5, -0.5), xticks=[0, 0.5, 1], ylabel="query position  t")
    mixture.set_xlabel("probability")
    mixture.set_title("$p(l\\,|\\,t)$\nwhich state is asked", fontsize=12)

    top = 0.22
    panels = (
        ("$p(s\\,|\\,t)$\nevery row sums to 1", everything, COLOURS),
        (f"window part\nsoftmax over {WINDOW} keys", window_TS[:, None], COLOURS[:1]),
        (f"latent part\n{L} latents, the whole past", latents_TLS, COLOURS[1:]),
    )
    for axis, (title, weights, colours), sign in zip(maps, panels, ("", "=", "+"), strict=True):
        axis.imshow(coloured(weights, colours, top), interpolation="nearest", aspect="auto")
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("source position  s")
        axis.set_xticks([0, 25, 50, 75, 100])
        axis.text(-0.08, 0.5, sign, transform=axis.transAxes, ha="center", va="center", fontsize=20)
    mixture.set_yticks([0, 25, 50, 75, 100])
    for axis in axes:
        axis.tick_params(length=3, labelsize=9.5)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    names = ["$l=0$: window", *(f"$l={latent}$" for latent in range(1, L + 1))]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS]
    figure.legend(
        handles,
        names,
        loc="lower center",
        ncol=L + 1,
        frameon=False,
        fontsize=11,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.8,
    )
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
