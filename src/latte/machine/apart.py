"""Work in a process of its own: what it leaves in memory is not measured with the next, and
what kills it kills nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

from latte.errors import LatteError


class WorkFailed(LatteError):
    """The work ended by something else than a LatteError; the message says by what."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, run in a new process; arguments and result are pickled.

    Raises:
        LatteError: as the function raised it.
        WorkFailed: another exception (its traceback goes to stderr), or the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        good, value = receiver.recv()
    except EOFError:
        process.join()
        raise WorkFailed(_ending(process.exitcode)) from None
    except BaseException:  # interrupted: the work must not go on alone
        process.terminate()
        raise
    finally:
        process.join()
    if not good:
        raise value
    return value


def _work(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = (True, function(*arguments))
    except LatteError as error:
        answer = (False, error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        answer = (False, WorkFailed(f"{type(error).__name__}: {text[:300]}"))
    sender.send(answer)


def _end_with_parent() -> None:
    """A killed parent takes the work with it: nobody is left to hear of its result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
