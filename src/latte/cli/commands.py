"""What each command does. Heavy imports stay inside the functions."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latte.errors import LatteError

# Option, keyword of `latte.conversion.convert`, type, help.
CONVERSION_SHAPE: tuple[tuple[str, str, Any, str], ...] = (
    ("--window", "window", int, "number of keys that the window sees (128)"),
    ("--latents", "num_latents", int, "total number of latents over all heads (16 per head)"),
    ("--latent-input", "latent_input", str, "source of the logits: none, conv or rglru (none)"),
    ("--window-probability", "window_probability", float, "initial value of p(l=0) (0.95)"),
    ("--sinks", "num_sinks", int, "number of first tokens that stay visible to the window (4)"),
    ("--initial", "initial", str, "initial latents: auto, landmarks or random (auto)"),
    ("--seed", "seed", int, "seed of the new weights (0)"),
    ("--dtype", "dtype", str, "dtype of the base's weights, as bfloat16 (the checkpoint's)"),
    ("--decay-range", "rglru_decay_range", float, "initial decays of the RG-LRU (0.9 0.999)"),
    ("--forgetting", "forgetting", str, "whether latents forget: none, static or gated (none)"),
    ("--half-lives", "half_life_range", float, "initial half-lives, if latents forget (4 512)"),
    ("--keep-layers", "keep_layers", list, "layers to keep full attention: 7,20,23 (none)"),
)


CONVERSION_SWITCHES = {
    "delay_latents": "latents read a token only when it has left the window",
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

    folder = find_checkpoint(options.checkpoint)
    recipe = training_recipe(folder)
    label = recipe.name if recipe is not None else folder.name
    label += f" ({options.mixing})" if options.mixing else ""
    if options.tasks is not None:
        if options.context_parallel > 1:
            raise LatteError("--context-parallel goes with held-out text, not with --tasks")
        from latte.evaluate import tasks
        from latte.progress import progress

        own = ("limit", "num_fewshot", "batch_size", "max_length", "bf16")
        settings = picked(options, "tasks", *own, "mixing", "device")
        settings["task_files"] = contents(name for name in options.tasks if Path(name).is_file())
        output = evaluation_results(options, folder, ("tasks.csv", "tasks.json"), settings)
        chosen = tasks.load_tasks(options.tasks)  # a name that is not there, before weights load
        model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
        label += kept_note(model.config)
        with progress(0, "task", label=f"{label}, tasks", bar=False):
            scores = tasks.evaluate_tasks(model, tokenizer, chosen, **picked(options, *own))
        with output.writing() as staged:
            tasks.write_tasks(staged, scores, label)
        print(tasks.tasks_table(scores.rows))
        print(f"written: {output.path('tasks.csv')} and {output.path('tasks.json')}")
        return 0
    from latte.train.run import check_groups, first_alone, join_processes

    processes, first = join_processes()
    check_groups("--context-parallel", options.context_parallel, processes)
    shape = picked(options, "join", "max_tokens")
    scoring = picked(options, "segment", "batch_tokens", "bf16", "positions")
    lengths = sorted(set(options.lengths))

    def place() -> Any:
        settings = picked(options, "corpus", "field", "mixing", "device", "context_parallel")
        settings |= {**shape, **scoring, "lengths": lengths, "processes": processes}
        settings["corpus_files"] = contents(corpus_files(options.corpus or ()))
        files = ("evaluation.csv", "evaluation.png", "positions.csv")
        return evaluation_results(options, folder, files, settings)

    output = first_alone(place)
    from latte.data.preparing import evaluation_text, held_out_text
    from latte.evaluate.lengths import evaluate_lengths, table, write_rows
    from latte.evaluate.plots import lengths_figure
    from latte.train.scoring import turns

    model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
    label += kept_note(model.config)
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
        lengths,
        **scoring,
        **turns(model.device, options.context_parallel),
        label=label,
        progress=first,
    )
    if not first:
        return 0
    with output.writing() as staged:
        write_rows(staged / "evaluation.csv", {label: rows})
        lengths_figure(
            staged / "evaluation.png",
            {label: rows},
            train_length=recipe.data.block_length if recipe is not None else None,
            title="Held-out text",
        )
    print(table(rows))
    print(f"written: {output.path('evaluation.csv')} and {output.path('evaluation.png')}")
    return 0


def generate(options: Namespace) -> int:
    """latte generate CHECKPOINT --prompt ..."""
    from latte.data.sources import first_document
    from latte.data.tokenizers import document_ends
    from latte.evaluate.checkpoint import load_checkpoint
    from latte.evaluate.generate import check_sampling
    from latte.evaluate.generate import generate as run
    from latte.results import check_new_file

    sampling = picked(options, "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    check_sampling(**sampling, reads=options.save_state is not None)
    if options.save_state is not None:
        check_new_file(options.save_state, "state", force=options.force)
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
    from latte.serve.server import Serving
    from latte.serve.server import serve as run

    serving = Serving(
        compiled=options.compile,
        slots=options.max_batch,
        piece=options.prefill_piece,
        state_cache=options.state_cache,
        state_folder=options.state_cache_dir,
        state_folder_room=options.state_cache_disk,
        longest=options.max_length,
    )
    run(options.checkpoint, serving=serving, **picked(options, "host", "port", "device"))
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
    if options.presets and options.baseline is None and section.baseline not in section.presets:
        section.baseline = None  # the recipe's is not among the chosen ones
    if not section.presets:
        raise LatteError("compare: name the presets, with --presets or comparison.presets")
    if not section.seeds:
        for name in ("baseline", "report", "dry_run"):
            if getattr(options, name) not in (None, False):
                raise LatteError(f"--{name.replace('_', '-')} is for several --seeds; name them")
    from latte.compare.compare import Comparison

    grid = Comparison(recipe, quiet=options.quiet)
    if options.dry_run:
        print(grid.listing(), end="")
        return 0
    _, text = grid.sweep(report_only=options.report)
    if text and not options.quiet:  # under torchrun one process speaks
        name = grid.report_place().path(grid.report_files[0]).stem
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
            print(f"written: {folder} holds the model")
        return 0
    if options.overrides:
        raise LatteError(
            f"key=value overrides belong to a recipe: expected --recipe with"
            f" {options.overrides[0]!r}"
        )
    from latte.conversion import convert as run
    from latte.progress import progress

    with progress(0, "layer", shown=not options.quiet, label="converting", bar=False):
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
    from latte.inspect import report
    from latte.progress import progress
    from latte.results import results_at

    folder = find_checkpoint(options.checkpoint)
    text = report.read_text(options.text, options.file)
    recipe = training_recipe(folder)
    settings = picked(options, "text", "layers", "tokens", "statistics_tokens", "at", "device")
    settings |= {"file": contents([options.file] if options.file else ()), **weights(folder)}
    where = Path(options.output) if options.output else folder / "inspection"
    given = {"named": bool(options.output), "force": options.force}
    output = results_at(where, report.FILES, settings, **given)
    model, tokenizer = load_checkpoint(folder, options.device)
    with progress(0, "layer", label="inspecting", bar=False):
        inspection = report.inspect_model(
            model,
            tokenizer,
            text,
            shown=options.tokens,
            read=options.statistics_tokens,
            layers=options.layers,
            at=options.at or (),
            label=recipe.name if recipe is not None else folder.name,
        )
        with output.writing() as staged:
            written = report.write_report(inspection, staged)
    print(report.outline(inspection))
    print(f"written into {output.folder}: {', '.join(written)}")
    page = output.path("index.html")
    print(f"open {page} ({report.page_size(output.folder)}) in a browser")
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
    folder = Path(options.output or "runs/benchmark")
    found = run(settings, folder, named=bool(options.output), force=options.force)
    print(f"written: {found.path}")
    return 0


def doctor(options: Namespace) -> int:
    """latte doctor [--json]"""
    import json

    from latte.doctor import report, required_kernels, text

    found = report()
    print(json.dumps(found, indent=2) if options.json else text(found))
    required_kernels()
    return 0


def evaluation_results(
    options: Namespace, checkpoint: Path, files: tuple[str, ...], settings: dict[str, Any]
) -> Any:
    """The place where an evaluation writes. Each control has a folder of its own.

    For a model in a single file it is in the current folder, since the file's may be read-only.

    Args:
        files: Names of the files that the evaluation may write.
        settings: Settings on which the results depend, without the weights.

    Raises:
        LatteError: The same errors as of :func:`latte.results.results_at`.
    """
    from latte.results import results_at

    if options.output:
        folder = Path(options.output)
    elif checkpoint.is_file():
        folder = Path(f"{checkpoint.stem}-evaluation")
    else:
        folder = checkpoint / ("evaluation" + (f"-{options.mixing}" if options.mixing else ""))
    every = {**settings, **weights(checkpoint)}
    return results_at(folder, files, every, named=bool(options.output), force=options.force)


def weights(checkpoint: Path) -> dict[str, Any]:
    """The setting that identifies a checkpoint's weights."""
    from latte.evaluate.checkpoint import weights_of

    return {"weights": weights_of(checkpoint)}


def contents(files: Iterable[str | Path]) -> str | None:
    """The setting that identifies the contents of files; None if there are none."""
    from latte.evaluate.checkpoint import contents_of

    paths = [Path(file).expanduser() for file in files]
    return contents_of(paths) if paths else None


def corpus_files(specs: Iterable[str]) -> list[Path]:
    """The local files that `--corpus` names."""
    from latte.data.sources import PREFIX, find_files

    local = [spec for spec in specs if spec != "embedded" and not spec.startswith(PREFIX)]
    return [path for spec in local for path in find_files(spec)]


def picked(options: Namespace, *names: str) -> dict[str, Any]:
    """The options of these names, as a dictionary."""
    return {name: getattr(options, name) for name in names}


def at_least_one(options: Namespace, *names: str) -> None:
    """Refuse options below 1. None means that an option was not given."""
    for name, value in picked(options, *names).items():
        if value is not None and value < 1:
            raise LatteError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
