"""The options of every command, without importing what the commands need."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from latte import __version__
from latte.cli import commands
from latte.lab.command_line import OneLineParser
from latte.layers.latent_fields import ConversionOptions, default_in_words, flag, options_of
from latte.serve.settings import Serving

# Help texts are what the page of the command line shows too: names and values are in backticks,
# and what follows the last semicolon says what happens without the option.
RUN = "folder written by `latte train` or `save_pretrained`, or a GGUF file"
DEVICE = "device to run on, such as `cpu` or `cuda`; a GPU if there is one"
DTYPE = "precision of the weights, such as `float32`; integers are dequantised; as saved"
COMPILE = "compile one step of decoding first"
QUIET = {"action": "store_true", "help": "print no progress bar and no lines"}
FORCE = {"action": "store_true", "help": "replace results of other settings"}
OVERRIDES = {
    "nargs": "*",
    "metavar": "key=value",
    "help": "changes to the recipe, by dotted names, such as `training.max_steps=200`",
}


def meaning_of(action: argparse.Action) -> tuple[str, str]:
    """What an argument means, and its default; empty if there is none to show."""
    text = action.help or ""
    if not action.option_strings:
        return text, ""
    if action.default not in (None, argparse.SUPPRESS, False, "", []):
        return text, f"`{spelled(action.default)}`"
    flags = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
    if flags or "; " not in text:
        return text, ""
    meaning, default = text.rsplit("; ", 1)
    return meaning, default.removeprefix("by default ")


def spelled(value: Any) -> str:
    """A default as it would be typed."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if isinstance(value, int) and value >= unit and value % unit == 0:
            return f"{value // unit}{name}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


class Help(argparse.HelpFormatter):
    """Shows meaning and default of an argument. A terminal needs no backticks."""

    def _get_help_string(self, action: argparse.Action) -> str:
        meaning, default = meaning_of(action)
        text = f"{meaning} (default: {default})" if default else meaning
        return text.replace("`", "").replace("%", "%%")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one call. Dotted overrides may be anywhere after the recipe.

    argparse accepts positional arguments in one place only. By itself it would refuse
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


def build_parser() -> argparse.ArgumentParser:
    """The parser of `latte`, with a function under `run` for each command."""
    parser = OneLineParser(
        prog="latte",
        description="Train, evaluate and sample Latte language models.",
        allow_abbrev=False,
    )
    version = f"latte {__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="show the version and exit"
    )
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[..., int], summary: str, details: str) -> Any:
        """A command with the name of its function; returns its parser."""
        each = kinds.add_parser(
            run.__name__,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            formatter_class=Help,
            allow_abbrev=False,
        )
        each.set_defaults(run=run)
        return each

    for add_options in (
        *(_train, _evaluate, _generate, _chat, _serve),
        *(_compare, _convert, _inspect, _benchmark, _doctor),
    ):
        add_options(command)
    return parser


# ---- types of options


def integers(text: str, least: int = 1) -> list[int]:
    """`256,1024` -> [256, 1024]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, got {text!r}"
        ) from None
    if any(value < least for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers of at least {least}, got {text!r}")
    return values


def numbers(text: str) -> list[int]:
    """`0,3` -> [0, 3]: numbers from 0 on."""
    return integers(text, least=0)


def one_or_more(text: str) -> int | list[int]:
    """`64` -> 64, `64,0,32` -> [64, 0, 32]."""
    values = numbers(text)
    return values if len(values) > 1 else values[0]


def kept_window(text: str) -> int | str:
    """`1024` -> 1024, `all` -> "all"."""
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        message = f"expected a number of keys, or all, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def size(text: str) -> int:
    """`1GiB`, `500MB` or `4096` -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?b?|b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 1GiB or 500MB, got {text!r}")
    number, prefix, binary = match.groups()
    power = 0 if prefix is None else 1 + "kmgt".index(prefix)
    return int(float(number) * (1024 if binary else 1000) ** power)


