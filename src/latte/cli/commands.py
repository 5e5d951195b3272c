"""What each command does. Heavy imports stay inside the functions."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from latte.errors import LatteError

# Option, keyword of `latte.conversion.convert`, type, help.
CONVERSION_SHAPE: tuple[tuple[str, str, Any, str], ...] = (
    ("--window", "window", int, "keys that the window sees, self included (128)"),
    ("--latents", "num_latents", int, "number over all query heads, which divide it (16 a head)"),
    ("--latent-input", "latent_input", str, "none, conv or rglru (none)"),
    ("--window-probability", "window_probability", float, "what p(l=0) starts at (0.95)"),
    ("--sinks", "num_sinks", int, "first tokens that stay visible to the window (4)"),
    ("--initial", "initial", str, "what latents begin as: auto, landmarks or random (auto)"),
    ("--seed", "seed", int, "of the new weights (0)"),
    ("--dtype", "dtype", str, "of the base's weights, such as bfloat16 (the checkpoint's)"),
    ("--decay-range", "rglru_decay_range", float, "initial decays of the RG-LRU (0.9 0.999)"),
    ("--forgetting", "forgetting", str, "the latents' horizon: none, static or gated (none)"),
    ("--half-lives", "half_life_range", float, "initial ones of latents that forget (4 512)"),
    ("--keep-layers", "keep_layers", list, "of full attention, left to the base: 7,20,23 (none)"),
)


CONVERSION_SWITCHES = {
    "delay_latents": "feed the latents only with tokens that have left the window",
    "joint_softmax": "the window's keys and the latents share one softmax",
}


def train(options: Namespace) -> int:
    """latte train RECIPE [key=value ...]"""
    from latte.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)  # checked before torch is imported
    from latte.train.run import train as run

    run(recipe, quiet=options.quiet)
    return 0


def evaluate(options: Namespace) -> int:
    """latte evaluate CHECKPOINT [--tasks ...]"""
    if (options.num_fewshot or 0) < 0:
        raise LatteError("--num-fewshot: expected 0 or more")
    at_least_one(options, "limit", "batch_size", "max_length")
    at_least_one(options, "segment", "batch_tokens", "max_tokens", "context_parallel")
    from latte.evaluate.checkpoint import find_checkpoint, load_checkpoint, training_recipe
    from latte.evaluate.lengths import kept_note
    from latte.train.run_folder import writable_folder

    folder = find_checkpoint(options.checkpoint)
    recipe = training_recipe(folder)
    label = recipe.name if recipe is not None else folder.name
    label += f" ({options.mixing})" if options.mixing else ""
    output = evaluation_folder(options, folder)
    if options.tasks is not None:
        if options.context_parallel > 1:
            raise LatteError("--context-parallel goes with held-out text, not with --tasks")
        from latte.evaluate import tasks

        chosen = tasks.load_tasks(options.tasks)  # a name that is not there, before weights load
        model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
        label += kept_note(model.config)
        scores = tasks.evaluate_tasks(
            model,
            tokenizer,
            chosen,
            **picked(options, "limit", "num_fewshot", "batch_size", "max_length", "bf16"),
        )
        table_file, record_file = tasks.write_tasks(writable_folder(output), scores, label)
        print(tasks.tasks_table(scores.rows))
        print(f"written: {table_file} and {record_file}")
        return 0
    from latte.train.run import check_groups, first_alone, join_processes

    processes, first = join_processes()
    check_groups("--context-parallel", options.context_parallel, processes)
    first_alone(lambda: writable_folder(output))
    from latte.data.preparing import evaluation_text, held_out_text
    from latte.evaluate.lengths import evaluate_lengths, table, write_rows
    from latte.evaluate.plots import lengths_figure
    from latte.train.scoring import turns

    model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
    label += kept_note(model.config)
    shape = picked(options, "join", "max_tokens")
    if options.corpus:
        corpus = options.corpus[0] if len(options.corpus) == 1 else options.corpus
        text = evaluation_text(corpus, tokenizer, field=options.field, **shape)
    elif recipe is not None:
        text = held_out_text(recipe.data, tokenizer, **shape)
    else:
        raise LatteError(f"{folder} does not say what it was trained on; give --corpus")
    rows = evaluate_lengths(
        model,
        text,
        sorted(set(options.lengths)),
        **picked(options, "segment", "batch_tokens", "bf16", "positions"),
        **turns(model.device, options.context_parallel),
        label=label,
        progress=first,
    )
    if not first:
        return 0
    write_rows(output / "evaluation.csv", {label: rows})
    lengths_figure(
        output / "evaluation.png",
        {label: rows},
        train_length=recipe.data.block_length if recipe is not None else None,
        title="Held-out text",
    )
    print(table(rows))
    print(f"written: {output / 'evaluation.csv'} and {output / 'evaluation.png'}")
    return 0


def generate(options: Namespace) -> int:
    """latte generate CHECKPOINT --prompt ..."""
    from latte.data.sources import first_document
    from latte.data.tokenizers import document_ends
    from latte.evaluate.checkpoint import load_checkpoint
    from latte.evaluate.generate import check_sampling
    from latte.evaluate.generate import generate as run

    sampling = picked(options, "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    check_sampling(**sampling, reads=options.save_state is not None)
    document = "" if options.file is None else first_document(options.file)
    model, tokenizer = load_checkpoint(options.checkpoint, options.device)
    document_ends(tokenizer)  # one that has no end says so before the prompt is printed
    states = {"document": document, **picked(options, "state", "save_state")}
    run(model, tokenizer, options.prompt, **sampling, echo=True, compiled=options.compile, **states)
    return 0


def chat(options: Namespace) -> int:
    """latte chat CHECKPOINT"""
    from latte.data.sources import first_document
    from latte.evaluate.chat import Chat, converse
    from latte.evaluate.checkpoint import load_checkpoint
    from latte.evaluate.generate import check_sampling

    sampling = picked(options, "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    check_sampling(**sampling)
    document = "" if options.file is None else first_document(options.file)
    model, tokenizer = load_checkpoint(options.checkpoint, options.device)
    converse(Chat(model, tokenizer, system=options.system, document=document, **sampling))
    return 0


def serve(options: Namespace) -> int:
    """latte serve CHECKPOINT"""
    if options.continuous_batching:
        raise LatteError(
            "continuous batching pages keys and values, and a state of Latte has no pages:"
            " expected no --continuous-batching"
        )
    from latte.serve.server import serve as run

    run(options.checkpoint, compiled=options.compile, **picked(options, "host", "port", "device"))
    return 0


def compare(options: Namespace) -> int:
    """latte compare RECIPE [--presets a,b,c] [--seeds 0,1,2]"""
    from latte.train.recipe import load_recipe

    at_least_one(options, "max_tokens")
    recipe = load_recipe(options.recipe, options.overrides)
    section = recipe.comparison
    for name in ("presets", "seeds", "baseline", "lengths", "max_tokens"):
        given = getattr(options, name)
        if given is not None:
            setattr(section, name, given)
    if options.presets and not options.baseline and section.baseline not in section.presets:
        section.baseline = None  # the recipe's is not among the chosen ones
    if not section.presets:
        raise LatteError("compare: name the presets, with --presets or comparison.presets")
    if not section.seeds:
        for name in ("baseline", "report", "dry_run"):
            if getattr(options, name):
                raise LatteError(f"--{name.replace('_', '-')} is for several --seeds; name them")
    from latte.compare.compare import Comparison

    grid = Comparison(recipe)
    if options.dry_run:
        print(grid.listing(), end="")
        return 0
    _, text = grid.sweep(report_only=options.report)
    if text:  # under torchrun one process speaks
        name = "seeds" if section.seeds else "comparison"
        print(f"{text}written: {name}.csv, .md and .png in {recipe.output_dir}")
    return 0


def convert(options: Namespace) -> int:
    """latte convert BASE OUT [--recipe RECIPE] [key=value ...]"""
    shape = picked(options, *(name for _, name, _, _ in CONVERSION_SHAPE), *CONVERSION_SWITCHES)
    given = {name: value for name, value in shape.items() if value is not None}
    if options.recipe is not None:
        if given:
            raise LatteError(
                f"with --recipe the model's shape is the recipe's: expected conversion.KEY=VALUE,"
                f" got --{next(iter(given)).replace('_', '-')}"
            )
        from latte.train.convert import convert_and_train, load_conversion_recipe

        recipe = load_conversion_recipe(options.recipe, options.overrides)
        folder = convert_and_train(options.base, options.output, recipe, quiet=options.quiet)
        if int(os.environ.get("RANK", "0")) == 0:  # the other processes have nothing left to do
            from latte.evaluate.lengths import report

            report(options.base, folder, recipe, quiet=options.quiet)
            print(f"written: {folder} holds the model; evaluation.csv, .md and .png compare it")
        return 0
    if options.overrides:
        raise LatteError(
            f"key=value overrides belong to a recipe: expected --recipe with"
            f" {options.overrides[0]!r}"
        )
    from latte.conversion import convert as run

    model = run(options.base, options.output, **given)
    new = sum(p.numel() for name, p in model.named_parameters() if ".latents." in name)
    total = sum(p.numel() for p in model.parameters())
    if not options.quiet:
        config = model.config
        layers = f"{len(config.converted_layers)} of {config.num_hidden_layers} layers converted"
        print(
            f"written: {options.output}, {config.model_type}, {layers},"
            f" {(total - new) / 1e6:.2f}M parameters of the base and {new / 1e6:.2f}M new ones,"
            " which have not been trained yet (see latte convert --recipe)"
        )
    return 0


def inspect(options: Namespace) -> int:
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


def benchmark(options: Namespace) -> int:
    """latte benchmark ..."""
    from latte.evaluate.benchmark import Settings
    from latte.evaluate.benchmark import benchmark as run

    given = {k: v for k, v in vars(options).items() if k in Settings.__dataclass_fields__}
    for name in ("ops", "models", "modes", "lengths"):
        if name in given:
            given[name] = () if given[name] == ["none"] else tuple(given[name])
    settings = Settings(**given, memory=not options.no_memory)
    run(settings, Path(options.output))
    print(f"written: {Path(options.output) / 'benchmark.csv'}")
    return 0


def evaluation_folder(options: Namespace, checkpoint: Path) -> Path:
    """Where an evaluation writes: a control's results beside the model's own, not over them.

    Of a file's model it writes into the present folder: a file may lie where nothing is written.
    """
    if options.output:
        return Path(options.output)
    if checkpoint.is_file():
        return Path(f"{checkpoint.stem}-evaluation")
    return checkpoint / ("evaluation" + (f"-{options.mixing}" if options.mixing else ""))


def picked(options: Namespace, *names: str) -> dict[str, Any]:
    """Some of the options, by the names of the keywords that they become."""
    return {name: getattr(options, name) for name in names}


def at_least_one(options: Namespace, *names: str) -> None:
    """Refuse options below 1; None means that it was not given."""
    for name, value in picked(options, *names).items():
        if value is not None and value < 1:
            raise LatteError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
