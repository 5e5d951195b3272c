"""A small random base of bytes, what it was converted to, and texts."""

import json
import random

import pytest

from latte.conversion import convert
from latte.lab.data import byte_tokenizer

CHAT = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '[/]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="session")
def folders(save_llama, tmp_path_factory):
    """`base` in Hugging Face's format and `converted`, with window 8, two sinks, delayed latents;
    `kept`, the same with 4 and 6 kept tokens; `texts`: five of some 300 tokens, one of 40.
    """
    where = tmp_path_factory.mktemp("bases")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_key_value_heads": 1, "bos_token_id": 257, "eos_token_id": 256}
    save_llama(where / "base", 4, **sizes)  # far from uniform, so that mistakes show
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(where / "base")
    shape = {"window": 8, "num_latents": 8, "num_sinks": 2, "delay_latents": True}
    convert(where / "base", where / "converted", latent_input="none", **shape)
    kept = {"kept_tokens": [4, 6], "kept_block": 4, "joint_softmax": True}
    convert(where / "base", where / "kept", **shape, **kept)
    choose = random.Random(0)
    words = ["ship", "the", "of", "sea", "captain", "a", "night", "letter", "and", "lamp"]
    with open(where / "texts.jsonl", "w", encoding="utf-8") as file:
        for count in (70, 70, 70, 8, 70, 70):
            file.write(json.dumps({"text": " ".join(choose.choices(words, k=count))}) + "\n")
    return {name: str(where / name) for name in ("base", "converted", "kept")} | {
        "texts": str(where / "texts.jsonl")
    }


@pytest.fixture
def measure(folders, tmp_path):
    """measure(command, *options) -> the folder of the results of base, converted and window."""
    from experiments.bases.run import main

    def run(command, *options, models=None, code=0):
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
