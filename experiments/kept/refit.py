"""Trained latents of a file, to go on with kept tokens in every layer.

    python -m experiments.kept.refit BASE.gguf LATENTS.safetensors OUT --text books=FILE

1. The file's latents and low-rank updates are set. Layers that had kept their attention are
   converted too: their latents begin as landmarks and are fitted alone.
2. Scores of tokens are fitted in the model with the base's attention.
3. All latents and updates are trained together by KL from the base, on text and on rows in which
   facts are asked about, with weights in fp32 and products in bf16.

A file that has kept tokens in every layer has the first two behind it. Then
`latte.conversion.save_latents` writes a new file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from experiments.bases.reading import corpus
from latte.cli.parser import integers
from latte.conversion import save_latents
from latte.conversion.kept_rows import kept_rows
from latte.conversion.kept_scores import fit_kept_scores, set_kept_scores
from latte.conversion.landmarks import set_landmarks
from latte.conversion.modeling import NEW_WEIGHTS
from latte.conversion.pretrained import converted_config, load_base, load_tokenizer, save
from latte.conversion.recording import FitOptions, LayerFit, record, set_learning_rate
from latte.conversion.step import RotaryTable
from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.train.conversion_trainer import add_lora, merged_lora, mixing
from latte.lab.train.recipe import ConversionSection
from latte.models.tensor_file import read_tensors

LENGTH = 2048  # tokens of a row of a layer's fit
TEXT_TOKENS, CORPUS_TOKENS = 60_000, 400_000  # at most, of a text and of all of a corpus
RANK, TARGETS = 16, ["q_proj", "k_proj", "v_proj", "o_proj"]  # of low-rank updates
PLACES = 1024  # of a row, at most, whose next tokens are compared
ROWS, ASKED, FIT_STEPS = 14, (18, 8), 90


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m experiments.kept.refit", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("base", help="the GGUF file, or folder")
    parser.add_argument("latents", help="a file of save_latents")
    parser.add_argument("output", help="folder of the model; OUTPUT.safetensors has the latents")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILES")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--block", type=int, default=32, help="tokens between two choices")
    for name, kind in (("kept-range", int), ("kept-half-life", float)):
        parser.add_argument(f"--{name}", type=kind, help="the option of a conversion")
    parser.add_argument("--far-sinks", action="store_true", help="the option of a conversion")
    parser.add_argument("--steps", type=int, default=240, help="of the last stage")
    parser.add_argument("--lengths", type=integers, default=[LENGTH, 2 * LENGTH],
                        help="tokens of the last stage's rows, in turns")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the last stage's rows")
    parser.add_argument("--kept-tokens", type=integers, help="of the result, for each layer")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the last stage")
    options = parser.parse_args(arguments)
    return exit_code("refit", lambda: refit(options), "run it again")


def refit(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    tokenizer, output = load_tokenizer(options.base), Path(options.output)
    text = torch.cat([beginning(named, tokenizer) for named in options.text])
    about, tensors = read_tensors(Path(options.latents), "latents", "save_latents")
    fields: dict[str, Any] = json.loads(about["fields"])
    model, section = with_latents(options, fields, tensors)
    lacking = fields["keep_layers"]
    rows = [text[i * LENGTH : (i + 1) * LENGTH] for i in range(ROWS)]
    fit_layers(model, lacking, rows, output.with_suffix(".rows"))
    if not fields.get("kept_tokens"):
        asked = kept_rows(tokenizer, text, ASKED[0], LENGTH, seed=11)
        asked += kept_rows(tokenizer, text, ASKED[1], 2 * LENGTH, seed=12)
        folder = output.with_suffix(".scores")
        set_kept_scores(model, fit_kept_scores(model, asked, folder, block=options.block))
    train(model, tokenizer, text, options)
    merged = load_base(options.base, model.config, dtype=torch.float32)
    merged.load_state_dict(merged_lora(model.state_dict(), section))
    if options.kept_tokens:  # scores do not depend on how many are kept
        merged.config.kept_tokens = options.kept_tokens
    save(merged, tokenizer, output)
    save_latents(merged, f"{output}.safetensors", base=options.base, rank=section.lora_rank)
    return 0


def beginning(named: str, tokenizer: Any) -> Tensor:
    """The first token ids of a corpus, CORPUS_TOKENS or all."""
    found: list[Tensor] = []
    for _, ids in corpus(named).texts(tokenizer, tokenizer.bos_token_id, TEXT_TOKENS):
        found.append(torch.from_numpy(ids).long())
        if sum(map(len, found)) >= CORPUS_TOKENS:
            break
    return torch.cat(found)


def with_latents(
    options: argparse.Namespace, fields: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[Any, ConversionSection]:
    """The model, every layer converted, with what the file has, and how its updates were made."""
    keeping = fields.get("kept_tokens") or options.kept_tokens
    if not keeping:
        raise LatteError(f"--kept-tokens is needed: {options.latents} says nothing of kept tokens")
    wanted = {"keep_layers": [], "kept_window": None, "local_window": options.window}
    wanted |= {"kept_tokens": keeping, "kept_block": options.block}
    asked = {name: getattr(options, name) for name in ("far_sinks", "kept_range", "kept_half_life")}
    wanted |= {name: x for name, x in asked.items() if x}
    config = converted_config(options.base, fields | wanted)
    model = load_base(options.base, config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(NEW_WEIGHTS in name and "kept_scores" not in name)
    rank = next((x.shape[1] for name, x in tensors.items() if name.endswith(".up")), RANK)
    section = ConversionSection(
        trainable="lora", lora_rank=rank, lora_alpha=float(rank), lora_targets=TARGETS
    )
    add_lora(model, section, seed=0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            stem, _, update = name.partition(".lora_")
            if name in tensors:
                x.copy_(tensors[name])
            elif update and f"{stem}.weight.up" in tensors:
                x.copy_(tensors[f"{stem}.weight.{'down' if update.startswith('A') else 'up'}"])
    return model, section


def fit_layers(model: Any, lacking: list[int], rows: list[Tensor], folder: Path) -> None:
    """Fit the latents of some layers alone, from landmarks on."""
    if not lacking:
        return
    layers = [layer.self_attn for layer in model.model.layers]
    before = {i: layer.latents.state_dict() for i, layer in enumerate(layers) if i not in lacking}
    before = {i: {k: x.clone() for k, x in state.items()} for i, state in before.items()}
    set_landmarks(model, [row[None, :1024] for row in rows[:6]])
    for i, state in before.items():
        layers[i].latents.load_state_dict(state)
    files = record(model, rows, folder)
    for i in lacking:
        fit = LayerFit(layers[i], RotaryTable(model.model, layers[i].layer_kind), files, 2)
        best, scores = fit.fit(FitOptions(steps=FIT_STEPS))
        layers[i].latents.load_state_dict(best)
        print(f"layer {i}: output error {scores[0].output:.4f} -> {scores[-1].output:.4f}")


def train(model: Any, tokenizer: Any, text: Tensor, options: argparse.Namespace) -> None:
    """Train latents and low-rank updates together by KL from the base.

    Rows are text and rows with questions in turns, of each length in turn. A run that was
    interrupted goes on from OUTPUT.step.
    """
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    lengths: list[int] = options.lengths
    count = options.steps // (2 * len(lengths)) + 1
    asked = {
        length: kept_rows(tokenizer, text, count, length, seed=5 + length + 1_000 * options.seed)
        for length in set(lengths)
    }
    at, begin = Path(f"{options.output}.step"), 0
    if at.is_file():
        begin, trained, state = torch.load(at)
        optimizer.load_state_dict(state)
        for x, old in zip(parameters, trained, strict=True):
            x.data.copy_(old)
    for step in range(begin, options.steps):
        generator = torch.Generator().manual_seed(100_000 * options.seed + step)
        turn, which = divmod(step // 2, len(lengths))
        length = lengths[which]
        start = int(torch.randint(len(text) - length, (1,), generator=generator))
        sink = torch.tensor([tokenizer.bos_token_id])
        row, first = torch.cat([sink, text[start : start + length - 1]]), options.window
        places = first + torch.randperm(length - first, generator=generator)[:PLACES].sort().values
        if step % 2:  # all of the answers, and some of what comes before
            row, question = asked[length][turn]
            question = max(first, question - 1)
            places = torch.cat([places[places < question], torch.arange(question, len(row))])
        set_learning_rate(optimizer, options.learning_rate, step, options.steps, warm=8)
        given = {"input_ids": row[None], "use_cache": False, "logits_to_keep": places}
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad(), mixing(model, "base"):
                target = model(**given).logits[0].float().log_softmax(-1)
            found = model(**given).logits[0].float().log_softmax(-1)
        loss = (target.exp() * (target - found)).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        print(f"step {step + 1}: {length} tokens, KL {loss.item():.4f}", flush=True)
        if (step + 1) % 20 == 0:
            torch.save((step + 1, [x.data for x in parameters], optimizer.state_dict()), at)


if __name__ == "__main__":
    raise SystemExit(main())
