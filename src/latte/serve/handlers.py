"""Transformers' request handlers, with checked requests, and with reused tokens in the usage."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality

from latte.data.tokenizers import token_bytes
from latte.serve.answers import CALL, Call, ScoredText
from latte.serve.prompts import Prompt, Prompts
from latte.serve.requests import (
    BadRequest,
    check_chat,
    check_completion,
    check_response,
    error_body,
    most_likely,
)
from latte.serve.sampling import Penalties, TokenScore

Body = dict[str, Any]
PENALTIES = ("frequency_penalty", "presence_penalty")
MENDED = ('"usage":', '"error":')  # parts of an event that are changed here


class Checked(BaseHandler):
    """The first base class of each handler.

    ``one_model`` has the model's name in requests, the model and its prompts. ``longest`` is the
    number of tokens that prompt and answer may have together, or None.
    """

    one_model: tuple[str, Any, Prompts]
    longest: int | None = None
    last_event = ""  # last event of a stream, after those of Transformers
    check: Any = None

    async def handle_request(self, body: Body, request_id: str) -> Any:
        lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")
        bounded = any(body.get(name) is not None for name in lengths)
        call = Call(bounded=bounded, longest=self.longest)
        CALL.set(call)
        self._validate_request(body)
        self._resolve_model(body)
        # A long text is split for some time; other requests are answered meanwhile.
        call.prompt = await asyncio.to_thread(self._split, self.one_model[2], body)
        answer = await super().handle_request(body, request_id)  # type: ignore[misc]
        if isinstance(answer, StreamingResponse):
            events: Any = answer.body_iterator
            answer.body_iterator = self._counted(events, call)
            return answer
        whole = _count(json.loads(bytes(answer.body)), call)
        if call.most_likely is not None:
            whole["choices"][0]["logprobs"] = self._logprobs(call.scores)
        return JSONResponse(whole)

    def _validate_request(self, body: Body) -> None:
        type(self).check(body)
        super()._validate_request(body)

    def _resolve_model(self, body: Body) -> tuple[str, Any, Any]:
        name, model, prompts = self.one_model
        asked = body.get("model")
        if asked is not None and asked != name:
            raise BadRequest(
                f"model: expected {name!r}, which is served here; requested {asked!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        prompt = CALL.get().prompt
        return name, model, prompts if prompt is None else _Split(prompts, prompt)

    def _split(self, prompts: Prompts, body: Body) -> Prompt:
        """The prompt's tokens."""
        raise NotImplementedError

    def _split_chat(self, prompts: Prompts, messages: Any, tools: Any, body: Body) -> Prompt:
        inputs = self.get_processor_inputs_from_messages(messages, Modality.LLM)
        own = body.get("chat_template_kwargs") or {}
        return prompts.apply_chat_template(inputs, tools=tools, **own)

    def _build_generation_config(self, body: Body, *rest: Any, **options: Any) -> Any:
        # The handlers would set one seed for all requests together.
        call = CALL.get()
        call.seed, call.most_likely = body.get("seed"), most_likely(body)
        # The handlers read only one of the penalties, and compute it in another way.
        call.penalties = Penalties(*(body.get(name) or 0.0 for name in PENALTIES))
        own = {name: value for name, value in body.items() if name not in ("seed", *PENALTIES)}
        vocabulary = self.one_model[1].config.get_text_config().vocab_size
        if unknown := [x for x in own.get("logit_bias") or {} if int(x) >= vocabulary]:
            said = f"logit_bias: expected token ids below {vocabulary}, got {unknown[0]}"
            raise BadRequest(said, "logit_bias")
        if own.get("logit_bias"):
            own["logit_bias"] = {x: float(bias) for x, bias in own["logit_bias"].items()}
        config = super()._build_generation_config(own, *rest, **options)
        config.sequence_bias = config.sequence_bias or None
        if config.max_new_tokens is None:
            config.max_new_tokens = 1024  # as where no generation_config is given
            call.bounded = False
        return config

    def _logprobs(self, scores: list[TokenScore]) -> Body:
        """Tokens with their probabilities, in this endpoint's format."""
        raise NotImplementedError

    def _text(self, token: int) -> str:
        return self.one_model[2].decode([token])

    def _scored(self, event: str, text: Any) -> str:
        """A stream's event with a piece of text, and the probabilities of its tokens."""
        if not isinstance(text, ScoredText):
            return event
        fields = json.loads(event.removeprefix("data: "))
        fields["choices"][0]["logprobs"] = self._logprobs(text.scores)
        return f"data: {json.dumps(fields)}\n\n"

    async def _counted(self, events: Any, call: Call) -> AsyncIterator[str]:
        """A stream's events, with the number of reused tokens in its usage."""
        try:
            async for event in events:
                yield _mended(event, call) if any(x in event for x in MENDED) else event
            if self.last_event:
                yield self.last_event
        finally:
            await events.aclose()


