"""Argument checks shared by every op: one clear line that says what was expected and what came.

Nothing here reads a value from a GPU: only shapes, dtypes and devices are looked at there.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops.state import (
    LatteState,
    MacchiatoState,
    Partition,
    Sinks,
    WindowState,
    with_all_values,
)
from latte.ops.tensors import (
    Local,
    Sequences,
    computation_dtype,
    has_tangent,
    on_cpu,
    without_masked,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The dtypes of a state's parts, in the words of errors.
KINDS = {
    **{"floating point": FLOATS, "bool": (torch.bool,), "uint8": (torch.uint8,)},
    "int64": (torch.int32, torch.int64),
}
LARGEST_WINDOW = 2**63 - 1  # that the kernels take
# e^-200 of the past is nothing, and beside a larger number in a sum the others lose their digits.
LEAST_DECAY = -200.0
PAPER = Partition()


def check_floats(op: str, **tensors: Tensor) -> None:
    """All tensors are floating point, of one dtype and on one device."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in FLOATS:
            raise ValueError(
                f"{op}: {name} must be float32, bfloat16, float16 or float64, got {x.dtype}"
            )
        if x.dtype != first.dtype:
            raise ValueError(
                f"{op}: {name} must have the dtype of {first_name}, {first.dtype}, got {x.dtype}"
            )
        if x.device != first.device:
            raise ValueError(
                f"{op}: {name} must be on the device of {first_name}, {first.device}, "
                f"got {x.device}"
            )


