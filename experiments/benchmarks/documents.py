"""A document read once: its state as a file, and prompts answered from it or by reading anew.

The document is the first of FILE, cut to so many tokens; the prompts are the text after it, 16
tokens each. Answers are greedy. Each prompt loads the state anew, as another process would.

    python -m experiments.benchmarks.documents CHECKPOINT FILE [--tokens 100000] [--prompts 20]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.records import say, use_all_threads
from latte.lab.data.files import first_document
from latte.lab.data.tokenizers import document_ends
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.generate import read
from latte.models import LatteCache, load_state, save_state

PROMPT, ANSWER = 16, 16  # tokens


@torch.no_grad()
def answer(model: Any, cache: LatteCache, prompt: list[int]) -> tuple[torch.Tensor, float, float]:
    """Logits after the prompt and after each token of the answer; ms to the first and per token."""
    start = time.perf_counter()
    logits = [model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits]
    first = time.perf_counter()
    for _ in range(ANSWER):
        logits.append(model(logits[-1].argmax(-1), past_key_values=cache).logits)
    per_token = (time.perf_counter() - first) / ANSWER
    return torch.cat(logits), 1e3 * (first - start), 1e3 * per_token


def anew(model: Any, document: list[int]) -> tuple[LatteCache, float]:
    """A cache that has read the document, and the seconds that took."""
    cache, start = LatteCache(model.config), time.perf_counter()
    read(model, document, cache)
    return cache, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("checkpoint")
    options.add_argument("file")
    options.add_argument("--tokens", type=int, default=100_000, help="of the document")
    options.add_argument("--prompts", type=int, default=20, help="to answer")
    args = options.parse_args(arguments)
    threads = use_all_threads()
    model, tokenizer = load_checkpoint(args.checkpoint, "cpu")
    ids = [document_ends(tokenizer)[0]]
    ids += tokenizer.encode(first_document(args.file), add_special_tokens=False)
    document, rest = ids[: args.tokens], ids[args.tokens :]
    prompts = [rest[PROMPT * i : PROMPT * (i + 1)] for i in range(args.prompts)]
    cache, seconds = anew(model, document)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.safetensors"
        start = time.perf_counter()
        save_state(cache, path)
        saved = 1e3 * (time.perf_counter() - start)
        say(f"{len(document):,} tokens read in {seconds:.2f} s, {threads} threads")
        say(f"state {cache.nbytes / 1e3:,.0f} kB; file {path.stat().st_size / 1e3:,.0f} kB")
        say(f"saved in {saved:.1f} ms")
        rows, answers = [], []
        for prompt in prompts:
            start = time.perf_counter()
            loaded = load_state(path, model)
            milliseconds = 1e3 * (time.perf_counter() - start)
            logits, first, per_token = answer(model, loaded, prompt)
            rows.append((milliseconds, first, per_token))
            answers.append(logits)
    for name, times in zip(
        ("load", "16-token prompt", "token"), zip(*rows, strict=True), strict=True
    ):
        say(f"{name}: median {statistics.median(times):.2f} ms, largest {max(times):.2f} ms")
    again, seconds = anew(model, document)
    equal = torch.equal(answer(model, again, prompts[0])[0], answers[0])
    say(f"read anew in {seconds:.2f} s: logits of the first answer bit-equal: {equal}")
    whole = LatteCache(model.config)
    with torch.no_grad():
        model(torch.tensor([document]), past_key_values=whole, logits_to_keep=1)
    logits = answer(model, whole, prompts[0])[0]
    difference = (logits - answers[0]).abs().max() / answers[0].abs().max()
    same = torch.equal(logits.argmax(-1), answers[0].argmax(-1))
    say(f"read in one forward: largest difference {difference:.1e} of the largest logit")
    say(f"read in one forward: the same tokens: {same}")


if __name__ == "__main__":
    main()
