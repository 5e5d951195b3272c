"""The first stage of a conversion: every layer learns its base's attention by itself.

    OUT/layers/
      kept/asked-00000.safetensors ...    what the base looks at again, recorded once
      kept/kept-00.safetensors ...        the scores of kept tokens, of the layers that are done
      rows/row-00000.safetensors ...      the inputs of the base's layers, recorded once
      fitted/layer-00.safetensors ...     the latents of the layers that are done
      layers.csv                          their errors on held-out rows
      config.json, model.safetensors ...  the model, once all layers are done

When it is run again, it continues where it stopped: recorded rows and fitted layers are kept.
Layers are fitted in several processes of one thread each, or on a GPU one after another.
"""

from __future__ import annotations

import copy
import csv
import functools
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from latte.conversion.kept_rows import AskedRow, kept_rows
from latte.conversion.kept_scores import fit_kept_scores, set_kept_scores
from latte.conversion.pretrained import save
from latte.conversion.recording import FitErrors, FitOptions, LayerFit, record
from latte.conversion.step import RotaryTable
from latte.errors import LatteError
from latte.lab.data.preparing import DataSection, Text, prepare_text
from latte.lab.machine import default_device
from latte.lab.malloc import keep_memory
from latte.lab.progress import progress
from latte.lab.train.conversion_trainer import starting_model
from latte.lab.train.recipe import Recipe
from latte.lab.train.run import calibration_blocks, data_section, repetition
from latte.models.atomic_files import write_json
from latte.models.plain_files import read_object

COLUMNS = ("layer", "step", "output_error", "mass_divergence", "window_error", "seconds")


@dataclass
class LayersSection:
    """Attention distillation layer by layer, from hidden states that are recorded once.

    One step reads `batch_size` rows of `data.block_length` tokens. The base runs over `rows +
    held_out_rows` of them, and over no more, whatever the number of steps.
    """

    rows: int = 48  # number of recorded rows to train on, of `data.block_length` tokens each
    held_out_rows: int = 4  # number of recorded rows that decide when to stop
    steps: int = FitOptions.steps  # largest number of steps per layer
    batch_size: int = FitOptions.batch_size  # number of rows per step
    learning_rate: float = FitOptions.learning_rate  # peak of the learning rate
    eval_steps: int = FitOptions.eval_steps  # number of steps between scores on the held-out rows
    # number of scores without a gain of 0.5% after which a layer is finished
    patience: int = FitOptions.patience
    kept_rows: int = 32  # number of recorded rows that ask about facts, for scores of kept tokens
    processes: int = 2  # number of layers fitted at once, each on one thread; 1 on a GPU
    seed: int = 0  # seed of the choice of rows and of new weights

    def options(self, mass_weight: float) -> FitOptions:
        own = ("steps", "batch_size", "learning_rate", "eval_steps", "patience")
        return FitOptions(mass_weight=mass_weight, **{name: getattr(self, name) for name in own})


def distill_layers(recipe: Recipe, section: LayersSection, *, quiet: bool = False) -> Path:
    """Fit all converted layers of the recipe's base; returns the folder, which has the model.

    Raises:
        LatteError: The recipe keeps documents apart inside a block, the text is too short, or the
            folder cannot be written.
    """
    folder = Path(recipe.output_dir)
    if (folder / "config.json").is_file():
        if not quiet:
            print(f"{folder} is finished; nothing to do", flush=True)
        return folder
    if recipe.data.respect_documents:
        raise LatteError(
            "layers: expected data.respect_documents=false, since a recorded row is one sequence"
        )
    text = prepare_text(data_section(recipe), progress=not quiet)
    blocks = text.blocks(recipe.data, section.rows, section.seed)
    rows = [blocks[i]["input_ids"] for i in range(section.rows)]
    judges = _held_out(text, recipe.data, section.held_out_rows)
    samples = calibration_blocks(text, recipe.data)
    model = starting_model(recipe.conversion, section.seed, samples, default_device()).eval()
    text.train.check_vocabulary(model.config.vocab_size)
    layers = {layer.self_attn.layer_idx: layer.self_attn for layer in converted_layers(model)}
    every = len(rows) + len(judges)
    length = recipe.data.block_length

    def tell(line: str) -> None:
        if not quiet:
            print(f"layers: {line}", file=sys.stderr, flush=True)

    if note := repetition(len(text.train), section.rows * length):
        tell(note)
    if scored := [i for i, layer in layers.items() if hasattr(layer.latents, "kept_scores")]:
        tell(f"scores of kept tokens, from {section.kept_rows} rows of {length:,} tokens")
        sizes = section.kept_rows, length
        asked = kept_rows(text.tokenizer, torch.cat(rows), *sizes, seed=section.seed)
        _score(model, asked, scored, section.seed, folder, quiet)
    tell(f"recording {every} rows of {length:,} tokens")
    with progress(every, "row", shown=not quiet, label="layers") as state:
        files = record(model, [*rows, *judges], folder / "rows", lambda _: state.update(1))
    options = section.options(recipe.conversion.mass_weight)
    with progress(len(layers), "layer", shown=not quiet, label="layers", bar=False) as state:
        for index, scores in _fit_all(model, layers, files, section, options, folder):
            state.update(1)
            first, last = scores[0], min(scores, key=lambda score: score.output)
            tell(
                f"layer {index} ({state.done} of {len(layers)}), output error"
                f" {first.output:.4f} -> {last.output:.4f} (window alone {first.window:.4f})"
            )
            state.spoke()
    for index, layer in layers.items():
        layer.latents.load_state_dict(load_file(_fitted(folder, index)))
    _write_scores(folder)
    _export(model, text, recipe, folder)
    for name in ("rows", "kept"):  # gigabytes that nothing reads again
        shutil.rmtree(folder / name, ignore_errors=name == "kept")
    return folder


