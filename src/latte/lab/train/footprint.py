"""The least memory that a training run takes, before anything is made.

This is a lower bound: a run that it refuses could not run. A real run takes more memory, because
its layers keep values for the backward pass.
"""

from __future__ import annotations

from typing import Any

from latte.errors import LatteError
from latte.lab.machine import default_device, memory_there_is, size_text
from latte.lab.train.recipe import Recipe
from latte.lab.train.speed import autocasts
from latte.models.parameters import number_of_parameters
from latte.ops.processes import number_of_processes

# Bytes of a parameter. A trained one is in fp32, with its gradient and AdamW's two averages. A
# frozen one has at least half precision.
TRAINED_BYTES, FROZEN_BYTES = 16, 2
TOKEN_BYTES = 24  # a batch's ids, labels and positions, int64


def check_memory(recipe: Recipe, config: Any) -> None:
    """Raise LatteError for a model or a batch that is larger than the machine's memory.

    Args:
        config: Configuration of the model. Its vocabulary may grow once the tokenizer is known.
    """
    training = recipe.training
    device = default_device()
    there = memory_there_is(device)
    if there is None:
        return
    parts = number_of_processes() if training.strategy == "fsdp2" else 1
    parameters = number_of_parameters(config)
    each, why = TRAINED_BYTES, "weights, gradients and AdamW's averages"
    if recipe.conversion.base is not None and recipe.conversion.trainable != "all":
        each, why = FROZEN_BYTES, "its weights"
    if parameters is not None and each * parameters / parts > there:
        needed = size_text(each * parameters / parts)
        raise LatteError(
            f"model: {parameters:,} parameters need at least {needed} for {why}, and there are"
            f" {size_text(there)} of memory; expected a smaller model.size or smaller"
            " model.overrides"
        )
    tokens = training.batch_size * recipe.data.block_length // training.context_parallel
    batch = tokens * token_bytes(recipe, config)
    # All batches of a step are read before the first is used.
    batch += tokens * TOKEN_BYTES * training.gradient_accumulation
    if batch > there:
        raise LatteError(
            f"training.batch_size={training.batch_size}: a step of"
            f" {training.gradient_accumulation:,} x {tokens:,} tokens needs at least"
            f" {size_text(batch)}, and there are {size_text(there)} of memory; expected a smaller"
            " training.batch_size, gradient_accumulation or data.block_length"
        )


def token_bytes(recipe: Recipe, config: Any) -> int:
    """What a model keeps of each token of a batch at least: every layer's input, and the logits."""
    training = recipe.training
    sizes = (getattr(config, name, 0) for name in ("hidden_size", "num_hidden_layers"))
    width, layers = (size if isinstance(size, int) else 0 for size in sizes)
    logits = 0 if training.chunked_loss else vocabulary(recipe, config)
    return (2 if autocasts(training) else 4) * (width * layers + logits)


def vocabulary(recipe: Recipe, config: Any) -> int:
    """The least number of entries that the model will have."""
    given = recipe.model.overrides.get("vocab_size")
    if isinstance(given, int):
        return given
    known = {"byte": 259, "bpe": recipe.data.vocab_size}
    return min(known.get(recipe.data.tokenizer, 1), getattr(config, "vocab_size", 1))
