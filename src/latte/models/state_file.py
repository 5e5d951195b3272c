"""The state after a text as a file: read the text once, continue from it any number of times.

The file is in safetensors format. It holds every tensor of every layer's state, the identity of the
model that read the text (its configuration and a sample of its weights), and a checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from latte.errors import LatteError
from latte.layers.mixer import MixerState
from latte.models.cache import LatteCache
from latte.models.parameters import identifying_weights
from latte.models.tensor_file import check_finite, damaged, read_tensors, write_tensors
from latte.ops.kept import KeptState
from latte.ops.state import LatteState, LinearState, WindowState

KIND = "state"
SAMPLES = 16  # values of each weight that are kept
# Parts of a layer's state that are tuples of tensors; the others are tensors.
TUPLES: dict[str, Any] = {
    "latent": LatteState,
    "linear": LinearState,
    "window": WindowState,
    "pending": WindowState,
    "sinks": WindowState,
    "kept": KeptState,
}
# Parts, and fields of parts, in the model's dtype.
OF_ACTIVATIONS = (
    *("window", "pending", "sinks", "conv", "short_conv"),
    *("kept.keys", "kept.values", "kept.latent_keys"),
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EMPTY = (
    "latent.log_mass",
    "pending.keys",
    "kept.scores",
    "kept.latent_keys",
)  # -inf is a latent, or a key, that holds nothing
NOT_KEPT = ("sources", "recorded")  # they grow with the number of tokens
# Fields of every Transformers configuration do not change how a model reads a text.
IGNORED = (PreTrainedConfig().to_dict().keys() - {"model_type"}) | {"use_cache"}


def save_state(cache: LatteCache, path: str | Path, ids: Tensor | None = None) -> None:
    """Write the states of all layers, with the identity of their model.

        cache = LatteCache(model.config)
        model(document_ids, past_key_values=cache)
        save_state(cache, "document.safetensors")

    Every kind of :class:`LatteCache` can be saved: of a batch, with padding, static, offloaded, in
    the middle of decoding. The cache is not changed. Tokens recorded for removal, or for weights
    over the past, are not written; a loaded state starts with an empty record. The file is written
    completely or not at all.

    Args:
        cache: Cache whose states are written.
        path: File to write.
        ids: Tokens that were read, to keep them in the file: see :func:`read_state`.

    Raises:
        LatteError: The cache is of another kind, has read nothing, its last forward was
            interrupted, or its model was deleted; or the path cannot be written.
    """
    if not isinstance(cache, LatteCache):
        raise LatteError(f"expected a LatteCache to save, got {type(cache).__name__}")
    decoder = None if cache.model is None else cache.model()
    if cache.get_seq_length() == 0 or decoder is None:
        what = "has read nothing" if decoder is not None else "is of no model that is still there"
        if cache.model is None:
            what = "is of no model, since it has read nothing"
        raise LatteError(f"a state to save comes from a model that has read: this cache {what}")
    if cache.unfinished:
        raise LatteError(
            "expected a cache whose last forward ended, got one in which it was interrupted, after"
            " some of the layers"
        )
    # Copies, because safetensors refuses two names for the same memory.
    tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in _tensors(cache)}
    tensors["weights"] = weight_sample(identifying_weights(decoder))
    if ids is not None:
        tensors["ids"] = ids
    about = {
        "tokens": str(cache.get_seq_length()),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "config": json.dumps(_identity(decoder)),
    }
    write_tensors(Path(path).expanduser(), tensors, about, KIND)


def load_state(path: str | Path, model: Any, *, static_room: int | None = None) -> LatteCache:
    """Load a cache from :func:`save_state`, for the model that read the text.

        cache = load_state("document.safetensors", model)
        ones = torch.ones(1, cache.get_seq_length() + prompt_ids.shape[1], dtype=torch.long)
        model.generate(prompt_ids, attention_mask=ones, past_key_values=cache)

    Each call makes a new, independent cache from the file. The state goes to the device of each
    layer. If the model has another dtype than when the text was read, the parts of the state that
    are activations are rounded to the model's dtype. Accumulated states stay in fp32 (fp64 in an
    fp64 model).

    Args:
        path: File that :func:`save_state` wrote.
        model: Language model or its decoder. Its configuration and a sample of each of its weights
            are compared with the file's: exactly, or within the rounding of the coarser dtype.
        static_room: Number of further tokens that a growing state has room for. If it is given,
            the cache is static, for compiled steps (see :class:`LatteCache`).

    Raises:
        LatteError: The file does not exist, is damaged, or is the state of another model.
    """
    return read_state(path, model, static_room=static_room)[0]


def read_state(
    path: str | Path, model: Any, *, static_room: int | None = None
) -> tuple[LatteCache, Tensor | None]:
    """As :func:`load_state`, with the ids that :func:`save_state` was given; None if it had none.

    Raises:
        LatteError: As :func:`load_state`.
    """
    path = Path(path).expanduser()
    about, tensors = read_tensors(path, KIND, "save_state")
    decoder = model.get_decoder()
    ids = tensors.pop("ids", None)
    try:
        dtype, tokens = getattr(torch, about["dtype"]), int(about["tokens"])
        differs = _difference(about, tensors.pop("weights"), decoder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, KIND, f"{type(error).__name__} {error}") from None
    if differs:
        raise LatteError(f"{path} is the state of another model: {differs}")
    if ids is not None and ids.dtype not in (torch.int32, torch.int64):
        raise damaged(path, KIND, f"ids: expected whole numbers, got {ids.dtype}")
    room = None if static_room is None else tokens + static_room
    cache = LatteCache(decoder.config, max_cache_len=room)
    _check(path, tensors, tokens, decoder)
    for index, (layer, module) in enumerate(zip(cache.layers, decoder.layers, strict=True)):
        device, prefix = next(module.parameters()).device, f"layers.{index}."
        parts: dict[str, Any] = {}
        for name in [name for name in tensors if name.startswith(prefix)]:
            part, _, field = name.removeprefix(prefix).partition(".")
            x = tensors[name]
            # Copied even if nothing is converted, so that the file does not stay open.
            x = x.to(device, _dtype_of(part, field, x, dtype, decoder.dtype), copy=True)
            if field:
                parts.setdefault(part, {})[field] = x
            else:
                parts[part] = x
        found = {part: TUPLES[part](**x) if part in TUPLES else x for part, x in parts.items()}
        layer.update(MixerState(**found), tokens)
    return cache, None if ids is None else ids.clone()


@torch.no_grad()
def _check(path: Path, tensors: Mapping[str, Tensor], tokens: int, decoder: Any) -> None:
    """Raise LatteError if these cannot be the decoder's state after this number of tokens.

    Their names, dtypes and shapes are compared with those of the state after one token. Only the
    batch, and the window of full attention, have other sizes.
    """
    cache = LatteCache(decoder.config)
    first = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
    decoder(first, past_key_values=cache, use_cache=True)
    like = dict(_tensors(cache))
    if different := sorted(like.keys() ^ tensors.keys()):
        said = "missing" if different[0] in like else "unknown"
        raise damaged(path, KIND, f"{different[0]} is {said}")
    position = tensors["layers.0.position"]
    batch = position.shape[0] if position.ndim else 1
    for name, x in tensors.items():
        (_, index, part, *field), one = name.split("."), like[name]
        shape = [batch, *one.shape[1:]]
        if cache.layers[int(index)].grows and part == "window":
            shape[1:2] = tensors[f"layers.{index}.window.mask"].shape[1:2]
        dtypes: tuple[torch.dtype, ...] = (one.dtype,)
        if one.is_floating_point():  # autocast has activations of other dtypes than the model's
            dtypes = FLOATS if _is_activation(part, *field) else (torch.float32, torch.float64)
        if list(x.shape) != shape or x.dtype not in dtypes:
            expected, got = f"{tuple(shape)} of {one.dtype}", f"{tuple(x.shape)} of {x.dtype}"
            raise damaged(path, KIND, f"{name}: expected {expected}, got {got}")
    if tokens < 1 or not bool(((position >= 0) & (position <= tokens)).all()):
        raise damaged(path, KIND, f"expected positions of 0 to {tokens} tokens")
    check_finite(path, KIND, tensors, EMPTY)


def fingerprint(model: Any) -> str:
    """A hash of a model's configuration, dtype and a sample of each weight, as in a state file."""
    decoder = model.get_decoder()
    about = json.dumps([_identity(decoder), str(decoder.dtype)], sort_keys=True).encode()
    weights = weight_sample(identifying_weights(decoder))
    return hashlib.sha256(about + weights.numpy().tobytes()).hexdigest()


