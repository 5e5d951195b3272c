"""`latte evaluate --tasks`: any task of lm-evaluation-harness, on a model that is already loaded.

Tasks are named as the harness names them (`hellaswag`, `mmlu`), or are YAML files of its format:
a task, or a group such as `recipes/lm_eval/table5.yaml`. Data comes from the hub, or from local
files where the YAML says `dataset_path: json`; paths in a YAML are relative to the folder that
the command runs in. Nothing here touches the network by itself.

Two things are ours. A tokeniser that has a start token but does not put it before a text by
itself (all that `latte train` makes) is set to do so, since the model read its documents like that;
tokenisers whose start and end token are one (GPT-2's) stay as the harness uses them. And a model
whose state is constant in size has no longest input: `max_length` decides how much of a prompt it
sees.
"""

from __future__ import annotations

import copy
import difflib
import importlib.metadata
import json
import logging
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latte.errors import LatteError, one_line
from latte.lab.evaluate.tables import write_csv

INSTALL = 'pip install "latte-attention[eval]"'
# Names that the harness knows for the most tokens of a generated answer.
ANSWER_LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
PACKAGES = ("lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class TaskRow:
    """One metric of one task, or of a group as the mean over its tasks (`kind`)."""

    task: str
    kind: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    num_fewshot: int | None
    samples: int
    version: str


@dataclass(frozen=True)
class TaskScores:
    """The rows, and what the harness says about the run (versions, settings), for the record.

    Attributes:
        items: A metric's values of each item, by (task, metric, filter), for comparisons of models
            on the same items.
    """

    rows: list[TaskRow]
    record: dict[str, Any]
    items: dict[tuple[str, str, str], list[float]]


def load_tasks(specs: Sequence[str]) -> dict[str, Any]:
    """The harness's tasks of these names and YAML files, with their data.

    Raises:
        LatteError: The harness is not installed, a task does not exist, a file is not a task, or
            its data cannot be loaded.
    """
    import_harness()
    from lm_eval.tasks import TaskManager

    if not specs:
        raise LatteError("tasks: expected names or YAML files separated by commas, got none")
    files = [_task_file(spec) for spec in specs]
    # The index of all the harness's tasks takes seconds; a task in a file of its own needs none.
    alone = all(file is not None and "group" not in content for file, content in files)
    folders = sorted({file.parent for file, content in files if file and "group" in content})
    manager = TaskManager(include_defaults=not alone, include_path=list(folders) or None)
    for spec, (file, _) in zip(specs, files, strict=True):
        if file is None and spec not in manager.task_index:
            near = difflib.get_close_matches(spec, manager.all_tasks, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise LatteError(f"the harness has no task {spec!r}{hint}")
    # A group is found in the index by its name, a task by its path.
    names = [
        content.get("group", str(file)) if file else spec
        for spec, (file, content) in zip(specs, files, strict=True)
    ]
    try:
        return dict(manager.load(names))
    # Data sets, YAML files and the functions they name fail in ways of their own.
    except Exception as error:
        raise LatteError(f"tasks {', '.join(specs)} cannot be loaded: {one_line(error)}") from error


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: dict[str, Any],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    bf16: bool = False,
    start: str | None = None,
    chat: bool = False,
    whole: bool = False,
) -> TaskScores:
    """Run tasks of :func:`load_tasks` on a causal language model.

    Args:
        limit: Number of documents of each task, the first ones; None: all.
        num_fewshot: Number of examples before each question; by default the task's. A task whose
            number is 0 keeps it.
        batch_size: Number of prompts in a batch.
        max_length: Number of last tokens of a prompt that the model sees; by default its config's.
        bf16: Whether to autocast to bfloat16.
        start: Token that prompts begin with, "" for none; by default the one that the module
            describes. The start token of a chat model may be for chats only.
        chat: Whether prompts are put into the tokenizer's chat template, which says how a text
            begins.
        whole: Whether a prompt that does not fit is refused. Else it loses its beginning, and a
            line says of how many prompts this is so.

    Raises:
        LatteError: An option is out of range, a token or template does not exist, or the model
            cannot run a task.
    """
    import_harness()
    from lm_eval import evaluator

    for name, number, least in (
        ("limit", limit, 1),
        ("num-fewshot", num_fewshot, 0),
        ("batch-size", batch_size, 1),
        ("max-length", max_length, 2),
    ):
        if number is not None and number < least:
            raise LatteError(f"{name}: expected at least {least}, got {number}")
    if chat and not tokenizer.chat_template:
        raise LatteError("chat-template: the tokenizer has none")
    began = time.perf_counter()
    with _seeded():
        _set_fewshot(tasks["tasks"], num_fewshot)
        start = "" if chat and start is None else start
        lm = _harness_model(model, tokenizer, batch_size, max_length, bf16, start, chat, whole)
        lm.unchecked = list(tasks["tasks"].values())
        shape: dict[str, Any] = {"apply_chat_template": chat, "fewshot_as_multiturn": chat}
        try:
            found: Any = evaluator.evaluate(
                lm, tasks, limit=limit, bootstrap_iters=1000, log_samples=True, **shape
            )
        except LatteError:
            raise
        except (ValueError, KeyError, AssertionError, TypeError) as error:
            raise LatteError(f"the harness gave up: {one_line(error)}") from error
    assert found is not None  # there is one process
    settings: dict[str, Any] = {
        "limit": limit,
        "batch_size": batch_size,
        "max_length": lm.max_length,
        "start_token_added": lm.adds_start,
        "chat_template": chat,
        "prompts_cut": lm.cut,
        "seconds": round(time.perf_counter() - began, 2),
    }
    keys = ("dataset_path", "dataset_name", "output_type", "num_fewshot")  # decide its numbers
    configs = (found.get("configs") or {}).items()
    settings["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    settings["tasks"] = {name: {key: task.get(key) for key in keys} for name, task in configs}
    return TaskScores(_rows(found), settings, _items(found))


def write_tasks(folder: Path, scores: TaskScores, label: str) -> tuple[Path, Path]:
    """tasks.csv, a line per metric, and tasks.json, the same with the settings; their paths."""
    table, record = folder / "tasks.csv", folder / "tasks.json"
    rows = [asdict(row) for row in scores.rows]
    columns = ["model", *(field.name for field in fields(TaskRow))]
    write_csv(table, columns, ({"model": label, **row} for row in rows))
    content = {"model": label, **scores.record, "rows": rows}
    record.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return table, record


def tasks_table(rows: Sequence[TaskRow]) -> str:
    """The rows as aligned text."""
    lines: list[tuple[str, ...]] = [("task", "shots", "samples", "metric", "value", "stderr")]
    for row in rows:
        lines.append(
            (
                row.task + (" (group)" if row.kind == "group" else ""),
                "-" if row.num_fewshot is None else str(row.num_fewshot),
                str(row.samples),
                row.metric if row.filter == "none" else f"{row.metric} ({row.filter})",
                f"{row.value:.4f}",
                "-" if row.stderr is None else f"{row.stderr:.4f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>><>>", widths, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)


# --- the harness ------------------------------------------------------------------------------


def import_harness() -> None:
    """Import lm-evaluation-harness. Raises LatteError if it is not installed."""
    if not sys.stderr.isatty():  # bars belong on a terminal; read when `datasets` is imported
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import lm_eval.tasks  # noqa: F401
        from lm_eval.models import huggingface  # noqa: F401
    except ImportError as error:
        raise LatteError(
            f"evaluation tasks need lm-evaluation-harness ({one_line(error)}): {INSTALL}"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _task_file(spec: str) -> tuple[Path | None, dict[str, Any]]:
    """(path, content) of a YAML file; (None, {}) of a name of the harness's."""
    path = Path(spec).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        if os.sep in spec:
            raise LatteError(f"task {spec}: expected a name of the harness's or a .yaml file")
        return None, {}
    if not path.is_file():
        raise LatteError(f"task file {path} does not exist")
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        content = load_yaml(path, resolve_func=False)
    # YAML's and the file system's errors, and a file that includes what is not there
    except Exception as error:
        raise LatteError(f"task file {path} cannot be read: {one_line(error)}") from error
    if not ({"task", "group"} & set(content)):
        raise LatteError(f"task file {path} names no 'task' and no 'group'")
    return path.resolve(), content


def _set_fewshot(tasks: dict[str, Any], num_fewshot: int | None) -> None:
    """The harness's own rules: a task that says 0 keeps it, one that says nothing gets 0."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    for task in tasks.values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)


def _harness_model(
    model: Any,
    tokenizer: Any,
    batch_size: int,
    max_length: int | None,
    bf16: bool,
    start: str | None,
    chat: bool,
    whole: bool,
) -> Any:
    """The harness's view of a loaded model, with the options of :func:`evaluate_tasks`."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = copy.deepcopy(tokenizer)  # the harness sets its padding
    if start:
        if start not in tokenizer.get_vocab():
            raise LatteError(f"start: the tokenizer has no token {start!r}")
        tokenizer.bos_token = start
    bos = tokenizer.bos_token_id
    adds_start = (  # there is a start token of its own that `encode` does not add
        start != ""
        and bos not in (None, None if start else tokenizer.eos_token_id)
        and tokenizer.encode("a")[:1] != [bos]
        and hasattr(tokenizer, "add_bos_token")
    )
    if adds_start:
        tokenizer.add_bos_token = True

    class LoadedModel(HFLM):
        """HFLM around a model, which has no name on the hub to look up."""

        adds_start: bool
        cut = 0  # prompts that have lost their beginning
        add_bos_token: bool | None
        task_of: dict[Any, str | None] = {}
        unchecked: list[Any] = []  # tasks
        checks = False  # whether likelihoods are asked for, so that their lengths are checked

        def get_model_info(self) -> dict[str, Any]:
            return {"model_num_parameters": self._model.num_parameters()}

        def _check_all(self) -> None:
            """Check the lengths of all tasks' requests, once, before the first is answered.

            The harness answers one kind of requests after another, each for minutes.
            """
            tasks, self.unchecked = self.unchecked, []
            kinds: dict[str, list[Any]] = defaultdict(list)
            for task in tasks:
                for request in task.instances:
                    kinds[request.request_type].append(request)
            if likelihoods := kinds["loglikelihood"]:
                self.task_of = {request.args: request.task_name for request in likelihoods}
                self.checks = True
                super().loglikelihood(likelihoods, disable_tqdm=True)
                self.checks = False
            if generated := kinds["generate_until"]:
                self._check_generated(generated)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self._check_all()
            return super().loglikelihood(requests, disable_tqdm)

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.checks:
                return super()._loglikelihood_tokens(requests, *args, **kwargs)
            # The harness has an assertion for these.
            texts, _, answer = max(requests, key=lambda request: len(request[2]))
            if (length := len(answer)) > self.max_length:
                task = self.task_of.get(texts)
                raise _too_long(task, "an answer", length, self.max_length, length)
            # The last token of an answer is not read.
            self._check_cut(
                (len(before) + len(after) - 1, self.task_of.get(texts))
                for texts, before, after in requests
            )
            return []

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            self._check_all()
            return super().generate_until(requests, disable_tqdm)

        def _check_generated(self, requests: Any) -> None:
            def wanted(request: Any) -> int:
                options = request.args[1]
                given = (options[name] for name in ANSWER_LENGTH if name in options)
                return next(given, self.max_gen_toks)

            longest = max(requests, key=wanted)
            if (length := wanted(longest)) >= self.max_length:
                what = "an answer to be generated"
                raise _too_long(longest.task_name, what, length, self.max_length, length + 1)
            self._check_cut(
                (len(self.tok_encode(request.args[0])) + wanted(request), request.task_name)
                for request in requests
            )

        def _check_cut(self, lengths: Iterator[tuple[int, str | None]]) -> None:
            """Count the prompts that do not fit, by (tokens in all, task), and say so in a line."""
            every = list(lengths)
            over = [each for each in every if each[0] > self.max_length]
            if not over:
                return
            longest, task = max(over, key=lambda each: each[0])
            if whole:
                what = "a prompt with its answer"
                raise _too_long(task, what, longest, self.max_length, longest)
            self.cut += len(over)
            print(
                f"{len(over)} of {len(every)} prompts are longer than the {self.max_length:,}"
                f" tokens that the model sees, and lose their beginning (task {task}:"
                f" {longest:,}); --max-length {longest} keeps them whole",
                file=sys.stderr,
                flush=True,
            )

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> list[float]:
            self._check_all()
            # The harness puts the start token before each window itself; ours would be scored.
            before = self.add_bos_token
            self.add_bos_token = False if self.adds_start else before
            try:
                return super().loglikelihood_rolling(*args, **kwargs)
            finally:
                self.add_bos_token = before

    lm = LoadedModel(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=max_length,
        # A chat template writes the start token itself, if there is one.
        add_bos_token=True if adds_start else False if chat else None,
        mixed_precision_dtype="bfloat16" if bf16 else None,
        softmax_dtype="float32",
    )
    lm.adds_start = adds_start
    return lm


def _too_long(task: str | None, what: str, length: int, most: int, least: int) -> LatteError:
    where = f"task {task}" if task else "tasks"
    return LatteError(
        f"{where}: {what} has {length} tokens, and the model sees {most}; expected --max-length"
        f" of at least {least}, with room for the question"
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """No gradients; the harness's default seeds inside, the old random state afterwards."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    python, arrays = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


# --- its results -------------------------------------------------------------------------------


def _rows(found: dict[str, Any]) -> list[TaskRow]:
    groups = found.get("groups") or {}
    better = found.get("higher_is_better") or {}
    rows = []
    for task, scores in found["results"].items():
        for key, value in scores.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = scores.get(f"{metric}_stderr,{name}")
            shots = found.get("n-shot", {}).get(task)
            rows.append(
                TaskRow(
                    task=task,
                    kind="group" if task in groups else "task",
                    metric=metric,
                    filter=name,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    higher_is_better=(better.get(task) or {}).get(metric),
                    num_fewshot=shots if isinstance(shots, int) else None,
                    samples=_samples(found, task),
                    version=str(found.get("versions", {}).get(task, "")),
                )
            )
    return rows


def _items(found: dict[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for task, samples in found["samples"].items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for metric in sample["metrics"]:
                if isinstance(value := sample[metric], int | float):
                    values[task, metric, sample["filter"]].append(float(value))
    return dict(values)


def _samples(found: dict[str, Any], task: str) -> int:
    """Documents scored of a task, or of all tasks in a group."""
    counts = found.get("n-samples", {})
    if task in counts:
        return int(counts[task]["effective"])
    members = (found.get("group_subtasks") or {}).get(task, [])
    return sum(_samples(found, member) for member in members)
