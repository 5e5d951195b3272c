"""A recipe's choices of speed: the ops' backend, Liger's kernels, compiled blocks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from latte.errors import LatteError
from latte.train.recipe import Recipe


def check_speed(recipe: Recipe) -> None:
    """Raise LatteError for a backend, kernels or a loss that this machine does not have."""
    if recipe.training.chunked_loss:
        from latte.models.loss import check_chunked_loss

        check_chunked_loss()
        _own_models_only("training.chunked_loss", recipe)
    wanted = {
        "training.backend=triton": recipe.training.backend == "triton",
        "training.liger=true": recipe.training.liger,
    }
    asked = [name for name, chosen in wanted.items() if chosen]
    if not asked:
        return
    import torch

    from latte.ops.triton_backend.launch import triton_mode

    mode = triton_mode()
    if mode == "missing":
        raise LatteError(
            f"{asked[0]} needs Triton, which is not installed; pip install 'latte-attention[gpu]'"
        )
    if mode != "interpreter" and not torch.cuda.is_available():
        raise LatteError(f"{asked[0]} needs a GPU, and there is none here; leave it out")
    if recipe.training.liger:
        _own_models_only("training.liger", recipe)
        from latte.train.quicker import liger_functions

        liger_functions()


def _own_models_only(name: str, recipe: Recipe) -> None:
    if not of_own_blocks(recipe):
        raise LatteError(
            f"{name} serves Latte's own models; expected no conversion.base, no model.architecture"
            " and a preset of Latte's"
        )


def of_own_blocks(recipe: Recipe) -> bool:
    """Whether the model is one of Latte's own: its blocks can be compiled one by one."""
    return (
        recipe.conversion.base is None
        and recipe.model.architecture is None
        and not recipe.model.is_comparator
    )


def chosen_backend(recipe: Recipe) -> AbstractContextManager[None]:
    """The recipe's backend for the time of a ``with`` block; without one, what is the default."""
    if recipe.training.backend is None:
        return nullcontext()
    from latte.ops import use_backend

    return use_backend(recipe.training.backend)


def quicken(model: Any, recipe: Recipe) -> None:
    """Apply liger, chunked_loss and, to Latte's own models, torch_compile, in place."""
    from latte.train.quicker import compile_blocks, use_chunked_loss, use_liger

    if recipe.training.chunked_loss:
        use_chunked_loss(model)
    if recipe.training.liger:
        use_liger(model)
    if recipe.training.torch_compile and of_own_blocks(recipe):
        compile_blocks(model)
