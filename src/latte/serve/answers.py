"""The managers from which Transformers' request handlers get their answers.

A handler gets the tokens of an answer from its manager: all together, or one by one as they are
computed. There are two managers here. :class:`Answers` sends requests to the loop that decodes them
together. :class:`OneByOne` answers one request after the other with ``generate``. It is used if a
step is compiled, or if a model keeps no state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    DirectStreamer,
    GenerateManager,
    _StreamError,
)

from latte.errors import one_line
from latte.models.cache_name import CACHE_NAME
from latte.serve.counters import Counters
from latte.serve.engine import Engine, Request
from latte.serve.prompts import Prompt, Prompts
from latte.serve.reading import Reader
from latte.serve.requests import BadRequest
from latte.serve.sampling import Penalties, Sampler, TokenScore, ends
from latte.serve.states import Ids


@dataclass
class Call:
    """The data of one request that is not among the handlers' own arguments.

    Attributes:
        seed: Seed of its random numbers.
        penalties: Penalties of tokens that are in the answer already.
        bounded: Whether the request itself limits the length of its answer.
        most_likely: Number of most likely tokens whose probabilities are given with each token;
            None gives no probabilities.
        scores: Tokens of the answer with their probabilities.
        longest: Largest number of tokens of prompt and answer together; None is no limit.
        prompt: The prompt's tokens, once they are known.
        reused: Function that returns the number of tokens of the prompt that had been read
            before. It may be called after the answer has begun.
    """

    seed: int | None = None
    penalties: Penalties = Penalties()
    bounded: bool = False
    longest: int | None = None
    most_likely: int | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt: Prompt | None = None
    reused: Callable[[], int] = lambda: 0

    def bound(self, config: GenerationConfig, prompt: int) -> None:
        """Refuse a prompt of too many tokens, and limit the length of its answer.

        Raises:
            BadRequest: Prompt and answer would be too long.
        """
        if self.longest is None:
            return
        left = self.longest - prompt
        asked = config.max_new_tokens if self.bounded else 1
        if asked > left:
            raise BadRequest(
                f"expected at most {self.longest} tokens in all, got {prompt} of the prompt"
                + (f" and {asked} of the answer" if self.bounded else ""),
                code="context_length_exceeded",
            )
        config.max_new_tokens = min(config.max_new_tokens, left)


CALL: ContextVar[Call] = ContextVar("call")


class Delivery:
    """Passes the texts of a step on to the handlers all at once.

    To wake their thread for each text would take longer than to choose the token.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._texts: list[tuple[asyncio.Queue, Any]] = []

    def begin(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Queue]:
        """The event loop, which calls this, and a queue for the texts of a new answer."""
        self._loop = asyncio.get_running_loop()
        return self._loop, asyncio.Queue()

    def add(self, queue: asyncio.Queue, text: Any) -> None:
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


class ScoredText(str):
    """A piece of an answer, and the scores of its tokens."""

    scores: list[TokenScore]


class Streamer(DirectStreamer):
    """Passes tokens on to a handler as text. ``gone`` is set when its client has disconnected.

    The loop adds to the list ``scores`` if the request wants probabilities.
    """

    scores: list[TokenScore] | None = None
    _told = 0  # number of scores that were passed to the handler

    def __init__(self, delivery: Delivery, tokenizer: Any, **options: Any) -> None:
        super().__init__(tokenizer, *delivery.begin(), **options)
        self._delivery, self.gone = delivery, threading.Event()
        self._first = False  # no prompt comes before the answer

    def cancel(self) -> None:
        self.gone.set()

    def _enqueue(self, item: Any) -> None:
        if self.scores is not None and type(item) is str:
            item = ScoredText(item)
            item.scores = self.scores[self._told :]
            self._told += len(item.scores)
        self._delivery.add(self._queue, item)

    def fail(self, error: Exception) -> None:
        self._enqueue(stream_error(error))


def stream_error(error: Exception) -> _StreamError:
    """The text of an error in the middle of a stream. Handlers put it between two quotes."""
    return _StreamError(json.dumps(one_line(error))[1:-1])


