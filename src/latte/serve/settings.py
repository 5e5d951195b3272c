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
        False, "compile", "compile a step first; requests are then answered one by one"
    )
    slots: int = setting(8, "max-batch", "largest number of requests that share a step", least=1)
    piece: int | None = setting(
        None,
        "prefill-piece",
        "largest number of prompt tokens read between two steps; 256 on a CPU, else 2048",
        least=1,
    )
    longest: int | None = setting(
        None,
        "max-length",
        "largest number of tokens of prompt and answer; more is refused",
        least=1,
    )
    state_cache: int = setting(
        2**30,
        "state-cache",
        "size of the states kept in memory, such as 1GiB (the default); 0 keeps none",
        least=0,
        metavar="SIZE",
    )
    state_folder: str | Path | None = setting(
        None,
        "state-cache-dir",
        "folder where states are also kept as files, for the next start",
        metavar="DIR",
    )
    state_folder_room: int = setting(
        10 * 2**30, "state-cache-disk", "size of these files, 10GiB by default", metavar="SIZE"
    )
    body: int = setting(
        4 * 2**20, "max-body", "largest size of a request, 4MiB by default", least=1, metavar="SIZE"
    )
    messages: int = setting(4096, "max-messages", "largest number of messages of a chat", least=1)
    characters: int = setting(
        2_000_000, "max-characters", "largest number of characters of a request", least=1
    )
    patience: float = setting(
        30,
        "client-timeout",
        "how long to wait for the rest of a request, or for a client that reads nothing",
        least=1,
        metavar="SECONDS",
    )
    hosts: Sequence[str] | None = setting(
        None,
        "allowed-hosts",
        "names in URLs that the server answers to, separated by commas; at a loopback address those"
        " of this machine are added, elsewhere all are answered if none is named",
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
