"""The settings of a server, each declared once: default, option of ``latte serve``, meaning.

Torch is never imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from latte.errors import LatteError


def setting(
    default: Any, flag: str, help: str, *, least: int | None = None, metavar: str | None = None
) -> Any:
    """A field that is an option of the command.

    Args:
        flag: Name of the option, without dashes.
        least: Least value of a number.
        metavar: Name of the value in help texts, which says its kind. None for a plain number.
    """
    metadata = {"flag": flag, "help": help, "least": least, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass
class Serving:
    """Settings of a server. The texts of the options say what they mean.

    Attributes:
        threads: Number of threads that compute; None leaves PyTorch's number.
    """

    compiled: bool = setting(
        False, "compile", "compile one step of decoding first; requests are answered one by one"
    )
    slots: int = setting(8, "max-batch", "largest number of requests that share a step", least=1)
    piece: int | None = setting(
        None,
        "prefill-piece",
        "largest number of tokens of a prompt that are read between two steps; 256 on a CPU,"
        " elsewhere 2048",
        least=1,
    )
    longest: int | None = setting(
        None,
        "max-length",
        "largest number of tokens of prompt and answer together; no limit",
        least=1,
    )
    state_cache: int = setting(
        2**30,
        "state-cache",
        "memory for states that are kept, such as `2GiB`; 0 keeps none",
        least=0,
        metavar="SIZE",
    )
    state_folder: str | Path | None = setting(
        None,
        "state-cache-dir",
        "folder in which states are kept as files too, for the next start",
        metavar="DIR",
    )
    state_folder_room: int = setting(
        10 * 2**30, "state-cache-disk", "largest size of these files together", metavar="SIZE"
    )
    body: int = setting(
        4 * 2**20,
        "max-body",
        "largest size of a request's body, such as `16MiB`; a larger one gets status 413",
        least=1,
        metavar="SIZE",
    )
    messages: int = setting(4096, "max-messages", "largest number of messages of a chat", least=1)
    characters: int = setting(
        2_000_000,
        "max-characters",
        "largest number of characters of all strings of a request together",
        least=1,
    )
    patience: float = setting(
        30,
        "client-timeout",
        "seconds after which a client is dropped that does not send the rest of its request, or"
        " does not read its answer; it can take twice as long",
        least=1,
        metavar="SECONDS",
    )
    hosts: Sequence[str] | None = setting(
        None,
        "allowed-hosts",
        "names in URLs that the server answers to, without ports, separated by commas:"
        " `api.example.com`, `*.example.com`, or `*` for any name. At a loopback address those of"
        " this machine are added; at a loopback address none, elsewhere all",
        metavar="NAMES",
    )
    threads: int | None = None

    @classmethod
    def options(cls) -> list[Field[Any]]:
        """The fields that are options."""
        return [each for each in fields(cls) if each.metadata]

    def check(self) -> None:
        """Raise LatteError for numbers that are out of range."""
        for each in self.options():
            value, least = getattr(self, each.name), each.metadata["least"]
            if None not in (value, least) and not value >= least:  # nor nan
                raise LatteError(f"{each.metadata['flag']}: expected at least {least}, got {value}")
        if self.state_folder is not None and not self.state_cache:
            raise LatteError("state-cache-dir: expected a --state-cache above 0 beside it, got 0")