class _Split:
    """A tokenizer for Transformers' handlers, which have it split the prompt: it has done so."""

    def __init__(self, prompts: Prompts, prompt: Prompt) -> None:
        self._prompts, self._prompt, self.tokenizer = prompts, prompt, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompts, name)

    def __call__(self, *_: Any, **__: Any) -> Prompt:
        return self._prompt

    def apply_chat_template(self, *_: Any, **__: Any) -> Prompt:
        return self._prompt


class Chats(Checked, ChatCompletionHandler):
    """/v1/chat/completions"""

    check = staticmethod(check_chat)
    last_event = "data: [DONE]\n\n"
    _unused_fields = set()

    def _split(self, prompts: Prompts, body: Body) -> Prompt:
        return self._split_chat(prompts, body["messages"], body.get("tools"), body)

    def _logprobs(self, scores: list[TokenScore]) -> Body:
        def told(token: int, logprob: float) -> Body:
            raw = token_bytes(self.one_model[2].tokenizer, token)
            own = None if raw is None else list(raw)
            return {"token": self._text(token), "logprob": logprob, "bytes": own}

        content = [
            told(one.token, one.logprob) | {"top_logprobs": [told(*other) for other in one.top]}
            for one in scores
        ]
        return {"content": content, "refusal": None}

    def _build_chunk_sse(self, *args: Any, content: Any = None, **options: Any) -> str:
        event = super()._build_chunk_sse(*args, content=content, **options)  # type: ignore[misc]
        return self._scored(event, content)


class Completions(Checked, CompletionHandler):
    """/v1/completions"""

    check = staticmethod(check_completion)
    last_event = "data: [DONE]\n\n"
    _unused_fields = set()

    def _split(self, prompts: Prompts, body: Body) -> Prompt:
        return Prompt.of(prompts.ids(body["prompt"]))

    def _logprobs(self, scores: list[TokenScore]) -> Body:
        texts = [self._text(one.token) for one in scores]
        lengths = itertools.accumulate((len(text) for text in texts), initial=0)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in scores],
            "top_logprobs": [
                {self._text(token): logprob for token, logprob in one.top} for one in scores
            ],
            "text_offset": list(lengths)[: len(texts)],
        }

    def _build_chunk_sse(self, *args: Any, text: Any = "", **options: Any) -> str:
        event = super()._build_chunk_sse(*args, text=text, **options)  # type: ignore[misc]
        return self._scored(event, text)


class Responses(Checked, ResponseHandler):
    """/v1/responses"""

    check = staticmethod(check_response)
    _unused_fields = set()

    def _split(self, prompts: Prompts, body: Body) -> Prompt:
        tools = self._normalize_tools(body.get("tools"))
        return self._split_chat(prompts, self._normalize_input(body), tools, body)


def _count(answer: Body, call: Call) -> Body:
    """An answer, or an event of one, with the number of reused tokens in its usage."""
    usage = answer.get("usage") or (answer.get("response") or {}).get("usage")
    if isinstance(usage, dict):
        name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
        usage.setdefault(name, {})["cached_tokens"] = call.reused()
    return answer


def _mended(text: str, call: Call) -> str:
    """Events of a stream, with reused tokens in the usage, and errors in the usual form."""
    events = []
    for event in text.split("\n\n"):
        if event.startswith("data: {") and any(x in event for x in MENDED):
            fields = _count(json.loads(event[6:]), call)
            if isinstance(fields.get("error"), str):
                fields = error_body(ValueError(fields["error"]), kind="server_error")
            event = f"data: {json.dumps(fields)}"
        events.append(event)
    return "\n\n".join(events)
