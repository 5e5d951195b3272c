"""`latte train`: one recipe, one folder, start or resume, always to the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.utils import logging as transformers_logging

from latte.errors import LatteError, one_line
from latte.lab.data.blocks import SharedBlocks
from latte.lab.data.preparing import Text, prepare_text
from latte.lab.data.tokenfile import contents_of
from latte.lab.train.footprint import check_memory
from latte.lab.train.interruption import Interruption
from latte.lab.train.metrics import TrainingReport, read_metrics
from latte.lab.train.recipe import DataSection, Recipe
from latte.lab.train.run_folder import FINISHED_FILE, Claim, claim, write_manifest
from latte.lab.train.speed import autocasts, check_speed, chosen_backend
from latte.lab.train.trainer import LatteTrainer
from latte.models.atomic_files import write_json
from latte.models.modeling import language_model
from latte.models.plain_files import read_object
from latte.models.registry import carries_state, find_model, plugin_files
from latte.ops.processes import is_first_process, number_of_processes, number_on_machine
from latte.parallel.context import find_decoder

T = TypeVar("T")
# Files of a finished run that are checked before it is used.
MANIFEST_FILES = ("*.safetensors", "tokenizer*", "special_tokens*", "chat_template*")
# Longest time that processes wait for one another: the first may train layers alone for hours.
PATIENCE = timedelta(days=7)
STOPPED_FILE = "stopped.json"  # what `max_minutes` left, until the run is finished


@dataclass(frozen=True)
class Result:
    """How a run ended. `finished` is False when `max_minutes` stopped it."""

    folder: Path
    finished: bool
    steps: int
    tokens: int
    seconds: float
    validation: dict[str, float]


def train(recipe: Recipe, *, label: str | None = None, quiet: bool = False) -> Result:
    """Run a recipe in its output folder, from its last complete checkpoint if it has one.

    Under torchrun all processes call this; they hold the same data order and weights as any
    uninterrupted run with as many processes.

    Raises:
        LatteError: The recipe, the text or the folder cannot be used, or the loss is not finite.
    """
    check_model(recipe)
    check_speed(recipe)
    processes, first = join_processes()
    together = recipe.training.context_parallel
    check_groups("training.context_parallel", together, processes)
    owner = first_alone(lambda: claim(recipe, processes))
    steps = recipe.steps(processes)
    if owner.finished:
        result = _stored_result(owner.folder)
        if first and not quiet:
            print(f"{owner.folder} is finished ({result.steps} steps); nothing to do", flush=True)
        return result
    try:
        text = prepare_text(data_section(recipe), progress=first and not quiet)
        read = inputs(recipe, text)
        first_alone(lambda: owner.check_inputs(read, begun=owner.resume is not None))
        blocks: Any = text.blocks(
            recipe.data,
            steps * recipe.tokens_per_step(processes) // recipe.data.block_length,
            recipe.training.seed,
        )
        model = build_model(recipe, text)
        if together > 1:
            find_decoder(model)  # says so if it cannot be cut
            blocks = SharedBlocks(blocks, recipe.training.batch_size, together)
    except Exception:
        owner.give_back()
        raise
    kind = LatteTrainer
    if recipe.conversion.base is not None:
        from latte.lab.train.conversion_trainer import ConversionTrainer as kind
    progress, interruption = TrainingReport(recipe, label, quiet or not first), Interruption()
    trainer = kind(
        recipe,
        model,
        text,
        blocks,
        text.collator(
            recipe.data, pack=recipe.model.architecture is not None or carries_state(model)
        ),
        steps=steps,
        callbacks=[progress, interruption],
    )
    if first and not quiet:
        _announce(recipe, model, owner, steps, processes)
        if note := repetition(len(text.train), steps * recipe.tokens_per_step(processes)):
            print(note, flush=True)
    # Dropout differs between processes; a resumed run restores these states afterwards.
    torch.manual_seed(recipe.training.seed + 1_000_003 * trainer.args.process_index)
    resume = None if owner.resume is None else str(owner.resume)
    with chosen_backend(recipe), contextlib.closing(progress), interruption.listening(processes):
        trainer.train(resume_from_checkpoint=resume)
    finished = trainer.state.global_step >= steps
    return _finish(trainer, recipe, progress, finished)


def check_groups(key: str, together: int, processes: int) -> None:
    """Raise LatteError if the number of processes is not a multiple of ``together``."""
    if processes % together:
        raise LatteError(
            f"{key}={together}: expected a multiple of {together} processes, got {processes};"
            " start them with torchrun --nproc-per-node"
        )


def join_processes() -> tuple[int, bool]:
    """How many processes torchrun started, and whether this is the first; they can talk then."""
    processes, first = number_of_processes(), is_first_process()
    # Hide the messages of libraries: the terminal shows only Latte's own lines.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS", module="accelerate")
    if not first:
        warnings.filterwarnings("ignore")
    if processes > 1 and not torch.distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(number_on_machine())
        torch.distributed.init_process_group(timeout=PATIENCE)
    return processes, first


def first_alone(action: Callable[[], T]) -> T:
    """Run in the first process while others wait; all get its result or its error."""
    processes, first = join_processes()
    answer: list[Any] = [None, None]
    if first:
        try:
            answer[0] = action()
        except LatteError as error:
            answer[1] = error
    result, mistake = answer
    if processes > 1:
        torch.distributed.broadcast_object_list(answer, src=0)
        result, mistake = (result, mistake) if first else answer
    if mistake is not None:
        raise mistake
    return result


def check_model(recipe: Recipe) -> None:
    """Raise LatteError for a model that cannot be built, before any folder or text is touched.

    So is one that cannot be trained in this machine's memory. Imports the recipe's plugins first.
    """
    recipe.import_plugins()
    if recipe.conversion.base is None:
        check_memory(recipe, model_config(recipe, {}))
    else:
        from latte.lab.train.conversion_trainer import starting_config

        check_memory(recipe, starting_config(recipe.conversion))


def data_section(recipe: Recipe) -> DataSection:
    """The recipe's data, in the base's tokens if there is a base."""
    if recipe.conversion.base is None:
        return recipe.data
    return dataclasses.replace(recipe.data, tokenizer=recipe.conversion.base)


def inputs(recipe: Recipe, text: Text) -> dict[str, str | None]:
    """Digests of all that a run reads beside its recipe, by names that errors use."""
    found: dict[str, str | None] = {
        "the training text (data.corpus)": text.train.digest,
        "the held-out text": text.validation.digest,
    }
    if recipe.conversion.base is not None:
        from latte.conversion.pretrained import base_files, read_config

        base = recipe.conversion.base
        commit = getattr(read_config(base), "_commit_hash", None)  # of a name on the Hub
        found["the base"] = contents_of(base_files(base)) or commit
    for plugin in recipe.plugins:
        found[f"the plugin {Path(plugin).name}"] = contents_of(plugin_files(plugin))
    return found


def model_config(recipe: Recipe, defaults: dict[str, Any]) -> Any:
    """The recipe's model config; `model.overrides` wins over `defaults`."""
    section = recipe.model
    values = {**defaults, **section.overrides}
    try:
        if section.architecture is not None:
            return architecture_config(section.architecture, values)
        entry = find_model(section.preset)
        entry.check(causal=True)
        return entry.config(section.size, **values)
    except (ValueError, TypeError) as error:
        raise LatteError(f"model: {' '.join(str(error).split())}") from None


