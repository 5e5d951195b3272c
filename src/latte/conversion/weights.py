"""The weights of a converted model in 4 and 8 bits: a GGUF file's own, or rounded anew.

``file`` keeps the file's bits where the kernels have such a format. Blocks of Q4_0, Q4_1 and Q4_K
become ``int4`` one to one, and those of Q8_0 ``int8``: the integers are the file's, scale and zero
are rounded to bf16. All other quantised matrices (Q6_K, Q5, Q3, ...), embeddings, and what ``int4``
does not fit become ``int8`` too, from the dequantised weights. So do matrices that training has
changed: 4 bits of the sum would lose most of a small update. Plain matrices stay.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

from latte.conversion.gguf import FOUR_BITS, PLAIN, gguf_at, gguf_config, gguf_matrices, open_gguf
from latte.conversion.modeling import NEW_WEIGHTS
from latte.errors import LatteError
from latte.layers.quantised import quantisable
from latte.models.quantizer import (
    NONE,
    LatteQuantizationConfig,
    format_for,
    quantise_model,
)
from latte.ops.quantised import FORMATS, Integers, four_bits, quantise

FILE, BFLOAT16 = "file", "bfloat16"
WEIGHTS = (FILE, BFLOAT16, *FORMATS)


def weights_dtype(weights: str | None, base: str | Path, dtype: Any) -> Any:
    """The dtype in which a base is read, for weights that are wanted.

    Raises:
        LatteError: The weights are unknown, do not go with the dtype, or the base has no such.
    """
    if weights is None:
        return dtype
    if weights not in WEIGHTS:
        raise LatteError(f"weights: expected one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights == FILE:
        file = gguf_at(base)
        if file is None:
            raise LatteError(
                f"weights=file keeps the bits of a GGUF file: expected one as the base, got {base}"
            )
        if not set(open_gguf(file).kinds) - set(PLAIN):
            raise LatteError(
                f"weights=file: {file} has no quantised weights; expected one of"
                f" {', '.join(WEIGHTS[1:])}"
            )
    if dtype == "auto":
        return BFLOAT16  # in which the kernels multiply
    if weights == BFLOAT16 and dtype not in (BFLOAT16, torch.bfloat16):
        raise LatteError(f"weights=bfloat16 and dtype={dtype}: expected one of them")
    return dtype


def in_bits(model: Any, weights: str | None, base: str | Path, changed: Container[str] = ()) -> Any:
    """Put the weights of a model in plain weights into integers, in place; returns the model.

    Args:
        weights: One of :data:`WEIGHTS`, or None.
        base: Base of the model, for ``file``.
        changed: Names of weights that are no more the file's. With ``file`` they become ``int8``.
    """
    if weights is None or weights == BFLOAT16:
        return model
    if weights != FILE:
        return quantise_model(model, LatteQuantizationConfig(weights).formats(model))
    path = gguf_at(base)
    assert path is not None
    file = open_gguf(path)
    config = gguf_config(file)
    expected = {name: x for name, x in model.state_dict().items() if NEW_WEIGHTS not in name}
    matrices = gguf_matrices(file, config, expected)
    if config.tie_word_embeddings:
        matrices["lm_head.weight"] = matrices["model.embed_tokens.weight"]
    modules = quantisable(model)
    formats = {
        name: _format(module, matrices[f"{name}.weight"].kind, f"{name}.weight" in changed)
        for name, module in modules.items()
    }
    if config.tie_word_embeddings:
        formats["lm_head"] = formats["model.embed_tokens"]

    def found(name: str) -> Integers | None:
        matrix = matrices[f"{name}.weight"]
        if f"{name}.weight" in changed:
            return None
        if formats[name] == "int8":
            return quantise(matrix.weight(), "int8")
        q, scale, least = matrix.blocks()
        return four_bits(q, scale, least + 8 * scale)

    return quantise_model(model, formats, found)


def _format(module: Any, kind: str, changed: bool) -> str:
    if kind in PLAIN:
        return NONE
    return format_for(module, "int4" if kind in FOUR_BITS and not changed else "int8")
