"""How Latte's own modules start, wherever they stand in a model of Transformers."""

from torch import nn
from transformers import initialization as init


def initialise(module: nn.Module) -> None:
    """Draw the parameters that a module brings its own initial values for, if it does.

    Goes through ``transformers.initialization``, which leaves loaded weights alone.
    """
    draw = getattr(module, "initial_values", None)
    if draw is not None:
        for name, value in draw().items():
            init.copy_(module.get_parameter(name), value)