def check_shape(op: str, name: str, x: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """``x`` has the dimensions named by ``letters``; unknown letters are learnt into ``sizes``."""
    if isinstance(x, Tensor) and x.ndim == len(letters):
        for letter, size in zip(letters, x.shape, strict=True):
            if sizes.get(letter, size) != size:
                break
        else:
            sizes.update(zip(letters, x.shape, strict=True))
            return
    # Only here, because a graph that prints a size is for that size alone.
    wanted = "(" + ", ".join(f"{c}={sizes[c]}" if c in sizes else c for c in letters) + ")"
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor {wanted}, got {type(x).__name__}")
    raise ValueError(f"{op}: {name} must have shape {wanted}, got {tuple(x.shape)}")


def check_inputs(
    op: str, shapes: tuple[str, ...], *, empty: str = "BT", **inputs: Tensor
) -> dict[str, int]:
    """Check dtypes, devices and shapes of inputs, and return the size of each letter.

    If there is a G, the G key/value heads must serve the H query heads.

    Args:
        shapes: Shape of each input in letters, such as ``("BTHL", "BTGD")``. ``"-"`` is any shape.
        empty: Letters of sizes that may be 0. By default rows and tokens, not heads and widths.
    """
    sizes: dict[str, int] = {}
    dtype, device, fits = None, None, True
    for letters, x in zip(shapes, inputs.values(), strict=True):
        if not isinstance(x, Tensor):
            fits = False
            break
        if dtype is None:
            dtype, device = x.dtype, x.device
        elif x.dtype != dtype or x.device != device:
            fits = False
        if letters != "-":
            shape = x.shape
            if len(shape) != len(letters):
                fits = False
            for letter, size in zip(letters, shape, strict=False):
                if sizes.setdefault(letter, size) != size:
                    fits = False
    if not fits or dtype not in FLOATS:  # say what does not fit
        check_floats(op, **inputs)
        sizes = {}
        for letters, name in zip(shapes, inputs, strict=True):
            if letters != "-":
                check_shape(op, name, inputs[name], letters, sizes)
    if not all(sizes.values()):
        check_widths(op, sizes, empty)
    if "G" in sizes and sizes["H"] % sizes["G"]:
        grouped = [x for letters, x in zip(shapes, inputs, strict=True) if "G" in letters]
        raise ValueError(
            f"{op}: {' and '.join(grouped)} must have a number of heads that divides "
            f"{sizes['H']}, got {sizes['G']}"
        )
    return sizes


def check_latent_queries(op: str, latent_q: Tensor, latent_k: Tensor, window: bool) -> None:
    """``latent_q`` fits ``latent_k``, with one column more, the first, if there is a window."""
    B, T, H, L = latent_k.shape
    if tuple(latent_q.shape) == (B, T, H, L + window):
        return
    wanted = f"(B={B}, T={T}, H={H}, L={L}), the shape of latent_k"
    if window:
        wanted = (
            f"(B={B}, T={T}, H={H}, L+1={L + 1}), one column more than latent_k (column 0 is the "
            "window)"
        )
    raise ValueError(f"{op}: latent_q must have shape {wanted}, got {tuple(latent_q.shape)}")


def check_widths(op: str, sizes: dict[str, int], empty: str = "BT") -> None:
    """There may be no rows and no tokens, but heads and widths are at least 1."""
    missing = ""
    for letter, size in sizes.items():
        if not size and letter not in empty:
            missing += f", {letter}=0"
    if missing:
        raise ValueError(f"{op}: heads and widths must be at least 1, got {missing[2:]}")


def check_tangents(op: str, *inputs: Tensor | None) -> None:
    """No derivative is asked of an op that has none.

    For forward mode PyTorch would answer 0. Gradients by ``torch.func`` (``grad``, ``jacrev``,
    ``hessian``) would end in an error that does not name the op.
    """
    if torch.compiler.is_compiling():
        return
    for transform in torch._C._functorch.get_interpreter_stack() or ():
        if transform.key() == torch._C._functorch.TransformType.Grad:
            raise NotImplementedError(
                f"{op}: gradients by torch.func need backend='reference', the others have none;"
                " torch.autograd.grad works with all of them"
            )
    if forward_ad._current_level >= 0 and has_tangent(inputs):
        raise NotImplementedError(
            f"{op}: forward-mode derivatives need backend='reference', the others have none"
        )


def check_local(
    op: str,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    K: int,
    *,
    full: bool = False,
) -> Local:
    """Check a window (a number of keys) and its logits' scale (finite) and soft cap (positive).

    Args:
        K: Width of the keys, for the default scale.
        full: Whether the window may be None: all keys.
    """
    if window is not None or not full:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"{op}: window must be a positive number of keys, got {window!r}")
        if window > LARGEST_WINDOW:
            raise ValueError(
                f"{op}: window must be at most {LARGEST_WINDOW:,} keys, got {window:,}"
            )
    try:
        # A compiler may take a layer's scale for a number that varies, which has no such test.
        finite = scale is None or torch.compiler.is_compiling() or math.isfinite(scale)
    except TypeError:  # no number
        finite = False
    if not finite:
        raise ValueError(f"{op}: scale must be None or a finite number, got {scale!r}")
    if softcap is not None and (
        not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf
    ):
        raise ValueError(f"{op}: softcap must be None or a positive number, got {softcap!r}")
    return Local(window, 1.0 / math.sqrt(K) if scale is None else float(scale), softcap or 0.0)


