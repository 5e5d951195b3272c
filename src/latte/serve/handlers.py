"""The endpoints of OpenAI's API: requests to answers, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import numpy as np
from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import GenerationConfig
from transformers.utils import logging

from latte import __version__
from latte.serve.answers import Answering, Choice, Manager, Question, Wish
from latte.serve.prompts import Prompt, Prompts
from latte.serve.requests import (
    BadRequest,
    Body,
    check_chat,
    check_completion,
    check_response,
    messages_of,
    messages_of_response,
    no_such_model,
    prompts_of,
)
from latte.serve.sampling import Penalties, TokenScore
from latte.serve.writing import Scored, Spelling, Words

logger = logging.get_logger(__name__)
DONE = "data: [DONE]\n\n"


class Endpoint:
    """One endpoint that answers with a model.

    Args:
        name: The model's name in requests.
        longest: Largest number of tokens of prompt and answer together; None is no limit.
    """

    lengths: tuple[str, ...] = ()  # fields with the largest number of tokens, the first counts
    check: Any = None
    last_event = ""
    prefix = event_kind = ""  # of an answer's id, and the kind of object that each event is

    def __init__(
        self, name: str, model: Any, prompts: Prompts, manager: Manager, longest: int | None
    ) -> None:
        self.name, self._model, self._prompts = name, model, prompts
        self._manager, self._longest = manager, longest
        self._words = Words(prompts.tokenizer)

    async def handle_request(self, body: Body, request_id: str) -> Response:
        """The answer to a request.

        Raises:
            BadRequest: The request is refused, or has failed.
        """
        # A long text is checked and split into tokens for some time. Others are answered meanwhile.
        answering = await asyncio.to_thread(self._answering, body)
        if body.get("stream"):
            events = self._safe(self._events(answering, body, request_id))
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in answering.events():
            pass
        return JSONResponse(self._whole(answering, body, request_id))

    # --- what each endpoint has of its own

    def _questions(self, body: Body) -> list[Question]:
        raise NotImplementedError

    def _most_likely(self, body: Body) -> int | None:
        """Number of most likely tokens to return with each token; None is no probabilities."""
        return None

    def _most(self) -> int:
        """The largest number of tokens of an answer where a request says none."""
        return max(1024, self._model.generation_config.max_new_tokens or 0)

    def _whole(self, answering: Answering, body: Body, request_id: str) -> Body:
        raise NotImplementedError

    # --- what they share

    def _answering(self, body: Body) -> Answering:
        type(self).check(body)
        if body.get("model") not in (None, self.name):
            raise no_such_model(self.name, body["model"])
        questions, wish = self._questions(body), self._wish(body)
        candidates = body.get("best_of") or body.get("n") or 1
        return Answering(self._manager, questions, wish, candidates, self._longest)

    async def _safe(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """A stream's events. An error is an event too, because the status has been sent."""
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        except Exception as error:
            if not isinstance(error, BadRequest):
                logger.error("a stream failed", exc_info=error)
            yield _event(BadRequest.of(error).body)
        if self.last_event:
            yield self.last_event

    def _chat(self, messages: list[Body], body: Body) -> Question:
        options = body.get("chat_template_kwargs") or {}
        return Question(self._prompts.apply_chat_template(messages, **options))

    def _wish(self, body: Body) -> Wish:
        config = self._config(body)
        given = (*(body.get(name) for name in self.lengths), config.max_new_tokens)
        limits = [int(limit) for limit in given if limit is not None]
        config.max_new_tokens = None
        stops = body.get("stop") or ()
        likely = self._most_likely(body)
        ranked = (body.get("best_of") or 1) > (body.get("n") or 1)
        return Wish(
            config,
            limits[0] if limits else self._most(),
            bounded=bool(limits),
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            seed=body.get("seed"),
            penalties=Penalties(
                body.get("frequency_penalty") or 0.0, body.get("presence_penalty") or 0.0
            ),
            most_likely=0 if likely is None and ranked else likely,
            scores_prompt=bool(body.get("echo")) and likely is not None,
            ranked=ranked and likely is None,
            streams=bool(body.get("stream")),
        )

    def _config(self, body: Body) -> GenerationConfig:
        """The settings of ``generate``: the request's, and the checkpoint's for all others."""
        if body.get("generation_config") is not None:
            given = json.loads(body["generation_config"])
            whole = ("top_k", "max_new_tokens", "do_sample")
            own = {x: y if x in whole or y is None else float(y) for x, y in given.items()}
            config = GenerationConfig(**own)
        else:
            config = copy.deepcopy(self._model.generation_config)
            config.max_new_tokens = None
        if body.get("temperature") is not None:
            config.temperature = float(body["temperature"])
        if config.temperature == 0:
            config.do_sample, config.temperature = False, None
        if body.get("top_p") is not None:
            config.top_p = float(body["top_p"])
        vocabulary = self._model.config.get_text_config().vocab_size
        bias = {int(token): float(x) for token, x in (body.get("logit_bias") or {}).items()}
        if unknown := [token for token in bias if token >= vocabulary]:
            said = f"logit_bias: expected token ids below {vocabulary}, got {unknown[0]}"
            raise BadRequest(said, "logit_bias")
        config.sequence_bias = {(token,): x for token, x in bias.items()} or None
        return config

    def _about(self, kind: str, request_id: str) -> Body:
        """The fields with which each answer, and each event of a stream, begins."""
        return {
            "id": f"{self.prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"latte-{__version__}",
        }

    async def _events(
        self, answering: Answering, body: Body, request_id: str
    ) -> AsyncGenerator[str, None]:
        """The events of a stream, as completions and chats have them."""
        about = self._about(self.event_kind, request_id)
        counts = (body.get("stream_options") or {}).get("include_usage")
        # If the usage is wanted, each event has the field.
        rest: Body = {"usage": None} if counts else {}
        begun: set[int] = set()
        async with contextlib.aclosing(answering.events()) as batches:
            async for came in batches:
                events: list[str] = []
                try:
                    for choice, piece in came:
                        parts = [] if choice.index in begun else self._first(choice, body)
                        begun.add(choice.index)
                        if piece is None:
                            parts.append(self._last(choice))
                        else:
                            parts.append(self._next(choice, piece.text, piece.scored, body))
                        own = {"index": choice.index, "logprobs": None, "finish_reason": None}
                        bodies = ({**about, "choices": [{**own, **part}], **rest} for part in parts)
                        events += map(_event, bodies)
                except Exception:
                    yield "".join(events)  # what was written before an error is still streamed
                    raise
                yield "".join(events)
        if counts:
            yield _event({**about, "choices": [], "usage": usage(answering)})

    def _first(self, choice: Choice, body: Body) -> list[Body]:
        """Parts that come before a choice's first text."""
        return []

    def _next(self, choice: Choice, text: str, scored: list[Scored], body: Body) -> Body:
        raise NotImplementedError

    def _last(self, choice: Choice) -> Body:
        raise NotImplementedError


