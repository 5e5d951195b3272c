"""What each command does. Heavy imports stay inside the functions."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from latte.errors import LatteError


def train(options: Namespace) -> int:
    """latte train RECIPE [key=value ...]"""
    from latte.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)  # checked before torch is imported
    from latte.train.run import train as run

    run(recipe, quiet=options.quiet)
    return 0


def evaluate(options: Namespace) -> int:
    """latte evaluate CHECKPOINT ..."""
    at_least_one(options, "segment", "batch_tokens", "max_tokens")
    from latte.evaluate.checkpoint import find_checkpoint

    folder = find_checkpoint(options.checkpoint)
    from latte.train.run_folder import writable_folder

    output = writable_folder(evaluation_folder(options, folder))
    from latte.data.preparing import evaluation_text, held_out_text
    from latte.evaluate.checkpoint import load_checkpoint, training_recipe
    from latte.evaluate.lengths import evaluate_lengths, table, write_csv
    from latte.evaluate.plots import evaluation_figure

    recipe = training_recipe(folder)
    model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
    shape = {"join": options.join, "max_tokens": options.max_tokens}
    if options.corpus:
        corpus = options.corpus[0] if len(options.corpus) == 1 else options.corpus
        text = evaluation_text(corpus, tokenizer, field=options.field, **shape)
    elif recipe is not None:
        text = held_out_text(recipe.data, tokenizer, **shape)
    else:
        raise LatteError(f"{folder} does not say what it was trained on; give --corpus")
    label = recipe.name if recipe is not None else folder.name
    label += f" ({options.mixing})" if options.mixing else ""
    rows = evaluate_lengths(
        model,
        text,
        sorted(set(options.lengths)),
        segment=options.segment,
        batch_tokens=options.batch_tokens,
        bf16=options.bf16,
        label=label,
    )
    write_csv(output / "evaluation.csv", rows, [{"model": label}] * len(rows))
    evaluation_figure(
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
    from latte.evaluate.checkpoint import load_checkpoint
    from latte.evaluate.generate import check_sampling
    from latte.evaluate.generate import generate as run

    check_sampling(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    model, tokenizer = load_checkpoint(options.checkpoint, options.device)
    print(options.prompt, end="", flush=True)
    run(
        model,
        tokenizer,
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
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


def evaluation_folder(options: Namespace, checkpoint: Path) -> Path:
    """Where `latte evaluate` writes: a control's results beside the model's own, not over them."""
    if options.output:
        return Path(options.output)
    return checkpoint / ("evaluation" + (f"-{options.mixing}" if options.mixing else ""))


def at_least_one(options: Namespace, *names: str) -> None:
    """Refuse options below 1; None means that it was not given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LatteError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
