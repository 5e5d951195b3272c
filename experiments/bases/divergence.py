"""How far a model's next tokens are from a reference's: KL(reference || model) by position.

Perplexity averages over texts that the reference finds hard, too. In a chat, where the reference is
sure of most tokens, small changes of the weights can change the answer. So the texts are best the
reference's own (`examples.base_chats`). Positions below the window see what the reference sees: a
divergence there is of changed weights or of rounding, not of latents.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from experiments.bases.results import Row, by_model
from latte.errors import LatteError
from latte.lab.compare.intervals import mean_of
from latte.lab.evaluate.tables import table

KEY = ("corpus", "text", "first", "last")
SETTINGS = ("digest", "start", "dtype", "reference", "reference_dtype")
VALUES = ("tokens", "divergence", "same_token", "seconds")


def parts_of(length: int, edges: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of the parts between edges that a row of `length` tokens has, the last one cut.

    Raises:
        LatteError: the edges do not rise.
    """
    if list(edges) != sorted(set(edges)):
        raise LatteError(f"--edges: expected rising numbers, got {','.join(map(str, edges))}")
    found = zip((0, *edges), edges, strict=False)
    return [(first, min(last, length)) for first, last in found if first < length]


@torch.no_grad()
def compare(reference: Any, model: Any, ids: np.ndarray, edges: Sequence[int]) -> list[Row]:
    """The rows of one text, by the columns of `KEY` and `VALUES` that it decides.

    Args:
        ids: (T,) of the row that both read, in one call each.
        edges: where parts of the row end, in tokens, rising.

    Returns:
        Of each part: `divergence`, KL(reference || model) in nats, mean over the distributions
        after its tokens, and `same_token`, the share of these whose likeliest token is the same.
    """
    began = time.perf_counter()
    row_1T = torch.from_numpy(ids)[None]
    wanted_TV, found_TV = (
        each(row_1T.to(each.device)).logits[0].float().log_softmax(-1).cpu()
        for each in (reference, model)
    )
    kl_T = F.kl_div(found_TV, wanted_TV, reduction="none", log_target=True).sum(-1).double()
    same_T = (wanted_TV.argmax(-1) == found_TV.argmax(-1)).double()
    seconds = round(time.perf_counter() - began, 3)
    return [
        {
            "first": first,
            "last": last,
            "tokens": last - first,
            "divergence": float(kl_T[first:last].mean()),
            "same_token": float(same_T[first:last].mean()),
            "seconds": seconds,
        }
        for first, last in parts_of(len(ids), edges)
    ]


def report(folder: Path, rows: Sequence[Row], *, order: Sequence[str]) -> str:
    """Write divergence.md; returns the Markdown: means over texts with 95% intervals."""
    firsts = sorted({int(row["first"]) for row in rows})
    lines = [["model", *(head(rows, first) for first in firsts)]]
    for model, own in by_model(rows, order).items():
        cells = []
        for first in firsts:
            here = [row for row in own if int(row["first"]) == first]
            kl = mean_of([float(row["divergence"]) for row in here]) if here else None
            same = mean_of([float(row["same_token"]) for row in here]) if here else None
            cells.append(f"{kl.text('.4f')}, {same.text('.3f')}" if kl and same else "-")
        lines.append([model, *cells])
    text = (
        "KL(reference || model) in nats a token, and the share of tokens whose likeliest next token"
        " is the reference's.\n\n" + table(lines)
    )
    (folder / "divergence.md").write_text(text, encoding="utf-8")
    return text


def head(rows: Sequence[Row], first: int) -> str:
    """The name of a part: its tokens, as positions from 1, and its number of texts."""
    here = [row for row in rows if int(row["first"]) == first]
    last = max(int(row["last"]) for row in here)
    return f"{first + 1:,} to {last:,} ({len({row['text'] for row in here})} texts)"
