"""From prompts to answers: what a request asks for, and the managers that answer it.

A request can have several prompts, and several answers to each. Each of these is a :class:`Choice`.
There are two managers. :class:`Answers` sends them to the loop that decodes them together.
:class:`OneByOne` answers one after the other with ``generate``. It is used if a step is compiled,
or if a model keeps no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.utils import logging

from latte.models.cache_name import CACHE_NAME
from latte.serve.counters import Counters
from latte.serve.engine import Engine, Request
from latte.serve.prefix_cache import Ids
from latte.serve.prompts import Prompt, Prompts
from latte.serve.reading import Reader, Scoring
from latte.serve.requests import BadRequest
from latte.serve.sampling import Penalties, Sampler, TokenScore
from latte.serve.writing import Piece, Words, Writer

logger = logging.get_logger(__name__)


@dataclass
class Wish:
    """What a request asks for each of its answers.

    Attributes:
        config: Settings of the sampling, and the end tokens.
        most: Largest number of tokens.
        bounded: Whether the request itself limits the length of its answer.
        stops: Strings that end an answer.
        seed: Seed of the random numbers. The answer with number i to a prompt has ``seed + i``.
        penalties: Penalties of tokens that are in the answer already.
        most_likely: Number of most likely tokens whose probabilities are given with each token;
            None gives no probabilities.
        scores_prompt: Whether the probabilities of the prompt's tokens are given too.
        ranked: Whether those probabilities only say which answers are the best.
        streams: Whether the text is passed on while it is written.
    """

    config: GenerationConfig
    most: int
    bounded: bool = False
    stops: tuple[str, ...] = ()
    seed: int | None = None
    penalties: Penalties = Penalties()
    most_likely: int | None = None
    scores_prompt: bool = False
    ranked: bool = False
    streams: bool = False

    def bound(self, prompt: int, longest: int | None) -> int:
        """The largest number of tokens of an answer, for a prompt's number of tokens.

        Raises:
            BadRequest: Prompt and answer would have more than ``longest`` tokens.
        """
        if longest is None:
            return self.most
        left = longest - prompt
        asked = self.most if self.bounded else 1
        if asked > left:
            raise BadRequest(
                f"expected at most {longest} tokens in all, got {prompt} of the prompt"
                + (f" and {asked} of the answer" if self.bounded else ""),
                code="context_length_exceeded",
            )
        return min(self.most, left)


@dataclass
class Question:
    """A prompt with what is known of it.

    Attributes:
        prompt: Its tokens.
        text: Its text, if it is to be part of the answer.
        scores: Scores of its tokens but the first, if these are wanted.
        reused: Function that returns the number of its tokens that had been read before. It may be
            called after an answer has begun.
    """

    prompt: Prompt
    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    reused: Callable[[], int] = lambda: 0

    @property
    def length(self) -> int:
        """Number of tokens of the request itself, without the start token that is added."""
        return self.prompt["input_ids"].shape[-1]


class Delivery:
    """Passes the texts of a step on to the handlers all at once.

    To wake their thread for each text would take longer than to choose the token.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._texts: list[tuple[asyncio.Queue, Any]] = []

    def begin(self) -> None:
        """The event loop calls this before the first text of a request."""
        self._loop = asyncio.get_running_loop()

    def add(self, queue: asyncio.Queue, *text: Any) -> None:
        """Add a text, or the end of an answer. The thread of the answers calls this."""
        self._texts.append((queue, text))

    def send(self) -> None:
        """Pass on what was added since the last call."""
        texts, self._texts = self._texts, []
        if texts:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._put, texts)

    @staticmethod
    def _put(texts: list[tuple[asyncio.Queue, Any]]) -> None:
        for queue, text in texts:
            queue.put_nowait(text)


class Choice:
    """One answer in the making. The thread of the answers writes it.

    Attributes:
        index: Its number among all answers to the request.
        number: Its number among the answers to its question.
        gone: Event that is set when no client waits for it any more.
        pieces: What was written.
    """

    def __init__(
        self,
        index: int,
        number: int,
        question: Question,
        wish: Wish,
        tell: Callable[[Choice, Any], None],
    ) -> None:
        self.index, self.number, self.question, self.wish = index, number, question, wish
        self.seed = None if wish.seed is None else (wish.seed + number) % 2**63
        self.ids: Ids  # the prompt as the model reads it; these four are set by the manager
        self.marks: tuple[int, ...]
        self.writer: Writer
        self.sampler: Any
        self.gone, self._tell = threading.Event(), tell
        self.pieces: list[Piece] = []

    def put(self, token: int, score: TokenScore | None = None) -> bool:
        """Add a token; returns whether the answer ends with it."""
        piece = self.writer.put(token, score)
        if self.wish.streams and (piece.text or piece.scored):
            self._tell(self, piece)
        self.pieces.append(piece)
        return self.writer.reason is not None

    def end(self, error: Exception | None = None) -> None:
        """The answer is complete, or has failed."""
        self._tell(self, error)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Manager(Protocol):
    """Answers requests.

    ``prepare`` makes a choice ready, or refuses it. ``start`` begins all choices of one question.
    ``stop`` ends those that are left with an error.
    """

    delivery: Delivery

    def prepare(self, choice: Choice, longest: int | None) -> None: ...
    def start(self, choices: list[Choice]) -> None: ...
    def stop(self) -> None: ...


