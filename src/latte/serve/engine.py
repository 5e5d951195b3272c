"""Requests share a step: the loop that reads prompts and decodes all running answers together.

There are ``slots`` places. A request takes one place. Its prompt is read in pieces, and then it has
a row in a common cache (:mod:`latte.serve.rows`). A step decodes one token of every row. Between
two steps one piece of one prompt is read, so a long prompt delays running answers by one piece at
most. A row is removed at the next step when its answer has ended or its client has disconnected.

When an answer is complete, it is read once more, in the form that the next turn of the chat will
send. This is done when there is no other work (:class:`Ahead`). The next turn then finds a state
that has read the answer. Another thread renders and splits that turn, because both take long for a
long chat.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from latte.models.cache import LatteCache
from latte.models.cache_name import CACHE_NAME
from latte.serve.counters import Counters
from latte.serve.prefix_cache import Ids
from latte.serve.reading import Reader, Reading, Scoring
from latte.serve.requests import BadRequest
from latte.serve.rows import joined
from latte.serve.sampling import Sampler, TokenScore, scores_of

logger = logging.get_logger(__name__)

AHEAD = 32  # largest number of answers that wait to be read once more; older ones are dropped
FORWARD = 32  # number of tokens that a forward can read in the time that it needs for few
PATIENCE = 8  # number of steps between two pieces of such an answer, while other answers run


@dataclass(eq=False)
class Request:
    """A prompt to be answered. The loop's thread calls ``put`` and then, once, ``end``.

    Attributes:
        ids: Ids of the prompt, at least one.
        marks: Numbers of tokens after which other requests are likely to branch.
        sampler: Function that chooses the tokens.
        put: Function that is called with each token of the answer, and with its score if these are
            wanted. It returns whether the answer ends.
        end: Function that is called when the answer is complete, or with the exception by which
            it failed.
        follow: Function from the answer to the next turn's likely tokens and marks, or to None.
        most_likely: Number of most likely tokens whose probabilities are given with each token;
            None gives no probabilities.
        scored: Probabilities of the prompt's tokens, to be computed.
        silent: Whether the prompt is only read.
        gone: Event that is set when no client waits for the answer any more.
    """

    ids: Ids
    sampler: Sampler
    put: Callable[[int, TokenScore | None], bool]
    end: Callable[[Exception | None], None]
    marks: tuple[int, ...] = ()
    follow: Callable[[list[int]], tuple[Ids, tuple[int, ...]] | None] | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    most_likely: int | None = None
    scored: Scoring | None = None
    silent: bool = False
    written: list[int] = field(default_factory=list)
    next: int = 0  # token that its row reads in the next step
    reused: int = 0
    came: float = field(default_factory=time.perf_counter)
    last: float = 0.0
    reading: Reading | None = None


class Ahead:
    """Answers that are to be read, with the text that the next turn sends before them.

    Args:
        reader: Reader of prompts.
        do: Function that does some work now or later, perhaps in another thread.
    """

    def __init__(
        self, reader: Reader, do: Callable[[Callable[[], None]], object] = lambda work: work()
    ) -> None:
        self._reader, self._do = reader, do
        # Tokens and marks of a next turn, and the largest number of tokens to read of it.
        self._waiting: deque[tuple[Ids, tuple[int, ...], int]] = deque(maxlen=AHEAD)
        self._reading: Reading | None = None

    def add(self, request: Request) -> None:
        follow, written = request.follow, list(request.written)
        if follow is None or not self._reader.store.room:
            return
        prompt = len(request.ids)

        def find() -> None:
            next_turn = follow(written)
            if next_turn is not None:
                ids, marks = next_turn
                # If the prompt's own state was removed, to read all again would take too long.
                most = max(0, len(ids) - prompt) + self._reader.piece
                self._waiting.append((ids, marks, most))

        self._do(find)

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._reading is not None

    def read(self) -> int:
        """Read one piece, if there is one. Returns its number of tokens."""
        reading, self._reading = self._reading, None
        if reading is None:
            ids, marks, most = self._waiting.popleft()
            reading = self._reader.begin(ids, marks, most=most)
        if not reading.left:
            return 0
        tokens = reading.read()  # after an error it is dropped: its cache may have changed in part
        if reading.left:
            self._reading = reading
        return tokens


class Engine:
    """The loop, in a separate thread.

    Args:
        reader: Reader of prompts, with the model that answers.
        slots: Number of requests that are read or decoded at the same time. Others wait.
        sends: Function that is called after each step: it passes the tokens on to clients.
        threads: Number of threads that compute; None leaves PyTorch's number.
    """

    def __init__(
        self,
        reader: Reader,
        slots: int,
        counters: Counters,
        sends: Callable[[], None] = lambda: None,
        threads: int | None = None,
    ) -> None:
        # A step has one set of rotary frequencies. If the longest row chooses it, rows step alone.
        apart = getattr(reader.model.base_model, "frequencies_by_length", False)
        self.reader, self.slots, self.counters = reader, 1 if apart else slots, counters
        self._sends, self._threads = sends, threads
        self._model = reader.model
        self._came: queue.Queue[Request | None] = queue.Queue()
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        self._rows: list[Request] = []
        self._cache: LatteCache | None = None
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self._beside = ThreadPoolExecutor(1, "next turns")
        self._ahead = Ahead(reader, self._do_beside)
        self._steps = 0
        self._ends = False
        self._closing = threading.Lock()  # no request comes while the last ones are failed
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="answers")
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Answer a request.

        Raises:
            BadRequest: A token is not one of the model's. It would end the step of all rows.
        """
        if not 0 <= request.ids.min() <= request.ids.max() < self._vocabulary:
            raise BadRequest(f"prompt: expected token ids below {self._vocabulary}", "prompt")
        with self._closing:
            if not self._closed:
                self._came.put(request)
                return
        self._fail([request], _over())
        self._sends()

    def end(self) -> None:
        """Make the thread end after its present forward; remaining requests fail."""
        self._ends = True
        self._came.put(None)

    def close(self, seconds: float = 10) -> None:
        """End the thread, and wait for it."""
        self.end()
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._thread.join(seconds)

    def _do_beside(self, work: Callable[[], None]) -> None:
        """Do it in another thread than the loop's, and wake the loop."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                logger.error("an answer could not be split for its next turn", exc_info=error)
            self._came.put(None)

        with contextlib.suppress(RuntimeError):  # the server ends
            self._beside.submit(run)

    # --- the loop ------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while not self._ends:
            try:
                self._turn()
            except Exception as error:  # waiting requests get any error; later requests are served
                self._fail(self._let_all_go(), error)
            self._sends()
        with self._closing:
            self._closed = True
            came = [self._came.get() for _ in range(self._came.qsize())]
        left = [*self._let_all_go(), *self._waiting, *filter(None, came)]
        self._fail(left, _over())
        self._sends()

    def _turn(self) -> None:
        """One piece of a prompt, and a step of all rows."""
        self._admit()
        if self._reading:
            self._read()
        elif self._ahead and (not self._rows or self._steps % PATIENCE == 0):
            self._read_ahead()
        if self._rows:
            self._step()
            self._steps += 1
        self.counters.slots(len(self._rows) + len(self._reading), len(self._waiting))

    def _let_all_go(self) -> list[Request]:
        left = [*self._rows, *self._reading]
        self._rows, self._cache = [], None
        self._reading.clear()
        return left

    def _admit(self) -> None:
        """Take new requests; wait for one if there is no other work."""
        idle = not (self._rows or self._reading or self._waiting or self._ahead)
        try:
            while True:
                request = self._came.get(block=idle)
                if request is not None:
                    self._waiting.append(request)
                idle = False
        except queue.Empty:
            pass
        while self._waiting and len(self._rows) + len(self._reading) < self.slots:
            request = self._waiting.popleft()
            if not request.gone.is_set():
                self._reading.append(request)

    def _read(self) -> None:
        """Read one piece of a prompt, or some short ones. A prompt that is read gets a row."""
        left = self.reader.piece
        ready: list[Request] = []
        while self._reading and left > 0:
            request = self._reading.popleft()
            if request.gone.is_set():
                continue
            try:
                if request.reading is None:
                    request.reading = self.reader.begin(
                        request.ids[:-1], request.marks, scored=request.scored
                    )
                    request.reused = request.reading.reused
                    self.counters.prompt(len(request.ids), request.reused)
                if request.reading.left:
                    tokens = request.reading.read()
                    self.counters.read(tokens)
                    left -= tokens + FORWARD
                (self._reading if request.reading.left else ready).append(request)
            except Exception as error:  # of this request alone
                self._fail([request], error)
        self._join(ready)

    def _join(self, ready: list[Request]) -> None:
        """Give requests a row. The last token of a prompt is read by a step."""
        for request in ready:
            assert request.reading is not None
            cache, request.reading = request.reading.cache, None
            if request.silent:
                request.end(None)
                continue
            request.next = int(request.ids[-1])
            try:
                if not cache.get_seq_length():  # a row cannot begin with an empty state
                    logits = self._forward([request.next], cache)
                    if self._write(request, request.sampler(logits), logits):
                        continue
                caches = [cache] if self._cache is None else [self._cache, cache]
                self._cache = joined(self._model.config, caches)
            except Exception as error:  # of this request alone
                self._fail([request], error)
                continue
            self._rows.append(request)

    def _step(self) -> None:
        """One token of every row."""
        self._keep([i for i, request in enumerate(self._rows) if not request.gone.is_set()])
        if not self._rows:
            return
        logits_BV = self._forward([request.next for request in self._rows], self._cache)
        chosen = logits_BV.argmax(-1).tolist()
        kept = []
        for i, request in enumerate(self._rows):
            own = logits_BV[i : i + 1]
            try:
                token = chosen[i] if request.sampler.is_greedy else request.sampler(own)
                if not self._write(request, token, own):
                    kept.append(i)
            except Exception as error:  # of this request alone
                self._fail([request], error)
        self._keep(kept)

    def _forward(self, tokens: list[int], cache: Any) -> Tensor:
        """Logits (B, V) in fp32 after one token more of every row."""
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        logits = self._model(ids, use_cache=True, **{CACHE_NAME: cache}).logits
        return logits[:, -1].float()

    def _keep(self, kept: list[int]) -> None:
        """Remove the other rows."""
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        if kept and self._cache is not None:
            self._cache.batch_select_indices(torch.tensor(kept))
        else:
            self._cache = None

    def _write(self, request: Request, token: int, logits_1V: Tensor) -> bool:
        """Pass a token to its request; returns whether it was the answer's last."""
        now = time.perf_counter()
        self.counters.wrote(now - (request.last or request.came), first=not request.last)
        request.last = now
        request.written.append(token)
        request.next = token
        score = None
        if request.most_likely is not None:
            (score,) = scores_of(logits_1V, [token], request.most_likely)
        request.sampler.took(token)
        if not request.put(token, score):
            return False
        request.end(None)
        self._ahead.add(request)
        return True

    def _fail(self, requests: list[Request], error: Exception) -> None:
        """Pass the error to requests. When the server ends, some may no longer wait."""
        if requests and not self._ends:
            logger.error("a request failed", exc_info=error)
        for request in requests:
            with contextlib.suppress(RuntimeError):
                request.end(error)

    def _read_ahead(self) -> None:
        try:
            self.counters.read(self._ahead.read())
        except Exception as error:
            logger.error("an answer could not be read for its next turn", exc_info=error)


def _over() -> BadRequest:
    return BadRequest("the server ends", status=503)
