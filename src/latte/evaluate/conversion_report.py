"""What a conversion did: perplexity by context length of the base, the controls and the result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte.data.preparing import prepare_text
from latte.evaluate.checkpoint import load_checkpoint
from latte.evaluate.lengths import Row, evaluate_lengths, write_csv
from latte.evaluate.plots import conversion_figure
from latte.train.converted import mixing
from latte.train.run_folder import write_json

if TYPE_CHECKING:
    from latte.train.convert import ConversionRecipe

CACHE_FILE = "evaluation.json"
BASE, WINDOW = "base", "base, window only"
RESULT, P1, P0 = "converted", "converted, p(l=0) = 1", "converted, p(l=0) = 0"


def report(
    base: str, folder: Path, recipe: ConversionRecipe, *, quiet: bool = False
) -> dict[str, list[Row]]:
    """Score everything on the same held-out tokens; writes evaluation.csv, .md and .png.

    The base is scored as it is, and with a window on every layer and nothing else. The result is
    scored as it is and with p(l=0) held at 1 and at 0.
    """
    from latte.conversion.pretrained import converted_config, load_base
    from latte.train.run import data_section

    section = recipe.evaluation
    block = recipe.data.block_length
    lengths = section.lengths or [block, 2 * block, 4 * block, 8 * block]
    stage = list(recipe.stages(base, folder).values())[0]
    text = prepare_text(data_section(stage), progress=not quiet)
    held_out = text.held_out(section.max_tokens, join=section.join)
    wanted = {"lengths": lengths, "max_tokens": section.max_tokens, "join": section.join}
    stored = _stored(folder / CACHE_FILE, wanted)
    plain = converted_config(base, {**recipe.conversion.fields(), "num_sinks": 0})

    def rows(name: str, model: Any, how: str) -> None:
        if name in stored:
            return
        with mixing(model, how):
            stored[name] = evaluate_lengths(
                model, held_out, lengths, progress=not quiet, label=name
            )
        content = {key: [asdict(row) for row in found] for key, found in stored.items()}
        write_json(folder / CACHE_FILE, {"wanted": wanted, "rows": content})

    if not {BASE, WINDOW} <= set(stored):
        model = load_base(base, plain, dtype=recipe.conversion.dtype)
        rows(BASE, model, "base")
        rows(WINDOW, model, "window")
        del model
    if not {RESULT, P1, P0} <= set(stored):
        model, _ = load_checkpoint(folder)
        rows(RESULT, model, "learned")
        rows(P1, model, "window")
        rows(P0, model, "latents")
    order = (BASE, WINDOW, RESULT, P1, P0)
    found = {name: stored[name] for name in order}
    labels = [{"model": name} for name in order for _ in found[name]]
    write_csv(folder / "evaluation.csv", [row for name in order for row in found[name]], labels)
    (folder / "evaluation.md").write_text(markdown(found), encoding="utf-8")
    conversion_figure(folder / "evaluation.png", found, close=(WINDOW, RESULT), train_length=block)
    if not quiet:
        print(markdown(found), end="", flush=True)
    return found


def markdown(found: dict[str, list[Row]]) -> str:
    """Perplexity by context length, and the result's distance from the base at the shortest."""
    lengths = [row.length for row in next(iter(found.values()))]
    lines = [["model", *(f"{length:,}" for length in lengths)]]
    lines.append(["---", *("---:" for _ in lengths)])
    for name, rows in found.items():
        lines.append([name, *(f"{row.perplexity:.4g}" for row in rows)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _stored(file: Path, wanted: dict[str, Any]) -> dict[str, list[Row]]:
    """Rows of an earlier run that scored the same text at the same lengths."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["wanted"] != wanted:
        return {}
    return {name: [Row(**row) for row in rows] for name, rows in content["rows"].items()}
