"""Measure a pretrained base beside what it was converted to, and beside controls.

    python -m experiments.bases positions --model base=BASE --model converted=RESULT \
        --model 'window=RESULT,mixing=window' --text books=books/validation.jsonl.xz

A model is NAME=FOLDER, with other values of its config's fields behind commas; NAME#SEED=FOLDER for
several conversions of one name. Results go into a CSV file in the output folder, a part at a time:
run again, and what is there is not measured again. Then tables (Markdown) and a figure are written.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latte.cli.commands import at_least_one
from latte.cli.parser import integers, names
from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code

DOUBLING = [1024 * 2**i for i in range(7)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    options = parser().parse_args(arguments)
    program = f"bases {options.command}"
    return exit_code(program, lambda: options.run(options), "run again, it goes on where it was")


def parser() -> argparse.ArgumentParser:
    found = OneLineParser(
        prog="python -m experiments.bases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = found.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], None], text: str) -> Any:
        each = kinds.add_parser(run.__name__, help=text, description=text, allow_abbrev=False)
        each.set_defaults(run=run)
        add = each.add_argument
        add("--model", action="append", default=[], metavar="NAME=FOLDER[,FIELD=VALUE...]",
            help="a model and its name in the tables; repeat it")  # fmt: skip
        add("--output", default="runs/bases", help="folder of the results (%(default)s)")
        add("--report", action="store_true", help="write tables and figures of what is there")
        add("--dtype", help="of the weights, such as float32; as they were saved")
        add("--device", help="such as cpu or cuda; a GPU if there is one")
        add("--quiet", action="store_true", help="say nothing while it goes on")
        return add

    def reads(add: Any, *, several: bool, segment: int = 1024) -> None:
        text = "texts, NAME=FILES; with ,join=true documents are read one after another"
        add("--text", action="append", default=[], metavar="NAME=FILES[,join=true]",
            help=text + ("; repeat it" if several else ""))  # fmt: skip
        add("--start", help="the token that documents begin with; the tokenizer's own")
        add("--segment", type=int, default=segment, help="tokens read at a time (%(default)s)")

    add = command(positions, "Perplexity by position in long texts, and by context.")
    reads(add, several=True)
    add("--edges", type=integers, default=DOUBLING, help="where parts end, in tokens")
    add("--contexts", type=listed_or_none, default=[4096, 16384, 65536],
        help="tokens before the same scored ones, or none")  # fmt: skip
    add("--scored", type=int, default=1024, help="tokens scored by context (%(default)s)")
    add("--base-max", type=int, help="tokens that a base reads at most; as many as the others")
    add("--texts", type=int, help="the first so many texts of each corpus; all")
    add("--min-tokens", type=int, default=0, help="leave out shorter texts")
    add("--base", help="the model that others are compared with; the first")
    add("--control", help="of the distance from it to the base, the share won back is shown")

    add = command(retrieval, "Retrieval by gain in nats, and exact passkeys, by length and depth.")
    reads(add, several=False)
    add("--probes", type=names, default=["retrieval", "passkey"],
        help="some of retrieval, facts (as retrieval, several a text) and passkey")  # fmt: skip
    add("--lengths", type=integers, default=DOUBLING[:6], help="context lengths in tokens")
    add("--depths", type=depths, default=[0.1, 0.5, 0.9], help="0 (start) to 1 (end)")
    add("--cases", type=int, default=8, help="questions per length and depth (%(default)s)")
    add("--seed", type=int, default=0, help="which questions")
    add("--chat", choices=("auto", "yes", "no"), default="auto",
        help="ask for passkeys by the chat template; auto: where there is one")  # fmt: skip
    add("--batch-tokens", type=int, default=8192, help="tokens side by side (%(default)s)")
    add("--base-max", type=int, help="tokens that a base reads at most; as many as the others")

    add = command(tasks, "The tasks of the paper's Table 5, the paper's numbers beside them.")
    add("--tasks", type=names, help="tasks of lm-evaluation-harness and YAML files of its format")
    add("--limit", type=int, help="the first so many items of each task")
    add("--num-fewshot", type=int, help="examples before each question; what each task says")
    add("--start", help="the token that prompts begin with, or none; the tokenizer's own, if it"
        " is not its end token too")  # fmt: skip
    add("--batch-size", type=int, default=8, help="prompts side by side (%(default)s)")
    add("--max-length", type=int, default=2048,
        help="tokens of a prompt that a model sees, the last ones (%(default)s)")  # fmt: skip

    add = command(answers, "Greedy answers and continuations side by side, and repetition.")
    reads(add, several=False)
    add("--prompts", help="a file with a prompt a line; experiments/bases/prompts.txt")
    add("--continuations", type=int, default=8, help="texts to continue (%(default)s)")
    add("--prompt-tokens", type=int, default=512, help="tokens given of each (%(default)s)")
    add("--max-tokens", type=int, default=256, help="new tokens (%(default)s)")

    add = command(divergence, "KL to a reference's next tokens by position, as in its own chats.")
    add("--text", action="append", default=[], metavar="NAME=FILES",
        help="texts; special tokens in them, such as a chat's marks, are read as such")  # fmt: skip
    add("--start", default="none", help="the token before each text, or none (%(default)s)")
    add("--reference", metavar="NAME=FOLDER[,FIELD=VALUE...]", help="the model to be close to")
    add("--reference-dtype", default="float32", help="of its weights (%(default)s)")
    add("--edges", type=integers, default=[64, 128, 256, 512], help="where parts end, in tokens")
    add("--texts", type=int, help="the first so many texts; all")

    command(memory, "Bytes of a converted model's state, and the window that has as many.")
    return found


def listed_or_none(text: str) -> list[int]:
    """`4096,16384` -> [4096, 16384]; `none` -> []."""
    return [] if text == "none" else integers(text)


def depths(text: str) -> list[float]:
    """`0,0.5,1` -> [0.0, 0.5, 1.0]."""
    from experiments.probes.run import fractions

    return fractions(text)


# ---- the commands


def positions(options: argparse.Namespace) -> None:
    """Score every text, then report."""
    at_least_one(options, "segment", "scored", "base_max", "texts")
    from experiments.bases import positions as measure
    from experiments.bases.positions_report import report
    from experiments.bases.reading import start_token

    plan = measure.Plan(
        tuple(options.edges), tuple(options.contexts), options.scored, options.base_max
    )
    work = Work(options, "positions.csv", measure)

    def score(model: Any, tokenizer: Any, side: Any) -> None:
        start = start_token(tokenizer, options.start)
        for corpus in work.corpora():
            shape = {"digest": corpus.digest, "start": start, "segment": options.segment}
            fixed = work.begin(side, {"corpus": corpus.name}, **shape)
            count = 0
            most = max(plan.most, options.min_tokens)
            for text, ids in corpus.texts(tokenizer, start, most):
                if len(ids) < options.min_tokens:
                    continue
                if count == options.texts:
                    break
                count += 1
                there = {
                    tuple(row[name] for name in ("kind", "first", "last", "context"))
                    for row in work.results.of(side, corpus=corpus.name, text=text)
                }
                due = [
                    part
                    for part in plan.rows(len(ids), measure.reach(model, plan))
                    if not {tuple(map(str, key.values())) for key in part.keys()} <= there
                ]
                if not due:
                    continue
                rows = measure.score_text(model, ids, start, due, options.segment)
                where = {"corpus": corpus.name, "text": text}
                work.results.add([{**where, **row} for row in rows], fixed, model.device)
                work.say(side, f"{corpus.name} {text}: {summed(rows)}")

    work.each_side(score)
    rows = work.latest()
    print(report(work.folder, rows, base=options.base, control=options.control, order=work.order))
    work.written("positions.md", "positions.png", "positions-summary.csv")


def summed(rows: Sequence[dict[str, Any]]) -> str:
    """A text's measurements in a few words."""
    tokens = sum(row["tokens"] for row in rows)
    loss = sum(row["tokens"] * row["loss"] for row in rows) / tokens
    return f"{tokens:,} tokens, {loss:.4f} nats a token"


