"""The trained weights of a converted model as a file, without the base's weights.

The file has a few MB. With it and the base, the converted model is made without training. It is in
safetensors format, and holds the latents' weights, the low-rank updates of the base's projections
if there are any, the fields of the configuration that converting adds, and a sample of the base's
weights, so that another base is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

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
from latte.errors import LatteError
from latte.models.state_file import weight_sample
from latte.models.tensor_file import read_tensors, write_tensors
from latte.ops.tensors import computation_dtype
from latte.results import check_new_file

FORMAT = "latte latents 1"
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
        "format": FORMAT,
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
    write_tensors(path, tensors, about, "latents")


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
    dtype: str | torch.dtype = "auto",
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
        dtype: Dtype of the base's weights, as for :func:`latte.conversion.convert`.

    Returns:
        The converted model, in evaluation mode.

    Raises:
        LatteError: The file or the base cannot be read, the latents are for other weights, a value
            does not fit, or ``output`` exists. Nothing has been written then.
    """
    target = None if output is None else check_output(output)
    about, weights = _read(Path(latents).expanduser())
    trained = about["base"] or "the one they were trained for"
    fields = json.loads(about["fields"])
    read_config(base)  # says so if there is no base
    try:
        converted_config(base, fields)
    except LatteError as error:
        raise LatteError(f"latents {latents} are for another base, {trained}: {error}") from None
    fields["keep_layers"] = sorted({*fields["keep_layers"], *keep_layers})
    for name, width in (("local_window", window), ("kept_window", kept_window)):
        if width is not None:
            fields[name] = None if width == "all" else width
    config = converted_config(base, fields)
    tokenizer = None if target is None else load_tokenizer(base)
    model = load_base(base, config, dtype=dtype)
    sample, own = weights.pop("sample"), _base_sample(model)
    # The file's weights and these may be of one GGUF file, in different dtypes.
    rounding = max(torch.finfo(kind).eps for kind in (getattr(torch, about["dtype"]), model.dtype))
    if sample.shape != own.shape or not torch.allclose(sample, own, rtol=rounding, atol=1e-7):
        raise LatteError(
            f"latents {latents} are for another base: {base} has other weights than {trained}"
        )
    wanted = {name: x for name, x in model.state_dict().items() if NEW_WEIGHTS in name}
    for name, x in wanted.items():
        if name not in weights or weights[name].shape != x.shape:
            raise LatteError(f"latents {latents} have no {name} of shape {tuple(x.shape)}")
        x.copy_(weights[name])
    for name, x in model.state_dict().items():
        if f"{name}.up" in weights:
            wide = computation_dtype(x.dtype)
            up, down = (weights[f"{name}.{part}"].to(wide) for part in ("up", "down"))
            x.copy_(x.to(wide) + up @ down)
    if target is not None:
        save(model, tokenizer, target)
    return model


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file of latents says, and its tensors."""
    if not path.is_file():
        raise LatteError(f"latents {path} do not exist; expected a file written by save_latents")
    about, tensors = read_tensors(path, f"latents {path} are truncated or damaged")
    if about.get("format") != FORMAT:
        raise LatteError(f"{path} has no latents: expected a file written by save_latents")
    return about, tensors


def _base_sample(model: Any) -> Tensor:
    """Some values of every weight that is the base's."""
    named = model.get_decoder().named_parameters()
    return weight_sample(weight for name, weight in named if NEW_WEIGHTS not in name)
