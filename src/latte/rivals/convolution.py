"""Long convolutions by the fast Fourier transform, for layers whose recurrence does not change.

Shape suffixes: B batch, T tokens, E channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.precision import full_precision


@full_precision
def long_convolution(u_BTE: Tensor, kernel_ET: Tensor) -> Tensor:
    """``y_t = sum_{s<=t} kernel_{t-s} u_s`` per channel, in O(T log T).

    Computed in the dtype of the kernel, fp32 or fp64. The transform mixes all times, so that the
    future is left out to rounding, not exactly.
    """
    T = u_BTE.shape[1]
    n = 2 * T  # room for the tail, which would wrap around otherwise
    spectrum = torch.fft.rfft(u_BTE.to(kernel_ET.dtype), n, dim=1)
    spectrum = spectrum * torch.fft.rfft(kernel_ET.mT, n, dim=0)
    return torch.fft.irfft(spectrum, n, dim=1)[:, :T]