def retrieval(options: argparse.Namespace) -> None:
    """Ask all questions, then report."""
    at_least_one(options, "segment", "cases", "batch_tokens", "base_max")
    from experiments.bases import retrieval as measure
    from experiments.bases.reading import segment_of, start_token
    from experiments.sides import keeps_all_tokens

    for name in options.probes:
        if name not in measure.PROBES:
            expected = ", ".join(measure.PROBES)
            raise LatteError(f"--probes: expected some of {expected}, got {name!r}")
    work = Work(options, "retrieval.csv", measure)
    chat = {"auto": None, "yes": True, "no": False}[options.chat]

    def score(model: Any, tokenizer: Any, side: Any) -> None:
        (corpus,) = work.corpora(1)
        start = start_token(tokenizer, options.start)
        settings = {"cases": options.cases, "probe_seed": options.seed, "chat": options.chat}
        fixed = work.begin(side, digest=corpus.digest, start=start, **settings)
        most = 4 * max(options.lengths)
        material = measure.material_of(corpus, tokenizer, start, most)
        reach = options.base_max if keeps_all_tokens(model) else None
        for length in sorted(set(options.lengths)):
            if reach is not None and length > reach:
                continue
            for probe in options.probes:
                where = {"probe": probe, "length": length}
                due = [
                    depth
                    for depth in options.depths
                    if not work.results.of(side, **where, depth=f"{depth:g}")
                ]
                # The depths of `facts` are in one text.
                together = [due] if due and probe == "facts" else [[depth] for depth in due]
                for depths in together:
                    rows = measure.ask(
                        model,
                        tokenizer,
                        material,
                        probe,
                        length,
                        depths,
                        cases=options.cases,
                        seed=options.seed,
                        segment=segment_of(model, options.segment),
                        batch_tokens=options.batch_tokens,
                        chat=chat,
                    )
                    work.results.add(rows, fixed, model.device)
                    name = "exact" if probe == "passkey" else "gain"
                    for row in rows:
                        if row["metric"] == name:
                            said = f"{probe} at {length:,}, depth {row['depth']}: {name}"
                            work.say(side, f"{said} {row['value']:.3f}")

    work.each_side(score)
    print(measure.report(work.folder, work.latest(), order=work.order))
    work.written("retrieval.md", "retrieval.png")


