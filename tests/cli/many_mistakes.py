"""Hundreds of mistakes on the command line, made from the parser and the recipes' keys.

A case is a command that cannot work. ``{name}`` in its arguments stands for a path of the box that
:func:`make_box` fills, or of the place with the trained checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from latte.cli.parser import build_parser
from latte.lab.train.recipe import Recipe
from latte.lab.train.stages import ConversionRecipe


class Case(NamedTuple):
    """A command that is refused; `limit` is the largest file, in bytes, that can be written."""

    name: str
    arguments: tuple[str, ...]
    limit: int | None = None


# What each command needs before the mistake.
START: dict[str, tuple[str, ...]] = {
    "train": ("train", "{recipe}", "output_dir={box}/new"),
    "evaluate": ("evaluate", "{run}", "--lengths", "16", "--max-tokens", "64"),
    "generate": ("generate", "{run}", "--prompt", "a", "--max-new-tokens", "2"),
    "serve": ("serve", "{none}"),
    "chat": ("chat", "{run}"),  # whose tokenizer has no chat template
    "compare": ("compare", "{recipe}", "output_dir={box}/new", "--presets", "swa++"),
    "convert": ("convert", "{base}", "{box}/new"),
    "inspect": ("inspect", "{run}", "--text", "some text"),
    "benchmark": ("benchmark", "--ops", "latte", "--models", "none", "--no-memory",
                  "--modes", "forward", "--lengths", "16", "--budget", "0.001"),
}  # fmt: skip

WRONG_TYPES = {int: ("three", "1.5", ""), float: ("much", ""), list: ("a", "1;2", "")}
# Values of the right type that an option does not take. An option that is not here takes all.
OUT_OF_RANGE = {
    "evaluate": {
        "--lengths": ("0", "-4"),
        "--positions": ("0", "8,4"),
        "--max-tokens": ("0", "-1"),
        "--limit": ("0", "-1"),
        "--num-fewshot": ("-1",),
        "--batch-size": ("0", "-1"),
        "--max-length": ("0", "-5"),
        "--context-parallel": ("0", "-1", "3"),
        "--segment": ("0", "-1"),
        "--batch-tokens": ("0", "-1"),
        "--mixing": ("half", "window", ""),
        "--device": ("tpu7", "cuda:99", "meta", "cpu:x"),
        "--tasks": (",", "nothing.yaml", "{text}", "{garbage_yaml}", "{folder}"),
        "--corpus": ("{none}", "{empty}", "{garbage}", "{empty_folder}", "{text}.gz", "hub:",
                     "{png}", "{half_jsonl}", "{box}/*.nothing", ""),
        "--output": ("{text}", "/proc/latte/out", "{text}/out", "{long}"),
    },
    "generate": {
        "--max-new-tokens": ("0", "-1"),
        "--temperature": ("-1", "nan", "inf", "1e-320"),
        "--top-k": ("0", "-1"),
        "--top-p": ("0", "-1", "1.5", "nan"),
        "--seed": ("-1", "4294967296"),
        "--device": ("tpu7", "meta"),
        "--file": ("{none}", "{empty}", "{garbage}", "{folder}", "{unreadable}"),
        "--state": ("{none}", "{empty}", "{garbage}", "{folder}", "{text}", "{weights}"),
        "--save-state": ("{text}", "{folder}", "{device}", "{none}/state", "/proc/latte/state",
                         "{long}", "{weights}"),
    },
    "serve": {"--port": ("-1", "65536", "99999999999"), "--host": ("no such host",)},
    "compare": {
        "--presets": ("late++", "swa++,swa++", "swa++,nothing"),
        "--seeds": ("-1", "4294967296", "0,0"),
        "--baseline": ("latte++", ""),
        "--lengths": ("0", "-1"),
        "--max-tokens": ("0", "-1"),
    },
    "convert": {
        "--window": ("0", "-1"),
        "--latents": ("0", "-1", "3"),
        "--latent-input": ("x", ""),
        "--window-probability": ("0", "1", "-0.5", "nan"),
        "--sinks": ("-1",),
        "--initial": ("zeros",),
        "--seed": ("-1", "4294967296"),
        "--dtype": ("float31", "int8"),
        "--forgetting": ("all",),
        "--keep-layers": ("7", "0,1", "-1"),
        "--recipe": ("{none}", "{folder}", "{garbage_yaml}", "{empty}", "{recipe}"),
    },
    "inspect": {
        "--layers": ("2", "-1", "0,9"),
        "--tokens": ("0", "1", "-1", "5000"),
        "--statistics-tokens": ("0", "1", "-1", "99999999"),
        "--at": ("4000", "-1"),
        "--device": ("tpu7",),
        "--text": ("", " "),
        "--file": ("{text}",),  # beside --text
        "--output": ("{text}", "/proc/latte/out", "{text}/out", "{precious}"),
    },
    "benchmark": {
        "--ops": ("attention", ",", "latte,x"),
        "--models": ("gpt5", ""),
        "--modes": ("backward", "train"),
        "--size": ("huge", ""),
        "--batch": ("0", "-1", "100000000000"),
        "--heads": ("0", "-1", "100000000000"),
        "--latents": ("0", "-1"),
        "--head-dim": ("0", "-1", "100000000000"),
        "--window": ("0", "-1"),
        "--dtype": ("float31", "int8", ""),
        "--backend": ("triton", "cuda", ""),
        "--device": ("tpu7", "cuda:99"),
        "--budget": ("0", "-1", "nan"),
        "--lengths": ("0", "-1", "100000000000000"),
        "--output": ("{text}", "/proc/latte/out", "{text}/out", "{precious}"),
    },
}  # fmt: skip

# Of the first arguments, in the place of what START has.
FIRST = {
    "train": ("{none}", "{folder}", "{empty_yaml_list}", "{garbage}", "{garbage_yaml}", "{text}",
              "{own_base}", "{unreadable}", "{long}", ""),
    "compare": ("{none}", "{folder}", "{garbage}", "{garbage_yaml}", ""),
    "evaluate": ("{none}", "{folder}", "{text}", "{garbage}", "{empty}", "{long}", "/dev/null"),
    "generate": ("{none}", "{folder}", "{text}", "{garbage}", "{empty}", "{long}", "{no_weights}",
                 "{cut_weights}", "{no_config}", "{broken_config}", "{no_tokenizer}",
                 "{broken_tokenizer}", "{wide}", "{folder_for_weights}", "{folder_for_config}",
                 "{folder_for_tokenizer}", "{gguf}"),
    "inspect": ("{none}", "{folder}", "{text}", "{cut_weights}", "{no_tokenizer}"),
    "serve": ("{none}", "{folder}", "{text}", "{cut_weights}", "{no_tokenizer}"),
    "convert": ("{none}", "nope", "no/such", "{folder}", "{text}", "{run}", "{cut_base}",
                "{no_tokenizer}", "{gguf}", "{long}", ""),
}  # fmt: skip

# Of keys of a recipe, what has the right type and is out of range.
KEYS: dict[str, tuple[str, ...]] = {
    "model.preset": ("late++", "bert", '""'),
    "model.size": ("huge",),
    "model.architecture": ("no-such", "bert", "t5"),
    "model.overrides": ("{num_latent: 8}", "{num_latents: 7}", "{hidden_size: 33}"),
    "data.corpus": ("{none}", "{empty}", "{garbage}", "{empty_folder}", "hub:", "hub:nope", "[]",
                    "{half_jsonl}", "{png}", "[{text}, {none}]"),
    "data.validation": ("{none}", "{empty}", "{garbage}", "[]"),
    "data.tokenizer": ("./none", "{folder}", "{garbage}", "nope", "{broken_tokenizer}"),
    "data.vocab_size": ("0", "-1"),
    "data.block_length": ("0", "1", "-1", "10000000", "1000000000000000"),
    "data.max_validation_tokens": ("0", "-1"),
    "data.cache_dir": ("{text}", "/proc/latte", "{text}/in"),
    "data.hub_config": ("x",),
    "data.hub_validation_split": ("x",),
    "training.max_steps": ("0", "-1"),
    "training.max_tokens": ("1000",),  # beside max_steps, but an override takes its place: below
    "training.max_minutes": ("0", "-1"),
    "training.batch_size": ("0", "-1", "100000000"),
    "training.gradient_accumulation": ("0", "-1", "100000000000"),
    "training.learning_rate": ("0", "-1", ".nan"),
    "training.warmup_steps": ("-1",),
    "training.min_learning_rate": ("-1", "1", ".nan"),
    "training.betas": ("[0.9]", "[1, 0.9]", "[-1, 0]", "[0.9, .nan]"),
    "training.epsilon": ("0", "-1"),
    "training.weight_decay": ("-1",),
    "training.max_grad_norm": ("-1",),
    "training.backend": ("triton",),
    "training.context_parallel": ("0", "-1", "3", "1000"),
    "training.seed": ("-1", "4294967296"),
    "training.log_steps": ("0", "-1"),
    "training.save_steps": ("0", "-1"),
    "training.eval_steps": ("0", "-1"),
    "training.keep_checkpoints": ("0", "-1"),
    "comparison.lengths": ("[0]", "[-1]"),
    "comparison.max_tokens": ("0", "-1"),
    "conversion.base": ("{none}", "{folder}", "{text}", "nope"),
    "conversion.mass_weight": ("-1",),
    "conversion.distillation": ("2", "-1"),
    "output_dir": ("{text}", "{text}/in", "/proc/latte", "{folder}", '""', "{long}"),
    "plugins": ("[none.py]", "[no.such.module]", "[{garbage_py}]"),
}  # fmt: skip
FIELDS = {  # of `model.overrides`
    "hidden_size": ("wide", "-32", "0", "33", "4000000"),
    "num_hidden_layers": ("many", "-1", "0", "1000000000"),
    "num_attention_heads": ("x", "-1", "0", "3"),
    "num_key_value_heads": ("x", "-1", "0", "3"),
    "intermediate_size": ("x", "-1", "0", "100000000000"),
    "num_latents": ("x", "-1", "0", "7"),
    "sliding_window": ("x", "-1", "0"),
    "vocab_size": ("x", "-1", "0", "100", "100000000000"),
    "norm": ("x",),
    "mlp": ("x",),
    "mixer": ("x", "[1]"),
    "latent_input": ("x",),
    "position": ("x",),
    "rope_theta": ("-1", "0", "x"),
    "nothing": ("1",),
}

# A limit on the size of files stands for a full disk. The recipe's checkpoint has about 250 kB.
FULL = [
    Case("full disk, train, at once", START["train"], 100),
    Case("full disk, train, at a checkpoint", START["train"], 40_000),
    Case("full disk, tokens", (*START["train"], "data.cache_dir={box}/cache"), 1000),
    Case("full disk, evaluate", (*START["evaluate"], "--output", "{box}/new"), 100),
    Case("full disk, evaluate, the figure", (*START["evaluate"], "--output", "{box}/new"), 3000),
    Case("full disk, evaluate, by default", START["evaluate"], 100),
    Case("full disk, inspect", (*START["inspect"], "--output", "{box}/new"), 1000),
    Case("full disk, state", (*START["generate"], "--save-state", "{box}/state"), 1000),
    Case("full disk, state, --force",
         (*START["generate"], "--save-state", "{text}", "--force"), 1000),
    Case("full disk, convert", START["convert"], 2000),
    Case("full disk, compare", START["compare"], 40_000),
    Case("full disk, benchmark", (*START["benchmark"], "--output", "{box}/new"), 100),
]  # fmt: skip

# What the line says. A command has what START has before the words; after "of" comes another first
# argument; after "alone" all of the arguments.
SAID = {
    "train training.max_stepz=3": "the nearest valid key is 'training.max_steps'",
    "train training.max_steps=three": "training.max_steps: expected an integer (int)",
    "train training.seed=5000000000": "training.seed: expected 0 to 4294967295, got 5000000000",
    "train comparison.lengths=[0]": "comparison.lengths: expected numbers of at least 1",
    "train model.preset=late++": "unknown preset 'late++'",
    "train model.size=huge": "unknown size 'huge'",
    "train model.overrides.num_latent=8": "unknown field 'num_latent'",
    "train model.overrides.num_latents=7": "num_latents must be a multiple of num_attention_heads",
    "train model.overrides.hidden_size=33": "hidden_size must be a multiple",
    "train model.overrides.hidden_size=wide": "hidden_size",
    "train model.overrides.vocab_size=100": "vocabulary",
    "train data.corpus=nowhere.txt": "nowhere.txt",
    "train data.corpus={empty}": "empty.txt",
    "train data.corpus={garbage}": "garbage.txt",
    "train data.hub_validation_split=test": "expected data.hub_validation_split=null with",
    "train data.tokenizer=./no-such-folder": "no such folder",
    "train data.block_length=1000000": "too few for a single block",
    "train output_dir={run} training.learning_rate=0.5":
        "holds another run: training.learning_rate is 0.001 there and 0.5 here",
    "train output_dir={folder}": "holds no run of latte",
    "train output_dir={text}/run": "cannot be written",
    "train training.context_parallel=2": "context_parallel=2: expected a multiple of 2 processes",
    "train training.context_parallel=0": "expected a number above 0, got 0",
    "train training.context_parallel=64": "expected at most data.block_length (32) processes",
    "train training.context_parallel=2 training.torch_compile=true": "expected torch_compile=false",
    "train training.context_parallel=2 conversion.distillation=0.5":
        "expected conversion.distillation=0",
    "train model.architecture=bert-of-none": "no causal language model",
    "train model.architecture=llama model.overrides.hidden_sice=3":
        "unknown field 'hidden_sice' of LlamaConfig",
    "train plugins=[gone.py]":
        "plugins: gone.py is not a file, neither next to the recipe nor in",
    "train plugins=[no.such.module]": "plugin no.such.module: ModuleNotFoundError",
    "train plugins=[{garbage_py}]": "garbage.py: SyntaxError: invalid syntax",
    "train alone": "the following arguments are required: recipe",
    "train of missing.yaml": "missing.yaml does not exist",
    "trian alone": "invalid choice: 'trian'",
    "generate of {cut_weights}": "truncated or damaged",
    "generate of {edited_weights}": "was edited: its checksum does not match",
    "generate of {no_weights}": "has no weights; expected model.safetensors",
    "generate of {garbage_weights}": "truncated or damaged",
    "generate of {no_config}": "config.json is missing",
    "generate of {broken_config}": "config.json is damaged",
    "generate of {other_type}": "no-such-model",
    "generate of {wide}": "shape",
    "generate of {impossible}": "num_latents must be a multiple",
    "generate of {more_layers}": "lacks weights",
    "generate of {fewer_layers}": "its config does not know",
    "generate of {no_tokenizer}": "has no tokenizer",
    "generate of {broken_tokenizer}": "tokenizer.json is damaged",
    "generate of {edited_tokenizer}": "tokenizer.json has",
    "generate of {larger_tokenizer}":
        "token ids up to 299, but the model's vocabulary has 259 entries",
    "generate of {none}": "does not exist",
    "generate --temperature -1": "temperature: expected 0",
    "generate --temperature nan": "temperature: expected 0",
    "generate --temperature 1e-320": "temperature: expected 0",
    "generate --top-k 0": "top-k: expected at least",
    "generate --top-p 2": "top-p: expected a number above 0",
    "generate --seed -1": "seed: expected 0 to 4294967295",
    "generate --max-new-tokens 0": "expected at least 1",
    "generate --read {empty}": "expected some text, found none",
    "generate --read {text} --file {text}": "--read and --file: expected one of them",
    "generate --read {text} --compile": "--read and --compile: expected one of them",
    "generate alone {run} --read {text}": "expected a question or a text to continue with in --pro",
    "chat --read {garbage}": "found a binary file",
    "chat --read {none}": "cannot be read",
    "chat --read {text} --file {text}": "--read and --file: expected one of them",
    "chat --state-dir x": "--state-dir goes with --read",
    "chat --read {text}": "latte generate continues a text, also one that it has read (--read)",
    "serve --port 70000": "port: expected 0 to 65535",
    "serve --max-batch 0": "max-batch: expected at least 1, got 0",
    "serve --prefill-piece 0": "prefill-piece: expected at least 1, got 0",
    "serve --max-length -1": "max-length: expected at least 1, got -1",
    "serve --max-body 0": "max-body: expected at least 1, got 0",
    "serve --max-messages 0": "max-messages: expected at least 1, got 0",
    "serve --max-characters -1": "max-characters: expected at least 1, got -1",
    "serve --client-timeout 0": "client-timeout: expected at least 1, got 0",
    "serve --client-timeout nan": "client-timeout: expected at least 1, got nan",
    "serve --allowed-hosts a.com:80": "expected names without a port",
    "serve --state-cache 0 --state-cache-dir x": "expected a --state-cache above 0",
    "serve of {run} --port 0 --state-cache-dir {text}": "expected a folder to write to",
    "serve --port 0": "does not exist",
    "serve of {no_tokenizer} --port 0": "has no tokenizer",
    "evaluate of {recipe}": "is a file",
    "evaluate of {folder}": "is not a checkpoint",
    "evaluate --corpus {empty}": "empty.txt",
    "evaluate --corpus {garbage}": "garbage.txt",
    "evaluate --corpus missing.txt": "missing.txt",
    "evaluate --output {text}/out": "cannot be written",
    "evaluate --lengths a,b": "expected whole numbers",
    "evaluate --lengths 0": "at least 1",
    "evaluate --segment 0": "--segment: expected at least 1",
    "evaluate --device tpu7": "tpu7",
    "evaluate --tasks a --limit 0": "--limit: expected at least 1, got 0",
    "evaluate --num-fewshot -1": "--num-fewshot: expected 0 or more",
    "evaluate alone {run} --tasks gone.yaml": "gone.yaml",
    "evaluate --tasks ,": "expected names separated by commas",
    "evaluate --mixing window": "expected a converted model",
    "evaluate --mixing half": "expected one of learned, window, latents, base, got 'half'",
    "evaluate --context-parallel 2":
        "--context-parallel=2: expected a multiple of 2 processes, got 1",
    "evaluate --context-parallel 0": "expected at least 1",
    "evaluate --context-parallel 2 --tasks x": "not with --tasks",
    "evaluate alone {run} --tasks x --positions 3": "--positions goes with held-out text, not with",
    "evaluate alone {run} --tasks x --join": "--join goes with held-out text, not with --tasks",
    "evaluate alone {run} --tasks x --segment 9": "--segment goes with held-out text, not with",
    "evaluate alone {run} --tasks x --corpus {text}":
        "--corpus goes with held-out text, or with --tasks niah",
    "evaluate alone {run} --tasks x --seed 1": "--seed goes with --tasks niah",
    "evaluate --chat-template": "--chat-template goes with --tasks",
    "evaluate --num-fewshot 0": "--num-fewshot goes with --tasks",
    "evaluate --seed 1": "--seed goes with --tasks niah",
    "compare --presets latte++,latte++": "expected different names",
    "compare --presets latte++,lat": "unknown preset 'lat'",
    "compare model.architecture=llama":
        "model.architecture: expected none where presets are compared, got 'llama'",
    "compare alone {recipe}": "name the presets, with --presets",
    "compare --report": "--report is for several",
    "compare --seeds 0,x": "expected whole numbers",
    "compare --seeds 1,1": "seeds: expected different ones, got 1, 1",
    "compare --seeds 5000000000": "seeds: expected 0 to 4294967295, got 5000000000",
    "compare --seeds 0 --baseline latte++": "baseline: expected one of swa++, got 'latte++'",
    "inspect alone {run} --file missing.txt": "missing.txt: cannot be read",
    "inspect --tokens 5000": "tokens: expected 2 to 1024",
    "inspect --statistics-tokens 1": "statistics-tokens: expected 2 to 65536",
    "inspect --layers 2": "layers: expected numbers from 0 to 1",
    "inspect --layers -1": "expected numbers of at least 0, got '-1'",
    "inspect --layers a": "expected whole numbers separated by commas",
    "inspect --text abc --at 4": "at: expected positions from 0 to 3",
    "inspect --device tpu7": "tpu7",
    "inspect --output {text}": "cannot be written",
    "inspect of {base} --text abc": "LlamaForCausalLM has no layer of Latte",
    "inspect of {none} --text abc": "does not exist",
    **{f"convert --recipe {{conversion}} {override}": said for override, said in {
        "conversion.window=0": "local_window must be at least 1 key, got 0",
        "conversion.num_latents=3": "multiple of num_attention_heads",
        "conversion.window_dropout=2": "conversion.window_dropout: expected 0 to 1, got 2",
        "conversion.distillation=2": "conversion.distillation: expected 0 to 1, got 2",
        "conversion.base=elsewhere": "conversion.base: expected none",
        "conversion.lora=3": "unknown key 'conversion.lora'",
        "layers.rows=0": "layers.rows: expected a number above 0, got 0",
        "layers.learning_rate=-1": "layers.learning_rate: expected a number above 0",
        "layers.held_out_rows=1000000": "layers.held_out_rows: expected at most the",
        "training.strategy=fsdp": "training.strategy: expected one of 'ddp', 'fsdp2'",
        "evaluation.lengths=[0]": "evaluation.lengths: expected numbers of at least 1",
        "evaluation.max_tokens=0": "evaluation.max_tokens: expected a number above 0",
        "data.respect_documents=true": "expected data.respect_documents=false",
        "data.corpus={none}": "no such file or folder",
        "data.block_length=5000": "data.validation: the held-out text has",
        "data.block_length=1000000": "too few for a single block",
        "plugins=[none.py]": "plugins: none.py is not a file, neither next to the recipe nor in",
        "plugins=[no.such.module]": "plugin no.such.module: ModuleNotFoundError",
    }.items()},
    "benchmark --ops lattte": "ops: expected some of latte, macchiato",
    "benchmark --models latte+++": "models: expected some of latte, latte++",
    "benchmark --modes backward": "modes: expected some of forward",
    "benchmark --size huge": "size: expected one of tiny",
    "benchmark --dtype int8": "dtype: expected one of float32",
    "benchmark --heads 0": "heads: expected more than 0, got 0",
    "benchmark --device tpu7": "tpu7",
    "benchmark --ops none": "nothing to measure",
    "benchmark --backend cuda": "latte, forward: ",
}  # fmt: skip


# Commands as those of SAID, whose lines may say what they will.
UNSAID = (
    "retrain alone", "train training", "train =3", "train .=3", "train training.=3",
    "train training.max_steps.x=3", "train nothing=1", "train a.b.c=1",
    "train output_dir={run} training.seed=9", "compare --baseline swa++", "compare --dry-run",
    "compare output_dir={runs} --presets latte-r-swa++ training.seed=9",
    "generate alone {run} --state {none} --prompt ''", "generate --save-state {box}/a/b/c",
    "serve alone {none} --compile", "convert conversion.window=8",
    *(f"convert --recipe {{conversion}} {override}" for override in (
        "layers.steps=0", "layers.processes=0", "conversion.keep_layers=[9]", "nothing=1",
        "training.max_steps=0", "--window 8",
    )),
    *(f"convert alone {{base}} {output} {recipe}"
      for output in ("{text}", "{folder}", "{run}", "{text}/in", "/proc/latte", "{long}", "''")
      for recipe in ("", "--recipe {conversion}")),
)  # fmt: skip


def commands(lines: Iterable[str]) -> Iterator[Case]:
    """The cases of lines such as those of SAID."""
    for line in lines:
        command, *rest = shlex.split(line)
        if rest[:1] == ["alone"]:
            yield Case(line, (command, *rest[1:]))
        elif rest[:1] == ["of"]:
            yield Case(line, (command, rest[1], *START[command][2:], *rest[2:]))
        else:
            yield Case(line, (*START[command], *rest))


def options_of(command: str) -> dict[str, argparse.Action]:
    """The options of a command, by their first name."""
    kinds = next(a for a in build_parser()._actions if a.dest == "command").choices
    assert isinstance(kinds, dict)
    actions = kinds[command]._actions
    return {a.option_strings[0]: a for a in actions if a.option_strings and a.dest != "help"}


def cases() -> list[Case]:
    """All of them, in a fixed order that mixes the commands."""
    found = [
        *(case for command in START for case in _of_options(command)),
        *_of_first_arguments(),
        *(case for keys in (("train", Recipe), ("compare", Recipe)) for case in _of_keys(*keys)),
        *_of_fields(),
        *_of_conversions(),
        *FULL,
        Case("nothing", ()),
        *commands(UNSAID),
    ]
    random.Random(0).shuffle(found)
    return found


def _of_options(command: str) -> Iterator[Case]:
    every, known = START[command], options_of(command)
    ranges = OUT_OF_RANGE.get(command, {})
    assert not set(ranges) - set(known), "of an option that is not there"
    for option, action in known.items():
        # What evaluate starts with are options of a text, which do not go with tasks.
        start = every[:2] if option == "--tasks" else every
        kind: Any = action.type or str
        kind = kind if kind in (int, float, str) else list
        wrong = WRONG_TYPES.get(kind, ()) if kind is not list or "name" not in str(action.type) \
            else ()  # fmt: skip
        if getattr(action.type, "__name__", "") in ("listed", "names"):
            wrong = ()
        if action.nargs == 0:
            if option.startswith("--") and "BooleanOptional" not in type(action).__name__:
                yield Case(f"{command} {option}=1", (*start, f"{option}=1"))
            continue
        if command == "serve" and option != "--port" and option not in ranges:
            continue
        yield Case(f"{command} {option} without a value", (*start, option))
        count = action.nargs if isinstance(action.nargs, int) else 1
        for value in (*wrong, *ranges.get(option, ())):
            yield Case(f"{command} {option} {value!r}", (*start, option, *[value] * count))
    yield Case(f"{command} --nothing", (*every, "--nothing"))
    yield Case(f"{command} alone", (command, "--nothing"))
    yield Case(f"{command} and one more", (*every, "one-more"))


def _of_first_arguments() -> Iterator[Case]:
    for command, values in FIRST.items():
        for value in values:
            arguments = (command, value, *START[command][2:])
            if command == "serve":
                arguments = (command, value, "--port", "0")
            yield Case(f"{command} of {value!r}", arguments)


def _of_keys(command: str, kind: Any, path: str = "") -> Iterator[Case]:
    for key, hint in get_type_hints(kind).items():
        full = f"{path}{key}"
        if dataclasses.is_dataclass(hint):
            yield from _of_keys(command, hint, f"{full}.")
            for value in ("3", "text", "[1]"):
                yield Case(f"{command} {full}={value}", (*START[command], f"{full}={value}"))
            continue
        if command == "compare" and not full.startswith(("comparison", "output_dir")):
            continue
        values = (*_wrong_values(hint), *KEYS.get(full, ()))
        if command == "compare":  # which puts runs beside what is there
            values = tuple(value for value in values if value != "{folder}")
        for value in values:
            if full == "training.max_tokens" and value == "1000":
                value = "1000 training.max_steps=5"
            arguments = (*START[command], *f"{full}={value}".split(" training."))
            arguments = tuple(
                f"training.{a}" if a.startswith("max_steps") else a for a in arguments
            )
            yield Case(f"{command} {full}={value}", arguments)


def _wrong_values(hint: Any) -> tuple[str, ...]:
    """Values of another type than a key's, as YAML."""
    whole = (None, Literal, list, dict, Sequence)
    options = get_args(hint) if get_origin(hint) not in whole else (hint,)
    plain = {get_origin(option) or option for option in options}
    plain = {list if option is Sequence else option for option in plain}
    values = []
    if plain & {int, float}:
        values += ["three", "true"] + ([] if float in plain else ["1.5"])
        values += [] if list in plain else ["[1]"]
    elif bool in plain:
        values += ["maybe", "1", "[true]"]
    elif Literal in plain:
        values += ["nothing", "7"]
    elif dict in plain:
        values += ["7", "[1]"]
    elif list in plain:
        values += ["7"] + ([] if str in plain else ["text"])
        if str in plain or list in plain:
            values += ["[[1]]"]
    elif str in plain:
        values += ["7", "[1]"]
    if type(None) not in plain and dict not in plain:
        values.append("null")
    return tuple(values)