def _tensors(cache: LatteCache) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all layers' states, with names such as `layers.0.window.keys`."""
    for index, layer in enumerate(cache.layers):
        for part, value in zip(MixerState._fields, layer.state, strict=True):
            at = f"layers.{index}.{part}"
            if isinstance(value, Tensor):
                yield at, value
            elif value is not None and part not in NOT_KEPT:
                fields: Any = value
                named = ((f"{at}.{name}", getattr(fields, name)) for name in fields._fields)
                yield from ((name, x) for name, x in named if x is not None)


def _is_activation(part: str, field: str = "") -> bool:
    """Whether a part of the state, or a field of a part, is in the model's dtype."""
    return part in OF_ACTIVATIONS or f"{part}.{field}" in OF_ACTIVATIONS


def _dtype_of(
    part: str, field: str, x: Tensor, before: torch.dtype, now: torch.dtype
) -> torch.dtype:
    """The dtype of a part of the state, for a model in dtype ``now``, saved in dtype ``before``."""
    if before == now or not x.is_floating_point():
        return x.dtype
    return now if _is_activation(part, field) else torch.promote_types(now, torch.float32)


def bits_of(config: dict[str, Any]) -> str:
    """How a configuration says that weights are stored: the format of quantised ones, or plain."""
    return str((config.get("quantization_config") or {}).get("weights", "plain"))