class Chats(Endpoint):
    """/v1/chat/completions"""

    check = staticmethod(check_chat)
    lengths = ("max_completion_tokens", "max_tokens")
    last_event = DONE
    prefix, event_kind = "chatcmpl", "chat.completion.chunk"

    def _questions(self, body: Body) -> list[Question]:
        return [self._chat(messages_of(body), body)]

    def _most_likely(self, body: Body) -> int | None:
        return (body.get("top_logprobs") or 0) if body.get("logprobs") else None

    def _whole(self, answering: Answering, body: Body, request_id: str) -> Body:
        about = self._about("chat.completion", request_id)
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs([x for piece in choice.pieces for x in piece.scored])
                if body.get("logprobs")
                else None,
                "finish_reason": choice.writer.reason,
            }
            for choice in answering.choices[0]
        ]
        return {**about, "choices": choices, "usage": usage(answering)}

    def _first(self, choice: Choice, body: Body) -> list[Body]:
        return [{"delta": {"role": "assistant", "content": "", "refusal": None}}]

    def _next(self, choice: Choice, text: str, scored: list[Scored], body: Body) -> Body:
        logprobs = self._logprobs(scored) if body.get("logprobs") else None
        return {"delta": {"content": text}, "logprobs": logprobs}

    def _last(self, choice: Choice) -> Body:
        return {"delta": {}, "finish_reason": choice.writer.reason}

    def _logprobs(self, scored: list[Scored]) -> Body:
        def entry(token: int, logprob: float | None) -> Body:
            raw = self._words.bytes(token)
            own = None if raw is None else list(raw)
            return {"token": self._words.name(token), "logprob": logprob, "bytes": own}

        content = [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
            for _, one in scored
        ]
        return {"content": content, "refusal": None}


