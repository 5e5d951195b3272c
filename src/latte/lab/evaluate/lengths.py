"""`latte evaluate`: perplexity and bits per byte at several context lengths.

The protocol is that of `latte.lab.train.scoring`. All lengths are compared on the same text. Only
the number of earlier tokens that a prediction may use differs.

`latte convert BASE OUT --recipe RECIPE` ends with it too (:func:`report`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from latte.conversion.pretrained import converted_config, load_base
from latte.errors import LatteError
from latte.lab.data.blocks import EvaluationText, perplexity
from latte.lab.data.preparing import prepare_text
from latte.lab.evaluate import tables
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.plots import conversion_figure
from latte.lab.machine import default_device, peak_memory_bytes
from latte.lab.progress import progress as show_progress
from latte.lab.results import numbered, own_file
from latte.lab.train.conversion_trainer import mixing
from latte.lab.train.run import data_section
from latte.lab.train.scoring import score
from latte.lab.train.stages import ConversionRecipe
from latte.models.atomic_files import write_json, write_text
from latte.models.plain_files import read_object

CACHE_FILE = "evaluation.json"
# The models that are compared after a conversion, and their mixing: the base, the base with a
# window alone in every layer, the result, and the result with p(l=0) held at 1 and at 0.
OF_BASE = {"base": "base", "base, window only": "window"}
OF_RESULT = {
    "converted": "learned",
    "converted, p(l=0) = 1": "window",
    "converted, p(l=0) = 0": "latents",
}


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
    by_position: Sequence[tuple[int, int, float]] = ()  # first position, tokens, loss


COLUMNS = [field.name for field in fields(Row) if field.name != "by_position"]
POSITION_COLUMNS = ["length", "first", "last", "tokens", "loss", "perplexity"]


def evaluate_lengths(
    model: Any,
    text: EvaluationText,
    lengths: list[int],
    *,
    progress: bool = True,
    label: str = "",
    **options: Any,
) -> list[Row]:
    """Score `text` at each context length, in tokens.

    See the module docstring for the protocol. With `progress` it says how far it is.
    """
    for length in lengths:
        if length < 1:
            raise LatteError(f"lengths: expected whole numbers of at least 1, got {length}")
    check_positions(options.get("positions") or ())
    device = next(model.parameters()).device
    rows = []
    total = len(lengths) * text.num_targets
    with show_progress(total, "token", shown=progress) as bar:
        for length in lengths:
            bar.describe(f"{label} at {length}".strip())
            start = time.perf_counter()
            found = score(model, text, length, on_batch=bar.update, **options)
            seconds = time.perf_counter() - start
            names = ("tokens", "text_bytes", "loss", "perplexity", "bits_per_byte")
            values: dict[str, Any] = {name: getattr(found, name) for name in names}
            values |= {"seconds": seconds, "tokens_per_second": found.tokens / seconds}
            values["peak_memory_bytes"] = peak_memory_bytes(device)
            values["by_position"] = [(i, n, nll / max(n, 1)) for i, n, nll in found.by_position]
            rows.append(Row(length, **values))
    return rows


def check_positions(positions: Sequence[int]) -> None:
    """Raise LatteError for positions that cannot divide windows."""
    if any(a >= b for a, b in pairwise([0, *positions])):
        raise LatteError(f"positions: expected rising numbers of at least 1, got {positions}")


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
    for row in rows:
        for part in position_rows(row):
            place = f"{part['first']:,} to {part['last']:,} of {row.length:,}"
            lines.append(f"{place:>20}  {part['loss']:.4f}  {part['perplexity']:>10.4g}")
    lines.append(
        f"every row scores the same {rows[0].tokens:,} tokens ({rows[0].text_bytes:,.0f} bytes)"
    )
    return "\n".join(lines)


def write_rows(path: Path, by_label: Mapping[str, Sequence[Row]], name: str = "model") -> None:
    """The rows of each label as CSV; `name` is the first column's, which has the label.

    What they say by position goes into positions.csv beside it.
    """
    rows = [{name: label, **flat(row)} for label, found in by_label.items() for row in found]
    tables.write_csv(path, [name, *COLUMNS], rows)
    parts = [
        {name: label, **part}
        for label, found in by_label.items()
        for row in found
        for part in position_rows(row)
    ]
    if parts:
        tables.write_csv(path.with_name("positions.csv"), [name, *POSITION_COLUMNS], parts)


def flat(row: Row) -> dict[str, Any]:
    """A row's values for the whole length."""
    return {name: getattr(row, name) for name in COLUMNS}