def check_sequences(
    op: str, B: int, T: int, x: Tensor, key_mask: Tensor | None, cu: Tensor | None, causal: bool
) -> tuple[Sequences, int]:
    """Check mask and packing for inputs on the device of x.

    Returns:
        The sequences, and the number of states: N if packed, else B.
    """
    device = x.device
    if key_mask is not None:
        check_shape(op, "key_mask", key_mask, "BT", {"B": B, "T": T})
        if key_mask.dtype != torch.bool:
            raise ValueError(f"{op}: key_mask must be bool (True = a token), got {key_mask.dtype}")
        if key_mask.device != device:
            raise ValueError(f"{op}: key_mask must be on {device}, got {key_mask.device}")
    if cu is None:
        return Sequences(key_mask, None, causal), B
    if not isinstance(cu, Tensor) or cu.ndim != 1 or cu.shape[0] < 2:
        came = tuple(cu.shape) if isinstance(cu, Tensor) else type(cu).__name__
        raise ValueError(f"{op}: cu_seqlens must be a tensor (N+1,) with N >= 1, got {came}")
    if cu.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens must be int32 (or int64), got {cu.dtype}")
    if cu.device != device:
        raise ValueError(f"{op}: cu_seqlens must be on {device}, got {cu.device}")
    if B != 1:
        raise ValueError(f"{op}: packed sequences (cu_seqlens) need a batch of 1, got {B}")
    if device.type == "cpu" and torch.compiler.is_compiling():
        cu = _checked_bounds(cu, T, op)  # the graph checks the bounds that it uses
    elif device.type == "cpu":
        _check_bounds(cu, T, op)
    return Sequences(key_mask, cu, causal), cu.shape[0] - 1


def _check_bounds(cu: Tensor, T: int, op: str) -> None:
    values = cu.tolist()
    if values[0] != 0 or values[-1] != T or any(a > b for a, b in pairwise(values)):
        raise ValueError(
            f"{op}: cu_seqlens must rise from 0 to T={T}, got {values[:3]} ... {values[-1]}"
        )


@torch.library.custom_op(
    "latte::checked_bounds", mutates_args=(), schema="(Tensor cu, SymInt T, str op) -> Tensor"
)
def _checked_bounds(cu: Tensor, T: int, op: str) -> Tensor:
    """The bounds, in a graph: values are looked at when it runs."""
    _check_bounds(cu, T, op)
    return cu.clone()


@_checked_bounds.register_fake
def _(cu: Tensor, T: int, op: str) -> Tensor:
    return torch.empty_like(cu)