def _identity(decoder: Any) -> dict[str, Any]:
    """The fields of a configuration that change how a model reads a text, as JSON values."""
    fields = json.loads(json.dumps(decoder.config.to_dict(), default=str))
    return {name: value for name, value in fields.items() if name not in IGNORED}


def weight_sample(weights: Iterable[Tensor]) -> Tensor:
    """Some values of every weight, spread evenly, fp32 on the CPU.

    A sample is enough: training changes all weights, and merged updates change whole matrices.
    """
    flat = (weight.detach().flatten() for weight in weights)
    picked = (x[:: max(1, x.numel() // SAMPLES)][:SAMPLES] for x in flat)
    return torch.cat([x.to("cpu", torch.float32) for x in picked])


def _difference(about: dict[str, str], weights: Tensor, decoder: Any) -> str | None:
    """A difference between the model of a saved state and this one; None if they are the same."""
    was, own = json.loads(about["config"]), _identity(decoder)
    # The mixer first, since other fields depend on it. Fields that only one release of Transformers
    # has do not count.
    for name in ("mixer", *was):
        if name in was and name in own and was[name] != own[name]:
            return f"its {name} is {was[name]!r}, this one's {own[name]!r}"
    before, now = (bits_of(fields) for fields in (was, own))
    if before != now:
        return f"its weights are {before}, this one's are {now}"
    here = weight_sample(identifying_weights(decoder))
    dtypes = {getattr(torch, about["dtype"]), decoder.dtype}
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) if len(dtypes) > 1 else 0.0
    same = weights.shape == here.shape and weights.dtype == here.dtype
    if same and torch.allclose(weights, here, rtol=rounding, atol=1e-7 if rounding else 0.0):
        return None
    return "its weights are not this one's"