def architecture_config(architecture: str, values: dict[str, Any]) -> Any:
    """The config of a plain model of Transformers. Raises LatteError for unknown names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise LatteError(
            f"architecture {architecture!r} is no causal language model of Transformers;"
            " expected a model type such as llama, mistral or gemma2"
        )
    kind: Any = CONFIG_MAPPING[architecture]
    # Some have names of their own for fields that all share (GPT-2: n_positions).
    values = {kind.attribute_map.get(name, name): value for name, value in values.items()}
    known = {field.name for field in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise LatteError(f"unknown field {name!r} of {kind.__name__}")
    # An encoder such as BERT sees the next token, unless its config says what it is for.
    for name in ("is_decoder", "causal"):
        if name in known:
            values = {name: True, **values}
    return kind(**values)


def build_model(recipe: Recipe, text: Text) -> Any:
    """A freshly initialised model whose vocabulary fits the tokenizer, from the recipe's seed."""
    from transformers import set_seed

    from latte.lab.data.tokenizers import document_ends, model_vocab_size

    if recipe.conversion.base is not None:
        from latte.lab.train.conversion_trainer import starting_model

        rows = calibration_blocks(text, recipe.data)
        model = starting_model(recipe.conversion, recipe.training.seed, rows)
        text.train.check_vocabulary(model.config.vocab_size)
        return model
    bos, eos = document_ends(text.tokenizer)
    defaults = {
        "vocab_size": model_vocab_size(text.tokenizer),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": text.tokenizer.pad_token_id,
        "max_position_embeddings": recipe.data.block_length,
    }
    config = model_config(recipe, defaults)
    text.train.check_vocabulary(config.vocab_size)
    set_seed(recipe.training.seed)
    model = language_model(config)
    if recipe.model.architecture is None:
        find_model(recipe.model.preset).add_dropout(model)
    return model


