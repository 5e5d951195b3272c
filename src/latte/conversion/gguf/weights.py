"""The weights of a GGUF file, dequantised, under the names and in the orders of Transformers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from latte.conversion.gguf.file import GgufFile, shown
from latte.errors import LatteError, one_line
from latte.models.hub import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

ROTATION = "rope_freqs.weight"  # read as part of the configuration


def gguf_model(file: GgufFile, config: Any, dtype: Any = "auto") -> Any:
    """The file's model, dequantised: a plain model that can be trained and saved.

    Args:
        config: Configuration from :func:`gguf_config`.
        dtype: Dtype of all weights. ``auto`` is bf16 for quantised weights, else the file's.

    Raises:
        LatteError: Weights are missing, are more than the model has, or have other shapes than the
            configuration says.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    wanted = file.dtype if dtype == "auto" else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    places = _places(file, config, made.state_dict())
    weights = {name: _weight(file, config, *place).to(kind) for name, place in places.items()}
    with quiet_transformers():
        try:
            model, found = type(made).from_pretrained(
                None, config=config, state_dict=weights, dtype=kind, output_loading_info=True
            )
        except (ValueError, RuntimeError, KeyError) as error:
            raise LatteError(
                f"the weights of {file.path} cannot be read: {one_line(error)}"
            ) from None
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    model.name_or_path = model.config._name_or_path = str(file.path)
    return model.eval()


def _places(
    file: GgufFile, config: Any, expected: dict[str, Tensor]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names in Transformers -> (name in the file, shape), if the file has just these weights.

    Biases may be missing: they are zero then, as in llama.cpp.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(arch, config.num_hidden_layers)
    places = {}
    for name, weight in expected.items():
        stem, _, suffix = name.rpartition(".")
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            places[name] = (f"{known.get_name(stem)}.{suffix}", tuple(weight.shape))
    names = {name for name, _ in places.values()}
    unknown = [name for name in file.tensors if name not in names and name != ROTATION]
    if unknown:
        raise LatteError(
            f"{file.path} has weights that a {file.architecture} decoder of Transformers does not"
            f" know: {shown(unknown[0])}" + f" and {len(unknown) - 1} more" * (len(unknown) > 1)
        )
    for name, shape in places.values():
        if name not in file.tensors and not name.endswith(".bias"):
            raise LatteError(f"{file.path} lacks weights: {name}")
        if name in file.tensors and file.tensors[name][1] != shape:
            raise LatteError(
                f"{file.path}: {name} has the shape {list(file.tensors[name][1])}; expected"
                f" {list(shape)}, by its metadata"
            )
    return places


def _weight(file: GgufFile, config: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    """One weight in fp32, as the base's own file would have it."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape, quants

    if name not in file.tensors:
        return torch.zeros(shape)
    of = GGMLQuantizationType(file.tensors[name][0])
    data = np.memmap(
        file.path, np.uint8, "r", file.offsets[name], quant_shape_to_byte_shape(shape, of)
    )
    weight = torch.from_numpy(np.array(quants.dequantize(data, of), np.float32))
    if file.architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        # In the file, the halves of a head that rotate together are neighbours.
        weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(shape)
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight - 1
    return weight