class Completions(Endpoint):
    """/v1/completions"""

    check = staticmethod(check_completion)
    lengths = ("max_tokens",)
    last_event = DONE
    prefix, event_kind = "cmpl", "text_completion"

    def _questions(self, body: Body) -> list[Question]:
        return [self._question(prompt, body) for prompt in prompts_of(body)]

    def _question(self, prompt: str | list[int], body: Body) -> Question:
        if isinstance(prompt, str):
            ids: Any = self._prompts.ids(prompt)
        else:
            ids, vocabulary = prompt, self._model.config.get_text_config().vocab_size
            if unknown := [token for token in prompt if token >= vocabulary]:
                said = f"prompt: expected token ids below {vocabulary}, got {unknown[0]}"
                raise BadRequest(said[:200], "prompt")
        text = ""
        if body.get("echo"):
            text = prompt if isinstance(prompt, str) else self._words.text(prompt)
        return Question(Prompt.of(np.array(ids, np.int64)), text)

    def _most_likely(self, body: Body) -> int | None:
        return body.get("logprobs")

    def _most(self) -> int:
        return 16  # as in the API

    def _whole(self, answering: Answering, body: Body, request_id: str) -> Body:
        about = self._about("text_completion", request_id)
        choices: list[Body] = []
        for candidates in answering.choices:
            for choice in _best(candidates, body.get("n") or 1):
                scored = [x for piece in choice.pieces for x in piece.scored]
                parts = [*self._first(choice, body), self._next(choice, choice.text, scored, body)]
                whole = {"index": len(choices), "text": "".join(part["text"] for part in parts)}
                whole["logprobs"] = _joined([part["logprobs"] for part in parts])
                choices.append({**whole, "finish_reason": choice.writer.reason})
        return {**about, "choices": choices, "usage": usage(answering)}

    def _first(self, choice: Choice, body: Body) -> list[Body]:
        """The prompt, if it is wanted."""
        if not body.get("echo"):
            return []
        question, logprobs = choice.question, None
        if body.get("logprobs") is not None:
            logprobs = self._logprobs(list(self._scored(question)))
        return [{"text": question.text, "logprobs": logprobs}]

    def _scored(self, question: Question) -> Iterator[Scored]:
        """The prompt's tokens with their probabilities. A first token that follows nothing has
        none."""
        ids = question.prompt["input_ids"][0].tolist()
        missing = len(ids) - len(question.scores)
        scores = [TokenScore(token, None, ()) for token in ids[:missing]] + question.scores
        spelling = Spelling(self._words)
        for token, one in zip(ids, scores, strict=True):
            yield Scored(spelling.add(token)[1], one)

    def _next(self, choice: Choice, text: str, scored: list[Scored], body: Body) -> Body:
        begin = len(choice.question.text)
        logprobs = self._logprobs(scored, begin) if body.get("logprobs") is not None else None
        return {"text": text, "logprobs": logprobs}

    def _last(self, choice: Choice) -> Body:
        return {"text": "", "finish_reason": choice.writer.reason}

    def _logprobs(self, scored: list[Scored], begin: int = 0) -> Body:
        """Tokens with their probabilities. ``begin`` is the number of characters before them."""
        return {
            "tokens": [self._words.name(one.token) for _, one in scored],
            "token_logprobs": [one.logprob for _, one in scored],
            "top_logprobs": [self._likely(one) for _, one in scored],
            "text_offset": [begin + offset for offset, _ in scored],
        }

    def _likely(self, score: TokenScore) -> dict[str, float] | None:
        """The most likely tokens and the chosen one, by their texts.

        If several tokens have the same text, all but one are named by their ids.
        """
        if score.logprob is None:
            return None
        pairs = dict(score.top) | {score.token: score.logprob}
        owners: dict[str, int] = {self._words.name(score.token): score.token}
        found = {}
        for token, logprob in pairs.items():
            name = self._words.name(token)
            same = owners.setdefault(name, token) == token
            found[name if same else f"token_id:{token}"] = logprob
        return found


