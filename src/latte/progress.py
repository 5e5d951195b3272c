"""How far a long command is: a bar on a terminal, elsewhere a line every minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60.0  # between two lines


class Progress:
    """How much is done, of what. :func:`progress` makes it."""

    def __init__(self, total: int, unit: str, bar: object = None) -> None:
        self.total, self.unit, self.done, self.label = total, unit, 0, ""
        self._bar, self._start = bar, time.perf_counter()

    def describe(self, label: str) -> None:
        """What is being worked on now."""
        self.label = label
        if self._bar is not None:
            self._bar.set_description(label)  # type: ignore[attr-defined]

    def update(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)  # type: ignore[attr-defined]

    def line(self) -> str:
        """Such as `base at 4,096: 120,000 of 300,000 tokens (40%) in 3 min, about 5 min left`."""
        seconds = time.perf_counter() - self._start
        share = self.done / max(self.total, 1)
        text = f"{self.label}: " if self.label else ""
        text += f"{self.done:,} of {self.total:,} {self.unit}s ({share:.0%}) in {minutes(seconds)}"
        if self.done:
            text += f", about {minutes(seconds * (1 - share) / share)} left"
        return text


def minutes(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = round(seconds / 60)
    return f"{whole} min" if whole < 60 else f"{whole // 60} h {whole % 60} min"


@contextmanager
def progress(total: int, unit: str, *, shown: bool = True) -> Iterator[Progress]:
    """Show on stderr how far the work within is: a bar, or a line every minute.

    The lines come from a thread of their own: a single batch may take longer than a minute.

    Args:
        total: of units, named in the singular.
        shown: False shows nothing.
    """
    if shown and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, unit=unit, unit_scale=True) as bar:
            yield Progress(total, unit, bar)
        return
    state, over = Progress(total, unit), threading.Event()

    def say() -> None:
        while not over.wait(SECONDS):
            print(state.line(), file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    if shown:
        thread.start()
    try:
        yield state
    finally:
        over.set()
        if shown:
            thread.join()
