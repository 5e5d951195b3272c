"""Transformers' request handlers, with checked requests and with what was reused in the usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

from latte.serve.answers import CALL, Call
from latte.serve.prompts import Prompts
from latte.serve.requests import (
    BadRequest,
    check_chat,
    check_completion,
    check_response,
    error_body,
)

Body = dict[str, Any]
MENDED = ('"usage":', '"error":')  # what an event may have in it that is not yet as it should be


class Checked(BaseHandler):
    """Stands first among a handler's bases.

    ``one_model`` is its name in requests, the model and its prompts; ``longest`` how many tokens
    prompt and answer may have together, or None.
    """

    one_model: tuple[str, Any, Prompts]
    longest: int | None = None
    last_event = ""  # of a stream, after those of Transformers
    check: Any = None

    async def handle_request(self, body: Body, request_id: str) -> Any:
        lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")
        bounded = any(body.get(name) is not None for name in lengths)
        call = Call(bounded=bounded, longest=self.longest)
        CALL.set(call)
        answer = await super().handle_request(body, request_id)  # type: ignore[misc]
        if isinstance(answer, StreamingResponse):
            events: Any = answer.body_iterator
            answer.body_iterator = self._counted(events, call)
            return answer
        return JSONResponse(_count(json.loads(bytes(answer.body)), call))

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
        return name, model, prompts

    def _build_generation_config(self, body: Body, *rest: Any, **options: Any) -> Any:
        # The handlers' seed would be that of all requests at once.
        CALL.get().seed = body.get("seed")
        own = {name: value for name, value in body.items() if name != "seed"}
        return super()._build_generation_config(own, *rest, **options)

    async def _counted(self, events: Any, call: Call) -> AsyncIterator[str]:
        """A stream's events, with what was reused in its usage."""
        try:
            async for event in events:
                yield _mended(event, call) if any(x in event for x in MENDED) else event
            if self.last_event:
                yield self.last_event
        finally:
            await events.aclose()


class Chats(Checked, ChatCompletionHandler):
    """/v1/chat/completions"""

    check = staticmethod(check_chat)
    last_event = "data: [DONE]\n\n"
    _unused_fields = set()


class Completions(Checked, CompletionHandler):
    """/v1/completions"""

    check = staticmethod(check_completion)
    last_event = "data: [DONE]\n\n"
    _unused_fields = set()


class Responses(Checked, ResponseHandler):
    """/v1/responses"""

    check = staticmethod(check_response)
    _unused_fields = set()


def _count(answer: Body, call: Call) -> Body:
    """An answer, or an event of one, whose usage says what was reused."""
    usage = answer.get("usage") or (answer.get("response") or {}).get("usage")
    if isinstance(usage, dict):
        name = "prompt_tokens_details" if "prompt_tokens" in usage else "input_tokens_details"
        usage.setdefault(name, {})["cached_tokens"] = call.reused()
    return answer


def _mended(text: str, call: Call) -> str:
    """Events of a stream: usage that says what was reused, and errors as they are elsewhere."""
    events = []
    for event in text.split("\n\n"):
        if event.startswith("data: {") and any(x in event for x in MENDED):
            fields = _count(json.loads(event[6:]), call)
            if isinstance(fields.get("error"), str):
                fields = error_body(ValueError(fields["error"]), kind="server_error")
            event = f"data: {json.dumps(fields)}"
        events.append(event)
    return "\n\n".join(events)
