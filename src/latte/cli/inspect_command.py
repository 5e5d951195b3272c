"""`latte inspect`: its options, and what it does."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path


def numbers(text: str) -> list[int]:
    """`0,3` -> [0, 3]: numbers that count from 0."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def add_options(parser: ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("checkpoint", help="a folder written by latte train or latte convert")
    parser.add_argument("--text", help="the text to look at")
    parser.add_argument("--file", help="a file with it: plain text, or the first JSON line's")
    parser.add_argument("--layers", type=numbers, help="their numbers from 0, such as 0,3; all")
    parser.add_argument(
        "--tokens", type=int, default=256, help="shown in the page, with all their weights"
    )
    parser.add_argument(
        "--statistics-tokens", type=int, default=4096, help="read for means, CSVs and figures"
    )
    parser.add_argument(
        "--at", type=numbers, help="positions whose weights go into weights.csv, such as 40,80"
    )
    parser.add_argument("--device", help="such as cpu or cuda; a GPU if there is one")
    parser.add_argument("--output", help="folder of the results; CHECKPOINT/inspection")


def run(options: Namespace) -> int:
    """latte inspect CHECKPOINT --text ..."""
    from latte.evaluate.checkpoint import find_checkpoint, load_checkpoint, training_recipe
    from latte.inspect.report import inspect_model, outline, page_size, read_text, write_report
    from latte.train.run_folder import writable_folder

    folder = find_checkpoint(options.checkpoint)
    text = read_text(options.text, options.file)
    recipe = training_recipe(folder)
    model, tokenizer = load_checkpoint(folder, options.device)
    inspection = inspect_model(
        model,
        tokenizer,
        text,
        shown=options.tokens,
        read=options.statistics_tokens,
        layers=options.layers,
        at=options.at or (),
        label=recipe.name if recipe is not None else folder.name,
    )
    output = writable_folder(Path(options.output) if options.output else folder / "inspection")
    written = write_report(inspection, output)
    print(outline(inspection))
    print(f"written into {output}: {', '.join(written)}")
    print(f"open {output / 'index.html'} ({page_size(output)}) in a browser")
    return 0
