"""Optional faster training: the ops' backend, compiled blocks, Liger's kernels, a loss in chunks.

They change how a model computes, not its results: parameters keep their names, and a saved model
is a plain one. Everything here is off unless a recipe or a caller turns it on.
"""

from __future__ import annotations

import types
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.errors import LatteError
from latte.layers import RMSNorm, SwiGLU
from latte.models.loss import check_chunked_loss
from latte.ops import use_backend
from latte.train.recipe import Recipe


def check_speed(recipe: Recipe) -> None:
    """Raise LatteError for a backend, kernels or a loss that this machine does not have."""
    if recipe.training.chunked_loss:
        check_chunked_loss()
        _own_models_only("training.chunked_loss", recipe)
    wanted = {
        "training.backend=triton": recipe.training.backend == "triton",
        "training.liger=true": recipe.training.liger,
    }
    asked = [name for name, chosen in wanted.items() if chosen]
    if not asked:
        return
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
    return use_backend(recipe.training.backend)


def quicken(model: Any, recipe: Recipe) -> None:
    """Apply liger, chunked_loss and, to Latte's own models, torch_compile, in place."""
    if recipe.training.chunked_loss:
        model.chunked_loss = True  # of training steps, without all the logits in memory
    if recipe.training.liger:
        use_liger(model)
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


def liger_functions() -> tuple[Any, Any]:
    """Liger-Kernel's autograd functions for RMSNorm and for silu(a) * b.

    Raises:
        LatteError: liger-kernel is not installed.
    """
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise LatteError(
            f"training.liger needs liger-kernel, which cannot be imported ({error}):"
            " pip install 'latte-attention[liger]'"
        ) from error
    return LigerRMSNormFunction, LigerSiLUMulFunction


def use_liger(model: nn.Module) -> int:
    """Let RMSNorm and SwiGLU use Liger-Kernel's Triton kernels, in place. Returns their number.

    Raises:
        LatteError: liger-kernel is not installed, or the model has no such module.
    """
    rms_norm, silu_mul = liger_functions()

    def normed(self: Any, x: Tensor) -> Tensor:
        # "gemma": computed in fp32, rounded once, as nn.RMSNorm does. Not in place, which would
        # write over a gradient that the residual stream shares.
        return rms_norm.apply(x, self.weight, self.eps, 0.0, "gemma", False)

    def gated(self: Any, x_BTE: Tensor) -> Tensor:
        return self.down_proj(silu_mul.apply(self.gate_proj(x_BTE), self.up_proj(x_BTE)))

    changed = 0
    for module in model.modules():
        forward = {RMSNorm: normed, SwiGLU: gated}.get(type(module))
        if forward is not None:
            module.forward = types.MethodType(forward, module)
            changed += 1
    if not changed:
        raise LatteError("training.liger: the model has neither an RMSNorm nor a SwiGLU of Latte's")
    return changed