def tasks(options: argparse.Namespace) -> None:
    """Run the tasks, then report."""
    at_least_one(options, "limit", "batch_size", "max_length")
    from experiments.bases import table5 as measure

    if not options.tasks and not options.report:
        raise LatteError("--tasks: expected names or YAML files, got none")
    work = Work(options, "tasks.csv", measure)
    loaded: list[Any] = []

    def score(model: Any, tokenizer: Any, side: Any) -> None:
        from latte.lab.evaluate.tasks import load_tasks

        if not loaded:  # once for all models
            loaded.extend(measure.one_by_one(load_tasks(options.tasks)))
        shape = {name: getattr(options, name) for name in ("limit", "num_fewshot", "max_length")}
        given = {name: "" if value is None else value for name, value in shape.items()}
        fixed = work.begin(side, start=options.start or "", **given)
        start = "" if options.start == "none" else options.start
        for name, task in loaded:
            if work.results.of(side, task=name):
                continue
            rows = measure.score_task(
                model, tokenizer, task, batch_size=options.batch_size, start=start, **shape
            )
            work.results.add(rows, fixed, model.device)
            found = {row["metric"]: row["value"] for row in rows}
            seconds = rows[0]["seconds"] if rows else 0
            work.say(side, f"{name}: acc {found.get('acc', float('nan')):.3f} in {seconds:.0f} s")

    work.each_side(score)
    print(measure.report(work.folder, work.latest(), order=work.order))
    work.written("table5.md", "table5.csv")


def answers(options: argparse.Namespace) -> None:
    """Let all models answer and go on, then report."""
    at_least_one(options, "segment", "prompt_tokens", "max_tokens")
    import zlib

    from experiments.bases import answers as measure
    from experiments.bases.reading import segment_of, start_token
    from experiments.sides import Side

    asked = measure.prompts(options.prompts)
    work = Work(options, "answers.csv", measure)

    def score(model: Any, tokenizer: Any, side: Any) -> None:
        start = start_token(tokenizer, options.start)
        corpora = work.corpora(1) if options.continuations else []
        shape = {name: getattr(options, name) for name in ("max_tokens", "prompt_tokens")}
        shape |= {"asked": f"{zlib.crc32(repr(asked).encode()):08x}", "start": start}
        shape |= {"digest": corpora[0].digest if corpora else ""}
        fixed, segment = work.begin(side, **shape), segment_of(model, options.segment)
        for item, prompt in enumerate(asked):
            if not work.results.of(side, kind="prompt", item=item):
                rows = measure.answer_prompts(
                    model, tokenizer, [(item, prompt)], start, options.max_tokens, segment
                )
                work.results.add(rows, fixed, model.device)
                work.say(side, f"{prompt} {' '.join(rows[0]['answer'].split())[:80]}")
        for corpus in corpora:
            count = options.continuations
            if len(work.results.of(side, kind="continuation")) == count:
                continue
            given, more = options.prompt_tokens, options.max_tokens
            texts = measure.excerpts(corpus, tokenizer, start, count, given, more)
            rows = measure.continue_texts(model, tokenizer, texts, start, given, segment)
            work.results.add(rows, fixed, model.device)
            work.say(side, f"{count} continuations of {corpus.name}")
            itself = Side(measure.ITSELF, side.folder)
            if not work.results.of(itself, kind="continuation"):
                rows = measure.continue_texts(None, tokenizer, texts, start, given, segment)
                plain = {**fixed, "model": itself.name, "seed": "", "overrides": "", "weights": ""}
                work.results.add(rows, plain, model.device)

    work.each_side(score)
    print(measure.report(work.folder, work.latest(), order=work.order))
    work.written("answers.md")


def divergence(options: argparse.Namespace) -> None:
    """Compare the next tokens of all models with the reference's, then report."""
    at_least_one(options, "texts")
    from experiments.bases import divergence as measure

    measure.parts_of(0, options.edges)
    work = Work(options, "divergence.csv", measure)
    if not options.report:
        _compare_with_reference(options, work)
    print(measure.report(work.folder, work.latest(), order=work.order))
    work.written("divergence.md")