class Answering:
    """All answers to one request.

    Args:
        candidates: Number of answers to each question.
        longest: Largest number of tokens of prompt and answer together; None is no limit.

    Raises:
        BadRequest: The request cannot be served.
    """

    def __init__(
        self,
        manager: Manager,
        questions: list[Question],
        wish: Wish,
        candidates: int,
        longest: int | None,
    ) -> None:
        self._manager = manager
        self._queue: asyncio.Queue[tuple[Choice, Any]] = asyncio.Queue()
        tell = partial(manager.delivery.add, self._queue)
        self.questions = questions
        self.choices: list[list[Choice]] = []  # of each question
        for number, question in enumerate(questions):
            begin = number * candidates
            own = [Choice(begin + i, i, question, wish, tell) for i in range(candidates)]
            for choice in own:
                manager.prepare(choice, longest)
            self.choices.append(own)

    async def events(self) -> AsyncGenerator[list[tuple[Choice, Piece | None]], None]:
        """Answers the request. Gives what was written since the last time; None ends a choice.

        Raises:
            BadRequest: A choice has failed.
        """
        left = sum(len(own) for own in self.choices)
        self._manager.delivery.begin()
        try:
            for own in self.choices:
                self._manager.start(own)
            while left:
                came = [await self._queue.get()]
                came += [self._queue.get_nowait() for _ in range(self._queue.qsize())]
                for i, (_, what) in enumerate(came):
                    if isinstance(what, Exception):  # it has been logged
                        if i:
                            yield came[:i]
                        raise BadRequest.of(what)
                    left -= what is None
                yield came
        finally:  # also when the client has disconnected
            for own in self.choices:
                for choice in own:
                    choice.gone.set()

    def tokens(self) -> tuple[int, int, int]:
        """Numbers of tokens: of the prompts, of all answers, and of the prompts as they were read
        before."""
        written = sum(choice.writer.tokens for own in self.choices for choice in own)
        asked = sum(question.length for question in self.questions)
        return asked, written, sum(question.reused() for question in self.questions)


class Answers:
    """Sends choices to the loop that decodes them together."""

    def __init__(self, engine: Engine, prompts: Prompts, delivery: Delivery) -> None:
        self._engine, self._prompts, self.delivery = engine, prompts, delivery
        self._words = Words(prompts.tokenizer)

    def prepare(self, choice: Choice, longest: int | None) -> None:
        wish = choice.wish
        choice.ids, choice.marks = begun(self._prompts, choice.question.prompt)
        most = wish.bound(len(choice.ids), longest)
        model = self._engine.reader.model
        choice.sampler = Sampler(model, wish.config, choice.ids, choice.seed, wish.penalties)
        choice.writer = Writer(self._words, most, ends(choice.sampler.config), wish.stops)

    def start(self, choices: list[Choice]) -> None:
        first, *others = choices

        def put(token: int, score: TokenScore | None) -> bool:
            # The state after the prompt is kept now. The others begin from it.
            while others:
                other = others.pop(0)
                self._engine.submit(self._request(other, other.put, other.end))
            return first.put(token, score)

        def end(error: Exception | None) -> None:
            for choice in (first, *others):
                choice.end(error)

        request = self._request(first, put, end)
        question = first.question
        if first.wish.scores_prompt:
            most = first.wish.most_likely or 0
            request.scored = Scoring(first.ids[1:], most, question.scores)
        request.follow = self._follow(first)
        added = len(first.ids) - question.length
        question.reused = lambda: max(0, request.reused - added)
        self._engine.submit(request)

    def stop(self) -> None:
        self._engine.end()

    def _request(
        self,
        choice: Choice,
        put: Callable[[int, TokenScore | None], bool],
        end: Callable[[Exception | None], None],
    ) -> Request:
        return Request(
            choice.ids,
            choice.sampler,
            put,
            end,
            choice.marks,
            gone=choice.gone,
            most_likely=choice.wish.most_likely,
            silent=choice.writer.reason is not None,
        )

    def _follow(self, choice: Choice) -> Callable[[list[int]], tuple[Ids, tuple[int, ...]] | None]:
        """The likely beginning of the next request, given the answer to this one."""
        prompt, ids = choice.question.prompt, choice.ids

        def chat(written: list[int]) -> tuple[Ids, tuple[int, ...]] | None:
            then = self._prompts.answered(prompt, choice.text)
            if then is None:
                return None
            whole, marks = begun(self._prompts, then)
            return (whole[: marks[-1]], marks) if marks else None

        def text(written: list[int]) -> tuple[Ids, tuple[int, ...]] | None:
            # A longer text is cut at these places, and at no others.
            whole = np.concatenate([ids, np.array(written, ids.dtype)])
            end = len(whole) - len(whole) % self._engine.reader.piece
            return (whole[:end], ()) if end >= len(ids) else None

        return text if prompt.chat is None else chat


