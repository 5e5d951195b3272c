"""From a pretrained decoder to a Latte-Macchiato that keeps its weights (paper, section 5.4)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from latte.conversion.gguf import gguf_at, gguf_config, gguf_model, gguf_tokenizer, open_gguf
from latte.errors import LatteError, check_seed, one_line, why_not_written
from latte.layers.latent_fields import INITIAL, LATENTS_PER_HEAD, ConversionOptions, name_options
from latte.models.atomic_files import check_writable, staged_beside
from latte.models.hub import (
    check_files,
    check_no_code,
    config_errors,
    hub_options,
    quiet_transformers,
    reason,
    unreachable,
)
from latte.models.own_memory import own_memory
from latte.models.parameters import number_of_parameters, number_of_weights

MULTIMODAL = ("gemma3",)
WEIGHTS = ("*.safetensors", "*.bin", "config.json")
LORA = ".lora_"  # in the name of every parameter that peft adds


def convert(
    base: str | Path,
    output: str | Path | None = None,
    *,
    calibration: str | Sequence[torch.Tensor] | None = None,
    seed: int = 0,
    dtype: str | torch.dtype = "auto",
    weights: str | None = None,
    **options: Any,
) -> Any:
    """Replace a decoder's full attention by a window and latents; keep every weight.

    The new weights, ``layers.*.self_attn.latents.*``, start as landmarks, which approximate the
    base's own attention, or at random. Train them for good results: ``latte convert --recipe``.
    With p(l=0) = 1 the model is exactly the base with a ``window`` instead of full attention.
    Layers that already have a window (in Gemma 2 and 3, Mistral, Qwen) are not changed, because
    their state is of constant size.

    Args:
        base: Folder written by ``save_pretrained``, GGUF file or a folder with one, or a name on
            the Hub. Supported: Gemma 1, 2 and 3 (text), Llama 2 and 3, Mistral, Qwen 2 and 3.
        output: New folder for the model and the base's tokeniser; None saves nothing.
        calibration: Text, or rows of token ids (B, T), from which landmarks are computed. None is
            English text that is part of every Python. About 8,000 tokens are used.
        seed: Seed of the new weights.
        dtype: Dtype of the base's weights. ``auto`` keeps the checkpoint's, and is bf16 for a
            quantised GGUF file. The new weights are fp32 (fp64 if the base is).
        weights: Bits of the base's weights in memory and in the folder, for decoding on a CPU.
            ``file`` keeps those of a GGUF file, ``int4`` and ``int8`` round, ``bfloat16`` and None
            are plain weights (:mod:`latte.conversion.weights`). A model of Latte's own, or one that
            is converted already, gets these weights and stays as it is otherwise.
        **options: Options of :class:`latte.layers.latent_fields.ConversionOptions`:

    Returns:
        The converted model, in evaluation mode.

    Raises:
        LatteError: The base cannot be read, has an unsupported architecture, is quantised (except
            as GGUF) or has no layer of full attention; a value does not fit; or ``output``
            exists. Nothing has been written then.
    """
    from latte.conversion.weights import in_bits, weights_dtype

    chosen = ConversionOptions(**options)
    check_seed("seed", seed)
    target = None if output is None else check_output(output)
    dtype = weights_dtype(weights, base, dtype)
    if weights is not None and is_latte(read_config(base)):
        if options or calibration is not None:
            given = next(iter(options), "calibration")
            raise LatteError(
                f"base {base} is converted: expected weights and dtype alone, got {given}"
            )
        return _other_weights(base, target, weights, dtype)
    config = converted_config(base, chosen.fields())
    tokenizer = None if target is None else load_tokenizer(base)
    rows: Sequence[torch.Tensor] = ()
    if begins_with_landmarks(chosen.initial, config):
        try:
            rows = _calibration_rows(base, tokenizer, calibration, config.local_window)
        except LatteError as error:
            if chosen.initial != "auto" or calibration is not None:
                raise
            warnings.warn(f"latents begin at random, not as landmarks: {error}", stacklevel=2)
    model = load_base(base, config, seed=seed, dtype=dtype)
    if len(rows):
        from latte.conversion.landmarks import set_landmarks

        set_landmarks(model, rows, seed=seed)
    in_bits(model, weights, base)
    if target is not None:
        save(model, tokenizer, target)
    return model


name_options(convert, ConversionOptions)


def is_latte(config: Any) -> bool:
    """Whether a configuration is of a model of Latte's own, or of a converted one."""
    return config.model_type == "latte" or config.model_type.startswith("macchiato_")


