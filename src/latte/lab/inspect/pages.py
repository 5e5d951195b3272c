"""Pages of `latte inspect`: a template, the head that all have, and the data of the script."""

from __future__ import annotations

import html
import json
import math
import re
from importlib import resources
from typing import Any


def rounded(value: float, digits: int) -> float | str:
    """A number, rounded to these digits. Infinity becomes JavaScript's word, as JSON has none."""
    if math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def filled_page(template: str, title: str, data: dict[str, Any]) -> str:
    """A page as text: the template's file with its title, and the data as JSON."""

    def text(name: str) -> str:
        return (resources.files(__package__) / name).read_text(encoding="utf-8")

    # "<" never stands in the data, so that no text can close the script element.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    values = {"title": html.escape(title), "data": embedded, "head": text("head.html").rstrip()}
    # One pass over the template alone: nothing in a value is taken for a marker.
    return re.sub(r"\{\{(\w+)\}\}", lambda marker: values[marker[1]], text(template))
