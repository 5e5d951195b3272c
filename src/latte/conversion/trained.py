"""The trained weights of a converted model as a file, without the base's weights.

The file has a few MB. With it and the base, the converted model is made without training. It is in
safetensors format, and holds the latents' weights, the low-rank updates of the base's projections
if there are any, the fields of the configuration that converting adds, a sample of the base's
weights, so that another base is refused, and a checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from latte.conversion.config import OWN_FIELDS
from latte.conversion.modeling import NEW_WEIGHTS
from latte.conversion.pretrained import (
    check_output,
    converted_config,
    load_base,
    load_tokenizer,
    read_config,
    save,
)
from latte.conversion.weights import in_bits, weights_dtype
from latte.errors import LatteError
from latte.models.atomic_files import check_new_file
from latte.models.state_file import weight_sample
from latte.models.tensor_file import check_finite, damaged, read_tensors, write_tensors
from latte.ops.tensors import computation_dtype

KIND = "latents"
# Fields that say how a model is used or where it comes from, not which weights it has.
NOT_KEPT = ("converted_layers", "converted_from", "mixing")


@torch.no_grad()
def save_latents(
    model: Any,
    path: str | Path,
    *,
    base: str | Path | None = None,
    rank: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the latents of a converted model to a file.

        model = AutoModelForCausalLM.from_pretrained("runs/smollm2", dtype="auto")
        save_latents(model, "latents.safetensors", base="SmolLM2-135M-Instruct.Q4_1.gguf")

    Args:
        model: Converted language model.
        path: New file.
        base: Base of the model, as for :func:`latte.conversion.convert`. It is needed if weights of
            the base were trained too (stage ``training`` of a recipe): the file then has their
            updates, as products of two matrices. Without it :func:`apply_latents` refuses the file
            of such a model.
        rank: Rank of the updates, ``conversion.lora_rank`` of the recipe.
        dtype: Dtype of the weights in the file.

    Raises:
        LatteError: The model is not a converted one, its weights differ from the base's by more
            than updates of that rank, or the path exists or cannot be written.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise LatteError(
            "the model's weights are quantised: expected the one that it was made from, in plain"
            " weights"
        )
    fields = model.config.to_dict()
    tensors = {
        name: x.to("cpu", dtype).contiguous()
        for name, x in model.state_dict().items()
        if NEW_WEIGHTS in name
    }
    if not tensors:
        raise LatteError(
            f"expected a converted model, got {type(model).__name__}: it has no latents"
        )
    path = check_new_file(path, "latents")
    kept = {name: fields[name] for name in OWN_FIELDS if name not in NOT_KEPT}
    about = {
        "fields": json.dumps(kept | {"keep_layers": model.config.keep_layers}),
        "base": model.config.converted_from or "",
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if base is None:
        tensors["sample"] = _base_sample(model)
    else:
        plain = load_base(base, model.config, dtype=model.dtype)
        tensors["sample"] = _base_sample(plain)
        tensors |= {name: x.to(dtype) for name, x in _updates(model, plain, rank).items()}
    write_tensors(path, tensors, about, KIND)


def _updates(model: Any, base: Any, rank: int) -> dict[str, Tensor]:
    """The factors of each matrix that was trained: ``NAME.up`` (M, rank), ``NAME.down`` (rank, E).

    Merging an update into a half-precision weight rounds the sum, so what is left of the difference
    may be as large as that.
    """
    found: dict[str, Tensor] = {}
    before = dict(base.named_parameters())
    for name, weight in model.named_parameters():
        if NEW_WEIGHTS in name or torch.equal(weight, before[name]):
            continue
        wide = computation_dtype(weight.dtype)
        change = weight.to(wide) - before[name].to(wide)
        if weight.ndim == 2:
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            up, down = u[:, :rank] * s[:rank].sqrt(), s[:rank, None].sqrt() * v[:rank]
            left, rounding = (change - up @ down).norm(), torch.finfo(weight.dtype).eps
            if left <= 0.01 * change.norm() + rounding * weight.to(wide).norm():
                found |= {f"{name}.up": up.contiguous(), f"{name}.down": down.contiguous()}
                continue
        raise LatteError(
            f"{name} differs from the base's by more than an update of rank {rank}: expected only"
            " low-rank updates (conversion.trainable: lora, and its lora_rank)"
        )
    return found


def apply_latents(
    base: str | Path,
    latents: str | Path,
    output: str | Path | None = None,
    *,
    window: int | None = None,
    keep_layers: Sequence[int] = (),
    kept_window: int | Literal["all"] | None = None,
    kept_tokens: int | Sequence[int] | None = None,
    kept_half_life: float | None = None,
    kept_dtype: str | None = None,
    kept_range: int | None = None,
    dtype: str | torch.dtype = "auto",
    weights: str | None = None,
) -> Any:
    """Convert a base with latents that have been trained before.

    Args:
        base: The base that the latents were trained for, as for :func:`latte.conversion.convert`.
        latents: File that :func:`save_latents` wrote.
        output: New folder for the model and the base's tokeniser; None saves nothing.
        window: Number of keys that the window of converted layers sees; None: as in the file. A
            wider one needs no training.
        keep_layers: Numbers of more layers with the base's attention than the file names.
        kept_window: Number of keys that layers with the base's attention see; None: as in the file;
            "all": full attention, with a state that grows.
        kept_tokens: Number of tokens, of each key/value head, that stay visible after they have
            left the window; or one number for each layer; None: as in the file. The file must have
            scores of tokens.
        kept_half_life: Number of tokens after which the weight by which a token is kept has halved;
            None: as in the file.
        kept_dtype: Type of the keys and values that the state has; None: as in the file.
        kept_range: Number of positions that kept tokens are seen from at most; None: as in the
            file.
        dtype: Dtype of the base's weights, as for :func:`latte.conversion.convert`.
        weights: Bits of the base's weights, as for :func:`latte.conversion.convert`. With
            ``file``, weights that the latents' file updates have 8 bits.

    Returns:
        The converted model, in evaluation mode.

    Raises:
        LatteError: The file or the base cannot be read, the file is damaged, the latents are for
            other weights, a value does not fit, or ``output`` exists. Nothing has been written
            then.
    """
    target = None if output is None else check_output(output)
    about, tensors = _read(Path(latents).expanduser())
    trained, fields = about.base or "the one they were trained for", about.fields
    read_config(base)  # says so if there is no base
    dtype = weights_dtype(weights, base, dtype)
    try:
        converted_config(base, fields)
    except LatteError as error:
        raise LatteError(f"latents {latents} are for another base, {trained}: {error}") from None
    fields["keep_layers"] = sorted({*fields["keep_layers"], *keep_layers})
    given: dict[str, Any] = {"local_window": window, "kept_window": kept_window}
    given |= {"kept_tokens": kept_tokens, "kept_half_life": kept_half_life}
    given |= {"kept_dtype": kept_dtype, "kept_range": kept_range}
    for name, value in given.items():
        if value is not None:
            fields[name] = None if value == "all" else value
    config = converted_config(base, fields)
    for layer in filter(config.kept_of, range(config.num_hidden_layers)):
        scores = f"model.layers.{layer}.self_attn.latents.kept_scores.up.weight"
        if kept_tokens is not None and scores not in tensors:
            raise LatteError(
                f"latents {latents} have no scores of tokens in layer {layer}: expected"
                f" kept_tokens=0 there, got {kept_tokens}"
            )
    tokenizer = None if target is None else load_tokenizer(base)
    model = load_base(base, config, dtype=dtype)
    sample, own = tensors.pop("sample"), _base_sample(model)
    # Both may come from one GGUF file, in different dtypes.
    rounding = max(torch.finfo(kind).eps for kind in (about.dtype, model.dtype))
    if sample.shape != own.shape or not torch.allclose(sample, own, rtol=rounding, atol=1e-7):
        raise LatteError(
            f"latents {latents} are for another base: {base} has other weights than {trained}"
        )
    _check(latents, tensors, model)
    for name, x in model.state_dict().items():
        if NEW_WEIGHTS in name:
            x.copy_(tensors[name])
        elif f"{name}.up" in tensors:
            wide = computation_dtype(x.dtype)
            up, down = (tensors[f"{name}.{part}"].to(wide) for part in ("up", "down"))
            x.copy_(x.to(wide) + up @ down)
    updated = {name.removesuffix(".up") for name in tensors if name.endswith(".up")}
    in_bits(model, weights, base, changed=updated)
    if target is not None:
        save(model, tokenizer, target)
    return model


class _About(NamedTuple):
    """What a file of latents says of its model.

    Attributes:
        base: Name of the base, or "".
        dtype: Dtype of the base's weights when the sample was taken.
        fields: Fields of the configuration that converting adds, with ``keep_layers``.
    """

    base: str
    dtype: torch.dtype
    fields: dict[str, Any]


def _read(path: Path) -> tuple[_About, dict[str, Tensor]]:
    """What a file of latents says, and its tensors."""
    about, tensors = read_tensors(path, KIND, "save_latents")
    check_finite(path, KIND, tensors)
    try:
        said = _About(about["base"], getattr(torch, about["dtype"]), json.loads(about["fields"]))
        layers, sample = said.fields["keep_layers"], tensors["sample"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, KIND, f"{type(error).__name__} {error}") from None
    if not isinstance(said.dtype, torch.dtype) or not said.dtype.is_floating_point:
        raise damaged(path, KIND, f"dtype: expected one of floating point, got {said.dtype}")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise damaged(path, KIND, f"keep_layers: expected numbers of layers, got {layers}")
    if sample.dtype != torch.float32:
        raise damaged(path, KIND, f"sample: expected {torch.float32}, got {sample.dtype}")
    return said, tensors


def _check(path: str | Path, weights: Mapping[str, Tensor], model: Any) -> None:
    """Raise LatteError if these are not the latents of the model, and updates of its matrices."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, x in model.state_dict().items():
        up, down = (weights.get(f"{name}.{part}") for part in ("up", "down"))
        if NEW_WEIGHTS in name:
            expected[name] = tuple(x.shape)
        elif x.ndim == 2 and (up is not None or down is not None):
            ranks = [
                *(() if up is None else up.shape[1:2]),
                *(() if down is None else down.shape[:1]),
            ]
            rank = ranks[0] if ranks else 0
            expected |= {f"{name}.up": (x.shape[0], rank), f"{name}.down": (rank, x.shape[1])}
    for name, shape in expected.items():
        found = weights.get(name)
        if found is None or tuple(found.shape) != shape or not found.is_floating_point():
            got = "none" if found is None else f"{tuple(found.shape)} of {found.dtype}"
            raise damaged(path, KIND, f"{name}: expected {shape} of floating point, got {got}")
    # Weights of layers that the file converts, and scores of layers that keep no tokens now.
    unused = [f".layers.{layer}." for layer in model.config.keep_layers] + [".kept_scores."]
    for name in weights.keys() - expected.keys():
        if NEW_WEIGHTS not in name or not any(part in f".{name}" for part in unused):
            raise damaged(path, KIND, f"{name} is no weight of the latents or of the base")


def _base_sample(model: Any) -> Tensor:
    """Some values of every weight that is the base's."""
    named = model.get_decoder().named_parameters()
    return weight_sample(weight for name, weight in named if NEW_WEIGHTS not in name)
