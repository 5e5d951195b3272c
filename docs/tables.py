"""Tables of options, recipe keys and public names, written into the pages from the code.

    python docs/tables.py

rewrites every block between ``<!-- generated: NAME -->`` and ``<!-- /generated -->`` of the pages
below. Names, values and defaults of options and keys come from the code. Their meaning is the words
below; where there are none, it is the help of the option or the comment beside the field. The
options of latents have their meaning in `latte.layers.latent_fields`, and nowhere else. A public
name of a reference page gets the first sentence of its docstring, so that the page can
be read in the repository, where nothing fills in the whole docstrings.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latte.cli.parser import build_parser, has_default
from latte.conversion.config import MacchiatoFields
from latte.lab.data.preparing import DataSection
from latte.lab.train.layers import LayersSection
from latte.lab.train.recipe import (
    ComparisonSection,
    ConversionSection,
    ModelSection,
    TrainingSection,
)
from latte.lab.train.stages import EvaluationSection
from latte.layers.latent_fields import ConversionOptions, default_in_words, flag, options_of
from latte.models import LatteConfig

DOCS = Path(__file__).parent
OPTIONS_PAGE = DOCS / "reference/command-line.md"
KEYS_PAGE = DOCS / "reference/recipes.md"
MODULES = ("ops", "layers", "models", "conversion", "data")  # each has a page in reference/
SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "training": TrainingSection,
    "comparison": ComparisonSection,
    "conversion": ConversionSection,
    "layers": LayersSection,
    "evaluation": EvaluationSection,
}


def marked(each: dataclasses.Field[Any]) -> str:
    """The default of an option of latents, in words; text in backticks."""
    words = default_in_words(each)
    return f"`{words}`" if isinstance(each.default, str) else words


def meaning(each: dataclasses.Field[Any]) -> str:
    """What an option of latents is, and what it means that its default is None."""
    none = each.metadata["none"] if each.default is None else ""
    return each.metadata["help"] + (f"; None: {none}" if none else "")


# Where a help text of one line is not enough for a page. `*` holds for every command.
OPTION_WORDS: dict[str, dict[str, str]] = {
    "*": {
        "--device": "device to run on, such as `cpu` or `cuda`; a GPU if there is one",
        "--quiet": "print no progress bar and no lines",
        "--force": "replace results of other settings",
        "--state-dir": "folder of the state that `--read` keeps; the document's",
        "overrides": "changes to the recipe, by dotted names, such as `training.max_steps=200`",
        "checkpoint": "folder written by `latte train` or `save_pretrained`, or a GGUF file",
    },
    "evaluate": {
        "--corpus": "text to score: `embedded`, `hub:NAME`, or files, folders and globs;"
        " by default the validation text of the run",
        "--lengths": "context lengths in tokens, separated by commas; `256,1024,4096`, of `niah`"
        " `1024,4096`",
        "--positions": "positions at which the scores of each window are divided too,"
        " such as `16,64,256`",
        "--join": "make one long document of all, for contexts longer than the documents",
        "--max-tokens": "number of tokens to score, about, spread evenly over the text; all",
        "--tasks": "tasks of lm-evaluation-harness to run instead: names or YAML files, separated"
        " by commas. `niah` (or `niah_single`, `niah_keys`, `niah_values`, `niah_variables`,"
        " `niah_words`) finds facts in long texts, made from the corpus",
        "--limit": "number of documents per task; all, of `niah` 24",
        "--chat-template": "put each prompt into the tokenizer's chat template",
        "--field": "JSON field or Parquet column of the text; `text`",
        "--seed": "seed of the cases of `niah`; `0`",
        "--num-fewshot": "number of examples before each question; as the task says",
        "--batch-size": "number of prompts of tasks in one batch; `8`",
        "--max-length": "number of tokens of a prompt that the model sees; as its config says, of"
        " `niah` the longest of `--lengths`",
        "--context-parallel": "under torchrun: number of processes that share each window. With 1,"
        " each process scores windows of its own; `1`",
        "--mixing": "of a converted model: `learned` (the model itself), or a control: `window`,"
        " `latents` or `base`",
        "--segment": "number of tokens read at a time; `1024`",
        "--batch-tokens": "number of tokens in one batch; `16384`",
        "--bf16": "compute in bfloat16 (autocast)",
        "--output": "folder of the results; `CHECKPOINT/evaluation`, with `-MIXING` if that is"
        " given, and of a GGUF file `FILE-evaluation` in the working folder",
    },
    "convert": {
        "output": "new folder; with a recipe, run the command again to continue",
        "--recipe": "YAML recipe of a conversion: train the latents too, and compare with the base",
        **{flag(each): f"`{each.name}`; {marked(each)}" for each in options_of(ConversionOptions)},
        "--seed": "seed of the new weights; 0",
        "--dtype": "precision of the base's weights, such as `bfloat16`; the checkpoint's",
        "--weights": "bits of the base's weights: `file` (those of a GGUF file), `int4`, `int8` or"
        " `bfloat16`; BASE may be a converted model, too; as `--dtype` says",
    },
    "generate": {
        "--file": "document to read before the prompt, not printed. A file with several documents"
        " gives its first",
        "--force": "replace the file of `--save-state` if it exists",
        "--state": "file that `--save-state` wrote: continue from it",
        "--save-state": "new file for the state after document and prompt, before the continuation",
        "--max-new-tokens": "largest number of new tokens; 0 with `--save-state` only reads",
        "--temperature": "0 always takes the most likely token",
        "--top-k": "sample among the k most likely tokens",
        "--top-p": "sample among the most likely tokens that have this probability together",
        "--seed": "seed: the same seed gives the same text",
        "--compile": "compile one step of decoding first; useful for long texts",
        "--dtype": "precision of the weights, such as `float32`; integers are dequantised;"
        " as saved",
    },
    "chat": {
        "checkpoint": "checkpoint, as above, whose tokenizer has a chat template",
        "--system": "system message; that of the template",
        "--file": "document to talk about, in front of the first message",
        "--temperature": "0 always takes the most likely token",
        "--top-k": "sample among the k most likely tokens",
        "--top-p": "sample among the most likely tokens that have this probability together",
        "--seed": "seed: the same seed gives the same answers",
        "--dtype": "precision of the weights, such as `float32`; integers are dequantised;"
        " as saved",
    },
    "serve": {
        "--dtype": "precision of the weights, such as `float32`; integers are dequantised;"
        " as saved",
        "checkpoint": "checkpoint, as above; requests name it as it is written here",
        "--max-batch": "largest number of requests that share a step",
        "--prefill-piece": "largest number of tokens of a prompt that are read between two steps;"
        " 256 on a CPU, elsewhere 2048",
        "--max-length": "largest number of tokens of prompt and answer together; no limit",
        "--state-cache": "memory for states that are kept, such as `2GiB`; 0 keeps none",
        "--state-cache-dir": "folder in which states are kept as files too, for the next start",
        "--state-cache-disk": "largest size of these files together",
        "--max-body": "largest size of a request's body, such as `16MiB`; a larger one gets status"
        " 413",
        "--max-messages": "largest number of messages of a chat",
        "--max-characters": "largest number of characters of all strings of a request together",
        "--client-timeout": "seconds after which a client is dropped that does not send the rest of"
        " its request, or does not read its answer; it can take twice as long",
        "--allowed-hosts": "names in URLs that the server answers to, without ports, separated by"
        " commas: `api.example.com`, `*.example.com`, or `*` for any name. At a loopback address"
        " those of this machine are added; at a loopback address none, elsewhere all",
        "--host": "address to listen at",
        "--port": "port; 0 takes a free one. The address is printed when the server is ready",
        "--compile": "compile one step of decoding first",
    },
    "compare": {
        "recipe": "YAML recipe; its `model.preset` is not used",
        "--presets": "names separated by commas; the recipe's `comparison.presets`",
        "--seeds": "seeds separated by commas: train each preset with each of them, report"
        " intervals and paired differences",
        "--baseline": "with seeds: model that the others are compared with; `transformer++`, or the"
        " first",
        "--lengths": "context lengths in tokens, separated by commas; 1, 4 and 16 blocks, with"
        " seeds one block",
        "--max-tokens": "number of held-out tokens scored at the end; all",
        "--quiet": "print no progress bar, no lines and no table",
        "--dry-run": "with seeds: list the runs and their state, train nothing",
        "--report": "with seeds: report what is finished, train nothing",
    },
    "inspect": {
        "--text": "text to read",
        "--file": "file with the text: plain text, or JSON lines, whose first document is read",
        "--layers": "layers to show, by number from 0, separated by commas; all",
        "--tokens": "number of tokens shown on the page with all their weights, at most 1024",
        "--statistics-tokens": "number of tokens read for means, tables and figures",
        "--at": "positions whose weights are written to `weights.csv`, separated by commas",
        "--output": "folder of the results; `CHECKPOINT/inspection`",
    },
    "benchmark": {
        "--ops": "`latte`, `macchiato`, `window`, `linear`, `rg-lru`, `softmax`, or `none`; the"
        " first three and `softmax`",
        "--models": "presets and baselines, or `none`; `latte-r-swa++` and `transformer++`",
        "--modes": "`forward`, `forward+backward`, `decode` (one token after a context, models"
        " only); all",
        "--size": "size of the models: `tiny`, `small`, `paper`, `400m` or `2.6b`; `tiny`",
        "--batch": "number of sequences in a batch; 1",
        "--heads": "number of heads of the ops; 8",
        "--latents": "number of latents per head of the ops; 32",
        "--head-dim": "width of keys and values of the ops; 64",
        "--window": "window of the ops, in keys; 128",
        "--dtype": "`float32`, `bfloat16` or `float16`; `float32`",
        "--backend": "backend of the ops: `reference`, `torch`, `cpu` or `triton`; the library's"
        " choice",
        "--budget": "seconds of timed calls for each op or model; 1",
        "--lengths": "numbers of tokens, separated by commas; 1,024 and 4,096",
        "--no-memory": "measure time only",
        "--output": "folder of `benchmark.csv`; `runs/benchmark`",
    },
}

KEY_WORDS: dict[str, dict[str, str]] = {
    "model": {
        "preset": "name of a preset, of a baseline, or of a model that a plugin registers",
        "size": "`tiny`, `small`, `paper`, `400m` or `2.6b`",
        "architecture": "model type of Transformers, such as `llama`, used instead of a preset",
        "overrides": "fields of `LatteConfig`, or of the architecture's config, by name",
    },
    "data": {
        "corpus": "training text: `embedded`, `hub:NAME`, a path, a folder, a glob, or a list",
        "validation": "held-out text, as files; without it a part of the corpus is held out",
        "field": "JSON field or Parquet column that holds the text",
        "hub_config": "configuration of a Hub dataset",
        "hub_validation_split": "held-out split of a Hub dataset",
        "tokenizer": "`byte`, `bpe` (trained on the corpus), a folder, or a name on the Hub",
        "vocab_size": "number of entries of a trained BPE",
        "block_length": "number of tokens of a training example",
        "respect_documents": "no document sees another in the same block; `false` ignores bounds",
        "cache_dir": "folder of tokenised text; by default `$LATTE_CACHE`, or `~/.cache/latte`",
        "max_validation_tokens": "number of held-out tokens scored during training; null: all",
    },
    "training": {
        "max_steps": "number of optimiser steps. Give this or `max_tokens`, not both",
        "max_tokens": "number of tokens to train on",
        "max_minutes": "training saves and stops after this time; the learning-rate schedule does"
        " not change",
        "batch_size": "blocks per process (or group of processes) and micro-batch",
        "gradient_accumulation": "number of micro-batches per step",
        "learning_rate": "peak of the learning rate",
        "schedule": "how the learning rate falls after the warmup",
        "warmup_steps": "number of steps in which the learning rate rises to its peak",
        "min_learning_rate": "learning rate at the end",
        "betas": "of AdamW",
        "epsilon": "of AdamW",
        "weight_decay": "of AdamW, on matrices only",
        "max_grad_norm": "gradients are scaled down to this norm",
        "bf16": "compute in bfloat16 (autocast); parameters and optimiser stay in fp32",
        "backend": "backend of Latte's ops; see [how it is chosen](ops.md#how-a-backend-is-chosen)",
        "torch_compile": "compile the model: Latte's own block by block, others whole",
        "chunked_loss": "compute the loss of Latte's own models without holding all logits"
        " (PyTorch 2.13)",
        "gradient_checkpointing": "save memory by computing each layer twice",
        "strategy": "with several processes: `ddp`, every process holds the model; `fsdp2`, it is"
        " sharded",
        "context_parallel": "number of processes that share each block"
        " ([Context parallelism](../context-parallel.md))",
        "seed": "seed of weights, data order and dropout",
        "log_steps": "number of steps between lines of `metrics.jsonl`",
        "save_steps": "number of steps between checkpoints",
        "eval_steps": "number of steps between scores on held-out text",
        "keep_checkpoints": "number of newest checkpoints that are kept",
    },
    "comparison": {
        "presets": "names of the models to compare",
        "equal_parameters": "model whose number of parameters all presets get, within half a"
        " percent, by their `intermediate_size`; null: no fit",
        "seeds": "seeds; with none, one run of each model by `training.seed`",
        "baseline": "model that the others are compared with; `transformer++`, or the first",
        "lengths": "context lengths of the evaluation, in tokens",
        "positions": "positions at which the scores of each window are divided, such as [64, 256]",
        "max_tokens": "number of held-out tokens scored at the end; null: all",
    },
    "conversion": {
        "base": "pretrained decoder: a folder, a GGUF file or a Hub name. A converted model is"
        " trained further. `model` is then not used, and the tokenizer is the base's",
        "dtype": "precision of the base's weights; `auto`: the checkpoint's",
        "mass_weight": "weight of KL(m, p(l=0)) in the stage `layers`",
        "window_dropout": "probability that a layer's window is hidden in the first step of next"
        " tokens; it falls to 0",
        "distillation": "share of KL(base, model) in next-token training, 0 to 1",
        "trainable": "what is trained: `latents`, `lora` (latents and low-rank updates) or `all`",
        "lora_rank": "rank of the low-rank updates",
        "lora_alpha": "scale of the low-rank updates",
        "lora_targets": "projections that get low-rank updates",
    },
    "layers": {
        "rows": "number of recorded rows to train on, of `data.block_length` tokens each",
        "held_out_rows": "number of recorded rows that decide when to stop",
        "steps": "largest number of steps per layer",
        "batch_size": "number of rows per step",
        "learning_rate": "peak of the learning rate",
        "eval_steps": "number of steps between scores on the held-out rows",
        "patience": "number of scores without a gain of 0.5% after which a layer is finished",
        "processes": "number of layers fitted at once, each on one thread",
        "seed": "seed of the choice of rows and of new weights",
    },
    "evaluation": {
        "lengths": "context lengths in tokens; null: 1, 2, 4 and 8 blocks",
        "max_tokens": "number of held-out tokens scored; null: all",
        "join": "make one long document of all",
    },
}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


# ---- options


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    kinds = next(action for action in parser._actions if action.dest == "command").choices
    assert isinstance(kinds, dict)
    return kinds


def option_rows(name: str, parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """(option, default, meaning) of a command's arguments, as its help lists them."""
    words = OPTION_WORDS["*"] | OPTION_WORDS.get(name, {})
    rows: list[tuple[str, ...]] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        meaning = words.get(names(action)[0]) or (action.help or "").replace("%(default)s", "")
        optional = action.option_strings and has_default(action)
        shown = f"`{spelled(action.default)}`" if optional else ""
        # Words say what happens without the option.
        takes_a_value = action.nargs != 0 or len(names(action)) > 1
        if not shown and action.option_strings and takes_a_value and "; " in meaning:
            meaning, shown = meaning.rsplit("; ", 1)
            shown = shown.removeprefix("by default ")
        for option in names(action):
            if option.startswith("--no-") and len(names(action)) > 1:
                rows.append((f"`{option}`", "", f"turns `{names(action)[0]}` off"))
            else:
                rows.append((f"`{option}`", shown, meaning))
    return rows


