"""A small random base of bytes, what it was converted to, and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from latte.conversion import convert
from latte.lab.data import byte_tokenizer

CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '[/]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`base` in Hugging Face's format and `converted`, with window 8, two sinks, delayed latents;
    `texts`: five of some 300 tokens, one of 40.
    """
    where = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 260}
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=257, eos_token_id=256)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that mistakes show
            parameter.mul_(4)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    model.save_pretrained(where / "base")
    tokenizer.save_pretrained(where / "base")
    shape: dict[str, Any] = {"window": 8, "num_latents": 8, "num_sinks": 2, "delay_latents": True}
    convert(where / "base", where / "converted", latent_input="none", **shape)
    choose = random.Random(0)
    words = ["ship", "the", "of", "sea", "captain", "a", "night", "letter", "and", "lamp"]
    with open(where / "texts.jsonl", "w", encoding="utf-8") as file:
        for count in (70, 70, 70, 8, 70, 70):
            file.write(json.dumps({"text": " ".join(choose.choices(words, k=count))}) + "\n")
    return {name: str(where / name) for name in ("base", "converted")} | {
        "texts": str(where / "texts.jsonl")
    }


@pytest.fixture
def measure(folders: dict[str, str], tmp_path: Path) -> Any:
    """measure(command, *options) -> the folder of the results of base, converted and window."""
    from experiments.bases.run import main

    def run(command: str, *options: str, models: list[str] | None = None, code: int = 0) -> Path:
        chosen = models or [
            f"base={folders['base']}",
            f"converted={folders['converted']}",
            f"window={folders['converted']},mixing=window,local_window=12",
        ]
        arguments = [command, "--output", str(tmp_path / "out"), "--quiet", *options]
        arguments += [word for model in chosen for word in ("--model", model)]
        assert main(arguments) == code
        return tmp_path / "out"

    return run
