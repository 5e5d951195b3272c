"""Models with weights of 4 and 8 bits, by the machinery of Transformers.

A folder's ``config.json`` says which format the weights have:

    "quantization_config": {
        "quant_method": "latte", "weights": "int4", "others": {"model.embed_tokens": "int8", ...}
    }

So ``AutoModelForCausalLM.from_pretrained(folder)`` builds the modules of
:mod:`latte.layers.quantised` and reads their integers from the file. They are never widened.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from latte.errors import LatteError
from latte.layers.quantised import (
    Quantised,
    QuantisedEmbedding,
    QuantisedLinear,
    quantisable,
)
from latte.ops.quantised import FORMATS, GROUP, Integers, fits, quantise

METHOD = "latte"
NONE = "none"  # weights that are no integers


@register_quantization_config(METHOD)
class LatteQuantizationConfig(QuantizationConfigMixin):
    """Which weights are integers of which format.

        AutoModelForCausalLM.from_pretrained(folder, quantization_config=LatteQuantizationConfig())

    Args:
        weights: Format of the linear maps, ``"int4"`` or ``"int8"``. Embeddings and the head are
            ``int8``, and so are maps whose sizes do not fit ``int4``. Latents stay as they are, and
            so do weights whose rows are no multiple of 32.
        others: Formats of the modules that have another one, by name; ``"none"`` for weights that
            are no integers. Given, it is complete.
    """

    def __init__(
        self, weights: str = "int4", others: Mapping[str, str] | None = None, **_: Any
    ) -> None:
        if weights not in FORMATS:
            raise LatteError(f"weights: expected one of {', '.join(FORMATS)}, got {weights!r}")
        for name, kind in (others or {}).items():
            if kind not in (*FORMATS, NONE):
                raise LatteError(
                    f"others: expected one of {', '.join((*FORMATS, NONE))} for {name}, got"
                    f" {kind!r}"
                )
        self.quant_method: Any = METHOD
        self.weights = weights
        self.others = None if others is None else dict(others)

    @classmethod
    def of(cls, formats: Mapping[str, str]) -> LatteQuantizationConfig:
        """The configuration of modules with these formats."""
        usual = max(FORMATS, key=Counter(formats.values()).__getitem__)
        others = {name: kind for name, kind in formats.items() if kind != usual}
        return cls(usual, others)

    def formats(self, model: Any) -> dict[str, str]:
        """The format of each of the model's modules that have one, by name."""
        modules = quantisable(model)
        if self.others is not None:
            if unknown := sorted(self.others.keys() - modules.keys()):
                raise LatteError(
                    f"quantization_config: {unknown[0]} is no map or embedding of this model"
                )
            return {name: self.others.get(name, self.weights) for name in modules}
        ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        return {
            name: format_for(module, "int8" if id(module) in ends else self.weights)
            for name, module in modules.items()
        }


def format_for(module: nn.Module, wanted: str) -> str:
    """The format that a module gets: int8 for embeddings, and for sizes that int4 does not fit."""
    weight: Any = module.weight
    shape = weight.shape
    if isinstance(module, nn.Linear) and fits(wanted, *shape):
        return wanted
    return "int8" if fits("int8", *shape) else NONE


