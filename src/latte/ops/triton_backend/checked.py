"""On which GPUs the Triton kernels are the default: what was checked there, and the rule.

``checked.csv`` has a row for each card, op and dtype all of whose checks passed on a GPU
(``experiments.benchmarks.gpu_check`` writes it). The kernels are the default for inputs like those
of a row. Everywhere else ``"torch"`` is, and one warning says which condition failed and how to
meet it. :func:`refusal` is the rule. Its answer is kept, so a call looks it up.

A row is about one card by compute capability, times ten, and holds up to its widths: the number of
latents, the width of a window's keys, and that of the values. The kernels of single tokens have
rows of their own. These, the RG-LRU and the convolution have no products, so any assembler will do.

This file loads without Triton, and imports it for CUDA tensors alone.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops.arguments import Convolution, Latte
from latte.ops.notices import constant_in_graphs, warn_once
from latte.ops.triton_backend import launch

GPU = "cuda"  # the type of the devices that the rule is about
TABLE = Path(__file__).with_name("checked.csv")


class Form(NamedTuple):
    """An op, and which of its forms a call has: each has kernels or branches of its own."""

    op: str
    causal: bool = True
    decays: bool = False
    divided: bool = False  # with sinks, delayed latents or a joint softmax


# The checks of ``tests/ops/gpu_correctness.py`` by name, and the form that each is about.
FORMS = {
    "latte": Form("latte_attention"),
    "forgetting": Form("latte_attention", decays=True),
    "bidirectional": Form("latte_attention", causal=False),
    "macchiato": Form("macchiato_attention"),
    "macchiato-forgetting": Form("macchiato_attention", decays=True),
    "macchiato-bidirectional": Form("macchiato_attention", causal=False),
    "converted": Form("macchiato_attention", divided=True),
    "delayed-forgetting": Form("macchiato_attention", decays=True, divided=True),
    # With decay or without it: the kernels are the same.
    "kept": Form("macchiato_attention with kept tokens", divided=True),
    "kept-window": Form("sliding_window_attention with kept tokens", divided=True),
    "window": Form("sliding_window_attention"),
    "window-sinks": Form("sliding_window_attention", divided=True),
    "window-bidirectional": Form("sliding_window_attention", causal=False),
    "rg_lru": Form("rg_lru"),
    "rg_lru-reversed": Form("rg_lru", causal=False),
    "conv": Form("causal_conv1d"),
    "rotation": Form("rotate"),
    "silu-product": Form("silu_product"),
    "residual-norm": Form("add_rms_norm"),
}
NAMES = {form: name for name, form in FORMS.items()}
WITHOUT_PRODUCTS = ("rg_lru", "conv", "rotation", "silu-product", "residual-norm")
# Which input of an op has L, K and D as its last size.
WIDTHS: dict[str, dict[str, int]] = {
    "latte_attention": {"L": 0, "D": 2},
    "macchiato_attention": {"L": 1, "K": 2, "D": 4},
    "macchiato_attention with kept tokens": {"L": 1, "K": 2, "D": 4},
    "sliding_window_attention": {"K": 0, "D": 2},
    "sliding_window_attention with kept tokens": {"K": 0, "D": 2},
    "rotate": {"K": 0},
}


class Checked(NamedTuple):
    """One row: kernels that passed every check on a card, at most this wide."""

    card: int  # compute capability times ten
    name: str  # of FORMS
    step: bool  # the kernel of single tokens; else those of whole sequences
    dtype: str
    L: int
    K: int
    D: int
    checks: int  # that passed
    device: str
    torch: str
    triton: str
    ptxas: str
    date: str


class Machine(NamedTuple):
    """What the rule asks of a device."""

    card: int  # 0 for a GPU of another maker
    triton: str  # one of `launch.triton_mode`
    ptxas: str | None


def read(path: Path = TABLE) -> list[Checked]:
    """The rows of a table."""
    numbers = ("card", "L", "K", "D", "checks")
    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row |= {name: int(row[name]) for name in numbers} | {"step": row["step"] == "yes"}
    return [Checked(**row) for row in rows]


def write(rows: list[Checked], path: Path = TABLE) -> None:
    """A table of these rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Checked._fields)
        writer.writerows(row._replace(step="yes" if row.step else "no") for row in sorted(rows))  # type: ignore[arg-type]


# --- the rule --------------------------------------------------------------------------------


def refusal(
    form: Form, step: bool, device: torch.device, dtype: torch.dtype, **widths: int
) -> str | None:
    """Why the kernels are not the default here, and how to change that; None if they are.

    Args:
        step: Whether the call is a step of decoding, which has a kernel of its own.
        device: A CUDA device.
        widths: The call's L, K and D, as far as it has them.
    """
    found = _widest(*form, step, device, dtype)
    if isinstance(found, str):
        return found
    most, products = dict(zip("LKD", found, strict=False)), found[3]
    for name, width in widths.items():
        if width > most[name]:
            return (
                f"{form.op} was checked up to {name} = {most[name]} here, not for {name} = {width}"
            )
    return _trial(device, products)


def refused_call(
    op: str, form: tuple[Any, ...], step: bool, device: torch.device, inputs: tuple[Any, ...]
) -> str | None:
    """:func:`refusal` of a call: is it causal, its decays or None, is its past divided."""
    causal, decay, divided = form
    which = Form(op, causal, decay is not None, divided)
    widths = {name: inputs[place].shape[-1] for name, place in WIDTHS.get(op, {}).items()}
    return refusal(which, step, device, inputs[0].dtype, **widths)


def warn(reason: str) -> None:
    """Say once in a process why ``"torch"`` is the default; "" says nothing."""
    if reason:
        warn_once(
            f"latte: 'torch' is used on this GPU, not the Triton kernels: {reason} "
            "(LATTE_BACKEND=triton takes the kernels all the same, LATTE_BACKEND=torch is silent)"
        )


