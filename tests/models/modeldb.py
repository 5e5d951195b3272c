"""The models that carry a state, in one table: Latte's presets, and converted decoders.

The laws of ``test_laws.py`` and of ``tests/serve/test_laws.py`` run on every row. A row is small,
random and in fp64, at a scale of its weights where a broken cache is seen.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from latte.models import (
    PRESETS,
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
    preset_config,
)
from tests.conversion import bases

CLASSES = {
    "lm": LatteForCausalLM,
    "model": LatteModel,
    "classifier": LatteForSequenceClassification,
}
VOCABULARY = 40  # of the presets; converted models have 50


def tiny_config(preset: str, **overrides: Any) -> Any:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "initializer_range": 0.4,  # at 0.02 broken reordering and cropping go unseen
        "tie_word_embeddings": False,  # tied, these models would repeat their last token
    }
    if preset.startswith("latte") or preset == "linear++":
        values["num_latents"] = 12
    if "swa" in preset or preset in ("latte-gated", "latte-hybrid"):
        values["sliding_window"] = 4
    if preset == "latte-hybrid":
        values["block_types"] = ("recurrent", "attention")
    return preset_config(preset, "tiny", **(values | overrides))


def made(preset: str, kind: str = "lm", **overrides: Any) -> Any:
    """A model of a preset, in fp32 and evaluation mode."""
    torch.manual_seed(0)
    model = CLASSES[kind](tiny_config(preset, **overrides)).eval()
    for name, parameter in model.named_parameters():
        # 0 at the start: nothing of a gate, or of scores, would be seen.
        if name.endswith(("decay_proj.weight", "kept_scores.down.weight")):
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random ids (batch, length). No row takes them for padding or for an end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter."""
    pieces = ["<pad>", "<eos>", "<unk>", *string.ascii_lowercase]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
        name: Preset, or family and option of a conversion.
        make: Function that makes the model.
        grows: Whether some layer's state grows with every token.
        steps: Whether single tokens are decoded in place.
    """

    name: str
    make: Callable[[], Any]
    grows: bool = False
    steps: bool = True

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """The model, shared between tests: do not train it."""
        return _shared(self, dtype)


@functools.cache
def _shared(row: Row, dtype: torch.dtype) -> Any:
    return row.make().to(dtype)


SINKS, DELAYED = {"num_sinks": 3}, {"delay_latents": True, "latent_input": "none"}
BOTH, KEPT = SINKS | DELAYED, {"converted_layers": (1, 3)}
DIVIDED = {"num_sinks": 3, "delay_latents": True, "joint_softmax": True}
KEPT_TOKENS = DIVIDED | {"kept_tokens": 3, "kept_block": 4}
# The fields of a conversion. ``bases.converted`` has a window of 5 and latents from an RG-LRU.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "conv": {"latent_input": "conv"},
    "sinks": SINKS,
    "sinks, forgetting": SINKS | {"forgetting": "gated"},
    "more sinks than window": DELAYED | {"num_sinks": bases.WINDOW + 2},
    "delayed": {"delay_latents": True},
    "delayed, forgetting": DELAYED | {"forgetting": "gated"},
    "both": BOTH,
    "both, conv": BOTH | {"latent_input": "conv"},
    "both, a window of one": BOTH | {"local_window": 1},
    "joint": {"joint_softmax": True},
    "joint, both": BOTH | {"joint_softmax": True},
    "kept tokens": KEPT_TOKENS,
    "kept tokens, forgetting": KEPT_TOKENS | {"forgetting": "gated"},
    "kept tokens, half-life": KEPT_TOKENS | {"kept_half_life": 4.0},
    "kept tokens, 8 bits": KEPT_TOKENS | {"kept_dtype": "mxint8"},
    "kept tokens, window": KEPT_TOKENS | {"mixing": "window"},
    "joint, both, kept": BOTH | KEPT | {"joint_softmax": True},
    "window": {"mixing": "window"},
    "window, sinks": SINKS | {"mixing": "window"},
    "latents": {"mixing": "latents"},
    "base": {"mixing": "base"},
    "kept": KEPT,
    "kept, both": BOTH | KEPT,
    "kept with a window": BOTH | KEPT | {"kept_window": 8},
    # In gemma2 layers 1 and 3 have full attention, and the others a window of their own, of 9.
    "hybrid": {"converted_layers": (3,)},
}
CONVERSIONS = [("llama", option) for option in OPTIONS if option != "hybrid"]
CONVERSIONS += [
    ("gemma2", "kept tokens"),
    *((family, x) for family in bases.NAMES if family != "llama" for x in ("plain", "both")),
    *((family, x) for family in ("gemma2", "gemma3_text") for x in ("kept", "kept, both")),
    ("gemma3_text", "kept with a window"),
    *(("gemma2", "joint, both"), ("gemma2", "hybrid")),
]
# Some layer keeps the base's full attention.
GROWING = {("llama", x) for x in ("base", "kept", "kept, both", "joint, both, kept")}
GROWING |= {("gemma2", "hybrid")}


def conversion(family: str, option: str) -> Row:
    fields = OPTIONS[option]
    return Row(
        f"{family}: {option}",
        functools.partial(bases.converted, family, **fields),
        grows=(family, option) in GROWING,
        steps=option != "latents",
    )


OF_PRESETS = *PRESETS, "latte-r-swa-f++", "latte-conv-swa-f++", "latte-gated", "latte-hybrid"
ROWS = [
    Row(preset, functools.partial(made, preset), grows=preset == "transformer++")
    for preset in OF_PRESETS
]
ROWS += [
    Row("latte-r-swa++: sinks", functools.partial(made, "latte-r-swa++", **SINKS)),
    Row("latte-conv-swa-f++: divided", functools.partial(made, "latte-conv-swa-f++", **DIVIDED)),
    Row("latte-gated: divided", functools.partial(made, "latte-gated", **DIVIDED)),
    Row("latte-r-swa++: kept tokens", functools.partial(made, "latte-r-swa++", **KEPT_TOKENS)),
    Row("latte-gated: kept tokens", functools.partial(made, "latte-gated", **KEPT_TOKENS)),
    Row(
        "latte-hybrid: kept tokens",
        functools.partial(made, "latte-hybrid", **KEPT_TOKENS, kept_half_life=6.0),
    ),
]
ROWS += [conversion(*names) for names in CONVERSIONS]
BY_NAME = {row.name: row for row in ROWS}


def named(names: Iterable[str]) -> list[Row]:
    return [BY_NAME[name] for name in names]
