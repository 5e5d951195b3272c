"""One HTML file with a text in it: click a token, see where it looks and through which latents.

The file needs no network and no server. The arrays are packed with zlib and base64, per layer:

* ``states`` p(l|t) [T][H][S], 16 bits linear in [0, 1];
* ``keys`` key logits of the latents [T][H][L], fp32: the browser computes p(s|l,t) itself;
* ``window`` window weights [H][T][T], 8 bits, the square root relative to the row's largest.

T is here the number of tokens shown.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from dataclasses import asdict
from importlib import resources
from typing import Any

import numpy as np
from torch import Tensor

from latte.inspect.mixing import Inspection, Mixing
from latte.inspect.statistics import Summary


def build_page(inspection: Inspection, summaries: list[Summary]) -> str:
    """The page as text."""
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    data = {
        "tokens": inspection.tokens[: inspection.shown],
        "read": len(inspection.tokens),
        "layers": [
            _layer(number, mixing, inspection.shown, [s for s in summaries if s.layer == number])
            for number, mixing in inspection.layers.items()
        ],
    }
    # "<" never stands in the data, so that no text can close the script element.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    values = {"title": html.escape(inspection.label), "data": embedded}
    # One pass over the template alone: nothing in a value is taken for a marker.
    return re.sub(r"\{\{(\w+)\}\}", lambda marker: values[marker[1]], template)


def _layer(number: int, mixing: Mixing, shown: int, summaries: list[Summary]) -> dict[str, Any]:
    states = keys = window = None
    if mixing.states_THS is not None:
        states = _packed((mixing.states_THS[:shown].double().numpy() * 65535).round(), "<u2")
    if mixing.latent_k_THL is not None:
        keys = _packed(mixing.latent_k_THL[:shown].numpy(), "<f4")
    if mixing.window_HPP is not None:
        window = _packed(_companded(mixing.window_HPP[:, :shown, :shown]), "u1")
    return {
        "number": number,
        "heads": mixing.heads,
        "latents": mixing.latents,
        "names": mixing.names,
        "width": mixing.width,
        "delay": mixing.delay,
        "states": states,
        "keys": keys,
        "window": window,
        "summaries": [_plain(asdict(row)) for row in summaries],
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN; six digits are enough to read."""
    return {
        key: None
        if value is None or value != value
        else round(value, 6)
        if isinstance(value, float)
        else value
        for key, value in row.items()
    }


def _companded(weights_HPP: Tensor) -> np.ndarray:
    """Small weights keep their precision: 255 sqrt(w / largest of the row)."""
    weights = weights_HPP.double().numpy()
    largest = weights.max(-1, keepdims=True)
    return (255 * np.sqrt(weights / np.where(largest > 0, largest, 1.0))).round()


def _packed(values: np.ndarray, dtype: str) -> str:
    raw = np.ascontiguousarray(values.astype(dtype)).tobytes()
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