def differentiated_forward() -> bool:
    """Whether this is a transform of ``torch.func`` or forward mode, which custom ops lack."""
    if torch.compiler.is_compiling():
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return transformed or forward_ad._current_level >= 0


def refused_card(device: torch.device, products: bool = True) -> str | None:
    """Why no kernel, with or without products, is the default on this GPU; None if some are.

    It starts no kernel.
    """
    if (found := machine(device)) is None:
        return ""  # tensors without a GPU, such as those of fake modes
    card, triton, ptxas = found
    if card == 0:
        return "the kernels were checked on NVIDIA GPUs alone"
    if triton == "missing":
        return "Triton is not installed: pip install triton"
    if triton == "interpreter":
        return "TRITON_INTERPRET is set, whose interpreter is for tests"
    cards = sorted({row.card for row in _rows()})
    if card < launch.OLDEST:
        return f"compute capability {card / 10}, the kernels need {launch.OLDEST / 10} or newer"
    if card not in cards:
        known = ", ".join(str(c / 10) for c in cards) or "none"
        return f"compute capability {card / 10}, checked so far: {known}; `make gpu-check` checks"
    if products and card == launch.HOPPER and launch.older(ptxas):
        return (
            f"Triton's ptxas is {ptxas or 'unknown'}, {launch.OLDEST_ASSEMBLER} or newer is needed:"
            " pip install 'triton>=3.8', or set TRITON_PTXAS_PATH (docs/gpu.md)"
        )
    return None


@functools.cache
def machine(device: torch.device) -> Machine | None:
    """The GPU and its software; None without one. Imports Triton, and starts its assembler once."""
    if not torch.cuda.is_available():
        return None
    card = 0 if torch.version.hip is not None else launch.capability(device)
    return Machine(card, launch.triton_mode(), launch.assembler())


@functools.cache
def _rows() -> list[Checked]:
    return read()


@functools.cache
def _kept_widest(
    form: Form, step: bool, device: torch.device, dtype: torch.dtype
) -> tuple[int, int, int, bool] | str:
    name = NAMES.get(form)
    products = name not in WITHOUT_PRODUCTS and not step
    if (reason := refused_card(device, products)) is not None:
        return reason
    there = machine(device)
    assert there is not None
    own, precision = there.card, str(dtype).removeprefix("torch.")
    same = [r for r in _rows() if r.card == own and r.name == name and r.step == step]
    for row in same:
        if row.dtype == precision:
            return row.L, row.K, row.D, products
    what = f"{form.op} {_words(form, step)}".strip()
    checked = ", ".join(sorted(row.dtype for row in same)) or "no dtype"
    return f"{what} passed all checks on {own / 10} in {checked}, not in {precision}"


def _words(form: Form, step: bool) -> str:
    words = [
        "" if form.causal else "in both directions",
        "with decay" if form.decays else "",
        "with sinks, delayed latents or joint softmax" if form.divided else "",
        "of single tokens" if step else "",
    ]
    return " ".join(word for word in words if word)


@constant_in_graphs
def _widest(
    op: str,
    causal: bool,
    decays: bool,
    divided: bool,
    step: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[int, int, int, bool] | str:
    """The most L, K and D that were checked, and whether there are products; or the refusal."""
    return _kept_widest(Form(op, causal, decays, divided), step, device, dtype)


# --- the trial -------------------------------------------------------------------------------


@constant_in_graphs
def _trial(device: torch.device, products: bool) -> str | None:
    """Why a small call fails on this GPU, or None; asked once in a process.

    A broken compiler or driver is found so, and wrong products are, before a user's call meets
    them. While a graph is captured or traced nothing can be tried; the kernels are then used.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing or torch._C._len_torch_dispatch_stack():
        return None
    return _kept_trial(device, products)


@functools.cache
def _kept_trial(device: torch.device, products: bool) -> str | None:
    try:
        with torch.no_grad():
            off = tried_products(device) if products else tried_sums(device)
    except Exception as error:  # noqa: BLE001 - of a compiler, a driver or a linker
        lines = str(error).strip().splitlines() or [""]
        return f"a first call of the kernels failed, {type(error).__name__}: {lines[0][:200]}"
    # At most four times what bf16's factors, or fp32's sums, are rounded by.
    allowed = 2.0**-6 if products else 2.0**-18
    return None if off <= allowed else f"a first call of the kernels errs by {off:.1e}"


def _waves(device: torch.device, *shape: int, start: float = 0.0) -> Tensor:
    """Numbers in [-1, 1] that use up no random numbers."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, device=device) * 0.7 + start).view(shape)


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def tried_products(device: torch.device, T: int = 130) -> float:
    """Relative error of causal Latte in bf16, over the first three chunks."""
    from latte.ops import reference, triton_backend

    L, D = 32, 64
    q, k = (_waves(device, 1, T, 2, L, start=s).bfloat16() for s in (0.0, 1.0))
    v = _waves(device, 1, T, 2, D, start=2.0).bfloat16()
    none = (None,) * 5
    found = triton_backend.latte_attention(Latte(q, k, v, *none), True)[0]
    exact = Latte(q.float(), k.float(), v.float(), *none)
    return _error(found.float(), reference.latte_attention(exact, True)[0])


def tried_sums(device: torch.device, T: int = 130) -> float:
    """Relative error of a convolution in fp32."""
    from latte.ops import reference, triton_backend

    x, weight = _waves(device, 1, T, 32), _waves(device, 32, 4, start=1.0)
    call = Convolution(x, weight, None, None, None, None)
    return _error(triton_backend.causal_conv1d(call)[0], reference.causal_conv1d(call)[0])
