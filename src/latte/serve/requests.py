"""Checks a request's fields before any work; a wrong field is refused in one sentence.

The tables below name every field of OpenAI's API. A field that would change an answer is either
served or refused. A field that changes none, such as ``user``, is accepted. A name that the API
does not have is refused. Errors look like OpenAI's:

    {"error": {"message": "...", "type": "invalid_request_error", "param": "stop", "code": null}}
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from latte.errors import one_line

Body = dict[str, Any]
CHOICES = 128  # largest number of answers to one request
DEPTH = 64  # largest number of lists and objects within each other


class BadRequest(ValueError):
    """A refused request. ``param`` is the field, ``code`` is OpenAI's word for the reason."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    @classmethod
    def of(cls, error: Exception) -> BadRequest:
        """Any error as the answer to a request. It has status 500 unless it is a refusal."""
        return error if isinstance(error, BadRequest) else cls(one_line(error), status=500)

    @property
    def body(self) -> Body:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(self, kind=kind, param=self.param, code=self.code)


def error_body(
    message: Any, *, kind: str = "invalid_request_error", param: Any = None, code: Any = None
) -> Body:
    """The JSON of an error."""
    return {"error": {"message": one_line(message), "type": kind, "param": param, "code": code}}


def no_such_model(served: str, asked: str) -> BadRequest:
    """The refusal of another model than the one that is served."""
    said = f"model: expected {served!r}, which is served here; requested {asked!r}"
    return BadRequest(said, "model", status=404, code="model_not_found")