def begun(prompts: Prompts, prompt: Prompt) -> tuple[Ids, tuple[int, ...]]:
    """A prompt's tokens as the model reads them, with the start token, and its marks."""
    own = prompt["input_ids"][0].numpy().astype(np.int32)
    ids = prompts.begin(own)
    added = len(ids) - len(own)
    return ids, tuple(mark + added for mark in prompt.marks)


def ends(config: GenerationConfig) -> set[int]:
    """The tokens that end an answer."""
    eos = config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


class OneByOne:
    """Answers one choice after the other in one thread, with ``generate``.

    Args:
        reader: Reader of prompts into caches, with kept states; None for a model without states.
        threads: Number of threads that compute; None leaves PyTorch's number.
    """

    def __init__(
        self,
        model: Any,
        prompts: Prompts,
        reader: Reader | None,
        counters: Counters,
        threads: int | None = None,
    ) -> None:
        self.delivery = Delivery()
        # One thread for all, because compiled graphs belong to a thread.
        self._pool = ThreadPoolExecutor(1, "answers")
        if threads is not None:  # PyTorch keeps the number per thread
            self.submit(torch.set_num_threads, threads).result()
        self._model, self._prompts, self._reader = model, prompts, reader
        self._words, self._counters = Words(prompts.tokenizer), counters
        self._ended = threading.Event()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Do something in the thread of the answers."""
        return self._pool.submit(work, *arguments)

    def stop(self) -> None:
        self._ended.set()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self.stop()
        self._pool.shutdown()

    def prepare(self, choice: Choice, longest: int | None) -> None:
        wish = choice.wish
        asked = {"best_of": wish.ranked, "logprobs": wish.most_likely is not None}
        asked["penalties"] = any(wish.penalties)
        for name in (name for name in asked if asked[name]):
            raise BadRequest(f"{name}: not served by this model, or with --compile", name)
        choice.ids, choice.marks = begun(self._prompts, choice.question.prompt)
        most = wish.bound(len(choice.ids), longest)
        config, _ = self._model._prepare_generation_config(wish.config)
        choice.writer = Writer(self._words, most, ends(config), wish.stops)

    def start(self, choices: list[Choice]) -> None:
        for choice in choices:
            self.submit(self._answer, choice)

    def _answer(self, choice: Choice) -> None:
        """Runs in the thread of the answers."""
        if choice.gone.is_set():
            return
        failed = None
        try:
            if choice.writer.reason is None:
                self._generate(choice)
        except Exception as error:  # of this choice alone
            failed = error
            if not self._ended.is_set():
                logger.error("a request failed", exc_info=error)
        choice.end(failed)
        self.delivery.send()

    def _generate(self, choice: Choice) -> None:
        model, ids, question = self._model, choice.ids, choice.question
        came, last = time.perf_counter(), 0.0
        given: dict[str, Any] = {}
        reused = 0
        if choice.seed is not None:
            torch.manual_seed(choice.seed)
        if self._reader is not None:
            reading = self._reader.begin(ids[:-1], choice.marks)
            reused = reading.reused
            while reading.left:
                self._counters.read(reading.read())
            given[CACHE_NAME] = reading.cache
        if choice.number == 0:
            added = len(ids) - question.length
            question.reused = lambda: max(0, reused - added)
        self._counters.prompt(len(ids), reused)

        def stops(ids_BT: Tensor, scores: Tensor) -> Tensor:
            nonlocal last
            if self._ended.is_set():
                raise BadRequest("the server ends", status=503)
            now = time.perf_counter()
            self._counters.wrote(now - (last or came), first=not last)
            last = now
            ended = choice.put(int(ids_BT[0, -1])) or choice.gone.is_set()
            self.delivery.send()
            return torch.full(ids_BT.shape[:1], ended, device=ids_BT.device)

        ids_BT = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
        model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            generation_config=choice.wish.config,
            max_new_tokens=choice.writer.most,
            stopping_criteria=StoppingCriteriaList([stops]),
            **given,
        )