def _score(
    model: Any, rows: list[AskedRow], scored: list[int], seed: int, folder: Path, quiet: bool
) -> None:
    """Fit the scores of kept tokens. The latents are fitted after them, to what they leave."""
    with progress(len(rows) + len(scored), "part", shown=not quiet, label="layers") as state:
        found = fit_kept_scores(
            model,
            rows,
            folder / "kept",
            layers=scored,
            block=model.config.kept_block,
            seed=seed,
            on_row=lambda _: state.update(1),
            on_layer=lambda _: state.update(1),
        )
    set_kept_scores(model, found)


def converted_layers(model: Any) -> list[Any]:
    """The decoder layers whose attention has latents."""
    return [layer for layer in model.model.layers if hasattr(layer.self_attn, "latents")]


def _held_out(text: Text, section: DataSection, count: int) -> list[Tensor]:
    """Rows of the validation text, in its order."""
    length = section.block_length
    blocks = text.held_out_blocks(section)
    if len(blocks) < count:
        raise LatteError(
            f"layers.held_out_rows: expected at most the {len(blocks)} blocks of {length} tokens in"
            f" the validation text, got {count}"
        )
    step = len(blocks) // count
    return [blocks[i * step]["input_ids"] for i in range(count)]


def _fitted(folder: Path, index: int) -> Path:
    return folder / "fitted" / f"layer-{index:02d}.safetensors"


def _fit_all(
    model: Any,
    layers: dict[int, Any],
    files: list[Path],
    section: LayersSection,
    options: FitOptions,
    folder: Path,
) -> Iterator[tuple[int, list[FitErrors]]]:
    """Fit the layers that are not fitted yet, and give each with its scores when it is done."""
    (folder / "fitted").mkdir(exist_ok=True)
    jobs = []
    for index, layer in layers.items():
        scores = _fitted(folder, index).with_suffix(".json")
        if scores.is_file():
            kept = read_object(scores, "scores", then="delete it to fit this layer again")
            yield index, [FitErrors(*score) for score in kept["scores"]]
            continue
        table = RotaryTable(model.model, layer.layer_kind)
        given = (layer, table, files, section.held_out_rows, options, folder)
        jobs.append(functools.partial(_fit_one, *given))
    if section.processes == 1 or len(jobs) < 2 or model.device.type == "cuda":
        for job in jobs:
            yield job()
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(section.processes, context, _one_thread) as pool:
        try:
            for future in as_completed([pool.submit(job) for job in jobs]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    keep_memory()
    torch.set_num_threads(1)


def _fit_one(
    layer: Any,
    table: RotaryTable,
    files: list[Path],
    held_out: int,
    options: FitOptions,
    folder: Path,
) -> tuple[int, list[FitErrors]]:
    start = time.monotonic()
    index = layer.layer_idx
    latents, scores = LayerFit(copy.deepcopy(layer), table, files, held_out).fit(options)
    target = _fitted(folder, index)
    part = target.with_suffix(f".part-{os.getpid()}")
    save_file({name: value.cpu().contiguous() for name, value in latents.items()}, part)
    part.rename(target)
    kept = {"scores": scores, "seconds": round(time.monotonic() - start, 1)}
    write_json(target.with_suffix(".json"), kept)  # the sign that the layer is done
    return index, scores


def _write_scores(folder: Path) -> None:
    with open(folder / "layers.csv", "w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        for file in sorted((folder / "fitted").glob("layer-*.json")):
            kept = read_object(file)
            for step, output, mass, window in kept["scores"]:
                numbers = (f"{x:.6f}" for x in (output, mass, window))
                writer.writerow((int(file.stem[6:]), step, *numbers, kept["seconds"]))


def _export(model: Any, text: Text, recipe: Recipe, folder: Path) -> None:
    """The model's files, of which config.json, the sign that all is there, comes last."""
    staged = folder / "model"
    shutil.rmtree(staged, ignore_errors=True)
    save(model, text.tokenizer, staged)
    write_json(staged / "recipe.json", recipe.as_dict())
    for file in sorted(staged.iterdir(), key=lambda file: file.name == "config.json"):
        file.rename(folder / file.name)
    staged.rmdir()