def option_tables() -> dict[str, str]:
    """The arguments of each command; a first table has the options that commands share."""
    rows = {name: option_rows(name, parser) for name, parser in commands().items()}
    users: dict[tuple[str, ...], list[str]] = {}
    for name, each in rows.items():
        for row in each:
            users.setdefault(row, []).append(name)
    shared = {row: by for row, by in users.items() if len(by) > 1 and row[0].startswith("`--")}
    tables = {
        name: table(("argument", "default", "meaning"), [row for row in each if row not in shared])
        for name, each in rows.items()
    }
    head = ("option", "default", "meaning", "of the commands")
    return {"shared": table(head, [(*row, ", ".join(by)) for row, by in shared.items()])} | tables


def names(action: argparse.Action) -> list[str]:
    """What is typed: the long option and its opposite, or the argument's own name."""
    return [text for text in action.option_strings if text.startswith("--")] or [action.dest]


def spelled(value: Any) -> str:
    """A default as it would be typed."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if isinstance(value, int) and value >= unit and value % unit == 0:
            return f"{value // unit}{name}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- recipe keys


def comments(section: type) -> dict[str, str]:
    """The comment beside each field of a dataclass."""
    found = re.findall(r"^    (\w+): [^#\n]*# (.*)$", inspect.getsource(section), re.M)
    return {name: text.replace("_", r"\_") for name, text in found}


def kind(hint: Any) -> str:
    """A field's type as a recipe's reader would say it."""
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in given)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in given if each is not type(None))
    if origin in (list, Sequence) or hint is list:
        return f"list of {kind(given[0])}s" if given else "list"
    if origin is dict or hint is dict:
        return "fields"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(hint, "any")


def yaml_value(value: Any) -> str:
    """A default as YAML has it; nothing for null and for what is empty."""
    if value is None or value == {} or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def key_rows(name: str) -> list[tuple[str, ...]]:
    section = SECTIONS[name]
    elsewhere = {each.name for each in options_of(ConversionOptions)}  # conversion_table
    hints, beside = typing.get_type_hints(section), comments(section)
    words, blank = KEY_WORDS[name], section()
    return [
        (
            f"`{field.name}`",
            kind(hints[field.name]),
            yaml_value(getattr(blank, field.name)),
            words.get(field.name) or beside.get(field.name, ""),
        )
        for field in dataclasses.fields(section)
        if name != "conversion" or field.name not in elsewhere
    ]


# ---- options of latents, in Python


def field_table(kind: type) -> str:
    """Name and default of each option of a class; `conversion_table` has their meaning."""
    rows: list[tuple[str, ...]] = [
        (f"`{each.name}`", repr(each.default)) for each in options_of(kind)
    ]
    return table(("field", "default"), rows)


def conversion_table() -> str:
    """The options of `convert` and the fields of a converted model, with the default of each."""
    options, fields = (
        {each.name: each for each in options_of(kind)}
        for kind in (ConversionOptions, MacchiatoFields)
    )
    rows: list[tuple[str, ...]] = [
        (
            f"`{name}`",
            *(repr(held[name].default) if name in held else "-" for held in (options, fields)),
            meaning((fields | options)[name]),
        )
        for name in options | fields
    ]
    return table(("name", "default of the option", "of the field", "meaning"), rows)


# ---- public names


def name_rows(page: Path) -> list[tuple[str, ...]]:
    """(name, what it is) of each name whose docstring a page shows."""
    rows: list[tuple[str, ...]] = []
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.M):
        module, name = path.rsplit(".", 1)
        found = getattr(importlib.import_module(module), name)
        first = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
        first = re.sub(r":\w+:`([^`]*)`", r"`\1`", first).replace("``", "`")
        rows.append((f"`{name}`", first))
    return rows


# ---- pages


def blocks() -> dict[Path, dict[str, str]]:
    """What stands in each generated block of each page."""
    head = ("key", "value", "default", "meaning")
    keys = {name: table(head, key_rows(name)) for name in SECTIONS}
    pages = {OPTIONS_PAGE: option_tables(), KEYS_PAGE: keys}
    for module in MODULES:
        page = DOCS / f"reference/{module}.md"
        pages[page] = {"names": table(("name", "what it is"), name_rows(page))}
    pages[DOCS / "reference/models.md"] |= {"latents": field_table(LatteConfig)}
    pages[DOCS / "reference/conversion.md"] |= {
        "options": conversion_table(),
    }
    return pages


def written(text: str, parts: dict[str, str]) -> str:
    """A page's text with its generated blocks as they should be."""
    for name, body in parts.items():
        mark = f"<!-- generated: {name} -->"
        pattern = re.compile(re.escape(mark) + r"\n.*?<!-- /generated -->", re.S)
        found = list(pattern.finditer(text))
        if len(found) != 1:
            raise ValueError(f"expected one block {mark} on the page, got {len(found)}")
        whole = f"{mark}\n{body}\n<!-- /generated -->"
        text = text[: found[0].start()] + whole + text[found[0].end() :]
    return text


def main() -> None:
    for page, parts in blocks().items():
        page.write_text(written(page.read_text("utf-8"), parts), "utf-8")


if __name__ == "__main__":
    main()
