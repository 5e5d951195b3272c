"""The weights of a GGUF file under the names and in the orders of Transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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


# Types whose blocks are 4-bit integers with a scale and a least value for each 32 weights.
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
PLAIN = ("F32", "F16", "BF16", "F64")


class Matrix(NamedTuple):
    """A matrix of a file, read when it is asked for.

    Attributes:
        kind: Type in ggml, by its name.
        weight: Gives the dequantised weights (N, K), fp32.
        blocks: Gives the integers (N, K) of a type of :data:`FOUR_BITS`, uint8, with scales and
            least values (N, K / 32), fp32: ``w = scale q + least``.
    """

    kind: str
    weight: Callable[[], Tensor]
    blocks: Callable[[], tuple[Tensor, Tensor, Tensor]]


def gguf_matrices(file: GgufFile, config: Any, expected: dict[str, Tensor]) -> dict[str, Matrix]:
    """The file's matrices by their names in Transformers.

    Args:
        config: Configuration from :func:`gguf_config`.
        expected: State dict of the plain model.
    """
    from gguf import GGMLQuantizationType

    found = {}
    for name, place in _places(file, config, expected).items():
        if len(place[1]) == 2 and place[0] in file.tensors:
            given: Any = file, config, *place
            kind = GGMLQuantizationType(file.tensors[place[0]][0]).name
            found[name] = Matrix(kind, partial(_weight, *given), partial(_blocks, *given))
    return found


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
    from gguf import GGMLQuantizationType, quants

    if name not in file.tensors:
        return torch.zeros(shape)
    of = GGMLQuantizationType(file.tensors[name][0])
    weight = torch.from_numpy(
        np.array(quants.dequantize(_bytes(file, name, shape), of), np.float32)
    )
    weight = _rows(file, config, name, weight)
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight - 1
    return weight


def _blocks(
    file: GgufFile, config: Any, name: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of a weight of 4 bits, as in :class:`Matrix`."""
    import numpy as np
    import torch
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import Q4_K

    of = GGMLQuantizationType(file.tensors[name][0])
    data = np.ascontiguousarray(_bytes(file, name, shape)).reshape(-1, GGML_QUANT_SIZES[of][1])

    def numbers(first: int) -> Any:  # fp16, one a block
        return data[:, first : first + 2].copy().view(np.float16).astype(np.float32)

    scale = numbers(0)
    if of.name == "Q4_K":  # eight groups a block, of which two share the bytes of their integers
        own, least = (x.astype(np.float32) for x in Q4_K.get_scale_min(data[:, 4:16]))
        scale, least = scale * own, -numbers(2) * least
        pairs = data[:, 16:].reshape(len(data), 4, 32)
    else:
        least = numbers(2) if of.name == "Q4_1" else -8 * scale
        pairs = data[:, -16:].reshape(len(data), 1, 16)
    q = np.stack([pairs & 15, pairs >> 4], 2)
    parts = q.reshape(shape), scale.reshape(shape[0], -1), least.reshape(shape[0], -1)
    return tuple(_rows(file, config, name, torch.from_numpy(x)) for x in parts)  # type: ignore


def _bytes(file: GgufFile, name: str, shape: tuple[int, ...]) -> Any:
    import numpy as np
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    sizes = quant_shape_to_byte_shape(shape, GGMLQuantizationType(file.tensors[name][0]))
    return np.memmap(file.path, np.uint8, "r", file.offsets[name], sizes)


def _rows(file: GgufFile, config: Any, name: str, x: Tensor) -> Tensor:
    """Rows in the order of Transformers. In a file, those that rotate together are neighbours."""
    if file.architecture == "llama" and re.search(r"\.attn_[qk]\.", name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)
    return x
