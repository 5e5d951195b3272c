"""Native kernels in the place of modules, for a few rows such as single tokens.

A kernel of :mod:`latte.ops.decoding` reads the weights of modules, and skips hooks and adapters.
:func:`native_weights` alone decides whether a kernel may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from latte.ops import decoding

# The parameters that kernels read, of each class in whose place they stand.
READ: dict[type[nn.Module], tuple[str, ...]] = {nn.Linear: ("weight",)}


class NormKind(NamedTuple):
    """An RMSNorm, ``(offset + w) x / sqrt(mean(x^2) + eps)``, and whether it computes in fp32."""

    offset: float = 0.0
    in_fp32: bool = False


NORMS: dict[type[nn.Module], NormKind] = {}
# The kernels that replace gated networks, by class; None: the class of ``act_fn`` says which.
GATED: dict[type[nn.Module], Callable[..., Tensor] | None] = {}
ACTIVATIONS: dict[type[nn.Module], Callable[..., Tensor]] = {}


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does not only run the ``forward`` of its class."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return True
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def native_weights(
    x: Tensor,
    modules: Iterable[Any],
    kinds: Iterable[type[nn.Module]],
    most_rows: int = decoding.MOST_ROWS,
) -> list[Tensor]:
    """The parameters that a kernel reads in the place of these modules; empty if they are called.

    They are called if a module has a hook, or is an adapter, a parametrised, quantised or other
    module than the kernel's, and if kernels do not serve x or the parameters.

    Args:
        x: Input, (..., E).
        kinds: The class that each module must have exactly, one of :data:`READ`.
        most_rows: Number of rows of x up to which the kernel pays.
    """
    if not decoding.serves(x, most_rows):
        return []
    weights: list[Any] = []
    for module, kind in zip(modules, kinds, strict=True):
        if type(module) is not kind or is_hooked(module):
            return []
        held = module._parameters
        if kind is nn.Linear and held.get("bias") is not None:
            return []
        for name in READ[kind]:
            weights.append(held.get(name))
    return weights if decoding.fits(x, *weights) else []


def native_integers(x: Tensor, maps: Iterable[Any]) -> list[Tensor]:
    """The integers and scales that kernels read in the place of these maps, one after the other.

    Empty if the maps are called, as in :func:`native_weights`, for x (B, E).
    """
    found: list[Tensor] = []
    if x.dtype == torch.float64 or not decoding.serves(x, x.numel()):
        return found
    for module in maps:
        # The class itself has the method: a subclass may compute something else.
        reads = "native_integers" in vars(type(module)) and not is_hooked(module)
        integers = module.native_integers() if reads else None
        if integers is None:
            return []
        found += integers
    return found


def native_maps(x: Tensor, *maps: Any) -> list[Any]:
    """The weight and None of each of these maps, or all their integers and scales; empty if called.

    For x (B, E), as in :func:`native_weights` and :func:`native_integers`.
    """
    weights = native_weights(x, maps, (nn.Linear,) * len(maps))
    if weights:
        return [y for weight in weights for y in (weight, None)]
    return native_integers(x, maps)  # type: ignore[return-value]


def direct(x: Tensor, module: Any) -> Callable[[Tensor], Tensor]:
    """The module, or what may be called in its place for x (B, E): its class's ``direct``."""
    if "direct" not in vars(type(module)) or is_hooked(module):
        return module  # type: ignore[no-any-return]
    return module.direct() if decoding.serves(x, x.numel()) else module


def linear_maps(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """The output of up to three linear maps for x (..., E), in one call if possible."""
    weights = native_weights(x, maps, (nn.Linear,) * len(maps))
    return decoding.linear_maps(x, *weights) if weights else tuple(linear(x) for linear in maps)
