"""Load a trained checkpoint, or say in one line what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from latte.conversion.gguf import gguf_at, gguf_config, gguf_model, gguf_tokenizer, open_gguf
from latte.conversion.pretrained import LORA, check_size, load_whole, own_weights
from latte.errors import LatteError, one_line
from latte.lab.data.tokenfile import contents_of
from latte.lab.data.tokenizers import check_fits
from latte.lab.machine import default_device
from latte.lab.malloc import release_memory
from latte.lab.train.recipe import Recipe, check_plugins, recipe_from_dict
from latte.lab.train.run_folder import (
    FINISHED_FILE,
    MANIFEST_FILE,
    checkpoint_problem,
    newest_checkpoint,
)
from latte.models.hub import check_files, check_no_code, config_errors, hub_options, reason
from latte.models.plain_files import check_plain, read_object
from latte.models.quantizer import LatteQuantizer
from latte.models.registry import make_known
from latte.ops.widened import widen_calls

DTYPES = ("float32", "bfloat16", "float16", "float64")


def find_checkpoint(path: str | Path) -> Path:
    """The folder with the weights: `path` itself, or the newest checkpoint of an unfinished run.

    A pretrained decoder is a checkpoint too: its folder, or its GGUF file, also in a folder.

    Raises:
        LatteError: There is no checkpoint, a finished run's own files are missing, or a run's
            newest checkpoint is damaged. No other weights are used instead.
    """
    folder = Path(path)
    if not folder.exists():
        raise LatteError(f"checkpoint {folder} does not exist; expected a folder or a GGUF file")
    file = gguf_at(folder)
    if file is not None:
        return file
    if (folder / "config.json").exists():
        return folder
    reason = f"{folder / 'config.json'} is missing"
    if not (folder / FINISHED_FILE).exists():
        newest, problems = newest_checkpoint(folder)
        if newest is not None and not problems:
            return newest
        if newest is not None:
            raise LatteError(f"{problems[0]}; to use an earlier checkpoint, name it: {newest}")
        reason = problems[0] if problems else reason
    raise LatteError(f"{folder} is not a checkpoint: {reason}")


def load_checkpoint(
    path: str | Path,
    device: str | None = None,
    *,
    mixing: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer) of a folder written by training or save_pretrained.

    The weights of a GGUF file are dequantised.

    Args:
        mixing: Mixing of a converted model: `learned`, or a control: `window` (p(l=0) = 1),
            `latents` (p(l=0) = 0) or `base` (the base's own attention). None: the config's.
        overrides: Other fields of the config, such as `local_window`, for a control with the same
            weights.
        dtype: Dtype of the weights, such as `float32`; None: as they were saved. With one, and on
            a GPU, weights in 4 and 8 bits are dequantised.

    Raises:
        LatteError: The folder, its config, weights or tokenizer are missing; a file was truncated
            or edited; weights do not fit the config; the tokenizer has more tokens than the model;
            the model has no mixing; or the config does not have a field or refuses its value.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if dtype not in (None, *DTYPES):
        raise LatteError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = find_checkpoint(path)
    opened = open_gguf(folder) if folder.is_file() else None
    config = load_config(folder) if opened is None else gguf_config(opened)
    if mixing is not None:
        from latte.conversion.config import MIXINGS

        if mixing not in MIXINGS:
            raise LatteError(f"mixing: expected one of {', '.join(MIXINGS)}, got {mixing!r}")
        if not hasattr(config, "mixing"):
            raise LatteError(
                f"mixing: expected a converted model, whose config says how it mixes window and"
                f" latents, got {config.model_type!r} in {folder}"
            )
        config.mixing = mixing
    _override(config, overrides or {}, folder)
    if opened is not None:
        model = gguf_model(opened, config, **({} if dtype is None else {"dtype": dtype}))
    else:
        if any(LORA in name for name in check_weights(folder)):
            raise LatteError(
                f"checkpoint {folder} is of a run whose low-rank updates are not merged yet;"
                " expected a finished one: run its training again to continue it"
            )
        check_size("checkpoint", folder, config)
        options = {"config": config, **hub_options(folder)}
        if dtype is not None:
            options["dtype"] = dtype
        model = load_whole(AutoModelForCausalLM, "checkpoint", folder, **options)
    where = device or str(default_device())
    if where == "meta":
        raise LatteError("device 'meta' cannot be used: it holds no values")
    own = isinstance(getattr(model, "hf_quantizer", None), LatteQuantizer)
    if own and (dtype is not None or torch.device(where).type != "cpu"):
        model.dequantize(model.dtype)
    try:
        model.to(where)
    except (RuntimeError, AssertionError) as error:
        raise LatteError(f"device {where!r} cannot be used: {one_line(error)}") from None
    if opened is None and model.device.type == "cpu":
        own_weights(model)
    if not hasattr(config, "mixing"):  # a converted model does so by itself
        widen_calls(model)
    tokenizer = _load_tokenizer(folder) if opened is None else gguf_tokenizer(opened)
    try:
        check_fits(tokenizer, model.config.get_text_config().vocab_size)
    except LatteError as error:
        raise LatteError(f"checkpoint {folder}: {error}") from None
    release_memory()  # what loading has freed: tens of megabytes
    return model, tokenizer


def _override(config: Any, overrides: Mapping[str, Any], folder: Path) -> None:
    """Set fields of a config. Raises LatteError for one that is not there, or a wrong value."""
    from huggingface_hub.errors import StrictDataclassError

    for name, value in overrides.items():
        if not hasattr(config, name):
            raise LatteError(f"{name}: the config of {folder} has no such field")
        try:
            setattr(config, name, value)
            config.validate()
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise LatteError(f"{name}: {one_line(error.__cause__ or error)}") from None


def weight_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint's weights, in order: those of a folder, or a GGUF file itself."""
    return sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]


