"""A step of decoding as a CUDA graph: captured once, then replayed without the host's calls.

``generate`` uses it on a GPU (:func:`why_not` decides). The cache is then static: its buffers keep
their addresses, and a step reads nothing but them and its inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latte.models.cache import LatteCache
from latte.models.cache_name import CACHE_NAME
from latte.ops.backend import steps_in_place
from latte.ops.notices import warn_once

DEVICE = "cuda"  # whose steps are captured
SETTING = "LATTE_CUDA_GRAPHS"  # in the environment; 0 captures nothing
FEWEST_STEPS = 32  # capturing waits for the GPU, and takes the host as long as a few steps


class CapturedStep:
    """The step of one cache: the second one is captured, and later ones like it are replayed.

    A step with other arguments, or of other shapes, runs as usual. A copy has captured nothing.
    """

    def __init__(self) -> None:
        self._replay: Callable[[], None] | None = None
        self._inputs: dict[str, Any] = {}
        self._output: Any = None
        self._warm = False
        self._able = True

    def __call__(self, model: Any, inputs: dict[str, Any]) -> Any:
        """The model's output. That of a replay is overwritten by the next one."""
        cache = inputs[CACHE_NAME]
        if self._replay is None and self._able and self._warm:
            self._capture(model, inputs, cache)
        if self._replay is None or not self._fits(inputs):
            output = model(**inputs)
            # The first step fills the buffers that stay, and shows whether it writes in place.
            self._warm = all(layer.is_written_in_place for layer in cache.layers)
            return output
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                self._inputs[name].copy_(x)
        self._replay()
        return self._output

    def _capture(self, model: Any, inputs: dict[str, Any], cache: LatteCache) -> None:
        kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
        try:
            self._replay, self._output = record(lambda: model(**kept))
            self._inputs = kept
        except Exception as error:  # noqa: BLE001 - whatever a model of the user's own calls
            self._able = False
            cache.forget_step()
            reason = str(error).strip().partition("\n")[0][:160]
            refuse(f"it cannot be captured ({type(error).__name__}: {reason})")

    def _fits(self, inputs: dict[str, Any]) -> bool:
        """Whether these differ from the captured inputs in the tensors' values alone."""
        return inputs.keys() == self._inputs.keys() and all(
            _alike(x, self._inputs[name]) for name, x in inputs.items()
        )

    def __deepcopy__(self, memo: Any) -> CapturedStep:
        return CapturedStep()

    def __reduce__(self) -> Any:
        return CapturedStep, ()


def _alike(x: Any, other: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    return x is other or (isinstance(x, (bool, int, float, str)) and x == other)


def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function that repeats the call on the device, and the output that it writes.

    Nothing is computed yet.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the GPU.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = call()
    return graph.replay, output


def refuse(reason: str) -> None:
    """Say once why a step is not captured."""
    warn_once(f"generate: no CUDA graph of a step, so a token takes longer: {reason}")


def why_not(model: Any, settings: Any, mode: str, new_tokens: int) -> str | None:
    """Why ``generate`` does not capture its steps; None if it does, "" if that needs no line.

    Args:
        model: Language model.
        settings: Its ``GenerationConfig``. ``cache_implementation="dynamic"``, ``disable_compile``
            and a ``compile_config`` are a user's choice of something else.
        mode: Name of the generation mode, such as ``"greedy_search"``.
        new_tokens: Largest number of new tokens.
    """
    chosen = settings.cache_implementation is not None or settings.compile_config is not None
    if model.device.type != DEVICE or os.environ.get(SETTING) == "0":
        return ""
    if chosen or settings.disable_compile or new_tokens < FEWEST_STEPS:
        return ""
    if not steps_in_place(DEVICE, True):
        return ""  # another backend was named
    decoder = model.model
    if any(decoder.config.state_grows(index) for index in range(decoder.config.num_hidden_layers)):
        return ""  # its static cache would read empty places too
    if mode not in ("greedy_search", "sample"):
        return f"expected greedy search or sampling, got {mode}"
    if settings.is_assistant:
        return ""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(settings, name, False):
            return f"expected {name}=False, got True"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "expected a model on one device, got one on several"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return f"{type(quantizer).__name__} cannot be captured"
    if torch.is_autocast_enabled(DEVICE):
        return "expected no autocast"
    if not decoder.steps:
        return "expected layers with a step of decoding, and without hooks"
    return None
