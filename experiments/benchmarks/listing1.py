"""The rival: Listing 1 of the paper (arXiv 2402.17512), corrected, as a jitted ``jax.lax.scan``.

The listing as printed overwrites the carry. Here ``carry += einsum(...)``, and the output is
``einsum("BHL,BHLD->BHD", Qs_t / norm_cumsum, carry)``; the running maximum of the key logits keeps
the sums finite, as in the listing. Gradients do not flow through that maximum: the outputs do not
depend on it, and leaving it out makes the rival faster.

Shape suffixes: B batch, T tokens, H heads, L latents per head, D value width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None  # type: ignore[assignment]

AVAILABLE = jax is not None


def latte_scan(q_BTHL: Any, k_BTHL: Any, v_BTHD: Any, unroll: int) -> Any:
    """Causal Latte, (B, T, H, D), one step of the scan per token."""

    def accumulate(state: Any, inputs: Any) -> Any:
        carry, norm_cumsum, previous_max = state
        Qs_t, K_t, V_t, current_max = inputs
        revert_max = jnp.exp(previous_max - current_max)
        add = jnp.exp(K_t - current_max)
        norm_cumsum = norm_cumsum * revert_max + add
        carry = jnp.einsum("BHLD,BHL->BHLD", carry, revert_max)
        carry += jnp.einsum("BHL,BHD->BHLD", add, V_t)
        y = jnp.einsum("BHL,BHLD->BHD", Qs_t / norm_cumsum, carry)
        return (carry, norm_cumsum, current_max), y

    Q, K, V = (jnp.moveaxis(x, 1, 0) for x in (q_BTHL, k_BTHL, v_BTHD))
    largest = jax.lax.cummax(jax.lax.stop_gradient(K), axis=0)
    sums = jnp.zeros(K.shape[1:], K.dtype)
    carry = jnp.zeros((*K.shape[1:], V.shape[-1]), K.dtype)
    inputs = (jax.nn.softmax(Q, axis=-1), K, V, largest)
    _, y = jax.lax.scan(accumulate, (carry, sums, largest[0]), inputs, unroll=unroll)
    return jnp.moveaxis(y, 0, 1)


@functools.cache
def _jitted(unroll: int, with_gradients: bool) -> Callable[..., Any]:
    """The jitted function, compiled once per shape."""
    if not with_gradients:
        return jax.jit(functools.partial(latte_scan, unroll=unroll))

    def loss(q: Any, k: Any, v: Any, dy: Any) -> Any:
        return jnp.sum(latte_scan(q, k, v, unroll) * dy)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unroll: int) -> Callable[[], Any]:
    """A call that computes the outputs and waits for them."""
    step = _jitted(unroll, False)
    inputs = [jnp.asarray(x.detach().numpy()) for x in (q, k, v)]
    return lambda: jax.block_until_ready(step(*inputs))


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, unroll: int
) -> Callable[[], Any]:
    """A call that computes the gradients (q, k, v) of ``<dy, y>``, and waits for them."""
    step = _jitted(unroll, True)
    inputs = [jnp.asarray(x.detach().numpy()) for x in (q, k, v, dy)]
    return lambda: jax.block_until_ready(step(*inputs))


def to_torch(x: Any) -> torch.Tensor:
    """A copy of a JAX array as a tensor."""
    import numpy as np

    return torch.from_numpy(np.array(x))
