"""What a converted model's state holds, in bytes, and the control that may hold as much.

The honest control of latents is a window that is wider by as many keys as their state has bytes.
That depends on precisions (latents are fp32, keys mostly not) and on what else is held for them,
such as the tokens that delayed latents have not read yet: it is counted here, on a real state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.bases.results import Row, by_model
from latte.errors import LatteError
from latte.lab.evaluate.tables import table
from latte.models.cache import tensors_in

KEY = ("part",)
SETTINGS = ("dtype",)
VALUES = ("bytes",)
LATENTS = ("latent", "pending")  # what the state holds for the latents alone
READ = 64  # tokens beyond the window


@torch.no_grad()
def state_bytes(model: Any) -> list[Row]:
    """Bytes of each part of the state, all layers together, once the window is full.

    Besides the state's own parts: `all`, `key` (of one key and value more in the window of every
    converted layer), `local_window` (keys that it has) and `layers that grow` (their bytes a
    token).

    Raises:
        LatteError: the model is none that was converted.
    """
    config = model.config
    if not hasattr(config, "local_window"):
        raise LatteError(f"expected a converted model, got {config.model_type!r}")
    length = 2 * max(config.local_window, config.kept_window or 0) + config.num_sinks + READ
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    constant = [i for i in range(config.num_hidden_layers) if not config.state_grows(i)]
    parts: dict[str, int] = {}
    key = grows = 0
    for index, layer in enumerate(cache.layers):
        held = layer.state
        if index not in constant:
            grows += size_of(held) // length
            continue
        for name in held._fields:
            parts[name] = parts.get(name, 0) + size_of(getattr(held, name))
        if held.latent is None:  # a layer that has the base's own window
            continue
        exact = held.window if held.kept is None else held.kept
        shown = [x[:, :1] for x in (exact.keys, exact.values)]
        key += sum(x.numel() * x.element_size() for x in shown)
    found = {name: size for name, size in parts.items() if size}
    found |= {"all": sum(parts.values()), "key": key, "local_window": config.local_window}
    if grows:
        found["layers that grow"] = grows
    return [{"part": name, "bytes": size} for name, size in found.items()]


def size_of(value: Any) -> int:
    """Bytes of all tensors in nested tuples."""
    return sum(x.numel() * x.element_size() for x in tensors_in((value,)))


def report(folder: Path, rows: Sequence[Row], *, order: Sequence[str]) -> str:
    """Write memory.md; returns the Markdown."""
    names = [name for name in dict.fromkeys(row["part"] for row in rows)]
    parts = [name for name in names if name not in ("key", "local_window")]
    heads = [f"{name} (bytes)" for name in parts]
    lines = [["model", "window", *heads, "equal window, latents", "equal window, all"]]
    for model, own in by_model(rows, order).items():
        sizes = {row["part"]: int(row["bytes"]) for row in own}
        cells = [f"{sizes[name]:,}" if name in sizes else "-" for name in parts]
        window, key = sizes["local_window"], sizes["key"]
        held = [sizes.get("latent", 0), sum(sizes.get(name, 0) for name in LATENTS)]
        if "kept" in sizes:  # among them are the window - 1 keys that the control holds
            held = [size + sizes["kept"] - (window - 1) * key for size in held]
        equal = [f"{window - (-size // key):,}" if key else "-" for size in held]
        lines.append([model, f"{window:,}", *cells, *equal])
    text = (
        "Bytes of the state, all layers together. An equal window is that of a control,"
        " `mixing=window`, with as many bytes or just more: for the latents' own state, and for"
        " all that is held for them; with kept tokens, for these too.\n\n" + table(lines)
    )
    (folder / "memory.md").write_text(text, encoding="utf-8")
    return text