def check_state(
    op: str,
    state: object,
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> None:
    """``state`` is a tuple of tensors of the given shapes, all floating except a ``mask``."""
    if not isinstance(state, tuple) or len(state) != len(names):
        raise ValueError(
            f"{op}: initial_state must be a tuple ({', '.join(names)}), got {type(state).__name__}"
        )
    for name, shape, x in zip(names, shapes, state, strict=True):
        wanted = "bool" if name == "mask" else "floating point"
        check_state_part(op, name, x, shape, wanted, device)


def check_state_part(
    op: str, name: str, x: object, shape: tuple[int, ...], wanted: str, device: torch.device
) -> None:
    """A part of a state is a tensor of this shape and device; ``wanted`` is a key of KINDS."""
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{op}: initial_state.{name} must have shape {shape}, got {came}")
    if x.device != device:
        raise ValueError(f"{op}: initial_state.{name} must be on {device}, got {x.device}")
    if x.dtype not in KINDS[wanted]:
        raise ValueError(f"{op}: initial_state.{name} must be {wanted}, got {x.dtype}")


def check_latte_state(
    op: str, state: LatteState | None, sizes: tuple[int, int, int, int], q: Tensor
) -> LatteState | None:
    """The state fits N, H, L, D; as wide as what is computed with inputs like ``q``."""
    if state is None:
        return None
    dtype = computation_dtype(q.dtype)
    parts = 3 if isinstance(state, tuple) and len(state) == 3 else 2
    names, shapes = ("log_mass", "mean", "log_decay"), (sizes[:3], sizes, sizes[:3])
    check_state(op, state, names[:parts], shapes[:parts], q.device)
    if (
        isinstance(state, LatteState)
        and state[0].dtype == state[1].dtype == state[-1].dtype == dtype
    ):
        return state
    return LatteState(*[x.to(dtype) for x in state])


def check_log_decay(
    op: str, log_decay: Tensor | None, sizes: dict[str, int], q: Tensor, sequences: Sequences
) -> Tensor | None:
    """The latents' log-decay, (B, T, H, L): at most 0, and 0 at masked tokens.

    Values are looked at on CPUs alone. NaN and -inf go on, to outputs that are NaN, as those of
    other inputs do: a model that diverges has them. What is below :data:`LEAST_DECAY` becomes it.
    """
    if log_decay is None:
        return None
    if not sequences.causal:
        raise ValueError(f"{op}: log_decay needs causal=True: a bidirectional latent has no past")
    check_floats(op, log_decay=log_decay)
    if log_decay.ndim == 2:
        check_shape(op, "log_decay", log_decay, "HL", sizes)
    else:
        check_shape(op, "log_decay", log_decay, "BTHL", sizes)
    if log_decay.device != q.device:
        raise ValueError(f"{op}: log_decay must be on {q.device}, got {log_decay.device}")
    if on_cpu(log_decay) and log_decay.numel():
        values = log_decay.detach()
        if (values > 0.0).any():
            largest = float(values[values > 0.0].max())
            raise ValueError(f"{op}: log_decay must be at most 0, got values up to {largest}")
        below = values < LEAST_DECAY
        if below.any():
            log_decay = log_decay.masked_fill(below & values.isfinite(), LEAST_DECAY)
    g_BTHL = log_decay.to(computation_dtype(q.dtype))
    if log_decay.ndim == 2:
        g_BTHL = g_BTHL.expand(sizes["B"], sizes["T"], *log_decay.shape)
    return without_masked(sequences.key_mask, g_BTHL)


def check_window_state(
    op: str,
    state: WindowState | None,
    window: int | None,
    N: int,
    k_BTGK: Tensor,
    v_BTGD: Tensor | None,
    oldest_alone: bool = False,
) -> WindowState | None:
    """The state fits the window (any length of tail if that is None); as wide as k and v.

    Without v, values are not read, and may have any width.

    Args:
        oldest_alone: Whether the state may hold the value of its oldest token alone.
    """
    if state is None:
        return None
    if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], Tensor):
        raise ValueError(
            f"{op}: initial_state must be a tuple (keys, values, mask), got {type(state).__name__}"
        )
    P = window - 1 if window is not None else state[0].shape[1] if state[0].ndim > 1 else 0
    if v_BTGD is None:
        v_BTGD = state[1] if isinstance(state[1], Tensor) else k_BTGK
    held = P
    if oldest_alone and isinstance(state[1], Tensor) and state[1].shape[1:2] == (1,):
        held = 1
    shapes = ((N, P, *k_BTGK.shape[2:]), (N, held, *v_BTGD.shape[2:]), (N, P))
    check_state(op, state, ("keys", "values", "mask"), shapes, k_BTGK.device)
    keys, values, mask = state
    if (
        isinstance(state, WindowState)
        and keys.dtype == k_BTGK.dtype
        and values.dtype == v_BTGD.dtype
    ):
        return state
    return WindowState(keys.to(k_BTGK.dtype), values.to(v_BTGD.dtype), mask)


def check_macchiato_state(
    op: str,
    state: MacchiatoState | None,
    sizes: tuple[int, int, int, int],
    window: int,
    delay: bool,
    latent_k_BTHL: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
) -> tuple[LatteState | None, WindowState | None, WindowState | None]:
    """The parts of a state, which fit N, H, L, D and the inputs; as wide as these.

    Latents, the window's tail and, with ``delay``, the sources that the latents have not read, with
    all their values.
    """
    if state is None:
        return None, None, None
    named = hasattr(state, "pending")
    parts: Any = (state.latent, state.window, state.pending) if named else state
    if getattr(state, "kept", None) is not None:
        raise ValueError(f"{op}: initial_state has kept tokens, but partition.kept does not")
    if named and parts == (None, None, None):
        return None, None, None
    given = [x for x in parts if x is not None] if isinstance(parts, tuple) else []
    if len(given) != 2 + delay or len(parts) not in (2, 3):
        came = f"{len(given)} parts" if isinstance(state, tuple) else type(state).__name__
        kind = "(LatteState, WindowState)"
        if delay:
            kind = "(LatteState, WindowState, WindowState), as delay=True makes it,"
        raise ValueError(f"{op}: initial_state must be the tuple {kind} that came out, got {came}")
    latents = check_latte_state(op, parts[0], sizes, k_BTGK)
    tail = check_window_state(op, parts[1], window, sizes[0], k_BTGK, v_BTGD)
    if not delay:
        return latents, tail, None
    pending = check_window_state(
        op, parts[2], window + 1, sizes[0], latent_k_BTHL, v_BTGD, oldest_alone=True
    )
    if pending is not None and tail is not None:
        pending = with_all_values(pending, tail)
    return latents, tail, pending


