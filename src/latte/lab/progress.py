"""How far a long command is: a bar on a terminal, elsewhere a line every minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 60.0  # between two lines


class Progress:
    """The progress of some work. :func:`progress` makes it.

    `total` may be set later. 0 means that it is not known.
    """

    def __init__(self, total: int, unit: str, bar: Any = None) -> None:
        self.total, self.unit, self.done, self.label = total, unit, 0, ""
        self._before = 0  # done by an earlier call
        self._bar, self._start = bar, time.perf_counter()
        self.quiet_since = self._start

    def describe(self, label: str) -> None:
        """What is being worked on now."""
        self.label = label
        if self._bar is not None:
            self._bar.set_description(label)

    def update(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        if self._bar is not None:
            if self._bar.total != (self.total or None):  # it may be known only now
                self._bar.total = self.total or None
            self._bar.update(count)

    def skip(self, count: int) -> None:
        """So many were done before this call, in no time of its own."""
        self._before += count
        self.update(count)

    def note(self, text: str) -> None:
        """Set the text after the bar, where there is one."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def spoke(self) -> None:
        """Note that the command has printed a line itself: the next line follows in a minute."""
        self.quiet_since = time.perf_counter()

    def line(self) -> str:
        """Such as `base at 4,096: 120,000 of 300,000 tokens (40%) in 3 min, about 5 min left`."""
        seconds = time.perf_counter() - self._start
        text = f"{self.label}: " if self.label else ""
        if not self.total:
            done = f"{self.done:,} {self.unit}s in" if self.done else "at work for"
            return f"{text}{done} {minutes(seconds)}"
        share = self.done / self.total
        text += f"{self.done:,} of {self.total:,} {self.unit}s ({share:.0%}) in {minutes(seconds)}"
        if own := self.done - self._before:
            text += f", about {minutes(seconds * max(0, self.total - self.done) / own)} left"
        return text


def minutes(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60} min"


@contextmanager
def progress(
    total: int, unit: str, *, shown: bool = True, label: str = "", bar: bool = True
) -> Iterator[Progress]:
    """Show the progress of the work within on stderr: a bar, or a line every minute.

    A thread of its own writes the lines, because a single batch may take longer than a minute.

    Args:
        total: Number of units; 0 if it is unknown.
        unit: Name of a unit, in the singular.
        shown: Whether to show anything.
        label: Name of the first part of the work.
        bar: Whether to show a bar on a terminal. False if the work has a bar of its own.
    """
    if shown and sys.stderr.isatty():
        if not bar:
            yield Progress(total, unit)
            return
        from tqdm import tqdm

        with tqdm(total=total or None, unit=unit, unit_scale=True, desc=label or None) as drawn:
            yield Progress(total, unit, drawn)
        return
    state, over = Progress(total, unit), threading.Event()
    state.label = label

    def say() -> None:
        wait = SECONDS
        while not over.wait(wait):
            silent = time.perf_counter() - state.quiet_since
            wait = SECONDS - silent
            if wait <= 0:
                print(state.line(), file=sys.stderr, flush=True)
                state.spoke()
                wait = SECONDS

    thread = threading.Thread(target=say, daemon=True)
    if shown:
        thread.start()
    try:
        yield state
    finally:
        over.set()
        if shown:
            thread.join()
