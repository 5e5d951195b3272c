"""flash-linear-attention without a GPU: its kernels in Triton's interpreter, on CPU tensors.

They run with ``TRITON_INTERPRET=1`` set before Triton is imported; without it the tests of this
folder are not collected, and ``test_interpreted.py`` starts them in a process of their own. What is
patched here is patched for these tests alone: the library and ours stay as they are.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.triton_interpreter import speed_up_interpreter

TESTS = ["test_models.py", "test_layers.py"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FOUND = all(importlib.util.find_spec(name) for name in ("fla", "triton"))
collect_ignore = [] if INTERPRETED and FOUND else TESTS
speed_up_interpreter()


class Index(int):
    """A loop's counter with `.to`, which kernels may call and plain integers lack."""

    def to(self, dtype: Any) -> Any:
        from triton.runtime import interpreter

        return interpreter.interpreter_semantic.to_tensor(int(self), False).to(dtype)


def indices(*bounds: Any) -> Iterator[Index]:
    return map(Index, builtins.range(*map(int, bounds)))


def of_the_cpu(decorate: Any) -> Any:
    """A decorator of PyTorch's for autocast, whichever device it is asked for."""
    return lambda *of, device_type, **more: decorate(*of, device_type="cpu", **more)


@pytest.fixture(scope="module", autouse=True)
def kernels_on_a_cpu() -> Iterator[None]:
    """Import the library so that its kernels run in the interpreter."""
    if not (INTERPRETED and FOUND):
        yield
        return
    import torch
    from triton.runtime import autotuner, interpreter

    create = autotuner.Autotuner.__init__

    def take_the_first(
        self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **more: Any
    ) -> Any:
        # Timing several needs a GPU.
        create(self, fn, names, configs[:1], *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner.Autotuner, "__init__", take_the_first)
        # What this module names, kernels find.
        patch.setattr(interpreter, "range", indices, raising=False)
        # Backward passes restore the autocast of "cuda", by name.
        for name in ("custom_fwd", "custom_bwd"):
            patch.setattr(torch.amp, name, of_the_cpu(getattr(torch.amp, name)))
        importlib.import_module("fla")
        # A minute of compiling, of one activation.
        with torch.compiler.set_stance("force_eager"):
            yield


@pytest.fixture(autouse=True)
def nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own code asks for a GPU, since nobody would train in an interpreter."""
    from latte.lab.baselines.catalogue import Baseline

    if INTERPRETED and FOUND:
        monkeypatch.setattr(Baseline, "missing", lambda _: None)
