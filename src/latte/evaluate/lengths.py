"""`latte evaluate`: perplexity and bits per byte at several context lengths.

The protocol is that of `latte.train.scoring`: windows of n tokens that do not overlap,
within each held-out document, the state carried inside a window and empty at its start, every
token of the text scored exactly once at every n. What is compared between lengths is therefore
the same text, and only how far back a prediction may look differs.
"""

from __future__ import annotations

import csv
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from latte.data.blocks import EvaluationText
from latte.errors import LatteError
from latte.machine import peak_memory_bytes
from latte.train.scoring import score


@dataclass(frozen=True)
class Row:
    """One context length. Sizes in tokens or bytes as named, times in seconds, loss in nats."""

    length: int
    tokens: int
    text_bytes: float
    loss: float
    perplexity: float
    bits_per_byte: float
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int


def evaluate_lengths(
    model: Any,
    text: EvaluationText,
    lengths: list[int],
    *,
    segment: int = 1024,
    batch_tokens: int = 16384,
    bf16: bool = False,
    progress: bool = True,
    label: str = "",
) -> list[Row]:
    """Score `text` at each context length (tokens). See the module docstring for the protocol."""
    from tqdm import tqdm

    for length in lengths:
        if length < 1:
            raise LatteError(f"lengths: expected whole numbers of at least 1, got {length}")
    device = next(model.parameters()).device
    rows = []
    bar = tqdm(
        total=len(lengths) * text.num_targets,
        unit="token",
        unit_scale=True,
        disable=None if progress else True,
    )
    with bar:
        for length in lengths:
            bar.set_description(f"{label} at {length}".strip())
            start = time.perf_counter()
            found = score(
                model,
                text,
                length,
                segment=segment,
                batch_tokens=batch_tokens,
                bf16=bf16,
                on_batch=bar.update,
            )
            seconds = time.perf_counter() - start
            rows.append(
                Row(
                    length,
                    found.tokens,
                    found.text_bytes,
                    found.loss,
                    found.perplexity,
                    found.bits_per_byte,
                    seconds,
                    found.tokens / seconds,
                    peak_memory_bytes(device),
                )
            )
    return rows


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [
        f"{'context':>8}  {'nats/token':>10}  {'perplexity':>10}  {'bits/byte':>9}"
        f"  {'tokens/s':>9}  {'peak memory':>11}"
    ]
    for row in rows:
        lines.append(
            f"{row.length:>8}  {row.loss:>10.4f}  {row.perplexity:>10.4g}"
            f"  {row.bits_per_byte:>9.4f}  {row.tokens_per_second:>9,.0f}"
            f"  {row.peak_memory_bytes / 2**30:>7.2f} GiB"
        )
    lines.append(
        f"every row scores the same {rows[0].tokens:,} tokens ({rows[0].text_bytes:,.0f} bytes)"
    )
    return "\n".join(lines)


def write_csv(path: Path, rows: list[Row], labels: list[dict[str, Any]]) -> None:
    """The rows as CSV; `labels` gives each row's first columns, such as the model's name."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*labels[0], *(field.name for field in fields(Row))])
        writer.writeheader()
        for label, row in zip(labels, rows, strict=True):
            writer.writerow({**label, **asdict(row)})
