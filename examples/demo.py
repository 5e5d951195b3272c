"""`make demo`: a Latte and a transformer of the same size learn Python's own library, in minutes.

    python -m examples.demo [output_dir=runs/demo]

Trains `latte-r-swa++` and `transformer++` by one recipe on the same tokens of the embedded
corpus, scores both on held-out files at 1, 4 and 16 times the training length beside gzip and
xz, draws a figure and a sample, and leaves checkpoints that
`AutoModelForCausalLM.from_pretrained` loads after `import latte`. Interrupted, it goes on where
it stopped when run again.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import time
from pathlib import Path
from typing import Any

from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code

PRESETS = ("latte-r-swa++", "transformer++")
PROMPT = 'def read_lines(path):\n    """'
SAMPLE_TOKENS = 200
HELD_OUT_TOKENS = 65_536


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    parser = OneLineParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml", help="a YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    options = parser.parse_intermixed_args(arguments)
    return exit_code(
        "demo",
        lambda: demo(options.recipe, options.overrides),
        "run again, it goes on from the last checkpoint",
    )


def demo(recipe_path: str, overrides: list[str]) -> None:
    """Train, compare, sample and report. All results go to the recipe's `output_dir`."""
    from latte.lab.train.recipe import ComparisonSection, load_recipe

    began = time.perf_counter()
    recipe = load_recipe(recipe_path, overrides)
    from latte.lab.compare.compare import Comparison
    from latte.lab.data.preparing import prepare_text
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.generate import generate

    text = prepare_text(recipe.data)
    scored = text.held_out(HELD_OUT_TOKENS)
    references = compression_baselines(scored_bytes(scored, text.tokenizer))
    recipe.comparison = ComparisonSection(list(PRESETS), max_tokens=HELD_OUT_TOKENS)
    tokens = recipe.tokens_per_step() * recipe.steps()
    title = f"Python's library sources, {tokens:,} training tokens each"
    comparison = Comparison(recipe, references=references, title=title)
    statuses, table = comparison.sweep()
    latte = statuses[0].run.folder
    folder = Path(recipe.output_dir)
    print(f"\nA continuation by {PRESETS[0]} of {PROMPT!r}:\n")
    model, tokenizer = load_checkpoint(latte)
    print(PROMPT, end="", flush=True)
    sample = generate(
        model, tokenizer, PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=0.7, seed=0
    )
    (folder / "sample.txt").write_text(PROMPT + sample + "\n", encoding="utf-8")
    figure = comparison.report_place().path("comparison.png")
    lines = [
        "",
        "Held-out text, bits per byte (lower is better) by context length:",
        "",
        table.rstrip(),
        "",
        "On the same files: " + ", ".join(f"{k} {v:.3f}" for k, v in references.items()) + ".",
        f"Figure: {figure}. Sample: {folder / 'sample.txt'}.",
        f"Try: latte generate '{latte}' --prompt 'import '",
        f"All of it took {time.perf_counter() - began:.0f} s.",
    ]
    print("\n".join(lines), flush=True)


def scored_bytes(text: Any, tokenizer: Any) -> bytes:
    """The very bytes that the models are scored on, for the compressors."""
    pieces = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in text.documents()]
    return "".join(pieces).encode()


def compression_baselines(held_out: bytes, train: bytes | None = None) -> dict[str, float]:
    """Bits per byte that general compressors need for the held-out text.

    What each number measures:

    - ``gzip``: ``gzip -9`` of the held-out bytes in one piece, alone (a 32 KB window).
    - ``xz``: ``xz -9e`` of the held-out bytes in one piece, alone.
    - ``xz_after_train`` (if ``train`` is given): the bytes that ``xz -9e`` adds when the held-out
      text follows the training text, within one 64 MiB window: what a compressor knows that has
      seen what the model has seen. Training text before the last 64 MiB is out of its sight.

    ``gzip`` and ``xz`` start from nothing, whereas a trained model has seen the training text:
    the fair rival of a model is ``xz_after_train``. Headers and checksums are counted (they are
    below 0.001 bits per byte from 100 KB on).
    """
    if not held_out:
        raise LatteError("compression_baselines expected some held-out text, got none")
    bits = 8 / len(held_out)
    preset = 9 | lzma.PRESET_EXTREME
    result = {
        "gzip": len(gzip.compress(held_out, 9)) * bits,
        "xz": len(lzma.compress(held_out, preset=preset)) * bits,
    }
    if train is not None:
        both = len(lzma.compress(train + held_out, preset=preset))
        result["xz_after_train"] = (both - len(lzma.compress(train, preset=preset))) * bits
    return result


if __name__ == "__main__":
    raise SystemExit(main())
