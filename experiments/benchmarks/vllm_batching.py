"""Requests of mixed lengths: vLLM's continuous batching against `generate`, a batch at a time.

A random `latte-r-swa++` at `tiny`, fp32, greedy, on this CPU, one process. Prompts and answers have
16 to 256 tokens; a batch of `generate` is padded, and goes on to its longest answer. Only wanted
tokens count. In the environment of `make test-vllm`:

    VLLM_ENABLE_V1_MULTIPROCESSING=0 .venv-vllm/bin/python -m experiments.benchmarks.vllm_batching
        [--batch 8]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import vllm

from latte.models import LatteForCausalLM, preset_config

REQUESTS, REPEATS = 32, 3


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--batch", type=int, default=8, help="sequences at once")
    batch = options.parse_args().batch
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 257, (REQUESTS, 2), generator=generator).tolist()
    prompts = [torch.randint(256, (n,), generator=generator) for n, _ in lengths]
    answers = [n for _, n in lengths]
    config = preset_config("latte-r-swa++", max_position_embeddings=512, initializer_range=0.1)
    torch.manual_seed(0)
    model = LatteForCausalLM(config).eval()
    threads = torch.get_num_threads()

    def by_generate() -> list[list[int]]:
        found = []
        for first in range(0, REQUESTS, batch):
            rows, wanted = prompts[first : first + batch], answers[first : first + batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, True, 0, "left")
            mask = [torch.ones_like(row) for row in rows]
            kept: Any = {"attention_mask": torch.nn.utils.rnn.pad_sequence(mask, True, 0, "left")}
            kept |= {"max_new_tokens": max(wanted), "do_sample": False, "eos_token_id": None}
            out = model.generate(ids, pad_token_id=0, **kept)[:, ids.shape[1] :]
            found += [row[:n].tolist() for row, n in zip(out, wanted, strict=True)]
        return found

    expected = report("generate", by_generate, threads)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=batch,
            kv_cache_memory_bytes=64 << 20,
        )
    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    parameters = [vllm.SamplingParams(max_tokens=n, **plain) for n in answers]
    inputs = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]

    def by_vllm() -> list[list[int]]:
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in outputs]

    found = report("vLLM", by_vllm, torch.get_num_threads())
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{same} of {REQUESTS} answers are the same")


def report(name: str, run: Callable[[], list[list[int]]], threads: int) -> list[list[int]]:
    """Print the tokens per second of runs after one that does not count; the last one's answers."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - start)
    tokens = sum(map(len, found))
    rates = [tokens / x for x in seconds[1:]]
    middle = f"{statistics.median(rates):,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})"
    print(f"{name}: {middle}, {tokens:,} tokens, {threads} threads", flush=True)
    return found


if __name__ == "__main__":
    main()
