"""What each command does. Heavy imports stay inside the functions."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from latte.errors import LatteError
from latte.layers.latent_fields import ConversionOptions, flag, options_of
from latte.ops.processes import is_first_process


def train(options: Namespace) -> int:
    """latte train RECIPE [key=value ...]"""
    from latte.lab.train.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)  # checked before torch is imported
    from latte.lab.train.run import train as run

    run(recipe, quiet=options.quiet)
    return 0


def evaluate(options: Namespace) -> int:
    """latte evaluate CHECKPOINT [--tasks ...]"""
    if (options.num_fewshot or 0) < 0:
        raise LatteError("--num-fewshot: expected 0 or more")
    at_least_one(options, "limit", "batch_size", "max_length")
    at_least_one(options, "segment", "batch_tokens", "max_tokens", "context_parallel")
    from latte.lab.evaluate.evaluation import Evaluation
    from latte.lab.evaluate.needles import GROUP, expanded

    scored = picked(options, "join", "max_tokens", "segment", "batch_tokens", "positions")
    scored = given(scored | picked(options, "context_parallel"))
    asked = picked(options, "limit", "num_fewshot", "batch_size", "max_length", "chat_template")
    asked, made = given(asked), given(picked(options, "corpus", "field", "lengths"))
    seed, tasks = given(picked(options, "seed")), options.tasks
    if tasks is None:
        goes_with("--tasks", asked)
        goes_with(f"--tasks {GROUP}", seed)
    else:
        goes_with("held-out text, not with --tasks", scored)
        if not expanded(tasks):
            goes_with(f"held-out text, or with --tasks {GROUP}", made)
            goes_with(f"--tasks {GROUP}", seed)
    shared = picked(options, "mixing", "device", "output", "force")
    evaluation = Evaluation.of(options.checkpoint, **shared)
    if tasks is not None:
        asked |= {"chat": asked.pop("chat_template", False)}
        print(evaluation.on_tasks(tasks, bf16=options.bf16, **asked, **made, **seed))
        return 0
    lengths = made.pop("lengths", [256, 1024, 4096])
    found = evaluation.on_text(lengths, bf16=options.bf16, **made, **scored)
    if found is not None:  # under torchrun only one process prints
        print(found)
    return 0


def generate(options: Namespace) -> int:
    """latte generate CHECKPOINT --prompt ..."""
    from latte.lab.data.files import first_document
    from latte.lab.data.tokenizers import document_ends
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.generate import check_sampling
    from latte.lab.evaluate.generate import generate as run
    from latte.models.atomic_files import check_new_file

    sampling = picked(options, "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    check_sampling(**sampling, reads=options.save_state is not None)
    reads = checked_reading(options, "file", "state", "save_state", "compile")
    if reads and not options.prompt.strip():
        raise LatteError("--read: expected a question or a text to continue with in --prompt")
    if options.save_state is not None:
        check_new_file(options.save_state, "state", force=options.force)
    file = options.read if reads else options.file
    document = "" if file is None else first_document(file)
    where = picked(options, "device", "dtype")
    model, tokenizer = load_checkpoint(options.checkpoint, **where)
    document_ends(tokenizer)  # one that has no end says so before the prompt is printed
    if reads:
        return asked(model, tokenizer, document, options, sampling)
    states = {"document": document, **picked(options, "state", "save_state")}
    run(model, tokenizer, options.prompt, **sampling, echo=True, compiled=options.compile, **states)
    return 0


def asked(
    model: Any, tokenizer: Any, text: str, options: Namespace, sampling: dict[str, Any]
) -> int:
    """latte generate CHECKPOINT --read FILE --prompt ...: the answer, or what continues it."""
    from latte.lab.evaluate.chat import Chat, printed
    from latte.lab.evaluate.documents import read_document
    from latte.lab.evaluate.generate import generate as run

    document = read_document(model, tokenizer, text, options.read, states=options.state_dir)
    if tokenizer.chat_template is None:
        run(model, tokenizer, options.prompt, **sampling, echo=True, state=document.cache())
        return 0
    Chat(model, tokenizer, document=document, **sampling).say(options.prompt, printed)
    print(flush=True)
    return 0


def checked_reading(options: Namespace, *others: str) -> bool:
    """Whether --read was given. Raises LatteError where it does not fit."""
    if options.read is None:
        if options.state_dir is not None:
            raise LatteError("--state-dir goes with --read")
        return False
    for name in others:
        if getattr(options, name):
            raise LatteError(f"--read and --{name.replace('_', '-')}: expected one of them")
    return True


def chat(options: Namespace) -> int:
    """latte chat CHECKPOINT"""
    from latte.lab.data.files import first_document
    from latte.lab.evaluate.chat import Chat, check_template, converse
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.documents import read_document
    from latte.lab.evaluate.generate import check_sampling

    sampling = picked(options, "max_new_tokens", "temperature", "top_k", "top_p", "seed")
    check_sampling(**sampling)
    reads = checked_reading(options, "file")
    file = options.read if reads else options.file
    document: Any = "" if file is None else first_document(file)
    where = picked(options, "device", "dtype")
    model, tokenizer = load_checkpoint(options.checkpoint, **where)
    check_template(tokenizer)
    system = options.system
    if reads:
        shape = {"system": system, "states": options.state_dir}
        document = read_document(model, tokenizer, document, options.read, **shape)
    talk = Chat(model, tokenizer, system=system, document=document, **sampling)
    converse(talk, apart=options.apart)
    return 0


def serve(options: Namespace) -> int:
    """latte serve CHECKPOINT"""
    from latte.serve.server import serve as run
    from latte.serve.settings import Serving

    serving = Serving(**picked(options, *(each.name for each in Serving.options())))
    run(options.checkpoint, serving=serving, **picked(options, "host", "port", "device", "dtype"))
    return 0


def compare(options: Namespace) -> int:
    """latte compare RECIPE [--presets a,b,c] [--seeds 0,1,2]"""
    from latte.lab.train.recipe import load_recipe

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
    from latte.lab.compare.compare import Comparison

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
    flags = {each.name: flag(each) for each in options_of(ConversionOptions)}
    flags |= {"seed": "--seed", "dtype": "--dtype", "weights": "--weights"}
    given = {k: value for k, value in picked(options, *flags).items() if value is not None}
    if options.trained is not None:
        if options.recipe is not None:
            raise LatteError("--trained and --recipe: expected one of them; a recipe trains anew")
        kept = "kept_window", "kept_tokens", "kept_half_life", "kept_dtype", "kept_range"
        free = ("window", "keep_layers", *kept, "dtype", "weights")
        others = [name for name in given if name not in free]
        if others:
            raise LatteError(
                "with --trained the model's shape is the file's: expected only"
                f" {', '.join(flags[name] for name in free)}, got {flags[others[0]]}"
            )
    if options.recipe is not None:
        if given:
            raise LatteError(
                f"with --recipe the model's shape is the recipe's: expected conversion.KEY=VALUE,"
                f" got {flags[next(iter(given))]}"
            )
        from latte.lab.train.stages import convert_and_train, load_conversion_recipe

        recipe = load_conversion_recipe(options.recipe, options.overrides)
        folder = convert_and_train(options.base, options.output, recipe, quiet=options.quiet)
        if is_first_process():  # the other processes have nothing left to do
            from latte.lab.evaluate.lengths import report

            report(options.base, folder, recipe, quiet=options.quiet)
            print(f"finished: {folder} holds the model (try: latte generate {folder})")
        return 0
    if options.overrides:
        raise LatteError(
            f"key=value overrides belong to a recipe: expected --recipe with"
            f" {options.overrides[0]!r}"
        )
    from latte.conversion import apply_latents
    from latte.conversion import convert as run
    from latte.conversion.pretrained import is_latte, read_config, summary
    from latte.lab.progress import progress

    with progress(0, "layer", shown=not options.quiet, label="converting", bar=False):
        if options.trained is None:
            if given.get("kept_window") == "all":
                del given["kept_window"]  # the default
            model = run(options.base, options.output, **given)
        else:
            model = apply_latents(options.base, options.trained, options.output, **given)
    if not options.quiet:
        if options.trained is not None:
            trained = f", from {options.trained}"
        elif is_latte(read_config(options.base)):
            trained = f", with {options.weights} weights"
        else:
            trained = ", which have not been trained yet (see latte convert --recipe)"
        print(f"written: {options.output}, {summary(model)}{trained}")
    return 0


def inspect(options: Namespace) -> int:
    """latte inspect CHECKPOINT --text ..."""
    from latte.lab.inspect.report import inspect_checkpoint

    shown = picked(options, "layers", "tokens", "statistics_tokens", "at")
    where = picked(options, "device", "output", "force")
    print(inspect_checkpoint(options.checkpoint, options.text, options.file, **shown, **where))
    return 0


def benchmark(options: Namespace) -> int:
    """latte benchmark ..."""
    from latte.lab.evaluate.benchmark import Settings
    from latte.lab.evaluate.benchmark import benchmark as run

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

    from latte.lab.doctor import report, required_kernels, text

    found = report()
    print(json.dumps(found, indent=2) if options.json else text(found))
    required_kernels()
    return 0


def picked(options: Namespace, *names: str) -> dict[str, Any]:
    """The options of these names, as a dictionary."""
    return {name: getattr(options, name) for name in names}


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options, of these names, that were given. Only switches have a default."""
    return {k: value for k, value in options.items() if value is not None and value is not False}


def goes_with(what: str, options: dict[str, Any]) -> None:
    """Refuse options that were given without what they belong to."""
    for name in options:
        raise LatteError(f"--{name.replace('_', '-')} goes with {what}")


def at_least_one(options: Namespace, *names: str) -> None:
    """Refuse options below 1. None means that an option was not given."""
    for name, value in picked(options, *names).items():
        if value is not None and value < 1:
            raise LatteError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
