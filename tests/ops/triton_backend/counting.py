"""Number of kernels that a call would launch on a GPU, found on a CPU.

The call runs on CPU tensors along the paths of a GPU: our launches go to a stub, and each of
PyTorch's operations that would start a kernel counts as one. Results are whatever memory held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from latte.layers import projections, recomputation, recurrent
from latte.ops import cpp_backend, pointwise, use_backend
from latte.ops.torch_backend import pointwise as torch_pointwise
from tests.ops.triton_backend.launches import launching

# Operations that only allocate, or only look at memory in another way.
FREE = {
    *("alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided"),
    *("expand", "new_empty", "new_empty_strided", "permute", "select", "slice", "split", "squeeze"),
    *("split_with_sizes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "view_as_real"),
    *("is_same_size", "sym_size", "prim", "unsafe_split", "unsafe_chunk", "promote_types"),
}
# They start more than one kernel: the gradients of a norm's input and weight have one each. What a
# product is added to is copied first, unless that is done in place.
SEVERAL = {"native_layer_norm_backward": 2, "addmm": 2, "baddbmm": 2}
# They wait for the GPU.
WAITS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal"}


class Count(TorchDispatchMode):
    """The operations of a block, by name, ours included; ``waits`` are synchronisations."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "latte":
            inside = OPDEFS[func.name()]._init_fn
            with self:  # what it launches counts, by Triton or by PyTorch
                return inside(*args, **kwargs or {})
        if name in WAITS:
            self.waits[name] += 1
        elif name == "_to_copy" or name not in FREE and func.namespace in ("aten", "prims"):
            self.launched[name] += SEVERAL.get(name, 1)
        return func(*args, **kwargs or {})

    def launch(self, name: str, kernel: Any, args: Any, options: Any) -> None:
        self.launched[name] += 1

    @property
    def total(self) -> int:
        return self.launched.total()


@contextmanager
def as_on_a_gpu(count: bool = True) -> Iterator[Count]:
    """Our calls take the paths of a GPU. They are counted, unless they are to be compiled."""
    found = Count()
    with launching(found.launch) as patch, use_backend("triton", everywhere=True):
        on_a_gpu(patch)
        with found if count else nullcontext():
            yield found


def on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """No kernels for CPUs; the norm is one kernel, as CUDA's is."""
    patch.setattr(cpp_backend, "ABSENT", "as on a GPU")
    patch.setattr(cpp_backend, "WARNS", False)
    for module in (pointwise, torch_pointwise, recomputation):
        patch.setattr(module, "on_cpu", _on_a_gpu)
    for module in (recurrent, projections):
        patch.setattr(module, "on_gpu", lambda x: _on_a_gpu(x, True))
    patch.setattr(F, "rms_norm", _one_kernel)


def _on_a_gpu(x: Any, or_gpu: bool = False) -> bool:
    return or_gpu and not torch.compiler.is_compiling()


def _one_kernel(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    return F.layer_norm(x, shape, weight, None, eps)
