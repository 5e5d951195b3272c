"""How Latte's own modules start, wherever they stand in a model of Transformers."""

import math

from torch import nn
from transformers import initialization as init

from latte.layers import RGLRU, BlockDiagonalLinear, CausalConv1d, LatentLogits
from latte.rivals import ComparatorMixer


def initialise(module: nn.Module) -> None:
    """Initialise a module of :mod:`latte.layers` that Transformers does not know; else nothing.

    Goes through ``transformers.initialization``, which leaves loaded weights alone.
    """
    if isinstance(module, BlockDiagonalLinear):
        init.normal_(module.weight, std=1.0 / math.sqrt(module.weight.shape[-1]))
        init.zeros_(module.bias)
    elif isinstance(module, CausalConv1d):
        bound = 1.0 / math.sqrt(module.weight.shape[1])
        init.uniform_(module.weight, -bound, bound)
        init.zeros_(module.bias)
    elif isinstance(module, RGLRU):
        init.copy_(module.theta, module.initial_theta())
    elif isinstance(module, LatentLogits) and module.window_probability is not None:
        init.constant_(module.window_bias, module.initial_window_bias())
    elif isinstance(module, ComparatorMixer):
        for name, value in module.initial_values().items():
            init.copy_(module.get_parameter(name), value)