class Responses(Endpoint):
    """/v1/responses"""

    check = staticmethod(check_response)
    lengths = ("max_output_tokens",)

    def _questions(self, body: Body) -> list[Question]:
        return [self._chat(messages_of_response(body), body)]

    def _whole(self, answering: Answering, body: Body, request_id: str) -> Body:
        (choice,) = answering.choices[0]
        asked, written, reused = answering.tokens()
        short = choice.writer.reason == "length"
        item = self._item(request_id, choice, "incomplete" if short else "completed")
        counts = {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": reused},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + written,
        }
        fields = {"status": item["status"], "output": [item], "usage": counts}
        if short:
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(body, request_id, **fields)

    def _item(self, request_id: str, choice: Choice | None, status: str) -> Body:
        content = [] if choice is None else [_part(choice.text)]
        item = {"id": f"msg_{request_id}", "type": "message", "status": status}
        return {**item, "role": "assistant", "content": content}

    def _response(self, body: Body, request_id: str, **fields: Any) -> Body:
        return {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self.name,
            "output": [],
            "parallel_tool_calls": bool(body.get("parallel_tool_calls")),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            "user": body.get("user"),
            **fields,
        }

    async def _events(
        self, answering: Answering, body: Body, request_id: str
    ) -> AsyncGenerator[str, None]:
        number = 0

        def event(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            content = {"type": kind, "sequence_number": number - 1, **fields}
            return f"event: {kind}\n{_event(content)}"

        (choice,) = answering.choices[0]
        place = {"output_index": 0}
        within = {"item_id": f"msg_{request_id}", **place, "content_index": 0}
        begun = self._response(body, request_id)
        opening = self._item(request_id, None, "in_progress")
        yield event("response.created", response=begun) + event(
            "response.in_progress", response=begun
        )
        yield event("response.output_item.added", item=opening, **place) + event(
            "response.content_part.added", part=_part(""), **within
        )
        text = "response.output_text"
        try:
            async with contextlib.aclosing(answering.events()) as batches:
                async for came in batches:
                    pieces = [piece.text for _, piece in came if piece is not None]
                    deltas = [dict(delta=piece, logprobs=[], **within) for piece in pieces]
                    yield "".join(event(f"{text}.delta", **delta) for delta in deltas)
        except BadRequest as error:
            failed = {"code": "server_error", "message": error.body["error"]["message"]}
            yield event("error", **failed, param=error.param)
            fields = {"status": "failed", "error": failed}
            yield event("response.failed", response=self._response(body, request_id, **fields))
            return
        whole = self._whole(answering, body, request_id)
        yield event(f"{text}.done", text=choice.text, logprobs=[], **within) + event(
            "response.content_part.done", part=_part(choice.text), **within
        )
        yield event("response.output_item.done", item=whole["output"][0], **place) + event(
            f"response.{whole['status']}", response=whole
        )


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(fields: Body) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def usage(answering: Answering) -> Body:
    """Numbers of tokens of a request, as completions and chats tell them."""
    asked, written, reused = answering.tokens()
    return {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _best(candidates: list[Choice], count: int) -> list[Choice]:
    """The answers with the largest mean log-probability of a token, the best one first."""
    if len(candidates) == count:
        return candidates
    by_token = {one.index: one.writer.logprob / max(1, one.writer.tokens) for one in candidates}
    return sorted(candidates, key=lambda one: -by_token[one.index])[:count]


def _joined(parts: list[Body | None]) -> Body | None:
    """Probabilities of parts that follow each other as those of one text."""
    present = [part for part in parts if part is not None]
    return (
        {name: [x for part in present for x in part[name]] for name in present[0]}
        if present
        else None
    )
