"""How many tokens each layer should keep: the KL from the base with another number in one layer.

    python -m experiments.kept.layers BASE.gguf MODEL --text books=FILE --kept 4,16,200,400,800

MODEL is a converted model with kept tokens. The KL is of next tokens, in bf16, over plain text and
over rows in which facts are asked about: there, of the answers. Rows of OUTPUT that are there are
not measured again. Only the layers from the changed one on are computed anew.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bases.reading import corpus
from experiments.sides import side
from latte.cli.parser import integers
from latte.conversion.kept_rows import kept_rows
from latte.lab.command_line import OneLineParser, exit_code

NAMES = "rows", "layer", "kept", "kl"
TOKENS, SKIPPED = 60_000, 5_000  # read of a text; of its beginning, which is often no prose
PLACES = 768  # of a row of text, whose next tokens are compared
EVERY = "all"  # in the place of one layer


class Row(NamedTuple):
    """A row, the places whose next tokens are compared, and the base's log-probabilities there."""

    ids: Tensor
    places: Tensor
    base: Tensor


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m experiments.kept.layers", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("base", help="a folder, or a GGUF file")
    parser.add_argument("model", help="folder of the converted model")
    parser.add_argument("--text", required=True, help="NAME=FILES")
    parser.add_argument("--kept", type=integers, required=True, help="numbers for one layer")
    parser.add_argument("--texts", type=int, default=3, help="rows of text (%(default)s)")
    parser.add_argument("--asked", type=int, default=10, help="rows with questions (%(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("kept_layers.csv"))
    options = parser.parse_args(arguments)
    return exit_code("layers", lambda: measure(options), "run it again, it goes on")


@torch.inference_mode()
def measure(options: argparse.Namespace) -> None:
    """Write the table."""
    there: set[tuple[str, ...]] = set()
    if options.output.exists():
        with options.output.open(newline="") as file:
            there = {tuple(row[name] for name in NAMES[:3]) for row in csv.DictReader(file)}
    else:
        options.output.write_text(",".join(NAMES) + "\n")
    base, tokenizer = side(f"base={options.base}").load("cpu", dtype="bfloat16")
    rows = {"text": [*text_rows(tokenizer, options)], "asked": [*asked_rows(tokenizer, options)]}
    made = {kind: [Row(*row, chances(base, *row)) for row in each] for kind, each in rows.items()}
    del base
    model, _ = side(f"model={options.model}").load("cpu", dtype="bfloat16")
    every = model.model.layers
    own: list[int] = [layer.self_attn.kept_tokens for layer in every]
    for kind, kept in itertools.product(filter(made.get, made), [None, *options.kept]):
        inputs = [before_layers(model, row) for row in made[kind]]
        for index in [None] if kept is None else [*range(len(own)), None]:
            name = (
                kind,
                EVERY if index is None else str(index),
                "own" if kept is None else str(kept),
            )
            if name in there or (index is not None and own[index] == kept):
                continue
            changed = range(len(own)) if index is None else [index]
            for each in changed:
                every[each].self_attn.kept_tokens = own[each] if kept is None else kept
            model.model.layers = every[changed[0] :]
            given = [x[changed[0]] for x in inputs]
            found = [divergence(model, *each) for each in zip(made[kind], given, strict=True)]
            model.model.layers = every
            for each in changed:
                every[each].self_attn.kept_tokens = own[each]
            with options.output.open("a") as file:
                file.write(f"{','.join(name)},{sum(found) / len(found):.5f}\n")


def text_rows(tokenizer: Any, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for ids in itertools.islice(texts(tokenizer, options), options.texts):
        row = torch.cat([ids[:1], ids[SKIPPED : SKIPPED + options.length - 1]])
        first = len(row) // 4
        places = first + torch.randperm(len(row) - 1 - first, generator=generator)[:PLACES]
        yield row, places.sort().values


def asked_rows(tokenizer: Any, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    text = torch.cat([*itertools.islice(texts(tokenizer, options), 2 * options.texts)])
    for row, question in kept_rows(tokenizer, text, options.asked, options.length // 2, seed=91):
        yield row, torch.arange(max(1, question - 1), len(row))


def texts(tokenizer: Any, options: argparse.Namespace) -> Iterator[Tensor]:
    for _, ids in corpus(options.text).texts(tokenizer, tokenizer.bos_token_id, TOKENS):
        if len(ids) >= SKIPPED + options.length:
            yield torch.from_numpy(ids).long()


def before_layers(model: Any, row: Row) -> list[Tensor]:
    """The input of each layer."""
    found: list[Tensor] = []

    def take(module: Any, given: Any, named: Any) -> None:
        found.append((given[0] if given else named["hidden_states"]).clone())

    hooks = [x.register_forward_pre_hook(take, with_kwargs=True) for x in model.model.layers]
    chances(model, row.ids, row.places)
    for hook in hooks:
        hook.remove()
    return found


def chances(model: Any, ids: Tensor, places: Tensor) -> Tensor:
    """The log-probabilities (P, V) of next tokens."""
    given = {"input_ids": ids[None], "use_cache": False, "logits_to_keep": places}
    return model(**given).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def divergence(model: Any, row: Row, x_BTE: Tensor) -> float:
    """The mean KL from the base, in nats, of a model whose first layer reads ``x_BTE``."""
    given = {"inputs_embeds": x_BTE, "use_cache": False, "logits_to_keep": row.places}
    found = model(**given).logits[0].float().log_softmax(-1)
    return float((row.base.exp() * (row.base - found)).sum(-1).mean())


if __name__ == "__main__":
    raise SystemExit(main())
