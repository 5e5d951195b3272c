"""Train several presets by one recipe, on the same tokens, and put them side by side.

Every preset has its own run folder under the recipe's `output_dir`, an ordinary run that resumes
by itself; what is finished is not done again. All read the same blocks in the same order, take
the same number of steps and share every hyperparameter, and the number of tokens is fixed before
the first step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latte.data.preparing import Text, prepare_text
from latte.errors import LatteError
from latte.evaluate.checkpoint import load_checkpoint
from latte.evaluate.lengths import Row, evaluate_lengths, write_csv
from latte.evaluate.plots import comparison_figure
from latte.train.metrics import duration, read_metrics
from latte.train.recipe import Recipe
from latte.train.run import Result, check_model, train
from latte.train.run_folder import write_json

EVALUATION_FILE = "lengths.json"


@dataclass(frozen=True)
class Entry:
    """One preset's outcome."""

    preset: str
    parameters: int
    run: Result
    rows: list[Row]


def compare(
    recipe: Recipe,
    presets: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    max_tokens: int | None = None,
    references: dict[str, float] | None = None,
    title: str = "",
    quiet: bool = False,
) -> list[Entry]:
    """Train and evaluate each preset; write comparison.csv, .md and .png in `output_dir`.

    Args:
        recipe: shared by all; its `model.preset` is replaced.
        presets: names of `latte.models.PRESETS`.
        lengths: context lengths of the evaluation, in tokens; 1, 4 and 16 blocks by default.
        max_tokens: held-out tokens scored at the end; all by default.
        references: bits per byte of something else, drawn as lines.
        title: of the figure.
        quiet: no bars and no lines.

    Raises:
        LatteError: as for `train`, and for no or repeated presets.
    """
    if not presets or len(set(presets)) != len(presets):
        raise LatteError(f"presets: expected different names, got {', '.join(presets) or 'none'}")
    recipes = {preset: preset_recipe(recipe, preset) for preset in presets}
    for each in recipes.values():  # a mistake in the last one shows before the first one trains
        check_model(each)
    text = prepare_text(recipe.data, progress=not quiet)
    block = recipe.data.block_length
    chosen = sorted(set(lengths)) if lengths else [block, 4 * block, 16 * block]
    entries = []
    for preset, each in recipes.items():
        run = train(each, label=preset, quiet=quiet)
        if not run.finished:
            raise LatteError(
                f"{preset} was stopped at step {run.steps} by training.max_minutes before its"
                " tokens were used up; a comparison needs equal tokens: run again with more"
            )
        rows, parameters = _evaluated(run.folder, text, chosen, max_tokens, preset, quiet)
        entries.append(Entry(preset, parameters, run, rows))
    write_report(Path(recipe.output_dir), entries, recipe, references, title)
    return entries


def preset_recipe(recipe: Recipe, preset: str) -> Recipe:
    """The recipe for one preset, in a folder of its own.

    Overrides of the latents and the window go to the presets that have them.

    Raises:
        LatteError: the recipe is about a model that is no preset, which would be every one of them.
    """
    from latte.models import PRESETS, preset_config

    for name, value in (
        ("model.architecture", recipe.model.architecture),
        ("conversion.base", recipe.conversion.base),
    ):
        if value is not None:
            raise LatteError(f"{name}: expected none where presets are compared, got {value!r}")
    each = copy.deepcopy(recipe)
    each.model.preset = preset
    each.output_dir = str(Path(recipe.output_dir) / preset)
    if preset in PRESETS:
        own = preset_config(preset)
        for name in ("num_latents", "sliding_window"):
            if getattr(own, name) is None:
                each.model.overrides.pop(name, None)
    return each


def _evaluated(
    folder: Path,
    text: Text,
    lengths: list[int],
    max_tokens: int | None,
    label: str,
    quiet: bool,
) -> tuple[list[Row], int]:
    """(rows, number of parameters) of a finished run: from its folder if done before."""
    wanted = {"lengths": lengths, "max_tokens": max_tokens}
    file = folder / EVALUATION_FILE
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["wanted"] == wanted:
            return [Row(**row) for row in stored["rows"]], stored["parameters"]
    model, _ = load_checkpoint(folder)
    rows = evaluate_lengths(
        model, text.held_out(max_tokens), lengths, progress=not quiet, label=label
    )
    parameters = sum(p.numel() for p in model.parameters())
    stored = {"wanted": wanted, "parameters": parameters, "rows": [asdict(row) for row in rows]}
    write_json(file, stored)
    return rows, parameters


def write_report(
    folder: Path,
    entries: list[Entry],
    recipe: Recipe,
    references: dict[str, float] | None,
    title: str,
) -> None:
    """comparison.csv (a row per preset and length), comparison.md and comparison.png."""
    rows = [(entry.preset, row) for entry in entries for row in entry.rows]
    write_csv(
        folder / "comparison.csv",
        [row for _, row in rows],
        [{"preset": preset} for preset, _ in rows],
    )
    (folder / "comparison.md").write_text(markdown(entries), encoding="utf-8")
    comparison_figure(
        folder / "comparison.png",
        {entry.preset: read_metrics(entry.run.folder, "eval") for entry in entries},
        {entry.preset: entry.rows for entry in entries},
        train_length=recipe.data.block_length,
        references=references,
        title=title,
    )


def markdown(entries: list[Entry]) -> str:
    """A table: parameters, tokens, time and, by context length, perplexity and bits per byte."""
    lengths = [row.length for row in entries[0].rows]
    head = ["model", "parameters", "tokens", "training time", "tokens/s"]
    head += [f"ppl at {length:,}" for length in lengths]
    head += [f"bits/byte at {length:,}" for length in lengths]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for entry in entries:
        cells: list[Any] = [
            f"`{entry.preset}`",
            f"{entry.parameters / 1e6:.2f}M",
            f"{entry.run.tokens:,}",
            duration(entry.run.seconds),
            f"{entry.run.tokens / max(entry.run.seconds, 1e-9):,.0f}",
        ]
        cells += [f"{row.perplexity:.4g}" for row in entry.rows]
        cells += [f"{row.bits_per_byte:.4f}" for row in entry.rows]
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
