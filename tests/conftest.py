"""A tiny recipe over a few hundred words, and a folder where nothing else is."""

import json
import os
import random

import pytest

# A command that is called in the tests' own process would change malloc for the tests after it.
os.environ["LATTE_KEEP_MEMORY"] = "0"

MODEL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "num_latents": 8, "sliding_window": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """Training and held-out documents, short ones."""
    folder = tmp_path_factory.mktemp("words")
    generator = random.Random(0)
    choice = ["latent", "window", "state", "mean", "mass", "token", "sum", "of", "the", "a"]
    for kind, count in (("train", 150), ("held-out", 30)):
        with open(folder / f"{kind}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(count):  # documents end within blocks, so blocks count different tokens
                text = " ".join(generator.choices(choice, k=generator.randint(5, 60)))
                file.write(json.dumps({"text": text}) + "\n")
    return {
        "corpus": str(folder / "train.jsonl"),
        "validation": str(folder / "held-out.jsonl"),
        "cache_dir": str(folder / "cache"),
    }


@pytest.fixture
def make_recipe(recipe_in, tmp_path):
    """make_recipe(preset, name, **training) -> a checked recipe in tmp_path / name."""

    def make(preset="latte-r-swa++", name="run", **training):
        return recipe_in(tmp_path / name, preset, **training)

    return make


@pytest.fixture(scope="session")
def recipe_in(words):
    """recipe_in(folder, preset, **training) -> a checked recipe that writes there."""
    from latte.lab.train.recipe import recipe_from_dict

    def make(folder, preset="latte-r-swa++", **training):
        overrides = dict(MODEL)
        if preset in ("transformer++", "swa++"):
            del overrides["num_latents"]
        if preset == "transformer++":
            del overrides["sliding_window"]
        values = {
            "max_steps": 6,
            "batch_size": 2,
            "warmup_steps": 2,
            "log_steps": 1,
            "eval_steps": 3,
            "save_steps": 2,
        }
        return recipe_from_dict(
            {
                "model": {"preset": preset, "size": "tiny", "overrides": overrides},
                "data": {**words, "block_length": 32, "max_validation_tokens": 1000},
                "training": {**values, **training},
                "output_dir": str(folder),
            }
        )

    return make


@pytest.fixture(scope="session")
def make_model():
    """make_model(preset, **fields) -> an untrained model of bytes whose weights are large enough
    for its probabilities to differ.
    """
    import torch

    from latte.models import LatteForCausalLM, preset_config

    def make(preset, **fields):
        sizes = {**MODEL, "num_latents": 16, **fields}
        if not preset.startswith(("latte", "linear")):
            del sizes["num_latents"]
        if "swa" not in preset:
            del sizes["sliding_window"]
        torch.manual_seed(0)
        model = LatteForCausalLM(preset_config(preset, "tiny", **sizes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.mul_(30)
        return model

    return make


@pytest.fixture(scope="session")
def byte():
    """The tokenizer of bytes."""
    from latte.lab.data.tokenizers import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def mistake(capsys):
    """mistake(main, *arguments) -> the one line that a command says, which ends with code 2."""

    def run(main, *arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        said = capsys.readouterr().err
        assert code == 2 and said.count("\n") == 1 and "Traceback" not in said
        return said

    return run


@pytest.fixture(scope="session")
def save_llama():
    """save_llama(folder, scale, **fields) -> the folder with a random Llama of Transformers, whose
    weights are so many times larger, and with the tokenizer of bytes.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from latte.lab.data import byte_tokenizer

    def save(folder, scale=1.0, **fields):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "vocab_size": 259}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes | fields))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return folder

    return save