def _other_weights(base: str | Path, target: Path | None, weights: str, dtype: Any) -> Any:
    """A model of Latte's with weights of other bits."""
    from transformers import AutoModelForCausalLM

    from latte.conversion.weights import in_bits

    config = read_config(base)
    options = {"dtype": dtype, **hub_options(base)}
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised and weights != "bfloat16":
        raise LatteError(f"base {base} is quantised; expected full-precision weights, or bfloat16")
    tokenizer = None if target is None else load_tokenizer(base)
    with quiet_transformers():
        model = load_whole(AutoModelForCausalLM, "base", base, config, **options)
    model = model.dequantize(model.dtype) if quantised else in_bits(model, weights, base)
    if target is not None:
        save(model, tokenizer, target)
    return model


def _calibration_rows(
    base: str | Path,
    tokenizer: Any,
    calibration: str | Sequence[torch.Tensor] | None,
    window: int,
) -> Sequence[torch.Tensor]:
    """The tokens from which landmarks are computed. Raises LatteError if there are none."""
    from latte.conversion.landmarks import CALIBRATION_LENGTH, calibration_rows

    rows: Any = calibration
    if calibration is None or isinstance(calibration, str):
        length = max(CALIBRATION_LENGTH, 4 * window)  # so that most pasts are much longer
        rows = calibration_rows(tokenizer or load_tokenizer(base), calibration, length)
    if not sum(row.numel() for row in rows):
        raise LatteError("calibration: expected some tokens, got none")
    return rows


def begins_with_landmarks(initial: str, config: Any) -> bool:
    """Whether to compute landmarks. Raises LatteError if that is wanted but not possible."""
    if initial not in INITIAL:
        raise LatteError(f"initial: expected one of {', '.join(INITIAL)}, got {initial!r}")
    if initial == "landmarks" and config.latent_input != "none":
        raise LatteError(
            f"initial=landmarks needs latent_input=none, got {config.latent_input}: landmarks are"
            " linear in the layer's input"
        )
    return initial == "landmarks" or (initial == "auto" and config.latent_input == "none")


def check_output(output: str | Path) -> Path:
    """The path of a new folder. Raises LatteError if it exists or cannot be written."""
    target = Path(output).expanduser()
    if os.path.lexists(target):
        raise LatteError(f"output {target} exists; expected the name of a new folder")
    check_writable(target, "output")
    return target


