"""Number of parameters of a model, and the size at which a model has a given number."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

MOST_LAYERS = 256  # that are built to count parameters


def count_parameters(config: Any) -> int:
    """Count a language model's parameters, tied ones once, without allocating them.

    Args:
        config: Configuration of a causal model, of Latte or of another library.
    """
    from latte.models.modeling import language_model

    with torch.device("meta"):
        model = language_model(config)
    return sum(parameter.numel() for parameter in model.parameters())


def number_of_parameters(config: Any) -> int | None:
    """Count a model's parameters without making them; None if they cannot be counted."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= MOST_LAYERS:
        return _counted(config)
    # Kinds of layers repeat, so every further period has as many parameters.
    period, few = len(getattr(config, "block_types", (1,))), []
    first = layers % period or period
    for number in (first, first + period):
        short = copy.deepcopy(config)
        short.num_hidden_layers = number
        few.append(_counted(short))
    one, two = few
    return None if one is None or two is None else one + (layers - first) // period * (two - one)


def _counted(config: Any) -> int | None:
    try:
        return count_parameters(config)
    except Exception:  # not on the meta device; building the model reports an error
        return None


def number_of_weights(model: torch.nn.Module) -> int:
    """Count a model's parameters, tied ones once; of quantised maps their integers."""
    from latte.layers.quantised import Quantised

    modules = [x for x in model.modules() if isinstance(x, Quantised)]
    scales = {id(x.scales) for x in modules}
    sizes = {id(x.weight): math.prod(x.matrix.shape) for x in modules}
    return sum(sizes.get(id(x), x.numel()) for x in model.parameters() if id(x) not in scales)


def identifying_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors by which a model's weights are known again, in an order of their own.

    They are its parameters, but only the scales of quantised maps. Other weights and other bits
    have other scales, and the order of the integers depends on the processor.
    """
    from latte.layers.quantised import Quantised

    integers = {id(x.weight) for x in model.modules() if isinstance(x, Quantised)}
    return (x for x in model.parameters() if id(x) not in integers)


def nearest_size(count: Callable[[int], int], target: int, step: int = 1) -> int:
    """The size, a positive multiple of ``step``, at which a model has about ``target`` parameters.

    Args:
        count: Function from a size, such as a width or a depth, to the number of parameters. It
            must be affine.
        target: Wanted number of parameters.
        step: Number that the size is a multiple of.
    """
    one, two = count(step), count(2 * step)
    if one == two:
        return step
    return step * max(1, round(1 + (target - one) / (two - one)))
