"""`latte evaluate --tasks` and `--probes`: options and action. Heavy imports stay inside."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from latte.errors import LatteError


def names(text: str) -> list[str]:
    """`retrieval,copy` -> ['retrieval', 'copy']."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return list(dict.fromkeys(found))


def fractions(text: str) -> list[float]:
    """`0,0.5,1` -> [0.0, 0.5, 1.0]."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= value <= 1 for value in found):
        raise ArgumentTypeError(f"expected numbers from 0 to 1 separated by commas, got {text!r}")
    return found


def add_options(parser: ArgumentParser) -> None:
    """What `latte evaluate` takes beyond the options for held-out text."""
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness")
    tasks.add_argument("--tasks", type=names, help="names or YAML files, separated by commas")
    tasks.add_argument("--limit", type=int, help="documents per task; all")
    tasks.add_argument(
        "--num-fewshot", type=int, help="examples before each question; as the task says"
    )
    tasks.add_argument("--batch-size", type=int, default=8, help="prompts side by side")
    tasks.add_argument(
        "--max-length", type=int, help="tokens of a prompt that the model sees; as its config says"
    )
    probes = parser.add_argument_group("probes, at the --lengths")
    probes.add_argument(
        "--probes", type=names, help="retrieval, copy, continuation, separated by commas"
    )
    probes.add_argument(
        "--depths",
        type=fractions,
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="where the retrieval probe hides its statement, 0 (start) to 1 (end)",
    )
    probes.add_argument("--cases", type=int, default=32, help="questions per length and depth")
    probes.add_argument("--seed", type=int, default=0, help="which questions")
    parser.add_argument(
        "--mixing",
        help="of a converted model: learned, or the controls window, latents and base",
    )


def run(options: Namespace) -> int:
    """latte evaluate CHECKPOINT [--tasks ...] [--probes ...]"""
    from latte.cli import commands

    if options.seed < 0 or (options.num_fewshot or 0) < 0:
        raise LatteError("--seed and --num-fewshot: expected 0 or more")
    commands.at_least_one(options, "limit", "batch_size", "max_length", "cases")
    if options.tasks is None and options.probes is None:
        return commands.evaluate(options)
    from latte.evaluate.checkpoint import find_checkpoint, training_recipe

    folder = find_checkpoint(options.checkpoint)
    recipe = training_recipe(folder)
    tasks = None
    if options.tasks is not None:  # a name that the harness lacks is found before weights load
        from latte.evaluate.tasks import load_tasks

        tasks = load_tasks(options.tasks)
    from latte.evaluate.checkpoint import load_checkpoint

    model, tokenizer = load_checkpoint(folder, options.device, mixing=options.mixing)
    label = recipe.name if recipe is not None else folder.name
    label += f" ({options.mixing})" if options.mixing else ""
    output = commands.evaluation_folder(options, folder)
    if tasks is not None:
        _run_tasks(options, model, tokenizer, tasks, output, label)
    if options.probes is not None:
        _run_probes(options, model, tokenizer, recipe, output, label)
    return 0


def _run_tasks(
    options: Namespace, model: Any, tokenizer: Any, tasks: Any, output: Path, label: str
) -> None:
    from latte.evaluate.tasks import evaluate_tasks, tasks_table, write_tasks
    from latte.train.run_folder import writable_folder

    writable_folder(output)
    scores = evaluate_tasks(
        model,
        tokenizer,
        tasks,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        batch_size=options.batch_size,
        max_length=options.max_length,
        bf16=options.bf16,
    )
    table, record = write_tasks(output, scores, label)
    print(tasks_table(scores.rows))
    print(f"written: {table} and {record}")


def _run_probes(
    options: Namespace, model: Any, tokenizer: Any, recipe: Any, output: Path, label: str
) -> None:
    from latte.cli.commands import at_least_one
    from latte.train.run_folder import writable_folder
    from replication.probes.questions import make_material
    from replication.probes.report import probes_figure, probes_table, write_probes
    from replication.probes.scores import plan, run_probes

    at_least_one(options, "segment", "batch_tokens", "max_tokens")
    material = make_material(tokenizer, _probe_text(options, tokenizer, recipe))
    lengths, depths = sorted(set(options.lengths)), sorted(set(options.depths))
    plan(material, options.probes, lengths, depths)  # what cannot be asked, before writing
    writable_folder(output)
    rows = run_probes(
        model,
        material,
        options.probes,
        lengths,
        depths=depths,
        cases=options.cases,
        seed=options.seed,
        segment=options.segment,
        batch_tokens=options.batch_tokens,
        bf16=options.bf16,
    )
    write_probes(output / "probes.csv", rows, label)
    probes_figure(output / "probes.png", rows, label)
    print(probes_table(rows))
    print(f"written: {output / 'probes.csv'} and {output / 'probes.png'}")


def _probe_text(options: Namespace, tokenizer: Any, recipe: Any) -> Any:
    """Ids of what --corpus says, else of what the run held out, else of the embedded corpus."""
    from latte.data.preparing import evaluation_text, held_out_text

    given = {"max_tokens": options.max_tokens, "join": True}
    if options.corpus or recipe is None:
        corpus = options.corpus or "embedded"
        if isinstance(corpus, list) and len(corpus) == 1:
            corpus = corpus[0]
        held_out = evaluation_text(corpus, tokenizer, field=options.field, **given)
    else:
        held_out = held_out_text(recipe.data, tokenizer, **given)
    ((ids, _),) = held_out.documents()
    return ids
