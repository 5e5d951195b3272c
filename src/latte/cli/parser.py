"""The options of every command, without importing what the commands need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from latte.cli import (
    benchmark_command,
    commands,
    convert_command,
    evaluate_command,
    inspect_command,
)
from latte.errors import OneLineParser


def build_parser() -> argparse.ArgumentParser:
    """The parser of `latte`, with a function under `run` for each command."""
    parser = OneLineParser(
        prog="latte",
        description="Train, evaluate and sample Latte language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, help="show the version and exit")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(kinds)
    _add_evaluate(kinds)
    _add_generate(kinds)
    _add_compare(kinds)
    _add_convert(kinds)
    _add_inspect(kinds)
    _add_benchmark(kinds)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one call. Dotted overrides may stand anywhere after the recipe.

    argparse itself takes the positional arguments of one place only, and would refuse
    `latte train RECIPE --quiet seed=1`.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if rest and (unknown or not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


class Version(argparse.Action):
    """Looks the version up only when asked."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        from latte import __version__

        print(f"latte {__version__}")
        parser.exit(0)


def integers(text: str) -> list[int]:
    """`256,1024` -> [256, 1024]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, got {text!r}"
        ) from None
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, got {text!r}")
    return values


def presets(text: str) -> list[str]:
    """`latte++,swa++` -> ['latte++', 'swa++']; whether they differ is looked at later."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds(text: str) -> list[int]:
    """`0,1,2` -> [0, 1, 2]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers of at least 0 separated by commas, got {text!r}"
        )
    return [int(part) for part in parts]


def _command(kinds, name: str, summary: str, details: str, run):  # type: ignore[no-untyped-def]
    parser = kinds.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_train(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "train",
        "train a model by a recipe",
        "Run again after an interruption, it goes on from the last complete checkpoint. With"
        " several processes: torchrun --nproc-per-node 2 -m latte.cli train RECIPE.",
        commands.train,
    )
    parser.add_argument("recipe", help="a YAML recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="dotted overrides, such as training.max_steps=200 model.preset=latte++",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no lines")


def _add_evaluate(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "evaluate",
        "score a checkpoint: held-out text at several context lengths, tasks or probes",
        "Perplexity and bits per byte as a table, a CSV and a plot. Every length scores the same"
        " tokens: each document is cut into windows of that length, the state is carried inside"
        " a window and starts empty in the next. With --tasks or --probes it runs those instead.",
        evaluate_command.run,
    )
    parser.add_argument("checkpoint", help="a folder written by latte train or save_pretrained")
    parser.add_argument(
        "--corpus",
        nargs="+",
        help="'embedded', 'hub:NAME', or files, folders and globs, scored whole; by default the"
        " held-out text of the run that made the checkpoint",
    )
    parser.add_argument("--field", default="text", help="JSON field or Parquet column of the text")
    parser.add_argument(
        "--lengths", type=integers, default=[256, 1024, 4096], help="context lengths in tokens"
    )
    parser.add_argument(
        "--join", action="store_true", help="one long document of all, for contexts beyond them"
    )
    parser.add_argument("--max-tokens", type=int, help="score about so many, spread evenly")
    evaluate_command.add_options(parser)
    parser.add_argument("--segment", type=int, default=1024, help="tokens read at a time")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens side by side")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", help="such as cpu or cuda; a GPU if there is one")
    parser.add_argument(
        "--output", help="folder of the tables and figures; CHECKPOINT/evaluation[-MIXING]"
    )


def _add_generate(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "generate",
        "continue a prompt, streaming",
        "Prints the prompt and its continuation as it comes.",
        commands.generate,
    )
    parser.add_argument("checkpoint", help="a folder written by latte train or save_pretrained")
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="at most so many")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, help="sample among the k most likely tokens")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample within this mass")
    parser.add_argument("--seed", type=int, help="for the same sample again")
    parser.add_argument("--device", help="such as cpu or cuda; a GPU if there is one")


def _add_compare(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "compare",
        "train several presets by one recipe and put them side by side",
        "Each preset gets its own run in OUTPUT_DIR/PRESET, on the same tokens in the same order;"
        " writes comparison.csv, .md and .png. With --seeds it trains each preset by each seed, in"
        " OUTPUT_DIR/PRESET/seed-N, and writes seeds.csv, .md and .png: means with 95% intervals,"
        " differences paired by seed, the order claimed and found. Run again, it goes on where it"
        " stopped.",
        commands.compare,
    )
    parser.add_argument("recipe", help="a YAML recipe; its model.preset is not used")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.add_argument(
        "--presets",
        type=presets,
        help="names separated by commas, such as latte++,swa++; the recipe's comparison.presets",
    )
    parser.add_argument(
        "--seeds", type=seeds, help="such as 0,1,2, of initialisation and data order"
    )
    parser.add_argument(
        "--baseline", help="with --seeds, what to take differences to; transformer++ or the first"
    )
    parser.add_argument(
        "--lengths",
        type=integers,
        help="context lengths in tokens; 1, 4 and 16 times the block, with --seeds the block",
    )
    parser.add_argument("--max-tokens", type=int, help="held-out tokens scored at the end")
    parser.add_argument(
        "--dry-run", action="store_true", help="with --seeds, list the runs and do none"
    )
    parser.add_argument(
        "--report", action="store_true", help="with --seeds, report what is done, train nothing"
    )


def _add_convert(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "convert",
        "give a pretrained decoder a window and latents in the place of full attention",
        "Keeps all of the base's weights and adds the latents'. With a recipe it also trains them"
        " and compares base, controls and result; run again, it goes on where it stopped.",
        convert_command.run,
    )
    convert_command.add_options(parser)


def _add_inspect(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "inspect",
        "show which tokens a model looks at, and through which latents",
        "Writes index.html, where a token can be picked, figures and CSVs of how the latents are"
        " used, such as the collapse figure.",
        inspect_command.run,
    )
    inspect_command.add_options(parser)


def _add_benchmark(kinds) -> None:  # type: ignore[no-untyped-def]
    parser = _command(
        kinds,
        "benchmark",
        "time and memory of the ops and of models, on the device at hand",
        "Medians of interleaved calls and peak memory, as lines and as benchmark.csv with device,"
        " threads, version and date. By default Latte, Latte-Macchiato, the window and softmax"
        " attention, latte-r-swa++ and transformer++, at 1,024 and 4,096 tokens.",
        benchmark_command.run,
    )
    benchmark_command.add_options(parser)
    parser.add_argument(
        "--lengths", type=integers, default=argparse.SUPPRESS, help="tokens; 1024,4096"
    )
