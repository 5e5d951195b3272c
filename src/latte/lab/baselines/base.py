"""Code that the baselines' token mixers share: calls, checks, initial values, long convolutions.

Shape suffixes: B batch, T tokens, E hidden size (channels).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from latte.layers.checks import check_input, check_positive
from latte.layers.parts import InitializedModule
from latte.ops.tensors import full_precision


class BaselineMixer(InitializedModule):
    """Base of the baselines' layers: ``forward(x, key_mask) -> update``, whole sequences only.

    There is no state for later calls. Packed sequences are not supported: each row is a sequence. A
    masked token contributes nothing as a source, and the output at its position has no meaning.

    Class attributes:
        directions: Values of ``causal`` that the layer supports: True, False or both.
        gates_residual: Whether the layer also takes the block's input, as in
            ``forward(x, key_mask, residual)``.
        undecayed: Names of parameters without weight decay, such as rates of forgetting. Decay
            would pull them towards values without a meaning.
    """

    directions: ClassVar[tuple[bool, ...]] = (True, False)
    gates_residual: ClassVar[bool] = False
    undecayed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, hidden_size: int, causal: bool = True) -> None:
        super().__init__()
        check_positive(type(self).__name__, hidden_size=hidden_size)
        if causal not in self.directions:
            raise ValueError(
                f"{type(self).__name__}: expected causal={self.directions[0]}, the only direction"
                f" that it has, got causal={causal}"
            )
        self.hidden_size, self.causal = hidden_size, causal

    def forward(self, x_BTE: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The update, (B, T, E), which the block adds to its input.

        Args:
            x_BTE: Normalised input, (B, T, E).
            key_mask: Mask, (B, T) bool, True = a valid token.

        Raises:
            ValueError: Shapes or dtypes do not fit.
        """
        self._check(x_BTE, key_mask)
        return self._mix(x_BTE, key_mask) if x_BTE.shape[1] else x_BTE

    def _mix(self, x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define _mix: BaselineMixer is only a base")

    def _check(self, x_BTE: Tensor, key_mask: Tensor | None) -> None:
        name = type(self).__name__
        weight = next((p for p in self.parameters() if p.ndim >= 2), None)
        check_input(name, x_BTE, self.hidden_size, weight)
        if key_mask is not None and (
            key_mask.shape != x_BTE.shape[:2] or key_mask.dtype != torch.bool
        ):
            raise ValueError(
                f"{name}: key_mask must be bool (B, T)={tuple(x_BTE.shape[:2])}, "
                f"got {key_mask.dtype} {tuple(key_mask.shape)}"
            )

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, causal={self.causal}"


def masked(x_BTE: Tensor, key_mask: Tensor | None) -> Tensor:
    """``x`` with zeros at masked tokens, also where it was not finite."""
    return x_BTE if key_mask is None else x_BTE.masked_fill(~key_mask[..., None], 0.0)


@full_precision
def long_convolution(u_BTE: Tensor, kernel_ET: Tensor) -> Tensor:
    """``y_t = sum_{s<=t} kernel_{t-s} u_s`` per channel, in O(T log T), by the Fourier transform.

    It is computed in the dtype of the kernel, fp32 or fp64. The transform mixes all times. So later
    inputs change an output by rounding errors.
    """
    T = u_BTE.shape[1]
    n = 2 * T  # with only T, the tail would wrap around
    spectrum = torch.fft.rfft(u_BTE.to(kernel_ET.dtype), n, dim=1)
    spectrum = spectrum * torch.fft.rfft(kernel_ET.mT, n, dim=0)
    return torch.fft.irfft(spectrum, n, dim=1)[:, :T]