def check_partition(op: str, partition: Partition | None) -> Partition:
    """The division of the past; that of the paper if it is None."""
    if partition is None:
        return PAPER
    if not isinstance(partition, Partition):
        raise ValueError(f"{op}: partition must be a Partition, got {type(partition).__name__}")
    return partition


def sinks_alone(op: str, partition: Partition | None, kept: bool = False) -> Sinks | None:
    """The sinks of a window without latents. Only ``kept`` tokens are allowed beside them."""
    sinks, delay, joint, chosen = check_partition(op, partition)
    if delay or joint:
        raise ValueError(
            f"{op}: partition must have sinks alone, because there are no latents, got "
            f"delay={delay}, joint={joint}"
        )
    if chosen is not None and not kept:
        raise ValueError(f"{op}: partition.kept must be None here, got a {type(chosen).__name__}")
    return sinks


def check_sinks(
    op: str, sinks: Sinks | None, sizes: dict[str, int], N: int, q: Tensor, causal: bool
) -> Sinks | None:
    """Sinks fit the inputs; as wide as these."""
    if sinks is None:
        return None
    if not isinstance(sinks, tuple) or len(sinks) != len(Sinks._fields):
        raise ValueError(
            f"{op}: sinks must be a tuple ({', '.join(Sinks._fields)}), got {type(sinks).__name__}"
        )
    if not causal:
        raise ValueError(f"{op}: sinks need causal=True: a bidirectional window has no past")
    sinks = Sinks(*sinks)
    check_floats(op, **{"q": q, "sinks.q": sinks.q})
    sizes, letters = sizes | {"N": N}, ("BTHK", "NnGK", "NnGD", "Nn", "N")
    for name, shape, x in zip(Sinks._fields, letters, sinks, strict=True):
        if x is None:
            if name == "position":
                continue
            raise ValueError(f"{op}: sinks.{name} must be a tensor, got None")
        check_shape(op, f"sinks.{name}", x, shape, sizes)
        if x.device != q.device:
            raise ValueError(f"{op}: sinks.{name} must be on {q.device}, got {x.device}")
        if name in ("keys", "values") and x.dtype not in FLOATS:
            raise ValueError(f"{op}: sinks.{name} must be floating point, got {x.dtype}")
    if sinks.mask.dtype != torch.bool:
        raise ValueError(f"{op}: sinks.mask must be bool (True = a token), got {sinks.mask.dtype}")
    if sinks.position is not None and sinks.position.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: sinks.position must be int64, got {sinks.position.dtype}")
    if not sinks.mask.shape[1]:
        return None
    return sinks._replace(keys=sinks.keys.to(q.dtype), values=sinks.values.to(q.dtype))


def check_parameter(
    op: str, inputs: Tensor, sizes: dict[str, int], name: str, x: Tensor, letters: str
) -> None:
    """A parameter has this shape, any floating dtype, and the device of the inputs."""
    check_shape(op, name, x, letters, sizes)
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: {name} must be floating point, got {x.dtype}")
    if x.device != inputs.device:
        raise ValueError(f"{op}: {name} must be on {inputs.device}, got {x.device}")