def repetition(tokens: int, wanted: int) -> str:
    """A line where a run reads more tokens than the training text has; else empty."""
    if wanted <= tokens:
        return ""
    return (
        f"the training text has {tokens:,} tokens and the run reads {wanted:,}:"
        f" it is read {wanted / tokens:,.1f} times"
    )


def calibration_blocks(text: Text, section: DataSection) -> list[torch.Tensor]:
    """Blocks of training text, (T,) each, of some 8,000 tokens: what landmarks are made of."""
    from latte.conversion.landmarks import CALIBRATION_TOKENS

    count = max(1, CALIBRATION_TOKENS // section.block_length)
    blocks = text.blocks(section, count, seed=0)
    return [blocks[i]["input_ids"] for i in range(count)]


def _finish(
    trainer: LatteTrainer, recipe: Recipe, progress: TrainingReport, finished: bool
) -> Result:
    folder = Path(recipe.output_dir)
    if finished:
        trainer.save_model(str(folder))
    if trainer.args.should_save:
        if finished:
            files = (path for pattern in MANIFEST_FILES for path in folder.glob(pattern))
            write_manifest(folder, sorted(files))
        evaluations = read_metrics(folder, "eval")
        last = evaluations[-1] if evaluations else {}
        result = {
            "finished": finished,
            "steps": trainer.state.global_step,
            "tokens": trainer.state.global_step * recipe.tokens_per_step(trainer.args.world_size),
            "seconds": round(progress.seconds, 2),
            "validation": {k: v for k, v in last.items() if k.startswith("eval_")},
        }
        if finished:
            (folder / STOPPED_FILE).unlink(missing_ok=True)
        write_json(folder / (FINISHED_FILE if finished else STOPPED_FILE), result)
        if not progress.quiet:
            # A run with a label is one of several: their command says what comes after them.
            code = f" --plugins {','.join(recipe.plugins)}" if recipe.plugins else ""
            hint = "" if progress.labelled else f" (try: latte generate {folder}{code})"
            print(
                f"finished: {folder} holds the model{hint}"
                if finished
                else f"stopped at step {result['steps']} by training.max_minutes="
                f"{recipe.training.max_minutes:g}; run again with more minutes to continue",
                flush=True,
            )
    if trainer.args.world_size > 1:
        torch.distributed.barrier()
    return _stored_result(folder)


def _stored_result(folder: Path) -> Result:
    name = FINISHED_FILE if (folder / FINISHED_FILE).exists() else STOPPED_FILE
    then = "remove it, and the run ends again from its last checkpoint"
    stored = read_object(folder / name, then=then)
    try:
        return Result(folder=folder, **stored)
    except TypeError as error:
        raise LatteError(f"{folder / name} is damaged ({one_line(error)}); {then}") from None


def _text_of(recipe: Recipe) -> str:
    corpus = recipe.data.corpus
    if corpus == "embedded":
        return "embedded (Python's sources and documentation; data.corpus=... for another)"
    return corpus if isinstance(corpus, str) else ", ".join(corpus)


def _announce(recipe: Recipe, model: Any, owner: Claim, steps: int, processes: int) -> None:
    for problem in owner.skipped:
        print(f"passing over a damaged checkpoint: {problem}", file=sys.stderr, flush=True)
    if recipe.training.bf16 and not autocasts(recipe.training):
        print(
            "training.bf16: this CPU has no bf16 products; computing in fp32, which is faster here",
            file=sys.stderr,
            flush=True,
        )
    parameters = sum(p.numel() for p in model.parameters())
    if recipe.conversion.base is not None:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        detail = f" ({trained / 1e6:.2f}M trained)"
    else:
        detail = "" if recipe.model.architecture else f" ({recipe.model.size})"
    print(
        f"{recipe.name}{detail}, {parameters / 1e6:.2f}M parameters |"
        f" {steps} steps of {recipe.tokens_per_step(processes):,} tokens on {processes}"
        f" process{'es' if processes > 1 else ''} |"
        f" {'resuming from ' + owner.resume.name if owner.resume else 'from the start'} |"
        f" text: {_text_of(recipe)} |"
        f" {owner.folder}",
        flush=True,
    )