def converted_config(base: str | Path, values: dict[str, Any]) -> Any:
    """The checked configuration of the converted model.

    Args:
        base: Base, as for :func:`convert`.
        values: Values of fields, with ``keep_layers`` instead of ``converted_layers``.

    Raises:
        LatteError: The base does not exist, its architecture is not supported, its weights are
            quantised, there is no layer to convert, or a value does not fit.
    """
    from latte.conversion.config import CONFIGS, OWN_FIELDS

    config = read_config(base)
    kind = config.model_type
    if kind in MULTIMODAL:
        raise LatteError(
            f"base {base} is {kind} with vision, which is not supported; expected its text model,"
            " gemma3_text"
        )
    if kind not in CONFIGS:
        raise LatteError(
            f"base {base} is of architecture {kind!r}, which is not supported; expected one of"
            f" {', '.join(CONFIGS)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise LatteError(
            f"base {base} is quantised; expected full-precision weights (fp32, bf16 or fp16), or a"
            " GGUF file"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise LatteError(f"base {base} is bidirectional; expected a causal decoder")
    values = dict(values)
    keep = values.pop("keep_layers", ())
    if values.get("kept_window") is not None and not keep:
        raise LatteError(
            "kept_window is the window of layers in keep_layers: expected some there, got"
            f" kept_window={values['kept_window']} without keep_layers"
        )
    unknown = sorted(set(values) - set(OWN_FIELDS))
    if unknown:
        expected = ", ".join(sorted(OWN_FIELDS))
        raise LatteError(f"unknown field {unknown[0]!r}, expected one of {expected}")
    inherited = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        inherited.pop(name, None)
    file = gguf_at(base)
    inherited["converted_from"] = _origin(base) if file is None else open_gguf(file).note
    if values.get("num_latents", 0) is None:
        values["num_latents"] = LATENTS_PER_HEAD * config.num_attention_heads
    made = CONFIGS[kind](**inherited, **values)
    made.converted_layers = _to_convert(base, made, keep)
    return made


def _origin(base: str | Path) -> str:
    """A base's name on the Hub, or its folder's name without the path, which is private."""
    return Path(base).resolve().name if Path(base).exists() else str(base)


def _to_convert(base: str | Path, config: Any, keep: Sequence[int]) -> tuple[int, ...]:
    """The layers of full attention, without those to keep."""
    full, count = config.full_layers, config.num_hidden_layers
    if not full:
        raise LatteError(
            f"base {base} has a window of {config.base_window(0)} tokens in every layer: it is"
            " linear in time already; expected one with layers of full attention"
        )
    for layer in keep:
        if layer in full:
            continue
        why = (
            f"which has a window of its own, of {config.base_window(layer)} tokens"
            if (0 <= layer < count)
            else f"and the base has {count} layers"
        )
        raise LatteError(
            f"keep_layers: expected numbers of layers of full attention ({_listed(full)}), got"
            f" {layer}, {why}"
        )
    chosen = tuple(layer for layer in full if layer not in keep)
    if not chosen:
        raise LatteError(
            "keep_layers: expected a layer of full attention that is not kept, got all of them"
            f" ({_listed(full)}): nothing would be converted"
        )
    return chosen


def _listed(layers: Sequence[int]) -> str:
    """`0 to 29`, or `5, 11, 17`."""
    first, last = layers[0], layers[-1]
    if len(layers) > 2 and len(layers) == last - first + 1:
        return f"{first} to {last}"
    return ", ".join(map(str, layers))


def read_config(base: str | Path) -> Any:
    """A pretrained model's configuration, whatever its architecture. Raises LatteError."""
    from transformers import AutoConfig

    file, folder = gguf_at(base), Path(base)
    if file is not None:
        return gguf_config(open_gguf(file))
    if not folder.exists() and (folder.is_absolute() or len(folder.parts) > 2):
        raise LatteError(
            f"base {folder} does not exist; expected a folder, a GGUF file, or a name on the Hub"
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise LatteError(f"base {folder} is no model: {folder / 'config.json'} is missing")
    if folder.is_dir():
        check_files(folder)
    try:
        config = AutoConfig.from_pretrained(base, **hub_options(base))
    except config_errors() as error:
        why = unreachable(base) or reason(error)
        raise LatteError(
            f"base {base} cannot be read: {why}; expected a folder, a GGUF file, or a name on the"
            " Hub"
        ) from None
    check_no_code(config, f"base {base}")
    return config


def base_files(base: str | Path) -> list[Path]:
    """The files of a base's weights and configuration; none where it is a name on the Hub."""
    file = gguf_at(base)
    if file is not None:
        return [file]
    return sorted(path for kind in WEIGHTS for path in Path(base).glob(kind))


def load_base(base: str | Path, config: Any, *, seed: int = 0, dtype: Any = "auto") -> Any:
    """``from_pretrained`` of the base as a converted model; the new weights are drawn by ``seed``.

    Raises:
        LatteError: Weights are missing, damaged, or have other shapes than the config says.
    """
    from latte.conversion.modeling import FAMILIES, NEW_WEIGHTS

    _, language_model = FAMILIES[config.model_type.removeprefix("macchiato_")]
    file, place, options = gguf_at(base), base, {"dtype": dtype, **hub_options(base)}
    if file is None:
        check_size("base", base, read_config(base))
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        if file is not None:  # its weights have other names and orders, which the base undoes
            opened = open_gguf(file)
            plain = gguf_model(opened, gguf_config(opened), dtype)
            options = {"state_dict": plain.state_dict(), "dtype": plain.dtype}
        torch.manual_seed(seed)
        model = load_whole(language_model, "base", place, config, new=NEW_WEIGHTS, **options)
    if file is None and not torch.cuda.is_available():  # with a GPU they are copied there
        own_weights(model)
    return model


def check_size(what: str, place: str | Path, config: Any) -> None:
    """Compare a config with a folder's weights, before the model is built.

    Args:
        what: Name of the place in error messages.

    Raises:
        LatteError: The model has more parameters than the weights have bytes, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(place).glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, framework="pt"):
                pass
    except (OSError, SafetensorError) as error:
        raise LatteError(f"{what} {place} has damaged weights: {one_line(error)}") from None
    stored = sum(file.stat().st_size for file in files)
    if not stored or getattr(config, "quantization_config", None) is not None:
        return
    wanted = number_of_parameters(config)
    if wanted is not None and wanted > stored:
        raise LatteError(
            f"{what} {place}: its config describes {wanted:,} parameters, and its weights have"
            f" {stored:,} bytes: config.json was edited, or weights are missing"
        )


def load_whole(
    kind: Any, what: str, place: str | Path, config: Any, *, new: str | None = None, **options: Any
) -> Any:
    """``kind.from_pretrained(place)`` with exactly the weights that its config says.

    Args:
        what: Name of the place in error messages.
        new: Part of the names of weights that may be missing.
        options: Options of ``from_pretrained``. A ``state_dict`` replaces the place's weights.

    Returns:
        The model, in evaluation mode.

    Raises:
        LatteError: Weights are missing, damaged, or have other shapes than the config says.
    """
    from safetensors import SafetensorError

    failures: tuple[type[Exception], ...] = (*config_errors(), RuntimeError)
    try:
        model, found = kind.from_pretrained(
            None if "state_dict" in options else place,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them below
            **options,
        )
    except SafetensorError as error:
        raise LatteError(f"{what} {place} has damaged weights: {one_line(error)}") from None
    except failures as error:
        raise LatteError(f"{what} {place} cannot be loaded: {reason(error)}") from None
    missing = [name for name in found["missing_keys"] if new is None or new not in name]
    for problem, names in (
        ("has weights of another shape than its config", found["mismatched_keys"]),
        ("lacks weights", missing),
        ("has weights that its config does not know", found["unexpected_keys"]),
    ):
        if names:
            first = min(name[0] if isinstance(name, tuple) else name for name in names)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LatteError(f"{what} {place} {problem}: {first}{more}")
    _check_defaults(model.generation_config, f"{what} {place}")
    return model.eval()


# Defaults of `generate` by the type that they should have.
DEFAULTS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("a token's id", int, ("bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens")),
    ("a whole number", int, ("min_length", "max_length", "min_new_tokens", "max_new_tokens")),
    ("a number", (int, float), ("temperature", "top_p", "top_k", "repetition_penalty")),
    ("text", str, ("stop_strings",)),
    ("true or false", bool, ("do_sample", "output_attentions", "output_hidden_states")),
)
LISTS = ("eos_token_id", "suppress_tokens", "stop_strings")  # may be of several


def _check_defaults(defaults: Any, where: str) -> None:
    """Raise LatteError for a default of ``generate`` that is of another type than it should be."""
    for expected, kinds, names in DEFAULTS:
        for name in names:
            value = getattr(defaults, name, None)
            several = value if isinstance(value, list) and name in LISTS else [value]
            if not all(one is None or isinstance(one, kinds) for one in several):
                raise LatteError(
                    f"{where}: generation_config.json has {name}={value!r}; expected {expected}"
                )


def summary(model: Any) -> str:
    """A model in a line: its type, its converted layers, its parameters in millions."""
    from latte.conversion.modeling import NEW_WEIGHTS

    new = sum(p.numel() for name, p in model.named_parameters() if NEW_WEIGHTS in name)
    base = number_of_weights(model) - new
    config = model.config
    if not hasattr(config, "converted_layers"):
        return f"{config.model_type}, {(base + new) / 1e6:.2f}M parameters"
    return (
        f"{config.model_type}, {len(config.converted_layers)} of {config.num_hidden_layers} layers"
        f" converted, {base / 1e6:.2f}M parameters of the base and {new / 1e6:.2f}M new ones"
    )


def own_weights(model: Any) -> Any:
    """Copy parameters and buffers into memory of their own, in place; returns the model.

    Weights that ``from_pretrained`` need not convert stay views of the mapped file. They are not
    aligned, are in small pages, and are read from the file again when memory is short. Steps of
    decoding read every weight, and are slower then.
    """
    own_memory((*model.parameters(), *model.buffers()))  # tied ones are given once
    return model


def load_tokenizer(base: str | Path) -> Any:
    """The base's tokeniser. Raises LatteError if it has none that can be read."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    file, folder = gguf_at(base), Path(base)
    if file is not None:
        return gguf_tokenizer(open_gguf(file))
    if folder.is_dir() and not any((folder / name).exists() for name in files):
        raise LatteError(f"base {folder} has no tokenizer; expected tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(base, **hub_options(base))
    except Exception as error:  # the tokenizers library raises bare Exception for a bad file
        raise LatteError(f"the tokenizer of base {base} cannot be read: {reason(error)}") from None


def save(model: Any, tokenizer: Any, target: Path) -> None:
    """Write a model and its tokeniser to a new folder, completely or not at all."""
    from safetensors import SafetensorError

    try:
        with staged_beside(target) as staged:
            with quiet_transformers():
                model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            staged.rename(target)
    except (OSError, SafetensorError) as error:
        raise LatteError(f"output {target} cannot be written: {why_not_written(error)}") from None
