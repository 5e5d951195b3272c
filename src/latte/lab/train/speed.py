"""Optional faster training: the ops' backend, compiled blocks, a loss in chunks.

They change how a model computes, not its results: parameters keep their names, and a saved model
is a plain one. Everything here is off unless a recipe or a caller turns it on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.errors import LatteError
from latte.lab.train.recipe import Recipe, TrainingSection
from latte.models.loss import check_chunked_loss
from latte.ops import use_backend
from latte.ops.widened import emulates


def autocasts(section: TrainingSection) -> bool:
    """Whether training autocasts to bf16: if asked to, but not on a CPU that emulates bf16."""
    return section.bf16 and (torch.accelerator.is_available() or not emulates(torch.bfloat16))


def check_speed(recipe: Recipe) -> None:
    """Raise LatteError for a backend or a loss that this machine or the model does not have."""
    if recipe.training.chunked_loss:
        check_chunked_loss()
        if not of_own_blocks(recipe):
            raise LatteError(
                "training.chunked_loss serves Latte's own models; expected no conversion.base, no"
                " model.architecture and a preset of Latte's"
            )
    if recipe.training.backend != "triton":
        return
    from latte.ops.triton_backend.launch import triton_mode

    mode = triton_mode()
    if mode == "missing":
        raise LatteError(
            "training.backend=triton needs Triton, which is not installed;"
            " pip install 'latte-attention[gpu]'"
        )
    if mode != "interpreter" and not torch.cuda.is_available():
        raise LatteError(
            "training.backend=triton needs a GPU, and there is none here; leave it out"
        )


def of_own_blocks(recipe: Recipe) -> bool:
    """Whether the model is one of Latte's own: its blocks can be compiled one by one."""
    return (
        recipe.conversion.base is None
        and recipe.model.architecture is None
        and not recipe.model.is_comparator
    )


def chosen_backend(recipe: Recipe) -> AbstractContextManager[None]:
    """The recipe's backend, or else the default, for the time of a ``with`` block."""
    if recipe.training.backend is None:
        return nullcontext()
    return use_backend(recipe.training.backend, everywhere=True)


def apply_speed_options(model: Any, recipe: Recipe) -> None:
    """Apply chunked_loss and, to Latte's own models, torch_compile, in place."""
    if recipe.training.chunked_loss:
        model.chunked_loss = True  # of training steps, without all the logits in memory
    if recipe.training.torch_compile and of_own_blocks(recipe):
        compile_blocks(model)


def compile_blocks(model: nn.Module) -> int:
    """Compile every decoder block in place (``nn.Module.compile``); how many there were.

    Blocks are alike, so that one compilation serves all of them: norms, gates, rotations and
    residuals are fused around the mixers' kernels. Embeddings, head and loss stay as they are.
    """
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for block in blocks:
        block.compile()
    return len(blocks)
