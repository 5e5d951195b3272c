"""Checks a request's fields before any work; a wrong field is refused in one sentence.

Transformers' handlers read the fields that they know, and do not check their types. A number in
place of a list ends in a traceback. A field that they do not support is ignored. Here
every field that changes an answer is either served or refused. Errors look like OpenAI's:

    {"error": {"message": "...", "type": "invalid_request_error", "param": "stop", "code": null}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from latte.errors import one_line

Body = dict[str, Any]


class BadRequest(ValueError):
    """A refused request. ``param`` is the field, ``code`` is OpenAI's word for the reason."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_body(
    message: Any, *, kind: str = "invalid_request_error", param: Any = None, code: Any = None
) -> Body:
    """The JSON of an error."""
    return {"error": {"message": one_line(message), "type": kind, "param": param, "code": code}}


class Field(NamedTuple):
    """The requirement of a field, in words and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _between(low: float, high: float) -> Field:
    return Field(f"a number from {low:g} to {high:g}", lambda x: _is_number(x) and low <= x <= high)


def _only(*values: Any) -> Field:
    """Values that are accepted because they change nothing."""
    said = " or ".join(json.dumps(value) for value in values) or "null"
    return Field(f"{said} (nothing else is served)", lambda x: x in values and x is not True)


def _is_text(value: Any) -> bool:
    """A string without lone surrogates. JSON can have them, but no tokenizer accepts them."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(x and _is_text(x) for x in value)


