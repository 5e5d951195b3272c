"""What Hugging Face's libraries say, and whether the Hub answers, which is asked once and quickly.

Without a network the Hub's client tries five times, for half a minute, and prints every attempt.
Files that are on the disk already need no Hub: the client then reads only the disk.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 2.0  # for the answer


def hub_options(name: str | Path) -> dict[str, Any]:
    """Options of ``from_pretrained(name)``: files on the disk alone, where the Hub is not needed or
    does not answer.
    """
    return {"local_files_only": True} if Path(name).exists() or not hub_answers() else {}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it, Transformers' warnings and progress bars are off, such as of new weights."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def config_errors() -> tuple[type[Exception], ...]:
    """The exceptions with which Transformers ends where a ``config.json`` is damaged."""
    from huggingface_hub.errors import StrictDataclassError

    damaged = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
    return (*damaged, OSError, StrictDataclassError)


def unreachable(name: str | Path) -> str:
    """A clause for errors if a name was not found because the Hub cannot be reached; else empty."""
    if Path(name).exists() or hub_answers():
        return ""
    return f"there is no folder or file {name} here, and the Hugging Face Hub cannot be reached"


@functools.cache
def hub_answers() -> bool:
    """Whether the Hub can be reached. Asked once; offline mode is no."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:  # every client, proxy and system has errors of its own; all mean no
            return
        answered.set()

    # In a thread: a name that is looked up without a network can take longer than any time limit.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * SECONDS)
    return answered.is_set()
