"""How Hugging Face's libraries read a model: what they may read and run, and what they say.

Without a network the Hub's client tries five times, for half a minute, and prints every attempt.
Files that are on the disk already need no Hub: the client then reads only the disk. Whether the
Hub answers is asked once and quickly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte.errors import LatteError, one_line
from latte.models.plain_files import check_plain, read_object

SECONDS = 2.0  # for the answer
# Files of a model's folder that hold a JSON object, and the kinds of all that are read.
OBJECTS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("processor_config.json", "chat_template.json", "adapter_config.json"),
)
MOST_LAYERS = 100_000  # a configuration lists its layers: more of them fill the memory
SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf", ".model", ".bin", ".txt")


def hub_options(name: str | Path) -> dict[str, Any]:
    """Options of ``from_pretrained(name)``.

    No code that a model brings is run. Only the disk is read where the Hub is not needed or does
    not answer.
    """
    offline = Path(name).exists() or not hub_answers()
    return {"trust_remote_code": False} | ({"local_files_only": True} if offline else {})


def check_files(folder: Path) -> None:
    """Check the files of a model's folder before a library opens them.

    Raises:
        LatteError: A file is no plain file, or has no JSON object where one belongs.
    """
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.name in OBJECTS:
            values = read_object(path)
            layers, longest = values.get("num_hidden_layers"), values.get("model_max_length", 0)
            if isinstance(layers, int) and layers > MOST_LAYERS:
                raise LatteError(f"{path} was edited: no model has {layers:,} layers")
            if not isinstance(longest, (int, float, type(None))):
                raise LatteError(f"{path} was edited: model_max_length is no number")
        elif path.suffix in SUFFIXES:
            check_plain(path)


def check_no_code(config: Any, place: str | Path) -> None:
    """Raise LatteError for a configuration whose attention is code of the Hub (``owner/name``)."""
    attention = getattr(config, "_attn_implementation", None)
    if "/" in str(attention):
        raise LatteError(
            f"{place}: its config asks for the code {attention!r} as its attention, which is not"
            " run; remove attn_implementation from config.json"
        )


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
    """The exceptions with which Transformers ends where a model's JSON files are damaged."""
    from huggingface_hub.errors import StrictDataclassError

    damaged = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    return (*damaged, AssertionError, OSError, RecursionError, StrictDataclassError)


def reason(error: BaseException) -> str:
    """Why Transformers did not load something, in one line."""
    if "trust_remote_code" in str(error):
        return "it needs Python code that it brings, which is not run"
    return one_line(error)


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