class Field(NamedTuple):
    """The requirement of a field, in words and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    # Compared, because a whole number of JSON can be too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _between(low: float, high: float) -> Field:
    return Field(f"a number from {low:g} to {high:g}", lambda x: _is_number(x) and low <= x <= high)


def _whole(low: int, high: int) -> Field:
    said = f"a whole number from {low} to {high}"
    return Field(said, lambda x: _is_whole(x) and low <= x <= high)


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


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(x) and x >= 0 for x in value)


def _are_prompts(value: Any) -> bool:
    if isinstance(value, list) and value and not _is_whole(value[0]):
        return all(map(_is_text, value)) or all(map(_are_ids, value))
    return _is_text(value) or (_are_ids(value) and value != [])


def _has_options(value: Any) -> bool:
    names = {"include_usage", "include_obfuscation"}
    return isinstance(value, dict) and all(
        name in names and (x is None or isinstance(x, bool)) for name, x in value.items()
    )


TEXT = Field("a string of valid Unicode", _is_text)
YES_OR_NO = Field("true or false", lambda x: isinstance(x, bool))
LENGTH = Field("a whole number from 1 up to 2^31", lambda x: _is_whole(x) and 1 <= x <= 2**31)
UP_TO_20 = _whole(0, 20)
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
    "a string or a list of at most 4 strings, each of 1 to 1000 characters",
    lambda x: (
        all(_is_text(y) and 1 <= len(y) <= 1000 for y in (x if isinstance(x, list) else [x]))
        and len(x) <= (4 if isinstance(x, list) else 1000)
    ),
)
BIAS = Field(
    "an object of token ids with a number from -100 to 100 each",
    lambda x: (
        isinstance(x, dict)
        and all(
            k.isascii() and k.isdecimal() and len(k) < 10 and _is_number(v) and abs(v) <= 100
            for k, v in x.items()
        )
    ),
)
# Arguments that the server itself passes when it applies a template.
OWN = {"chat_template", "tools", "documents", "add_generation_prompt", "continue_final_message"}
OWN |= {"tokenize", "return_dict", "return_tensors", "load_audio_from_video", "conversation"}
OWN |= {"self", "messages", "padding", "truncation", "max_length", "tokenizer_kwargs"}
OWN |= {"return_assistant_tokens_mask"}
TEMPLATE = Field(
    "an object of a template's own variables", lambda x: isinstance(x, dict) and not x.keys() & OWN
)
PLAIN_TEXT = Field('{"type": "text"} (nothing else is served)', lambda x: x == {"type": "text"})

STREAM_OPTIONS = Field("an object with include_usage, true or false", _has_options)

# Fields of every endpoint. A field that is missing or null has its default.
COMMON: dict[str, Field] = {
    "model": TEXT,
    "stream": YES_OR_NO,
    "stream_options": STREAM_OPTIONS,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "seed": SEED,
    "generation_config": TEXT,  # a JSON object, see SAMPLING
    # Those below change no answer.
    "user": TEXT,
    "metadata": OBJECT,
    "store": YES_OR_NO,
    "service_tier": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
}
WRITING: dict[str, Field] = {  # of completions and chats
    "n": _whole(1, CHOICES),
    "stop": STOP,
    "frequency_penalty": _between(-2, 2),
    "presence_penalty": _between(-2, 2),
    "logit_bias": BIAS,
}
NO_TOOLS: dict[str, Field] = {  # of chats and responses
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": YES_OR_NO,
    "moderation": _only(),
}
OF_COMPLETIONS = COMMON | {
    **WRITING,
    "prompt": Field(
        "a string of valid Unicode, a list of token ids, or a list of one of these", _are_prompts
    ),
    "max_tokens": Field(
        "a whole number from 0 up to 2^31", lambda x: _is_whole(x) and 0 <= x <= 2**31
    ),
    "suffix": _only(""),
    "best_of": _whole(1, CHOICES),
    "echo": YES_OR_NO,
    "logprobs": UP_TO_20,
}
OF_CHATS = COMMON | {
    **WRITING,
    **NO_TOOLS,
    "messages": OBJECTS,
    "max_tokens": LENGTH,
    "max_completion_tokens": LENGTH,
    "logprobs": YES_OR_NO,
    "top_logprobs": UP_TO_20,
    "response_format": PLAIN_TEXT,
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "modalities": _only(["text"]),
    "audio": _only(),
    "prediction": _only(),
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "web_search_options": _only(),
    "chat_template_kwargs": TEMPLATE,
}
OF_RESPONSES = COMMON | {
    **NO_TOOLS,
    "input": Field("a string or a list of objects", lambda x: _is_text(x) or OBJECTS.fits(x)),
    "instructions": TEXT,
    "max_output_tokens": LENGTH,
    "text": Field(
        '{"format": {"type": "text"}} (nothing else is served)',
        lambda x: (
            isinstance(x, dict)
            and x.get("format") in (None, {"type": "text"})
            and x.get("verbosity") in (None, "medium")
            and x.keys() <= {"format", "verbosity"}
        ),
    ),
    "background": _only(False),
    "include": _only([]),
    "max_tool_calls": LENGTH,
    "previous_response_id": _only(),
    "conversation": _only(),
    "context_management": _only([]),
    "prompt": _only(),
    "reasoning": _only({}),
    "truncation": _only("disabled"),
    "top_logprobs": _only(0),
    "chat_template_kwargs": TEMPLATE,
}
# Allowed entries of Transformers' `generation_config`, a JSON object in a string.
SAMPLING: dict[str, Field] = {
    "do_sample": YES_OR_NO,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": _whole(0, 2**31),
    "min_p": _between(0, 1),
    "typical_p": TOP_P,
    "repetition_penalty": _between(0.01, 100),  # far beyond, logits are infinite
    "max_new_tokens": LENGTH,
}
# Input items of /v1/responses that are no messages, with their fields of text.
CALLS = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _said(value: Any) -> str:
    """A value as JSON, or its beginning. It is none of the largest, and not nested too deeply."""
    said = json.dumps(value, default=str)
    return said if len(said) <= 80 else f"{said[:77]}..."


def _check_whole(body: Body, fields: dict[str, Field], endpoint: str) -> None:
    """That no value is nested too deeply, and that the endpoint has all fields."""
    level: list[Any] = [body]
    for _ in range(DEPTH):
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [y for x in inner for y in x if isinstance(y, (dict, list))]
    if level:
        raise BadRequest(f"body: expected at most {DEPTH} lists and objects within each other")
    for name in body.keys() - fields.keys():
        said = f"{name[:80]}: expected a field of {endpoint}, which has none of this name"
        if name in SAMPLING:
            said += "; it can be a field of generation_config"
        raise BadRequest(said, name[:80])
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadRequest("stream_options: expected stream to be true beside it", "stream_options")


def _check(body: Body, fields: dict[str, Field], required: str | None, within: str = "") -> None:
    for name, field in fields.items():
        value = body.get(name)
        if value is None:
            if name == required:
                raise BadRequest(f"{name}: expected {field.expected}, got none", name)
        elif not field.fits(value):
            said = f"{within}{name}: expected {field.expected}, got {_said(value)}"
            raise BadRequest(said, name)


def check_completion(body: Body) -> None:
    """A request to /v1/completions. A prompt that is null begins a new document.

    Raises:
        BadRequest: A field has a value that is not allowed.
    """
    _check_whole(body, OF_COMPLETIONS, "/v1/completions")
    _check(body, OF_COMPLETIONS, None)
    if "prompt" not in body:
        expected = OF_COMPLETIONS["prompt"].expected
        raise BadRequest(f"prompt: expected {expected}, got none", "prompt")
    n, best_of = body.get("n") or 1, body.get("best_of")
    if best_of is not None and best_of < n:
        raise BadRequest(f"best_of: expected at least n, which is {n}, got {best_of}", "best_of")
    if best_of is not None and best_of > n and body.get("stream"):
        raise BadRequest("best_of: expected n, because a stream cannot be compared", "best_of")
    prompts = len(prompts_of(body))
    if prompts * (best_of or n) > CHOICES:
        said = f"{prompts} times {best_of or n}"
        raise BadRequest(f"prompt: expected at most {CHOICES} answers in all, got {said}", "prompt")
    _check_generation_config(body)


def prompts_of(body: Body) -> list[str | list[int]]:
    """The prompts of a request to /v1/completions, each a text or token ids."""
    prompt = body["prompt"]
    if prompt is None:
        return [""]
    if isinstance(prompt, str) or _is_whole(prompt[0]):
        return [prompt]
    return prompt


def check_chat(body: Body) -> None:
    """A request to /v1/chat/completions; raises as :func:`check_completion`."""
    _check_whole(body, OF_CHATS, "/v1/chat/completions")
    _check(body, OF_CHATS, "messages")
    if not body["messages"]:
        raise BadRequest("messages: expected at least one message, got an empty list", "messages")
    for index, message in enumerate(body["messages"]):
        _check_message(message, f"messages[{index}]", "messages")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("top_logprobs: expected logprobs to be true beside it", "top_logprobs")
    _check_generation_config(body)


def check_response(body: Body) -> None:
    """A request to /v1/responses; raises as :func:`check_completion`."""
    _check_whole(body, OF_RESPONSES, "/v1/responses")
    _check(body, OF_RESPONSES, "input")
    if not body["input"]:
        raise BadRequest("input: expected some text or messages, got none", "input")
    if isinstance(body["input"], list):
        for index, item in enumerate(body["input"]):
            _check_item(item, f"input[{index}]")
    _check_generation_config(body)


def _check_message(message: Body, at: str, param: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        said = f"one of {', '.join(ROLES)}"
        raise BadRequest(f"{at}.role: expected {said}, got {_said(role)}", param)
    calls = message.get("tool_calls")
    if calls is not None:
        for call in calls if isinstance(calls, list) else [None]:
            function = call.get("function") if isinstance(call, dict) else None
            _check_call(function if isinstance(function, dict) else {}, f"{at}.tool_calls", param)
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None and not _is_text(message[name]):
            raise BadRequest(f"{at}.{name}: expected a string, got {_said(message[name])}", param)
    if content is None and (calls or role in ("assistant", "function")):
        return
    _check_content(content, f"{at}.content", param)


def _check_call(function: Body, at: str, param: str) -> None:
    """A call of a function in an earlier answer: its name, and its arguments as JSON."""
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not _is_text(function.get("name")) or not isinstance(arguments, dict):
        raise BadRequest(
            f"{at}: expected calls, each with function.name and function.arguments, a JSON object",
            param,
        )


def _check_content(content: Any, at: str, param: str) -> None:
    if _is_text(content):
        return
    texts = ("text", "input_text", "output_text")
    for part in content if isinstance(content, list) else [None]:
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        if kind in texts and _is_text(fields.get("text")):
            continue
        said = _said(kind if kind is not None else content)
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
    elif isinstance(kind, str) and kind in CALLS:
        for name in CALLS[kind]:
            if not _is_text(item.get(name)):
                said = f"{at}.{name}: expected a string, got {_said(item.get(name))}"
                raise BadRequest(said, "input")
        if kind == "function_call":
            _check_call(item, at, "input")
    elif kind != "reasoning":
        _check_content([item], at, "input")


def messages_of(body: Body) -> list[Body]:
    """The messages of a chat, as templates take them: the content is text."""
    return [_message(message) for message in body["messages"]]


def _message(message: Body) -> Body:
    """One message of a chat, after its check. The arguments of calls are objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content)
    found = {"role": message["role"], "content": content}
    found |= {x: message[x] for x in ("name", "tool_call_id") if message.get(x) is not None}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in message["tool_calls"]
        ]
    return found


