"""Faster training on request: compiled blocks, kernels of Liger-Kernel, a loss in chunks.

They change how a model computes and not what: parameters keep their names, and a saved model is
the plain one. Nothing here is on unless a recipe or a caller asks for it.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.errors import LatteError
from latte.layers import SwiGLU
from latte.layers.parts import RMSNorm
from latte.models.loss import check_chunked_loss


def compile_blocks(model: nn.Module) -> int:
    """Compile every decoder block in place (``nn.Module.compile``); how many there were.

    Blocks are alike, so that one compilation serves all of them: norms, gates, rotations and
    residuals are fused around the mixers' kernels. Embeddings, head and loss stay as they are.
    """
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for block in blocks:
        block.compile()
    return len(blocks)


def use_chunked_loss(model: nn.Module) -> None:
    """Compute the loss of training steps without all the logits in memory; they are not returned.

    Raises:
        LatteError: this PyTorch cannot, or the model is no language model of Latte's.
    """
    check_chunked_loss()
    if not hasattr(model, "chunked_loss"):
        raise LatteError(
            f"training.chunked_loss serves Latte's own models, got {type(model).__name__}"
        )
    model.chunked_loss = True  # type: ignore[assignment]


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
    """Let RMSNorm and SwiGLU run on Liger-Kernel's Triton kernels, in place; how many now do.

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
