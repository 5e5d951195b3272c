"""Which tokens to keep: scores in the attention of a pretrained decoder, from fit to answers.

    python -m experiments.kept fit BASE --text books=FILE --text wikipedia=FILE --weights OUT
    python -m experiments.kept train BASE --text books=FILE --weights FROM --trained OUT
    python -m experiments.kept ask BASE --text books=FILE --weights OUT     # end to end
    python -m experiments.kept share BASE --text books=FILE --weights OUT   # of attention, by layer

`ask` and `share` go on where they stopped when run again.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.bases.passkey import PLACE, ids_of, make_frame, passkey_case
from experiments.bases.reading import corpus, start_token
from experiments.kept.attention import blocks, grouped, kept_attention, kept_sets, key_difference
from experiments.kept.gates import train_gates
from experiments.probes.questions import Material, make_material, retrieval_case
from latte.cli.parser import integers, names
from latte.conversion import convert
from latte.conversion.attention_distillation import base_output
from latte.conversion.kept_rows import kept_rows
from latte.conversion.kept_scores import (
    fit_kept_scores,
    read_kept_scores,
    save_kept_scores,
    wanted,
)
from latte.conversion.pretrained import load_tokenizer
from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.evaluate.checkpoint import weight_files
from latte.layers.kept_scores import KeptScores

TEXTS, TOKENS = 20, 6000  # of a corpus: so many texts, the second half of the first tokens
PLAIN = ("none", "full", "random", "latest", "keydiff", "oracle")  # need no weights
QUESTIONS = (Path(__file__).parent / "questions.txt").read_text(encoding="utf-8").splitlines()
SHARES = (
    "task",
    "length",
    "score",
    "kept",
    "layer",
    "far",
    "far_answer",
    "caught",
    "caught_answer",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    parser = OneLineParser(prog="python -m experiments.kept", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = {"fit": fit, "train": train, "share": share, "ask": ask}
    add = parser.add_argument
    add("command", choices=commands)
    add("base", help="a folder, or a GGUF file")
    add("--text", action="append", default=[], help="NAME=FILES[,join=true]; may be repeated")
    add("--output", type=Path, default=Path("runs/kept"), help="folder of tables and recorded rows")
    add("--weights", type=Path, help="file of fitted scores, or the folder of a converted model")
    add("--trained", type=Path, help="new file of scores, which `train` writes")
    add("--steps", type=int, default=40, help="of `train`, a row each")
    add("--learning-rate", type=float, default=1e-3, help="of `train`")
    add("--rows", type=int, default=32, help="to fit on")
    add("--length", type=int, default=2048, help="tokens of a row or case")
    add("--scores", type=names, default=["fitted"], help=f"some of {', '.join(PLAIN)}, or any name"
        " for the scores in --weights")  # fmt: skip
    add("--kept", type=integers, default=[64, 128], help="sources a layer and key group")
    add("--window", type=int, default=128, help="in the layers of full attention (%(default)s)")
    add("--block", type=int, default=64, help="tokens between two choices (%(default)s)")
    add("--tasks", type=names, default=["passkey"], help="passkey, word, fact")
    add("--cases", type=int, default=8, help="even ones have depth 0.1, odd ones 0.5")
    add("--oracle-layers", type=names, default=[], help="layers that choose as the oracle does")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    work = commands[options.command]
    return exit_code("kept", lambda: work(options), "run again, it goes on where it stopped")


def opened(options: argparse.Namespace) -> tuple[Any, Any, Material]:
    """(model, tokenizer, what rows are made of). The model's latents are not used."""
    if not options.text:
        raise LatteError("--text: expected NAME=FILES")
    shape: dict[str, Any] = {"window": options.window, "num_sinks": 4, "initial": "random"}
    model = convert(options.base, None, dtype="float32", **shape)
    tokenizer = load_tokenizer(options.base)
    start, parts = start_token(tokenizer), []
    for text in options.text:
        texts = corpus(text).texts(tokenizer, start, TOKENS)
        parts += [ids[len(ids) // 2 :] for _, ids in islice(texts, TEXTS)]
    return model, tokenizer, replace(make_material(tokenizer, np.concatenate(parts)), start=start)


def fit(options: argparse.Namespace) -> None:
    """The library's fit of all layers, to the file `--weights`."""
    if options.weights is None:
        raise LatteError("--weights: expected the name of a new file")
    model, tokenizer, material = opened(options)
    text, sizes = torch.from_numpy(material.text), (options.rows, options.length)
    rows = kept_rows(tokenizer, text, *sizes, seed=options.seed)
    found = fit_kept_scores(
        model, rows, options.output / "fit", block=options.block, seed=options.seed,
        on_row=lambda done: print(f"{done} rows", flush=True),
        on_layer=lambda done: print(f"{done} layers", flush=True),
    )  # fmt: skip
    save_kept_scores(options.weights, found)


def train(options: argparse.Namespace) -> None:
    """The scores in `--weights`, trained end to end, to the file `--trained`."""
    if options.weights is None or options.trained is None:
        raise LatteError(
            "--weights, --trained: expected a file of scores, and the name of a new one"
        )
    model, tokenizer, material = opened(options)
    text = torch.from_numpy(material.text)
    rows = kept_rows(tokenizer, text, options.rows, options.length, seed=options.seed)
    scores = scores_in(options.weights)
    train_gates(model, rows, nn.ModuleDict({str(i): each for i, each in scores.items()}), options)
    save_kept_scores(options.trained, {i: each.state_dict() for i, each in scores.items()})


class Scorer:
    """The score of a name; `oracle`: (G, S) of each layer, what later queries want."""

    def __init__(self, name: str, options: argparse.Namespace, oracle: dict[int, Tensor]) -> None:
        self.name, self.oracle, self.block = name, oracle, options.block
        self.layers = {int(layer) for layer in options.oracle_layers}
        self.fitted: dict[int, KeptScores] = {}
        if name in PLAIN:
            return
        if options.weights is None:
            raise LatteError(f"--scores: {name} needs --weights")
        self.fitted = scores_in(options.weights)

    @torch.no_grad()
    def __call__(self, layer: Any, x_BTE: Tensor) -> Tensor:
        """(G, T)."""
        index, length = layer.layer_idx, x_BTE.shape[1]
        if self.name == "oracle" or index in self.layers:
            score = self.oracle[index]
            return torch.nn.functional.pad(score, (0, length - score.shape[1]))
        if self.name == "keydiff":
            return key_difference(layer, x_BTE, self.block)
        if self.fitted:
            return self.fitted[index](x_BTE)[0].mT
        groups = layer.k_proj.out_features // layer.head_dim
        if self.name == "latest":  # of equal scores the later ones are kept
            return x_BTE.new_zeros(groups, length)
        return torch.rand(groups, length, generator=torch.Generator().manual_seed(index))


def scores_in(path: Path) -> dict[int, KeptScores]:
    """The scores of each layer, of a file of `fit` or a converted model's folder."""
    found: dict[int, Any] = {} if path.is_dir() else read_kept_scores(path)
    for file in weight_files(path) if path.is_dir() else []:
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():
                if own := re.search(r"layers\.(\d+)\.self_attn\.latents\.kept_scores\.(.+)", name):
                    found.setdefault(int(own[1]), {})[own[2]] = tensors.get_tensor(name).float()
    if not found:
        raise LatteError(f"--weights: expected a model with kept tokens, {path} has none")
    made = {}
    for index, weights in found.items():
        groups, width = weights["down.weight"].shape
        made[index] = KeptScores(weights["up.weight"].shape[1], groups, width)
        made[index].load_state_dict(weights)
    return made


# ---- cases


@dataclass(frozen=True)
class Case:
    """`ids` (T,), prompt and answer; `answer`: number of tokens, the last, that are the answer."""

    place: dict[str, Any]
    ids: Tensor
    answer: int


def cases(options: argparse.Namespace, tokenizer: Any, material: Material) -> Iterator[Case]:
    """`--cases` of each task."""
    frame = make_frame(tokenizer, material.start)
    for task in options.tasks:
        for index in range(options.cases):
            depth, where = 0.5 if index % 2 else 0.1, (options.seed, index)
            if task == "fact":
                prompt, answer = fact_case(tokenizer, material, *where, options.length, depth)
            elif task == "word":
                word = retrieval_case(material, *where, length=options.length, depth=depth)
                prompt, answer = word.prompt, word.candidates[0]
            else:
                sizes: dict[str, Any] = {"length": options.length, "depth": depth}
                case = passkey_case(tokenizer, material, frame, *where, **sizes)
                prompt, answer = case.prompt, case.answer
            ids = torch.from_numpy(np.concatenate([prompt, answer]))
            place = {"task": task, "seed": options.seed, "index": index}
            yield Case(place | {"length": len(ids), "depth": depth}, ids, len(answer))


def fact_case(
    tokenizer: Any, material: Material, seed: int, index: int, length: int, depth: float
) -> tuple[np.ndarray, np.ndarray]:
    """A text with all of questions.txt, about one of which a chat asks: at `depth` stands the one
    that is asked about, the others elsewhere."""
    rng = np.random.default_rng([seed, index, 9])
    said = [line.split("~") for line in QUESTIONS]
    _, question, answer = said[index % len(said)]
    message = [{"role": "user", "content": f"{PLACE}\n\n{question}"}]
    whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after = (ids_of(tokenizer, part) for part in whole.split(PLACE))
    facts = [ids_of(tokenizer, f"\n{fact}\n") for fact, _, _ in said]
    answered = ids_of(tokenizer, answer)
    room = length - sum(map(len, (before, after, answered, *facts)))
    text = material.piece(int(rng.integers(len(material.text))), room)
    places = rng.integers(0, max(1, room - 200), len(facts))
    places[index % len(said)] = round(depth * room)
    parts: list[Any] = [before]
    done = 0
    for which in np.argsort(places, kind="stable"):
        parts += [text[done : places[which]], facts[which]]
        done = places[which]
    prompt = np.concatenate([*parts, text[done:], after]).astype(np.int64)
    return prompt, np.asarray(answered, np.int64)


@torch.no_grad()
def read(model: Any, case: Case, attend: Any) -> Tensor:
    """Last hidden states (T, E), with another attention in every layer."""
    found = model.model(input_ids=case.ids[None], teacher=attend, use_cache=False)
    return found.last_hidden_state[0]  # type: ignore[no-any-return]


def wishes(model: Any, case: Case, block: int) -> dict[int, Tensor]:
    """What the base's later queries want of each source (G, S), by layer."""
    found: dict[int, Tensor] = {}

    def attend(layer: Any, x_BTE: Tensor, near: Any, context: Any) -> Tensor:
        found[layer.layer_idx] = wanted(layer, near, block, len(case.ids))[0]
        return base_output(layer, near, context)

    read(model, case, attend)
    return found


def ask(options: argparse.Namespace) -> None:
    """kept_scores.csv: of each case and score the nats a token of the answer, whether all its
    tokens are the likeliest, and the nats of every fourth token of the text's second half."""
    model, tokenizer, material = opened(options)
    file, there = options.output / "kept_scores.csv", set()
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as lines:
            there = {tuple(row.values())[:-3] for row in csv.DictReader(lines)}
    for case in cases(options, tokenizer, material):
        oracle: dict[int, Tensor] = {}
        for name in options.scores:
            for kept in [0] if name in ("none", "full") else options.kept:
                place = {**case.place, "score": name, "kept": kept}
                if tuple(map(str, place.values())) in there:
                    continue
                if (name == "oracle" or options.oracle_layers) and not oracle:
                    oracle = wishes(model, case, options.block)
                scorer = Scorer(name, options, oracle)

                def attend(
                    layer: Any, x_BTE: Tensor, near: Any, context: Any,
                    scorer: Scorer = scorer, kept: int = kept,
                ) -> Tensor:  # fmt: skip
                    if scorer.name == "full":
                        return base_output(layer, near, context)
                    score = scorer(layer, x_BTE)
                    return kept_attention(layer, near, score, kept, options.block)

                row = {**place, **answered(model, case, read(model, case, attend))}
                append(file, [row])
                print(*row.values(), flush=True)


@torch.no_grad()
def answered(model: Any, case: Case, states: Tensor) -> dict[str, Any]:
    last = len(case.ids) - case.answer
    at = torch.cat([torch.arange(last // 2, last - 64, 4), torch.arange(last, len(case.ids))]) - 1
    logits, said = model.lm_head(states[at]), case.ids[at + 1]
    nats, right = cross_entropy(logits, said, reduction="none"), logits.argmax(-1) == said
    return {
        "nll": round(float(nats[-case.answer :].mean()), 4),
        "exact": int(right[-case.answer :].all()),
        "text": round(float(nats[: -case.answer].mean()), 4),
    }


def share(options: argparse.Namespace) -> None:
    """kept_share.csv: the base's attention beyond the window (`far`, and of the answer's queries),
    and what part of it falls on the kept sources, by layer and in the mean."""
    model, tokenizer, material = opened(options)
    sums: dict[tuple[Any, ...], Tensor] = {}
    for case in cases(options, tokenizer, material):
        oracle = wishes(model, case, options.block)
        scorers = {name: Scorer(name, options, oracle) for name in options.scores}

        def attend(
            layer: Any, x_BTE: Tensor, near: Any, context: Any,
            case: Case = case, scorers: dict[str, Scorer] = scorers,
        ) -> Tensor:  # fmt: skip
            (q, k, _), T = grouped(layer, near), len(case.ids)
            far = torch.zeros(
                T // options.block + 1, 2, len(k), T
            )  # attention of all, and of the answer
            for first, stop, left in blocks(layer, options.block, T):
                later = torch.arange(stop) > torch.arange(first, stop)[:, None]
                logits = (q[:, :, first:stop] @ k[:, None, :stop].mT).masked_fill(later, -torch.inf)
                given = logits.softmax(-1)[..., :left].mean(1)  # (G, C, S)
                given[..., : layer.num_sinks] = 0
                asks = torch.arange(first, stop) >= T - case.answer - 1
                far[first // options.block, 0, :, :left] = given.sum(1) / T
                far[first // options.block, 1, :, :left] = given[:, asks].sum(1) / case.answer
            for name, scorer in scorers.items():
                score = scorer(layer, x_BTE)
                for count in options.kept:
                    caught = torch.zeros(2)
                    for first, _, _, kept in kept_sets(layer, score, count, options.block):
                        index = kept.expand(2, -1, -1)
                        caught += far[first // options.block].gather(2, index).sum(2).mean(1)
                    both = torch.cat([far.sum((0, 3)).mean(1), caught])
                    for where in (layer.layer_idx, "mean"):
                        cell = (case.place["task"], T, name, count, where)
                        sums[cell] = sums.get(cell, torch.zeros(4)) + both
            return base_output(layer, near, context)

        read(model, case, attend)
        print(*case.place.values(), flush=True)
    found, layers = [], len({cell[-1] for cell in sums} - {"mean"})
    for cell, mass in sums.items():
        far = mass[:2] / options.cases / (layers if "mean" in cell else 1)
        values = [round(float(x), 3) for x in (*far, *mass[2:] / mass[:2])]
        found.append(dict(zip(SHARES, (*cell, *values), strict=True)))
    append(options.output / "kept_share.csv", found)


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    begins = not file.is_file()
    with file.open("a", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        if begins:
            writer.writeheader()
        writer.writerows(rows)
