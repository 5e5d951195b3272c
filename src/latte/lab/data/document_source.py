"""What a source of documents is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Meter = Callable[[int], Any]


def no_meter(done: int) -> None:
    """A meter that shows no progress."""


class Source:
    """Documents in a fixed order. ``total`` counts ``unit``s (None until known), for a bar."""

    name: str
    unit = "B"
    total: int | None = None

    def fingerprint(self) -> str:
        """A digest that changes when the documents do."""
        raise NotImplementedError

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        """The documents; ``meter`` gets the number of ``unit``s that are read."""
        raise NotImplementedError


def without_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs (legal in JSON, not in UTF-8)."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