def position_rows(row: Row) -> list[dict[str, Any]]:
    """A row's scores by position in its windows; `last` is the last position of each part."""
    ends = [first for first, _, _ in row.by_position[1:]] + [row.length]
    return [
        {"length": row.length, "first": first, "last": end - 1, "tokens": tokens,
         "loss": loss, "perplexity": perplexity(loss, 1)}
        for (first, tokens, loss), end in zip(row.by_position, ends, strict=False)
    ]  # fmt: skip


def kept_note(config: Any) -> str:
    """What a table adds to a model's name: the layers that are kept, and whether they grow."""
    kept = getattr(config, "keep_layers", ())
    if not kept:
        return ""
    layers = f"layers {', '.join(map(str, kept))} kept"
    if config.kept_window is None:
        return f", hybrid: {layers}"
    return f", {layers} with a window of {config.kept_window}"


def report(
    base: str, folder: Path, recipe: ConversionRecipe, *, quiet: bool = False
) -> dict[str, list[Row]]:
    """What a conversion did, all scored on the same held-out tokens.

    Writes evaluation.csv, .md (perplexities) and .png, with a number in their names where the
    folder has those of other lengths. What an earlier call has scored on the same text at the same
    lengths is not scored again.
    """
    section = recipe.evaluation
    block = recipe.data.block_length
    stage = list(recipe.stages(base, folder).values())[0]
    prepared = prepare_text(data_section(stage), progress=not quiet)
    held_out = prepared.held_out(section.max_tokens, join=section.join)
    lengths = section.lengths or [block, 2 * block, 4 * block, 8 * block]
    wanted = {"lengths": lengths, "max_tokens": section.max_tokens, "join": section.join}
    file, number = own_file(folder / CACHE_FILE, lambda there: _read(there)["wanted"] == wanted)
    stored: dict[str, Any]
    stored = _read(file) if file.exists() else {"wanted": wanted, "rows": {}}

    def score_due(mixings: Mapping[str, str], load: Callable[[], Any]) -> None:
        due = {name: how for name, how in mixings.items() if name not in stored["rows"]}
        model = load() if due else None
        for name, how in due.items():
            with mixing(model, how):
                rows = evaluate_lengths(model, held_out, lengths, progress=not quiet, label=name)
            stored["rows"][name] = [asdict(row) for row in rows]
            write_json(file, stored)

    plain = converted_config(base, {**recipe.conversion.fields(), "num_sinks": 0})
    score_due(
        OF_BASE,
        lambda: load_base(base, plain, dtype=recipe.conversion.dtype).to(default_device()),
    )
    score_due(OF_RESULT, lambda: load_checkpoint(folder)[0])
    note = kept_note(plain)
    named = {name: name if name == "base" else name + note for name in (*OF_BASE, *OF_RESULT)}
    found = {named[name]: [Row(**row) for row in stored["rows"][name]] for name in named}
    lines = [["model", *(f"{length:,}" for length in lengths)]]
    lines += [[name, *(f"{row.perplexity:.4g}" for row in found[name])] for name in found]
    text = tables.table(lines)
    close = (named["base, window only"], named["converted"])
    # The record of these is the file of the scores.
    table, words, figure = (
        numbered(folder / f"evaluation{suffix}", number) for suffix in (".csv", ".md", ".png")
    )
    write_rows(table, found)
    write_text(words, text)
    conversion_figure(figure, found, close=close, train_length=block)
    if not quiet:
        print("perplexity at each context length (lower is better):", flush=True)
        print(text, end="", flush=True)
        print(f"written: {table}, .md and .png", flush=True)
    return found


def _read(file: Path) -> dict[str, Any]:
    """The scores of an earlier call. Raises LatteError if the file is damaged."""
    again = "delete it to score again"
    stored = read_object(file, "wanted", "rows", then=again)
    if not isinstance(stored["rows"], dict):
        raise LatteError(f"{file} is damaged (its rows are no object); {again}")
    return stored