@register_quantizer(METHOD)
class LatteQuantizer(HfQuantizer):
    """Loads models with integer weights, and quantises others as they are loaded."""

    quantization_config: LatteQuantizationConfig
    is_trainable = True  # adapters and latents; integers have no gradients
    is_qat_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The state dict without tied tensors, of which Transformers knows only weights."""
        tied = model.all_tied_weights_keys
        return {name: x for name, x in model.state_dict().items() if name not in tied}, {}

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            formats = self.quantization_config.formats(model)
            _replace(model, {n: k for n, k in formats.items() if k != NONE}, _empty)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if not self.pre_quantized:
            quantise_model(model, self.quantization_config.formats(model))
        _prepare(model)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        kind: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        before = model.dtype
        for name, module in list(model.named_modules()):
            if isinstance(module, Quantised):
                _put(model, name, module.original(kind))
        for name in [name for name in model.all_tied_weights_keys if name.endswith(".scales")]:
            del model.all_tied_weights_keys[name]
        model.tie_weights()
        kept = model._keep_in_fp32_modules_strict or ()
        for name, x in model.named_parameters():
            if x.dtype == before and not any(f".{part}." in name for part in kept):
                x.data = x.data.to(kind)
        return model


def quantise_model(
    model: Any,
    formats: Mapping[str, str],
    found: Callable[[str], Integers | None] = lambda _: None,
) -> Any:
    """Put integers in the place of a model's weights; returns the model.

    Args:
        formats: Formats by the names of modules.
        found: The integers of a module by its name; None where they are those nearest to its
            weights.
    """

    def integers(name: str, module: Any, kind: str) -> Integers:
        weight, scales = found(name) or quantise(module.weight, kind)
        return Integers(weight, scales.to(module.weight.dtype))

    _replace(model, {n: k for n, k in formats.items() if k != NONE}, integers)
    config = LatteQuantizationConfig.of(formats)
    model.hf_quantizer = LatteQuantizer(config, pre_quantized=True)
    model.config.quantization_config = config
    model.is_quantized, model.quantization_method = True, METHOD
    _prepare(model)
    return model


def _empty(_: str, module: Any, kind: str) -> Integers:
    """Integers of a module on the device "meta", to be read from a file."""
    outputs, inputs = module.weight.shape
    new = module.weight.new_empty
    if kind == "int8":
        return Integers(new((outputs, inputs), dtype=torch.int8), new((inputs // GROUP, outputs)))
    weight = new((outputs, inputs // 2), dtype=torch.uint8)
    return Integers(weight, new((inputs // GROUP, outputs, 2)))


def _replace(model: Any, formats: Mapping[str, str], integers: Callable[..., Integers]) -> None:
    """Put quantised modules in the place of others. Tied weights stay so."""
    modules = quantisable(model)
    made: dict[int, Any] = {}
    for name, kind in formats.items():
        module = modules[name]
        best = format_for(module, kind)
        if best != kind:
            raise LatteError(
                f"quantization_config: {name} of shape {tuple(module.weight.shape)} cannot be"
                f" {kind}; expected {best}, or a linear map with multiples of 16 and {GROUP}"
            )
        own: Any = QuantisedLinear if isinstance(module, nn.Linear) else QuantisedEmbedding
        key = id(module.weight)
        if key in made and not module.weight.is_meta:
            first = made[key]
            new = own(Integers(first.weight, first.scales), module)
            new.weight, new.scales = first.weight, first.scales
        else:
            new = made[key] = own(integers(name, module, kind), module)
        _put(model, name, new)
    for target, source in list(model.all_tied_weights_keys.items()):
        if target.rpartition(".")[0] in formats and source.rpartition(".")[0] in formats:
            both = (x.removesuffix("weight") + "scales" for x in (target, source))
            model.all_tied_weights_keys |= [tuple(both)]


def _put(model: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    module.train(model.training)
    setattr(model.get_submodule(parent), own, module)


def _prepare(model: Any) -> None:
    """Integers in the order of the kernels; one line where there is none for them."""
    modules = [module for module in model.modules() if isinstance(module, Quantised)]
    orders: dict[int, int] = {}
    for module in modules:
        if id(module.weight) in orders:  # tied
            module.block = orders[id(module.weight)]
        module.prepare()
        orders[id(module.weight)] = module.block
    if any(module.weight.is_cpu and not module.block for module in modules):
        warnings.warn(
            "the weights are in 4 and 8 bits, and there is no fast kernel for all of them on this"
            " CPU (see `latte doctor`): every token dequantises them; dequantise them once with"
            " --dtype bfloat16, or model.dequantize()",
            stacklevel=2,
        )