def listed(text: str) -> list[str]:
    """`latte++,swa++` -> ['latte++', 'swa++']; repeated names are refused later."""
    return [name.strip() for name in text.split(",") if name.strip()]


def names(text: str) -> list[str]:
    """`retrieval,copy` -> ['retrieval', 'copy'], each once."""
    found = listed(text)
    if not found:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return list(dict.fromkeys(found))


# ---- the commands

PLUGINS: dict[str, Any] = {
    "type": names,
    "metavar": "a.py,b.module",
    "help": "code to run first, for a model that needs it: files or modules, separated by commas",
}


def _train(command: Any) -> None:
    add = command(
        commands.train,
        "train a model by a recipe",
        "To resume after an interruption, run it again: it continues from the last complete"
        " checkpoint. With several processes: torchrun --nproc-per-node 2 -m latte.cli train"
        " RECIPE.",
    ).add_argument
    add("recipe", help="YAML recipe")
    add("overrides", **OVERRIDES)
    add("--quiet", **QUIET)


def _evaluate(command: Any) -> None:
    parser = command(
        commands.evaluate,
        "score a checkpoint: held-out text at several context lengths, or tasks",
        "Prints perplexity and bits per byte, and writes them as a CSV file and a figure. Every"
        " length scores the same tokens: each document is cut into windows of that length, and each"
        " window starts with an empty state. With --tasks it runs tasks instead.",
    )
    add = parser.add_argument
    add("checkpoint", help=RUN)
    add("--plugins", **PLUGINS)
    add(
        "--corpus",
        nargs="+",
        help="text to score: `embedded`, `hub:NAME`, or files, folders and globs; by default the"
        " validation text of the run",
    )
    add("--field", help="JSON field or Parquet column of the text; `text`")
    add(
        "--lengths",
        type=integers,
        help="context lengths in tokens, separated by commas; `256,1024,4096`, of `niah`"
        " `1024,4096`",
    )
    add(
        "--positions",
        type=integers,
        help="positions at which the scores of each window are divided too, such as `16,64,256`",
    )
    add(
        "--join",
        action="store_true",
        help="make one long document of all, for contexts longer than the documents",
    )
    add(
        "--max-tokens",
        type=int,
        help="number of tokens to score, about, spread evenly over the text; all",
    )
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness").add_argument
    tasks(
        "--tasks",
        type=names,
        help="tasks of lm-evaluation-harness to run instead: names or YAML files, separated by"
        " commas. `niah` (or `niah_single`, `niah_keys`, `niah_values`, `niah_variables`,"
        " `niah_words`) finds facts in long texts, made from the corpus",
    )
    tasks("--limit", type=int, help="number of documents per task; all, of `niah` 24")
    tasks(
        "--num-fewshot", type=int, help="number of examples before each question; as the task says"
    )
    tasks(
        "--chat-template",
        action="store_true",
        help="put each prompt into the tokenizer's chat template",
    )
    tasks("--seed", type=int, help="seed of the cases of `niah`; `0`")
    tasks("--batch-size", type=int, help="number of prompts of tasks in one batch; `8`")
    tasks(
        "--max-length",
        type=int,
        help="number of tokens of a prompt that the model sees; as its config says, of `niah` the"
        " longest of `--lengths`",
    )
    add(
        "--context-parallel",
        type=int,
        metavar="P",
        help="under torchrun: number of processes that share each window. With 1, each process"
        " scores windows of its own; `1`",
    )
    add(
        "--mixing",
        help="of a converted model: `learned` (the model itself), or a control: `window`,"
        " `latents` or `base`",
    )
    add("--segment", type=int, help="number of tokens read at a time; `1024`")
    add("--batch-tokens", type=int, help="number of tokens in one batch; `16384`")
    add("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    add("--device", help=DEVICE)
    add(
        "--output",
        help="folder of the results; `CHECKPOINT/evaluation`, with `-MIXING` if that is given, and"
        " of a GGUF file `FILE-evaluation` in the working folder",
    )
    add("--force", **FORCE)


def _sampling(add: Any, sampled: str) -> None:
    """The options of sampling. `sampled` names the output that a seed repeats."""
    add("--temperature", type=float, default=0.8, help="0 always takes the most likely token")
    add("--top-k", type=int, help="sample among the k most likely tokens")
    add(
        "--top-p",
        type=float,
        default=0.95,
        help="sample among the most likely tokens that have this probability together",
    )
    add("--seed", type=int, help=f"seed: the same seed gives the same {sampled}")


def _reading(add: Any, purpose: str) -> None:
    """The options of a document that is read once. `purpose` says what for."""
    add("--read", metavar="FILE", help=f"document to {purpose}: read once, its state is a file")
    add(
        "--state-dir", metavar="DIR", help="folder of the state that `--read` keeps; the document's"
    )


def _generate(command: Any) -> None:
    add = command(
        commands.generate,
        "continue a prompt, streaming",
        "Prints the prompt and its continuation while it is generated. To ask several prompts about"
        " a document, name it with --read: it is read once.",
    ).add_argument
    add("checkpoint", help=RUN)
    add("--plugins", **PLUGINS)
    add("--prompt", default="", help="text to continue")
    add(
        "--file",
        help="document to read before the prompt, not printed. A file with several documents gives"
        " its first",
    )
    _reading(add, "continue, or to answer the prompt about where there is a chat template")
    add("--state", help="file that `--save-state` wrote: continue from it")
    add(
        "--save-state",
        help="new file for the state after document and prompt, before the continuation",
    )
    add("--force", action="store_true", help="replace the file of `--save-state` if it exists")
    add(
        "--max-new-tokens",
        type=int,
        default=200,
        help="largest number of new tokens; 0 with `--save-state` only reads",
    )
    _sampling(add, "text")
    add("--compile", action="store_true", help=f"{COMPILE}; useful for long texts")
    add("--device", help=DEVICE)
    add("--dtype", help=DTYPE)


def _chat(command: Any) -> None:
    add = command(
        commands.chat,
        "talk to a model, a line at a time",
        "Reads messages from standard input, one per line, and prints the answers while they are"
        " generated. A turn reads only its new tokens. /clear begins a new conversation, Ctrl-C"
        " stops an answer, and Ctrl-D or /exit ends the conversation.",
    ).add_argument
    add("checkpoint", help=f"{RUN}, whose tokenizer has a chat template")
    add("--plugins", **PLUGINS)
    add("--system", default="", help="system message; that of the template")
    add("--file", help="document to talk about, in front of the first message")
    _reading(add, "talk about")
    add("--apart", action="store_true", help="answer each message without those before it")
    add("--max-new-tokens", type=int, default=512, help="largest number of tokens of an answer")
    _sampling(add, "answers")
    add("--device", help=DEVICE)
    add("--dtype", help=DTYPE)


def _serve(command: Any) -> None:
    add = command(
        commands.serve,
        "serve a model through an OpenAI-compatible API",
        "Runs Transformers' own server with one checkpoint. The model's name in requests is"
        " CHECKPOINT as written here. Running requests are decoded together. A request continues"
        " from the kept state of a text that was read before. It ends when its client disconnects."
        " Needs the extra: pip install 'latte-attention[serving]'.",
    ).add_argument
    add("checkpoint", help=f"{RUN}; requests name it as it is written here")
    add("--plugins", **PLUGINS)
    add("--host", default="localhost", help="address to listen at")
    add(
        "--port",
        type=int,
        default=8000,
        help="port; 0 takes a free one. The address is printed when the server is ready",
    )
    add("--device", help=DEVICE)
    add("--dtype", help=DTYPE)
    kinds = {None: int, "SIZE": size, "DIR": str, "SECONDS": float, "NAMES": listed}
    for each in Serving.options():
        name, metavar = each.metadata["flag"], each.metadata["metavar"]
        about: dict[str, Any] = {"action": "store_true"}
        if each.default is not False:
            shown = metavar or name.replace("-", "_").upper()
            about = {"type": kinds[metavar], "metavar": shown, "default": each.default}
        add(f"--{name}", dest=each.name, help=each.metadata["help"], **about)


def _compare(command: Any) -> None:
    add = command(
        commands.compare,
        "train several presets by one recipe and compare them",
        "Each preset gets its own run in OUTPUT_DIR/PRESET, on the same tokens in the same order."
        " The results are comparison.csv, .md and .png. With --seeds it trains each preset with"
        " each seed, in OUTPUT_DIR/PRESET/seed-N, and writes seeds.csv, .md and .png: means with"
        " 95% intervals, differences paired by seed with their p-values, the order found. To"
        " resume after an interruption, run it again.",
    ).add_argument
    add("recipe", help="YAML recipe; its `model.preset` is not used")
    add("overrides", **OVERRIDES)
    add(
        "--presets",
        type=listed,
        help="names separated by commas; the recipe's `comparison.presets`",
    )
    add(
        "--seeds",
        type=numbers,
        help="seeds separated by commas: train each preset with each of them, report intervals and"
        " paired differences",
    )
    add(
        "--baseline",
        help="with seeds: model that the others are compared with; `transformer++`, or the first",
    )
    add(
        "--lengths",
        type=integers,
        help="context lengths in tokens, separated by commas; 1, 4 and 16 blocks, with seeds one"
        " block",
    )
    add("--max-tokens", type=int, help="number of held-out tokens scored at the end; all")
    add("--quiet", action="store_true", help="print no progress bar, no lines and no table")
    add(
        "--dry-run",
        action="store_true",
        help="with seeds: list the runs and their state, train nothing",
    )
    add("--report", action="store_true", help="with seeds: report what is finished, train nothing")


def _convert(command: Any) -> None:
    add = command(
        commands.convert,
        "replace a pretrained decoder's full attention by a window and latents",
        "Keeps all of the base's weights and adds those of the latents. With a recipe it also"
        " trains them, and compares the result with the base and controls. To resume after an"
        " interruption, run it again.",
    ).add_argument
    add("base", help="pretrained decoder: a folder, a GGUF file, or a name on the Hub")
    add("output", help="new folder; with a recipe, run the command again to continue")
    add("overrides", **OVERRIDES)
    add(
        "--recipe",
        help="YAML recipe of a conversion: train the latents too, and compare with the base",
    )
    add(
        "--trained",
        metavar="FILE",
        help="latents that were trained before, a file of `save_latents`",
    )
    hints, kinds = get_type_hints(ConversionOptions), dict[Any, dict[str, Any]]()
    for kind in (int, float):
        kinds[kind] = kinds[kind | None] = {"type": kind}
    kinds[bool] = {"action": argparse.BooleanOptionalAction}
    kinds[Sequence[float]] = {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH")}
    kinds[Sequence[int]] = {"type": numbers, "metavar": "7,20,23"}
    kinds[int | Sequence[int]] = {"type": one_or_more, "metavar": "NUMBER"}
    for each in options_of(ConversionOptions):
        text = f"{each.metadata['help'].replace('`', '')} ({default_in_words(each)})"
        given = kinds.get(hints[each.name], {})
        if each.name == "kept_window":
            given = {"type": kept_window, "metavar": "NUMBER|all"}
            text += ", or all. With --trained the file's number is the default"
        add(flag(each), dest=each.name, help=text, **given)
    add("--seed", type=int, help="seed of the new weights; 0")
    add("--dtype", help="precision of the base's weights, such as `bfloat16`; the checkpoint's")
    add(
        "--weights",
        help="bits of the base's weights: `file` (those of a GGUF file), `int4`, `int8` or"
        " `bfloat16`; BASE may be a converted model, too; as `--dtype` says",
    )
    add("--quiet", **QUIET)


def _inspect(command: Any) -> None:
    add = command(
        commands.inspect,
        "show which tokens a model attends to, and through which latents",
        "Writes index.html, an interactive page where you choose a token. Also writes figures and"
        " CSVs about the use of the latents, such as the collapse figure.",
    ).add_argument
    add("checkpoint", help="folder written by `latte train` or `latte convert`")
    add("--plugins", **PLUGINS)
    add("--text", help="text to read")
    add(
        "--file", help="file with the text: plain text, or JSON lines, whose first document is read"
    )
    add("--layers", type=numbers, help="layers to show, by number from 0, separated by commas; all")
    add(
        "--tokens",
        type=int,
        default=256,
        help="number of tokens shown on the page with all their weights, at most 1024",
    )
    add(
        "--statistics-tokens",
        type=int,
        default=4096,
        help="number of tokens read for means, tables and figures",
    )
    add(
        "--at",
        type=numbers,
        help="positions whose weights are written to `weights.csv`, separated by commas",
    )
    add("--device", help=DEVICE)
    add("--output", help="folder of the results; `CHECKPOINT/inspection`")
    add("--force", **FORCE)


def _benchmark(command: Any) -> None:
    add = command(
        commands.benchmark,
        "measure time and memory of the ops and of models on this device",
        "Prints medians of interleaved calls and peak memory, and writes benchmark.csv with device,"
        " threads, version and date. By default it measures Latte, Latte-Macchiato, the window and"
        " softmax attention, latte-r-swa++ and transformer++, at 1,024 and 4,096 tokens.",
    ).add_argument
    options: list[tuple[str, Any, str]] = [
        (
            "--ops",
            names,
            "`latte`, `macchiato`, `window`, `linear`, `rg-lru`, `softmax`, or `none`; the first"
            " three and `softmax`",
        ),
        (
            "--models",
            names,
            "presets and baselines, or `none`; `latte-r-swa++` and `transformer++`",
        ),
        (
            "--modes",
            names,
            "`forward`, `forward+backward`, `decode` (one token after a context, models only); all",
        ),
        ("--size", str, "size of the models: `tiny`, `small`, `paper`, `400m` or `2.6b`; `tiny`"),
        ("--batch", int, "number of sequences in a batch; 1"),
        ("--heads", int, "number of heads of the ops; 8"),
        ("--latents", int, "number of latents per head of the ops; 32"),
        ("--head-dim", int, "width of keys and values of the ops; 64"),
        ("--window", int, "window of the ops, in keys; 128"),
        ("--dtype", str, "`float32`, `bfloat16` or `float16`; `float32`"),
        (
            "--backend",
            str,
            "backend of the ops: `reference`, `torch`, `cpu` or `triton`; the library's choice",
        ),
        ("--device", str, DEVICE),
        ("--budget", float, "seconds of timed calls for each op or model; 1"),
        ("--lengths", integers, "numbers of tokens, separated by commas; 1,024 and 4,096"),
    ]
    for option, kind, text in options:  # `evaluate.benchmark` has the defaults
        add(option, type=kind, default=argparse.SUPPRESS, help=text)
    add("--no-memory", action="store_true", help="measure time only")
    add("--output", help="folder of `benchmark.csv`; `runs/benchmark`")
    add("--force", **FORCE)


def _doctor(command: Any) -> None:
    add = command(
        commands.doctor,
        "show what runs here: versions, backends, native kernels, threads, GPU",
        "Shows the backend of every op, and why native CPU kernels are not used if they are not."
        " The exit code is 0 whatever it finds, with one exception: LATTE_NATIVE=require is set and"
        " there are no native kernels.",
    ).add_argument
    add("--json", action="store_true", help="print the report as JSON")