class Answers(BaseGenerateManager):
    """Sends requests to the loop, and its tokens to the handlers' event loop."""

    def __init__(self, engine: Engine, prompts: Prompts, delivery: Delivery) -> None:
        self._engine, self._prompts, self._delivery = engine, prompts, delivery

    def generate_streaming(  # type: ignore[override]
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        tokenizer = self._prompts.tokenizer._tokenizer
        streamer = Streamer(self._delivery, tokenizer, response_parser=response_parser)

        def put(token: int) -> None:
            streamer.put(torch.tensor([token]))

        def end(error: Exception | None) -> None:
            streamer.end() if error is None else streamer.fail(error)

        call = CALL.get()
        streamer.scores = None if call.most_likely is None else call.scores
        self._submit(inputs, gen_config, put, end, streamer.gone)
        return streamer._queue, streamer

    async def generate_non_streaming(  # type: ignore[override]
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, list[int]]:
        loop = asyncio.get_running_loop()
        whole: asyncio.Future[None] = loop.create_future()

        def complete(error: Exception | None) -> None:
            if whole.done():
                return
            if error is None:
                whole.set_result(None)
            else:  # the loop has logged it
                known = isinstance(error, BadRequest)
                whole.set_exception(error if known else BadRequest(one_line(error), status=500))

        def end(error: Exception | None) -> None:
            loop.call_soon_threadsafe(complete, error)

        request = self._submit(inputs, gen_config, lambda _: None, end, threading.Event())
        try:
            await whole
        except asyncio.CancelledError:
            request.gone.set()
            raise
        text = self._prompts.decode(request.written, skip_special_tokens=True)
        return text, inputs["input_ids"].shape[-1], request.written

    def stop(self) -> None:
        self._engine.end()

    def _submit(
        self,
        inputs: Any,
        config: GenerationConfig,
        put: Callable[[int], None],
        end: Callable[[Exception | None], None],
        gone: threading.Event,
    ) -> Request:
        call = CALL.get()
        ids, marks = begun(self._prompts, inputs)
        call.bound(config, len(ids))
        stops, config.stop_strings = config.stop_strings or [], None
        sampler = Sampler(self._engine.reader.model, config, ids, call.seed, call.penalties)
        strings = [stops] if isinstance(stops, str) else stops
        request = Request(
            ids,
            sampler,
            ends(self._prompts.tokenizer, sampler.config, strings),
            put,
            end,
            marks,
            self._follow(inputs, ids),
            gone,
            call.most_likely,
            call.scores,
        )
        added = len(ids) - inputs["input_ids"].shape[-1]
        call.reused = lambda: max(0, request.reused - added)
        self._engine.submit(request)
        return request

    def _follow(
        self, inputs: Any, ids: Ids
    ) -> Callable[[list[int]], tuple[Ids, tuple[int, ...]] | None]:
        """The likely beginning of the next request, given the answer to this one."""

        def chat(written: list[int]) -> tuple[Ids, tuple[int, ...]] | None:
            text = self._prompts.decode(written, skip_special_tokens=True)
            then = self._prompts.answered(inputs, text)
            if then is None:
                return None
            whole, marks = begun(self._prompts, then)
            return (whole[: marks[-1]], marks) if marks else None

        def text(written: list[int]) -> tuple[Ids, tuple[int, ...]] | None:
            # A longer text is cut at these places, and at no others.
            whole = np.concatenate([ids, np.array(written, ids.dtype)])
            end = len(whole) - len(whole) % self._engine.reader.piece
            return (whole[:end], ()) if end >= len(ids) else None

        return chat if isinstance(inputs, Prompt) and inputs.chat is not None else text


def begun(prompts: Prompts, inputs: Any) -> tuple[Ids, tuple[int, ...]]:
    """A prompt's tokens as the model reads them, with the start token, and its marks."""
    own = inputs["input_ids"][0].cpu().numpy().astype(np.int32)
    ids = prompts.begin(own)
    added = len(ids) - len(own)
    return ids, tuple(mark + added for mark in getattr(inputs, "marks", ()))


class OneByOne(GenerateManager):
    """Answers one request after the other in one thread, with ``generate``.

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
        super().__init__()
        if threads is not None:  # PyTorch keeps the number per thread
            self.submit(torch.set_num_threads, threads).result()
        self._model, self._prompts, self._reader = model, prompts, reader
        self._counters = counters
        self._ended = threading.Event()

    def stop(self) -> None:
        self._ended.set()

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, config, **options):  # type: ignore
        # Transformers' streamer stops at the next token.
        return super().generate_streaming(*self._begin(inputs, config), config, **options)

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, config: Any, **options: Any
    ) -> tuple[str, int, Tensor]:
        gone = threading.Event()

        def stops(ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full(ids.shape[:1], gone.is_set(), device=ids.device)

        turn, tokenizer, given = self._begin(inputs, config)
        given["stopping_criteria"] = StoppingCriteriaList([stops])
        work = super().generate_non_streaming(turn, tokenizer, given, config, **options)
        try:
            text, _, ids = await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            raise
        return text, inputs["input_ids"].shape[-1], ids

    def _begin(self, inputs: Any, config: GenerationConfig) -> tuple[Any, Any, dict[str, Any]]:
        """The replacement of the model, the tokenizer, and the prompt, for ``generate``."""
        call = CALL.get()
        asked = {"logprobs": call.most_likely is not None, "penalties": any(call.penalties)}
        for name in (name for name in asked if asked[name]):
            raise BadRequest(f"{name}: not served by this model, or with --compile", name)
        ids, marks = begun(self._prompts, inputs)
        call.bound(config, len(ids))
        ids_BT = torch.from_numpy(ids.astype(np.int64))[None]
        given = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
        turn = _Turn(self._model, self._reader, self._counters, self._ended, ids, marks, call.seed)
        added = len(ids) - inputs["input_ids"].shape[-1]
        call.reused = lambda: max(0, turn.reused - added)
        return turn, self._prompts.tokenizer, given


@dataclass
class _Turn:
    """Generates one answer after its prompt has been read, in the thread of all answers."""

    model: Any
    reader: Reader | None
    counters: Counters
    ended: threading.Event  # set when the server ends
    ids: Ids
    marks: tuple[int, ...]
    seed: int | None
    reused: int = 0
    came: float = field(default_factory=time.perf_counter)
    last: float = 0.0

    def generate(self, **given: Any) -> Tensor:
        model, device = self.model, self.model.device
        if self.seed is not None:
            torch.manual_seed(self.seed)
        if self.reader is not None:
            reading = self.reader.begin(self.ids[:-1], self.marks)
            self.reused = reading.reused
            while reading.left:
                self.counters.read(reading.read())
            given[CACHE_NAME] = reading.cache
        self.counters.prompt(len(self.ids), self.reused)
        ids_BT, mask_BT = (given.pop(name).to(device) for name in ("input_ids", "attention_mask"))
        return model.generate(
            ids_BT, attention_mask=mask_BT, logits_processor=[self._count], **given
        )

    def _count(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.ended.is_set():
            raise BadRequest("the server ends", status=503)
        now = time.perf_counter()
        self.counters.wrote(now - (self.last or self.came), first=not self.last)
        self.last = now
        return scores