def _of_fields() -> Iterator[Case]:
    for field, values in FIELDS.items():
        for value in values:
            override = f"model.overrides.{field}={value}"
            yield Case(f"train {override}", (*START["train"], override))


def _of_conversions() -> Iterator[Case]:
    """Keys of a conversion's recipe."""
    start = ("convert", "{base}", "{box}/new", "--recipe", "{conversion}")
    for section, hint in get_type_hints(ConversionRecipe).items():
        kinds = [k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)]
        if not kinds:
            continue
        for key, of_key in get_type_hints(kinds[0]).items():
            full = f"{section}.{key}"
            for value in _wrong_values(of_key)[:2]:
                yield Case(f"convert {full}={value}", (*start, f"{full}={value}"))


# ---- folders whose files are not what they should be

# Files of a checkpoint, or of a base, that a command may read.
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "recipe.json"),
    *("manifest.json", "model.safetensors", "model.safetensors.index.json"),
)
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "bytes": b"\x00\xff\xfe" + random.Random(1).randbytes(300),
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "list": b"[1, 2]",
    "null": b"null",
    "number": b"3",
    "nesting": b"[" * 100_000,
    "digits": b"1" * 10_000,
    "wrong kinds": b'{"model_type": 3, "eos_token_id": "x", "temperature": "hot", "plugins": 3,'
    b' "files": 3, "weight_map": 7, "chat_template": 5, "num_hidden_layers": "two"}',
    "many layers": b'{"model_type": "llama", "num_hidden_layers": 1000000000, "vocab_size": 259}',
}
DAMAGES = (*CONTENTS, "folder", "pipe", "device", "nothing")