def weights_of(checkpoint: Path) -> str | None:
    """A short digest of a checkpoint's weights: a folder's, or a GGUF file's."""
    return contents_of(weight_files(checkpoint))


def training_recipe(path: str | Path) -> Recipe | None:
    """The recipe of a checkpoint's training, if it is there."""
    file = find_checkpoint(path) / "recipe.json"
    if not file.exists():
        return None
    values = read_object(file)
    try:
        return recipe_from_dict(values)
    except ValueError as error:
        raise LatteError(f"{file} is damaged: {one_line(error)}") from None


def load_config(folder: Path) -> Any:
    """The configuration in a checkpoint's folder.

    Raises:
        LatteError: A file of the folder is damaged, or the folder asks for code that its user has
            not imported (:func:`latte.models.registry.load_plugin`).
    """
    from transformers import AutoConfig

    check_files(folder)
    file = folder / "config.json"
    values = read_object(file)
    if "model_type" not in values:
        raise LatteError(f"{file} names no model_type: it was edited")
    try:
        recipe = training_recipe(folder)
    except LatteError:
        recipe = None  # damaged: code that needs it reports the error
    if recipe is not None:
        check_plugins(recipe, folder / "recipe.json")  # the config may name what they register
    try:
        make_known(values["model_type"])
        config = AutoConfig.from_pretrained(folder, **hub_options(folder))
    except LatteError:
        raise
    except config_errors() as error:
        raise LatteError(f"{file} is damaged or was edited: {reason(error)}") from None
    check_no_code(config, folder)
    return config


def check_weights(folder: Path) -> list[str]:
    """The weights' names, after a check that files are complete and match the manifest."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LatteError(f"checkpoint {folder} has no weights; expected model.safetensors")
    names: list[str] = []
    for file in files:
        try:
            with safe_open(check_plain(file), framework="pt") as tensors:
                names += tensors.keys()
        except SafetensorError as error:
            raise LatteError(f"{file} is truncated or damaged: {one_line(error)}") from None
        except OSError as error:
            raise LatteError(f"{file} cannot be read: {one_line(error)}") from None
    _check_manifest(folder, "*.safetensors")
    return names


def _check_manifest(folder: Path, only: str) -> None:
    """Raise LatteError if files of such names are not as the manifest has them, if there is one."""
    if (folder / MANIFEST_FILE).exists():
        problem = checkpoint_problem(folder, only)
        if problem is not None:
            raise LatteError(f"checkpoint is damaged: {problem}")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise LatteError(f"checkpoint {folder} has no tokenizer; expected tokenizer.json")
    _check_manifest(folder, "tokenizer*")
    try:
        return AutoTokenizer.from_pretrained(folder, **hub_options(folder))
    except Exception as error:  # the tokenizers library raises bare Exception for a bad file
        file = folder / "tokenizer.json"
        what = "damaged" if file.exists() else "missing"
        raise LatteError(f"{file} is {what}: {reason(error)}") from None