def _arguments(function: Body) -> Any:
    given = function["arguments"]
    return json.loads(given) if isinstance(given, str) else given


def messages_of_response(body: Body) -> list[Body]:
    """The messages of a request to /v1/responses: its instructions, and its input."""
    given, messages = body["input"], list[Body]()
    part: Body = {}  # a message of the user, of which the next item can be a part too
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind, last = item.get("type"), messages[-1] if messages else {}
        if "role" in item:
            messages.append(_message(item))
        elif kind == "function_call":
            call = {"id": item["call_id"], "type": "function"}
            call["function"] = {"name": item["name"], "arguments": _arguments(item)}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            own = {"tool_call_id": item["call_id"], "content": item["output"]}
            messages.append({"role": "tool", **own})
        elif kind != "reasoning" and last is part:
            part["content"] += f" {item['text']}"
        elif kind != "reasoning":
            part = {"role": "user", "content": item["text"]}
            messages.append(part)
    if not messages:
        raise BadRequest("input: expected some text or messages, got none of them", "input")
    said = body.get("instructions")
    if said and messages[0]["role"] == "system":  # most templates take one system message
        messages[0]["content"] = f"{said}\n\n{messages[0]['content']}"
    elif said:
        messages.insert(0, {"role": "system", "content": said})
    return messages


def _check_generation_config(body: Body) -> None:
    given = body.get("generation_config")
    if given is None:
        return
    try:
        fields = json.loads(given)
    except (TypeError, ValueError, RecursionError):
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