def damage(file: Path, how: str) -> None:
    """Put something else in a file's place."""
    file.unlink(missing_ok=True)
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how in ("device", "nothing"):
        file.symlink_to("/dev/zero" if how == "device" else "no-such-file")
    else:
        file.write_bytes(CONTENTS[how])


# ---- where they are made


def make_box(box: Path, run: Path, base: Path) -> dict[str, str]:
    """Fill a folder with what mistakes are made of; the names and their paths."""
    names: dict[str, str] = {"box": str(box)}

    def file(name: str, path: str, content: bytes | str) -> None:
        place = box / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
        names[name] = str(place)

    noise = random.Random(1).randbytes(2000)
    file("text", "text.txt", "the mean of the mass of the state\n" * 40)
    file("empty", "empty.txt", "")
    file("garbage", "garbage.txt", noise)
    file("garbage_yaml", "garbage.yaml", "a: [1, 2\nb: {")
    file("garbage_py", "garbage.py", "this is no Python")
    file("empty_yaml_list", "list.yaml", "- 1\n- 2\n")
    file("own_base", "own-base.yaml", "base: own-base.yaml\n")
    file("half_jsonl", "half.jsonl", json.dumps({"text": "whole"}) + '\n{"text": "ha')
    file("png", "picture.png", b"\x89PNG" + noise)
    file("gguf", "garbage.gguf", b"GGUF" + noise)
    file("notes", "folder/notes.txt", "mine")
    for name in ("benchmark.csv", "index.html", "evaluation.csv"):
        file("page", f"precious/{name}", "mine")
    (box / "empty-folder").mkdir()
    # A link, not the device: a command that replaced what it should refuse would replace that.
    (box / "device").symlink_to("/dev/full")
    names["device"] = str(box / "device")
    names |= {"folder": str(box / "folder"), "empty_folder": str(box / "empty-folder")}
    names |= {"precious": str(box / "precious"), "none": str(box / "none")}
    names |= {"long": str(box / ("x" * 300)), "unreadable": "/proc/self/mem"}
    names |= {"run": str(run), "base": str(base), "runs": str(run.parent)}
    names["weights"] = str(run / "model.safetensors")
    for name, harm in HARMS.items():
        folder, source = box / name, base if name == "cut_base" else run
        ignored = shutil.ignore_patterns("checkpoint-*", ".lock", "eval*", "tensorboard")
        shutil.copytree(source, folder, ignore=ignored)
        harm(folder)
        names[name] = str(folder)
    return names


