"""Trained latents of a file, to go on with kept tokens in every layer.

    python -m experiments.kept.refit BASE.gguf LATENTS.safetensors OUT --text books=FILE

1. The file's latents and low-rank updates are set. Layers that had kept their attention are
   converted too: their latents begin as landmarks and are fitted alone.
2. Scores of tokens are fitted in the model with the base's attention.
3. All latents are trained together by KL from that attention, on text and on rows in which facts
   are asked about.

Then `latte.conversion.save_latents` writes a new file. Everything is in fp32 on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from experiments.bases.reading import corpus
from latte.conversion import save_latents
from latte.conversion.kept_rows import kept_rows
from latte.conversion.kept_scores import fit_kept_scores, set_kept_scores
from latte.conversion.landmarks import set_landmarks
from latte.conversion.pretrained import converted_config, load_base, load_tokenizer, save
from latte.conversion.recording import FitOptions, LayerFit, record
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.train.layers import RotaryTable
from latte.models.tensor_file import read_tensors

LENGTH = 2048  # tokens of a row
ROWS, ASKED, FIT_STEPS = 14, (18, 8), 90
# Of SmolLM2: the layers in which facts are kept, and the numbers of tokens elsewhere and there.
KEY_LAYERS, KEPT, KEPT_THERE = (*range(5, 9), 14, 15, *range(17, 25), 26), 16, 152


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m experiments.kept.refit", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("base", help="the GGUF file, or folder")
    parser.add_argument("latents", help="a file of save_latents")
    parser.add_argument("output", help="folder of the model; OUTPUT.safetensors has the latents")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILES")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--block", type=int, default=32, help="tokens between two choices")
    parser.add_argument("--steps", type=int, default=60, help="of the last stage")
    options = parser.parse_args(arguments)
    return exit_code("refit", lambda: refit(options), "run it again")


def refit(options: argparse.Namespace) -> int:
    torch.manual_seed(0)
    tokenizer, output = load_tokenizer(options.base), Path(options.output)
    texts = [
        torch.from_numpy(ids).long()
        for named in options.text
        for _, ids in corpus(named).texts(tokenizer, tokenizer.bos_token_id, 30_000)
    ]
    text = torch.cat([ids[: len(ids) // 2] for ids in texts[:40]])
    model, lacking = with_latents(options)
    rows = [text[i * LENGTH : (i + 1) * LENGTH] for i in range(ROWS)]
    fit_layers(model, lacking, rows, output.with_suffix(".rows"))
    asked = kept_rows(tokenizer, text, ASKED[0], LENGTH, seed=11)
    asked += kept_rows(tokenizer, text, ASKED[1], 2 * LENGTH, seed=12)
    folder = output.with_suffix(".scores")
    set_kept_scores(model, fit_kept_scores(model, asked, folder, block=options.block))
    train(model, tokenizer, text, options.steps)
    save(model, tokenizer, output)
    save_latents(model, f"{output}.safetensors", base=options.base)
    return 0


def with_latents(options: argparse.Namespace) -> tuple[Any, list[int]]:
    """The model with what the file has, and the layers whose latents the file does not have."""
    about, tensors = read_tensors(Path(options.latents), "latents", "save_latents")
    fields: dict[str, Any] = json.loads(about["fields"])
    layers = load_base(options.base, converted_config(options.base, fields)).config
    kept = [KEPT_THERE if i in KEY_LAYERS else KEPT for i in range(layers.num_hidden_layers)]
    fields |= {"keep_layers": [], "kept_window": None, "local_window": options.window}
    fields |= {"kept_tokens": kept, "kept_block": options.block}
    config = converted_config(options.base, fields)
    model = load_base(options.base, config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name in tensors:
                x.copy_(tensors[name])
            elif f"{name}.up" in tensors:
                up, down = (tensors[f"{name}.{part}"].float() for part in ("up", "down"))
                x.add_(up @ down)
    return model, list(layers.keep_layers)


def fit_layers(model: Any, lacking: list[int], rows: list[Tensor], folder: Path) -> None:
    """Fit the latents of some layers alone, from landmarks on."""
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


def train(model: Any, tokenizer: Any, text: Tensor, steps: int) -> None:
    """Train the latents by KL from the base's attention in the same weights."""
    parameters = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".latents." in name and "kept_scores" not in name)
        parameters += [parameter] * parameter.requires_grad
    optimizer = torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    asked = kept_rows(tokenizer, text, steps, LENGTH, seed=5)
    generator = torch.Generator().manual_seed(3)
    layers = [layer.self_attn for layer in model.model.layers]
    for step in range(steps):
        start = int(torch.randint(len(text) - LENGTH, (1,), generator=generator))
        begin = torch.tensor([tokenizer.bos_token_id])
        row = torch.cat([begin, text[start : start + LENGTH - 1]])
        first = 64 + torch.randperm(LENGTH - 64, generator=generator)[:640].sort().values
        if step % 2:  # all of the answers, and some of what comes before
            row, question = asked[step].ids, max(64, asked[step].asked - 1)
            first = torch.cat([first[first < question], torch.arange(question, len(row))])
        for group in optimizer.param_groups:
            fall = 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 8) * fall
        given = {"use_cache": False, "logits_to_keep": first}
        for layer in layers:
            layer.mixing = "base"
        with torch.no_grad():
            target = model(row[None], **given).logits[0].log_softmax(-1)
        for layer in layers:
            layer.mixing = "learned"
        found = model(row[None], **given).logits[0].log_softmax(-1)
        loss = (target.exp() * (target - found)).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        print(f"step {step + 1}: KL {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