TEXT = Field("a string of valid Unicode", _is_text)
YES_OR_NO = Field("true or false", lambda x: isinstance(x, bool))
LENGTH = Field("a whole number from 1 up", lambda x: _is_whole(x) and x >= 1)
UP_TO_20 = Field("a whole number from 0 to 20", lambda x: _is_whole(x) and 0 <= x <= 20)
OBJECT = Field("an object", lambda x: isinstance(x, dict))
OBJECTS = Field(
    "a list of objects", lambda x: isinstance(x, list) and all(isinstance(y, dict) for y in x)
)
# Logits divided by much less than 1e-6 are infinite in fp32.
TEMPERATURE = Field(
    "0 (greedy) or a number from 1e-6 to 2",
    lambda x: _is_number(x) and (x == 0 or 1e-6 <= x <= 2),
)
TOP_P = Field("a number above 0 and up to 1", lambda x: _is_number(x) and 0 < x <= 1)
SEED = Field("a whole number of at most 63 bits", lambda x: _is_whole(x) and -(2**63) <= x < 2**63)
STOP = Field(
    "a string or a list of 1 to 4 strings, none empty",
    lambda x: (x != "" and _is_text(x)) or (_are_strings(x) and 1 <= len(x) <= 4),
)
BIAS = Field(
    "an object of token ids with a number from -100 to 100 each",
    lambda x: (
        isinstance(x, dict)
        and all(k.isdecimal() and _is_number(v) and abs(v) <= 100 for k, v in x.items())
    ),
)
# Arguments that the server itself passes when it applies a template.
OWN = {"chat_template", "tools", "documents", "add_generation_prompt", "continue_final_message"}
OWN |= {"tokenize", "return_dict", "return_tensors", "load_audio_from_video", "conversation"}
OWN |= {"padding", "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
TEMPLATE = Field(
    "an object of a template's own variables", lambda x: isinstance(x, dict) and not x.keys() & OWN
)
PLAIN_TEXT = Field('{"type": "text"} (nothing else is served)', lambda x: x == {"type": "text"})

# Fields of every endpoint. A field that is missing or null has its default.
COMMON: dict[str, Field] = {
    "model": TEXT,
    "stream": YES_OR_NO,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "seed": SEED,
    "user": TEXT,
}
OF_COMPLETIONS = COMMON | {
    "prompt": TEXT,
    "max_tokens": LENGTH,
    "stop": STOP,
    "frequency_penalty": _between(-2, 2),
    "presence_penalty": _between(-2, 2),
    "logit_bias": Field("null (it is served for chats alone)", lambda x: x == {}),
    "suffix": TEXT,
    "n": _only(1),
    "best_of": _only(1),
    "echo": _only(False),
    "logprobs": UP_TO_20,
    "stream_options": OBJECT,
}
OF_CHATS = COMMON | {
    "messages": OBJECTS,
    "max_tokens": LENGTH,
    "max_completion_tokens": LENGTH,
    "stop": STOP,
    "frequency_penalty": _between(-2, 2),
    "presence_penalty": _between(-2, 2),
    "logit_bias": BIAS,
    "n": _only(1),
    "logprobs": YES_OR_NO,
    "top_logprobs": UP_TO_20,
    "stream_options": OBJECT,
    "response_format": PLAIN_TEXT,
    "tools": OBJECTS,
    "tool_choice": _only("auto"),
    "functions": _only(),
    "function_call": _only(),
    "modalities": _only(["text"]),
    "audio": _only(),
    "prediction": _only(),
    "web_search_options": _only(),
    "chat_template_kwargs": TEMPLATE,
}
OF_RESPONSES = COMMON | {
    "input": Field("a string or a list of objects", lambda x: _is_text(x) or OBJECTS.fits(x)),
    "instructions": TEXT,
    "max_output_tokens": LENGTH,
    "text": Field(
        '{"format": {"type": "text"}} (nothing else is served)',
        lambda x: isinstance(x, dict) and x.get("format") in (None, {"type": "text"}),
    ),
    "tools": OBJECTS,
    "tool_choice": _only("auto"),
    "background": _only(False),
    "include": _only([]),
    "previous_response_id": _only(),
    "conversation": _only(),
    "prompt": _only(),
    "truncation": _only("disabled"),
    "top_logprobs": _only(0),
}
# Allowed entries of Transformers' `generation_config`, a JSON object in a string.
SAMPLING: dict[str, Field] = {
    "do_sample": YES_OR_NO,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": Field("a whole number from 0 up", lambda x: _is_whole(x) and x >= 0),
    "min_p": _between(0, 1),
    "typical_p": TOP_P,
    "repetition_penalty": Field("a number above 0", lambda x: _is_number(x) and x > 0),
    "max_new_tokens": LENGTH,
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _check(body: Body, fields: dict[str, Field], required: str | None, within: str = "") -> None:
    for name, field in fields.items():
        value = body.get(name)
        if value is None:
            if name == required:
                raise BadRequest(f"{name}: expected {field.expected}, got none", name)
        elif not field.fits(value):
            said = json.dumps(value, default=str)
            said = said if len(said) <= 80 else f"{said[:77]}..."
            raise BadRequest(f"{within}{name}: expected {field.expected}, got {said}", name)


def check_completion(body: Body) -> None:
    """A request to /v1/completions.

    Raises:
        BadRequest: A field has a value that is not allowed.
    """
    _check(body, OF_COMPLETIONS, "prompt")
    _check_generation_config(body)


def check_chat(body: Body) -> None:
    """A request to /v1/chat/completions; raises as :func:`check_completion`."""
    _check(body, OF_CHATS, "messages")
    if not body["messages"]:
        raise BadRequest("messages: expected at least one message, got an empty list", "messages")
    for index, message in enumerate(body["messages"]):
        _check_message(message, f"messages[{index}]", "messages")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("top_logprobs: expected logprobs to be true beside it", "top_logprobs")
    _check_generation_config(body)


def most_likely(body: Body) -> int | None:
    """Number of most likely tokens to return with each token; None is no probabilities."""
    if "messages" in body:
        return (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    return body.get("logprobs")


def check_response(body: Body) -> None:
    """A request to /v1/responses, which streams only if it says so; see `check_completion`."""
    _check(body, OF_RESPONSES, "input")
    if not body["input"]:
        raise BadRequest("input: expected some text or messages, got none", "input")
    if isinstance(body["input"], list):
        for index, item in enumerate(body["input"]):
            _check_item(item, f"input[{index}]")
    _check_generation_config(body)
    body["stream"] = bool(body.get("stream"))  # Transformers' handler streams unless told not to


def _check_message(message: Body, at: str, param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        said = f"one of {', '.join(ROLES)}"
        raise BadRequest(f"{at}.role: expected {said}, got {json.dumps(role, default=str)}", param)
    calls = message.get("tool_calls")
    if calls is not None:
        for call in calls if isinstance(calls, list) else [None]:
            function = call.get("function") if isinstance(call, dict) else None
            fields = function if isinstance(function, dict) else {}
            if not isinstance(fields.get("name"), str) or "arguments" not in fields:
                raise BadRequest(
                    f"{at}.tool_calls: expected a list of calls, each with function.name and "
                    "function.arguments",
                    param,
                )
    if content is None and (calls or role in ("assistant", "function")):
        return
    _check_content(content, f"{at}.content", param)


def _check_content(content: Any, at: str, param: str) -> None:
    if _is_text(content):
        return
    texts = ("text", "input_text", "output_text")
    for part in content if isinstance(content, list) else [None]:
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        if kind in texts and _is_text(fields.get("text")):
            continue
        said = json.dumps(kind if kind is not None else content, default=str)[:80]
        raise BadRequest(
            f"{at}: expected a string or a list of text parts, got {said}"
            + (" (this model reads text alone)" if kind is not None and kind not in texts else ""),
            param,
        )


def _check_item(item: Body, at: str) -> None:
    """One of the input items of a request to /v1/responses."""
    kind = item.get("type")
    if "role" in item:
        _check_message(item, at, "input")
    elif kind == "function_call":
        _check(item, dict.fromkeys(("call_id", "name", "arguments"), TEXT), None, f"{at}.")
        if missing := [x for x in ("call_id", "name", "arguments") if item.get(x) is None]:
            raise BadRequest(f"{at}.{missing[0]}: expected a string, got none", "input")
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str) or not isinstance(item.get("output"), str):
            raise BadRequest(f"{at}: expected call_id and output as strings", "input")
    elif kind != "reasoning":
        _check_content([item], at, "input")


def _check_generation_config(body: Body) -> None:
    given = body.get("generation_config")
    if given is None:
        return
    try:
        fields = json.loads(given)
    except (TypeError, ValueError):
        fields = None
    if not isinstance(fields, dict):
        raise BadRequest(
            "generation_config: expected a JSON object in a string", "generation_config"
        )
    if unknown := sorted(fields.keys() - SAMPLING.keys()):
        raise BadRequest(
            f"generation_config: expected fields of {', '.join(SAMPLING)}, got {unknown[0]}",
            "generation_config",
        )
    _check(fields, SAMPLING, None, "generation_config.")