Harm = Callable[[Path], object]


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])


def _flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 0xFF
    (folder / "model.safetensors").write_bytes(data)


def _config(**fields: Any) -> Harm:
    def harm(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return harm


def _write(name: str, text: str) -> Harm:
    """Another content of a file, in a folder without digests."""

    def harm(folder: Path) -> None:
        (folder / name).write_text(text)
        if name != "config.json":
            (folder / "manifest.json").unlink()

    return harm


def _folder_for(name: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return harm


def _larger_tokenizer(folder: Path) -> None:
    from latte.lab.data import train_bpe

    text = [" ".join(f"{word}{i}" for i in range(60)) for word in ("mean", "mass", "sum")] * 2
    train_bpe(text, 300, progress=False).save_pretrained(folder)
    (folder / "manifest.json").unlink()


def _edited_tokenizer(folder: Path) -> None:
    with open(folder / "tokenizer.json", "a", encoding="utf-8") as file:
        file.write(" ")


# Folders of the box: the trained run, or the base, with one thing wrong.
HARMS: dict[str, Harm] = {
    "no_weights": lambda folder: (folder / "model.safetensors").unlink(),
    "cut_weights": _cut,
    "cut_base": _cut,
    "edited_weights": _flip,
    "garbage_weights": _write("model.safetensors", "not a checkpoint"),
    "no_config": lambda folder: (folder / "config.json").unlink(),
    "broken_config": _write("config.json", "{"),
    "other_type": _config(model_type="no-such-model"),
    "wide": _config(hidden_size=64),
    "impossible": _config(num_latents=7),
    "more_layers": _config(num_hidden_layers=3),
    "fewer_layers": _config(num_hidden_layers=1),
    "no_tokenizer": lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
    "broken_tokenizer": _write("tokenizer.json", "{}"),
    "edited_tokenizer": _edited_tokenizer,
    "larger_tokenizer": _larger_tokenizer,
    "folder_for_weights": _folder_for("model.safetensors"),
    "folder_for_config": _folder_for("config.json"),
    "folder_for_tokenizer": _folder_for("tokenizer.json"),
}
