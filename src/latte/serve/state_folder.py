"""Keeps a server's states on disk, so that they are still there after a restart.

Each state is a file of :mod:`latte.models.state_file`, which also has its tokens. The file has the
name of the state (:mod:`latte.serve.prefix_cache`). ``latte generate --state`` can read such a file
too. A separate thread writes the files, so that no request waits. A file is complete or absent,
also when the process is killed. A damaged file is set aside under another name, and its text is
read again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from latte.errors import LatteError, one_line
from latte.models.state_file import fingerprint, read_state, save_state
from latte.serve.prefix_cache import Ids, Kept

logger = logging.get_logger(__name__)

ASIDE = ".damaged"  # suffix of files that could not be read
WAITING = 64  # largest number of states that wait for the disk; further ones are not written


class StateFolder:
    """State files of one model in a folder, at most ``room`` bytes. The oldest is removed first.

    Args:
        path: Folder; it is made if it does not exist. Each model has its own folder in it.
        model: Model that the states belong to.
        room: Largest number of bytes of the files.

    Raises:
        LatteError: The folder cannot be made or written.
    """

    def __init__(self, path: str | Path, model: Any, room: int) -> None:
        self.path, self.room = Path(path).expanduser() / fingerprint(model)[:16], room
        self._decoder = weakref.ref(model.get_decoder())
        self._waiting: queue.Queue[tuple[bytes, Kept] | None] = queue.Queue(WAITING)
        self._lock = threading.Lock()  # for the contents of the folder, which two threads change
        self._held: dict[str, int] = {}  # bytes by file name, the least recently used first
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
            self._look()
        except OSError as error:
            raise LatteError(
                f"state-cache-dir {path}: expected a folder to write to: {one_line(error)}"
            ) from None
        self._writer = threading.Thread(target=self._write, daemon=True, name="states to disk")
        self._writer.start()

    @property
    def nbytes(self) -> int:
        """Number of bytes of all files."""
        with self._lock:
            return sum(self._held.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def get(self, name: bytes, ids: Ids) -> Kept | None:
        """The state of this name, if there is one that has read these tokens."""
        path, decoder = self._file(name), self._decoder()
        if decoder is None or not path.is_file():
            return None
        try:
            cache, read = read_state(path, decoder)
            if read is None or cache.batch_size != 1:
                raise LatteError("expected the state of one text, with its tokens")
        except (LatteError, OSError) as error:
            self._set_aside(path, error)
            return None
        if not np.array_equal(read.numpy(), ids):
            return None
        with contextlib.suppress(OSError), self._lock:  # such as of a disk that is read alone
            _mark_used(path)
            if path.name in self._held:
                self._held[path.name] = self._held.pop(path.name)
        return Kept.of(cache, read.numpy())

    def put(self, name: bytes, kept: Kept) -> None:
        """Have a state written, if the disk is fast enough. This call does not wait.

        A state that is larger than the room is not written.
        """
        if self._file(name).name in self._held or kept.nbytes > self.room:
            return
        try:
            self._waiting.put_nowait((name, kept))
        except queue.Full:
            logger.warning_once("the disk is slower than states come: some are not written")

    def close(self, seconds: float = 10) -> None:
        """Write the waiting states, for at most this time."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=seconds)
        self._writer.join(max(0.0, end - time.monotonic()))

    def _file(self, name: bytes) -> Path:
        return self.path / f"{name.hex()}.safetensors"

    def _look(self) -> None:
        """List the files here, and remove the incomplete files of killed processes."""
        found = []
        for path in self.path.iterdir():
            _, part, process = path.name.partition(".safetensors.tmp-")
            if part and not _runs(process):
                path.unlink(missing_ok=True)
            elif path.suffix in (".safetensors", ASIDE):
                about = path.stat()
                found.append((about.st_mtime_ns, path.name, about.st_size))
        self._held = {name: size for _, name, size in sorted(found)}
        self._make_room()

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            name, kept = item
            path, decoder = self._file(name), self._decoder()
            if decoder is None:
                return
            try:
                save_state(kept.on_cpu(decoder), path, torch.from_numpy(kept.ids))
                _mark_used(path)
                size = path.stat().st_size
            except Exception as error:  # later states are written
                logger.warning_once(f"states are not written to disk: {one_line(error)}")
                continue
            with self._lock:
                self._held[path.name] = size
            self._make_room()
            del item, kept

    def _make_room(self) -> None:
        with self._lock:
            total = sum(self._held.values())
            gone = []
            for name, size in self._held.items():
                if total <= self.room:
                    break
                total -= size
                gone.append(name)
        for name in gone:
            self._remove(self.path / name)

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Rename a file that cannot be read. It still counts, and is removed when it is old."""
        aside = path.with_suffix(ASIDE)
        with self._lock:
            size = self._held.pop(path.name, 0)
            try:
                os.replace(path, aside)
                self._held[aside.name] = size
            except OSError:
                aside = path  # the next state of this name replaces it
        logger.warning(f"set aside as {aside.name}, its text is read anew: {one_line(error)}")

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with self._lock:
            self._held.pop(path.name, None)


def _mark_used(path: Path) -> None:
    """Give a file the time of now. A file system's own clock ticks too rarely to order files."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _runs(process: str) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except OSError:
        return True
    return True
