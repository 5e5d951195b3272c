"""`latte evaluate`: a checkpoint's scores on held-out text or on tasks, as files.

Text is scored by `latte.lab.evaluate.lengths`, tasks by `latte.lab.evaluate.tasks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import LatteError
from latte.lab.data.corpora import Corpus
from latte.lab.data.files import find_files
from latte.lab.data.hub_datasets import PREFIX
from latte.lab.data.preparing import (
    evaluation_corpus,
    evaluation_text,
    held_out_text,
    open_section,
)
from latte.lab.evaluate import needles, tasks
from latte.lab.evaluate.checkpoint import (
    contents_of,
    find_checkpoint,
    load_checkpoint,
    training_recipe,
    weights_of,
)
from latte.lab.evaluate.lengths import evaluate_lengths, kept_note, table, write_rows
from latte.lab.evaluate.plots import lengths_figure
from latte.lab.progress import progress
from latte.lab.results import Results, results_at
from latte.lab.train.recipe import Recipe
from latte.lab.train.run import check_groups, first_alone, join_processes
from latte.lab.train.scoring import shares_of_processes


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint to evaluate, and where its results go.

    Attributes:
        folder: Folder of the checkpoint, or its GGUF file.
        recipe: Recipe of its training, if it is there.
        mixing: Mixing of a converted model, as in `load_checkpoint`.
        device: Device of the model; None is a GPU if there is one.
        output: Folder of the results; None is one in the checkpoint.
        force: Whether to replace results of other settings.
    """

    folder: Path
    recipe: Recipe | None
    mixing: str | None = None
    device: str | None = None
    output: str | None = None
    force: bool = False

    @classmethod
    def of(cls, checkpoint: str, **options: Any) -> Evaluation:
        """The evaluation of a checkpoint. Raises LatteError if there is none."""
        folder = find_checkpoint(checkpoint)
        return cls(folder, training_recipe(folder), **options)

    def on_text(
        self,
        lengths: Sequence[int],
        *,
        corpus: Sequence[str] | None = None,
        field: str = "text",
        join: bool = False,
        max_tokens: int | None = None,
        segment: int = 1024,
        batch_tokens: int = 16384,
        bf16: bool = False,
        positions: Sequence[int] = (),
        context_parallel: int = 1,
    ) -> str | None:
        """Score text at each context length, and write a table, a CSV file and a figure.

        Under torchrun all processes call this.

        Args:
            lengths: Context lengths in tokens.
            corpus: Text to score, as `--corpus` names it. None is the text that the run held out.
            field: JSON field or Parquet column of the text.
            join: Whether to join all documents.
            max_tokens: Number of tokens to score; None is all.
            segment, batch_tokens, bf16, positions: Options of `latte.lab.train.scoring.score`.
            context_parallel: Number of processes that share each window.

        Returns:
            What to print; None in all processes but the first.

        Raises:
            LatteError: The checkpoint, the text or the place of the results cannot be used.
        """
        processes, first = join_processes()
        check_groups("--context-parallel", context_parallel, processes)
        shape: dict[str, Any] = {"join": join, "max_tokens": max_tokens}
        scoring: dict[str, Any] = {
            **{"segment": segment, "batch_tokens": batch_tokens},
            **{"bf16": bf16, "positions": positions},
        }
        lengths = sorted(set(lengths))

        def place() -> Results:
            settings = {
                **{"corpus": corpus, "field": field, "mixing": self.mixing, "device": self.device},
                **{"context_parallel": context_parallel, **shape, **scoring},
                **{"lengths": lengths, "processes": processes},
                "corpus_files": contents_of(local_files(corpus or ())),
            }
            return self.place(("evaluation.csv", "evaluation.png", "positions.csv"), settings)

        output = first_alone(place)
        model, tokenizer = load_checkpoint(self.folder, self.device, mixing=self.mixing)
        if corpus:
            named = corpus[0] if len(corpus) == 1 else list(corpus)
            text = evaluation_text(named, tokenizer, field=field, **shape)
        elif self.recipe is not None:
            text = held_out_text(self.recipe.data, tokenizer, **shape)
        else:
            raise LatteError(f"{self.folder} does not say what it was trained on; give --corpus")
        label = self.label(model)
        share = shares_of_processes(model.device, context_parallel)
        rows = evaluate_lengths(
            model, text, lengths, **scoring, **share, label=label, progress=first
        )
        if not first:
            return None
        with output.writing() as staged:
            write_rows(staged / "evaluation.csv", {label: rows})
            lengths_figure(
                staged / "evaluation.png",
                {label: rows},
                train_length=self.recipe.data.block_length if self.recipe is not None else None,
                title="Held-out text",
            )
        written = f"{output.path('evaluation.csv')} and {output.path('evaluation.png')}"
        return f"{table(rows)}\nwritten: {written}"

    def on_tasks(
        self,
        names: Sequence[str],
        *,
        limit: int | None = None,
        num_fewshot: int | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        bf16: bool = False,
        chat: bool = False,
        lengths: Sequence[int] = (1024, 4096),
        seed: int = 0,
        corpus: Sequence[str] | None = None,
        field: str = "text",
    ) -> str:
        """Score tasks of lm-evaluation-harness, and write their table and its record.

        Args:
            names: Names of tasks, or YAML files; or `niah` and names of its tasks, which are made
                here (:mod:`latte.lab.evaluate.needles`).
            limit, num_fewshot, batch_size, max_length, bf16, chat: Options of
                `latte.lab.evaluate.tasks.evaluate_tasks`. The limit of `niah` is 24 by default.
            lengths, seed: Of `niah`: numbers of tokens of a case, and its seed.
            corpus, field: Of `niah`: the text, as for :meth:`on_text`; without a run's text the
                embedded corpus.

        Returns:
            What to print.

        Raises:
            LatteError: The checkpoint, a task or the place of the results cannot be used.
        """
        own: dict[str, Any] = {
            **{"limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size},
            **{"max_length": max_length, "bf16": bf16, "chat": chat},
        }
        settings = {
            **{"tasks": names, **own, "mixing": self.mixing, "device": self.device},
            "task_files": contents_of(name for name in names if Path(name).is_file()),
        }
        made = needles.expanded(names)
        if made:
            if num_fewshot:
                raise LatteError(f"num-fewshot: niah has no examples, got {num_fewshot}")
            if max_length is not None and max_length < max(lengths):
                raise LatteError(
                    f"max-length: expected at least {max(lengths)}, the longest of --lengths, so"
                    f" that no prompt is cut, got {max_length}"
                )
            own |= {"max_length": max_length or max(lengths), "whole": True}
            lengths = sorted(set(lengths))
            settings |= {"lengths": lengths, "seed": seed, "corpus": corpus, "field": field}
            settings["corpus_files"] = contents_of(local_files(corpus or ()))
        output = self.place(("tasks.csv", "tasks.json"), settings)
        # A name that is not there is said before weights load.
        others = [name for name in names if name not in (needles.GROUP, *made)]
        if made and others:
            raise LatteError(f"tasks: niah is evaluated by itself, got {others[0]!r} with it")
        chosen = {"tasks": {}} if made else tasks.load_tasks(names)
        model, tokenizer = load_checkpoint(self.folder, self.device, mixing=self.mixing)
        if made:
            tasks.import_harness()
            text = self._text(corpus, field).documents("validation")
            shape: dict[str, Any] = {"cases": limit or needles.CASES, "seed": seed, "chat": chat}
            chosen["tasks"] = needles.needle_tasks(made, tokenizer, text, lengths, **shape)
        label = self.label(model)
        with progress(0, "task", label=f"{label}, tasks", bar=False):
            scores = tasks.evaluate_tasks(model, tokenizer, chosen, **own)
        with output.writing() as staged:
            tasks.write_tasks(staged, scores, label)
        written = f"{output.path('tasks.csv')} and {output.path('tasks.json')}"
        return f"{tasks.tasks_table(scores.rows)}\nwritten: {written}"

    def _text(self, corpus: Sequence[str] | None, field: str) -> Corpus:
        """The corpus that cases are made of: the one named, the run's, or the embedded one."""
        if not corpus and self.recipe is not None:
            return open_section(self.recipe.data)
        named = list(corpus or ("embedded",))
        return evaluation_corpus(named[0] if len(named) == 1 else named, field)

    def label(self, model: Any) -> str:
        """The model's name in the results."""
        name = self.recipe.name if self.recipe is not None else self.folder.name
        return name + (f" ({self.mixing})" if self.mixing else "") + kept_note(model.config)

    def place(self, files: Sequence[str], settings: dict[str, Any]) -> Results:
        """The place of results. Each control has a folder of its own.

        For a model in a single file it is in the current folder, since the file's may be read-only.

        Args:
            files: Names of the files that may be written.
            settings: Settings on which the results depend, without the weights.

        Raises:
            LatteError: As :func:`latte.lab.results.results_at`.
        """
        if self.output:
            folder = Path(self.output)
        elif self.folder.is_file():
            folder = Path(f"{self.folder.stem}-evaluation")
        else:
            folder = self.folder / ("evaluation" + (f"-{self.mixing}" if self.mixing else ""))
        settings = {**settings, "weights": weights_of(self.folder)}
        return results_at(folder, files, settings, named=bool(self.output), force=self.force)


def local_files(specs: Iterable[str]) -> list[Path]:
    """The files of this machine that `--corpus` names."""
    local = [spec for spec in specs if spec != "embedded" and not spec.startswith(PREFIX)]
    return [path for spec in local for path in find_files(spec)]
