"""Ctrl-C during training: the run saves a checkpoint after the current step, and stops."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback


class Interruption(TrainerCallback):
    """Stops a run with a checkpoint after the first Ctrl-C. A second one stops it at once.

    Attributes:
        asked: Whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self, processes: int) -> Iterator[None]:
        """Handle Ctrl-C inside the block, and raise KeyboardInterrupt at its end if it came.

        Ctrl-C has its usual effect where a run has several processes, because each could stop
        after another step; in a process that another one started, which ends it then; where the
        program has a handler of its own; and in other threads, which cannot have one.
        """
        alone = processes == 1 and multiprocessing.parent_process() is None
        main = threading.current_thread() is threading.main_thread()
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not (alone and main and usual):
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.asked:
            raise KeyboardInterrupt

    def _handle(self, *frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        line = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"
        print(f"\n{line}", file=sys.stderr, flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.asked and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True
        return control
