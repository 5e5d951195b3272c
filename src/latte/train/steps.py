"""What weight decay is for."""

from __future__ import annotations

import re

from torch import nn

# What libraries keep in more than one dimension and is no matrix: biases by head, Mamba's rates of
# forgetting, RWKV's rates, mixing shares and bonuses.
_RATES = re.compile(r"(bias|bonus|A_log|time_\w+)$")


def decayed_names(model: nn.Module) -> list[str]:
    """Parameters that weight decay is for: matrices.

    Not norms, biases and rates of forgetting, whichever library's, nor what a layer names in its
    ``undecayed``.
    """
    spared = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name not in spared and not _RATES.search(name)
    ]
