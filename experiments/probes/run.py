"""Ask a checkpoint the probes: can it look up, copy, go on without repeating itself?

    python -m experiments.probes RUN --probes retrieval,copy --lengths 256,1024,4096

Writes probes.csv (a line per probe, length, depth and metric) and probes.png into
RUN/evaluation, and prints a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from latte.cli.commands import at_least_one, picked
from latte.cli.parser import integers, names
from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    return exit_code("probes", lambda: ask(options), "run again to ask anew")


UNSET = ("checkpoint", "output", "force")  # options that results do not depend on


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m experiments.probes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", metavar="RUN", help="a folder written by latte train or save_pretrained")
    add("--probes", type=names, help="some of retrieval, copy, continuation; all of them",
        default=["retrieval", "copy", "continuation"])  # fmt: skip
    add("--lengths", type=integers, default=[256, 1024, 4096], help="context lengths in tokens")
    add("--depths", type=fractions, default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="where the retrieval probe hides its statement, 0 (start) to 1 (end)")  # fmt: skip
    add("--cases", type=int, default=32, help="questions per length and depth")
    add("--seed", type=int, default=0, help="which questions")
    add("--corpus", nargs="+", help="'embedded', 'hub:NAME', or files, folders and globs to hide"
        " things in; by default the held-out text of the run that made the checkpoint")  # fmt: skip
    add("--field", default="text", help="JSON field or Parquet column of the text")
    add("--max-tokens", type=int, help="of the text, about so many, spread evenly")
    add("--segment", type=int, default=1024, help="tokens read at a time")
    add("--batch-tokens", type=int, default=16384, help="tokens side by side")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--mixing", help="of a converted model: learned, or the controls window, latents and base")
    add("--device", help="such as cpu or cuda; a GPU if there is one")
    add("--output", help="folder of the table and the figure; RUN/evaluation[-MIXING], with a"
        " number where that holds results of other settings")  # fmt: skip
    add("--force", action="store_true", help="replace results of other settings")
    return parser


def fractions(text: str) -> list[float]:
    """`0,0.5,1` -> [0.0, 0.5, 1.0]."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= value <= 1 for value in found):
        raise argparse.ArgumentTypeError(
            f"expected numbers from 0 to 1 separated by commas, got {text!r}"
        )
    return found


def ask(options: argparse.Namespace) -> None:
    """Load, ask, write, print.

    Raises:
        LatteError: an impossible option, no or a damaged checkpoint, too little text.
    """
    at_least_one(options, "cases", "segment", "batch_tokens", "max_tokens")
    if options.seed < 0:
        raise LatteError("--seed: expected 0 or more")
    from experiments.probes.questions import make_material
    from experiments.probes.report import probes_figure, probes_table, write_probes
    from experiments.probes.scores import plan, run_probes
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.evaluation import Evaluation

    shared = picked(options, "mixing", "device", "output", "force")
    evaluation = Evaluation.of(options.checkpoint, **shared)
    settings = {k: v for k, v in vars(options).items() if k not in UNSET}
    output = evaluation.place(("probes.csv", "probes.png"), settings)
    model, tokenizer = load_checkpoint(evaluation.folder, options.device, mixing=options.mixing)
    label = evaluation.label(model)
    material = make_material(tokenizer, _text(options, tokenizer, evaluation.recipe))
    lengths, depths = sorted(set(options.lengths)), sorted(set(options.depths))
    plan(material, options.probes, lengths, depths)  # what cannot be asked, before writing
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
    with output.writing() as staged:
        write_probes(staged / "probes.csv", rows, label)
        probes_figure(staged / "probes.png", rows, label)
    print(probes_table(rows))
    print(f"written: {output.path('probes.csv')} and {output.path('probes.png')}")


def _text(options: argparse.Namespace, tokenizer: Any, recipe: Any) -> Any:
    """Ids of what --corpus says, else of what the run held out, else of the embedded corpus."""
    from latte.lab.data.preparing import evaluation_text, held_out_text

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