def _compare_with_reference(options: argparse.Namespace, work: Work) -> None:
    from experiments.bases import divergence as measure
    from experiments.bases.reading import start_token
    from experiments.sides import side as side_of

    if options.reference is None:
        raise LatteError("--reference: expected a model to be close to, NAME=FOLDER, got none")
    (corpus,) = work.corpora(1)
    chosen = side_of(options.reference)
    identity = chosen.identity()
    settings = {
        "digest": corpus.digest,
        "start": options.start,
        "reference": f"{identity['weights']} {identity['overrides']}".strip(),
        "reference_dtype": options.reference_dtype,
    }
    reference, _ = chosen.load(options.device, dtype=options.reference_dtype)

    def score(model: Any, tokenizer: Any, side: Any) -> None:
        fixed = work.begin(side, **settings)
        named = None if options.start == "none" else options.start
        opens = start_token(tokenizer, named)
        start = [] if named is None else [opens]
        most = options.edges[-1] - len(start)
        for text, ids in corpus.texts(tokenizer, opens, most, special_tokens=True):
            if options.texts is not None and int(text) >= options.texts:
                break
            if work.results.of(side, corpus=corpus.name, text=text):
                continue
            row = np.concatenate([np.asarray(start, np.int64), ids])
            rows = measure.compare(reference, model, row, options.edges)
            where = {"corpus": corpus.name, "text": text}
            work.results.add([{**where, **part} for part in rows], fixed, model.device)
            kl = sum(part["tokens"] * part["divergence"] for part in rows) / len(row)
            work.say(side, f"{corpus.name} {text}: {len(row)} tokens, KL {kl:.4f} nats a token")

    work.each_side(score)


def memory(options: argparse.Namespace) -> None:
    """Count the bytes of states, then report."""
    from experiments.bases import memory as measure

    work = Work(options, "memory.csv", measure)

    def count(model: Any, tokenizer: Any, side: Any) -> None:
        fixed = work.begin(side)
        if not work.results.of(side):
            work.results.add(measure.state_bytes(model), fixed, model.device)

    work.each_side(count)
    print(measure.report(work.folder, work.latest(), order=work.order))
    work.written("memory.md")


class Work:
    """What all the commands do alike: models one after another, and a file of results.

    Args:
        module: says by `KEY`, `SETTINGS` and `VALUES` what columns the file has.
    """

    def __init__(self, options: argparse.Namespace, file: str, module: Any) -> None:
        from experiments.bases.results import ResultsFile
        from experiments.sides import sides
        from latte.models.atomic_files import writable_folder

        self.options, self.folder = options, Path(options.output)
        self.sides = [] if options.report else sides(options.model)
        if not options.report and hasattr(options, "text"):
            self.corpora()  # a mistake in it shows before any weights are read
        writable_folder(self.folder)
        self.results = ResultsFile(self.folder / file, module.KEY, module.SETTINGS, module.VALUES)
        self.order = list(dict.fromkeys(name_of(text) for text in options.model))

    def corpora(self, most: int | None = None) -> list[Any]:
        """The corpora of --text. Raises LatteError if there are none, or more than `most`."""
        from experiments.bases.reading import corpus

        found = [corpus(text) for text in self.options.text]
        if not found and getattr(self.options, "continuations", True):
            raise LatteError("--text: expected texts to read, NAME=FILES, got none")
        if most is not None and len(found) > most:
            raise LatteError(f"--text: expected one corpus, got {len(found)}")
        return found

    def each_side(self, score: Callable[[Any, Any, Any], None]) -> None:
        """Load each model in turn and measure it."""
        for side in self.sides:
            model, tokenizer = side.load(self.options.device, dtype=self.options.dtype)
            score(model, tokenizer, side)
            del model
            gc.collect()

    def begin(self, side: Any, within: Any = None, **settings: Any) -> Any:
        """As `ResultsFile.begin`."""
        settings |= {"dtype": self.options.dtype or "saved"}
        return self.results.begin(side, settings, within)

    def latest(self) -> list[Any]:
        rows = self.results.latest()
        if not rows:
            raise LatteError(f"{self.results.path} has no results yet")
        return rows

    def say(self, side: Any, text: str) -> None:
        if not self.options.quiet:
            seed = f"#{side.seed}" if side.seed else ""
            print(f"{side.name}{seed}: {text}", flush=True)

    def written(self, *files: str) -> None:
        print(f"written: {', '.join((self.results.path.name, *files))} in {self.folder}")


def name_of(text: str) -> str:
    """The name in `NAME#SEED=FOLDER`."""
    return text.partition("=")[0].partition("#")[0]
