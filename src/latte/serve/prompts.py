"""From a request to tokens, with the places where other requests are likely to branch.

A client sends the whole chat at every turn. The chat template turns it into text. This text begins
with the text of the turn before, which ends where a message ends or where an answer begins. These
places are marked, so that states are kept there (:mod:`latte.serve.prefix_cache`).

Long texts between special tokens are remembered with their tokens, because splitting a document of
32,000 tokens again takes longer than reading the question after it.

All of this takes time in proportion to the text, and any thread may do it. The handlers of requests
leave it to other threads than the event loop's, so that the server answers others meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding

from latte.errors import one_line
from latte.lab.data.tokenizers import document_ends
from latte.serve.requests import BadRequest

# For tokenizers without a template. The start token is added elsewhere.
PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LONG = 2000  # least number of characters of a text that is remembered
REMEMBERED = 16_000_000  # largest number of characters in all
# Least number of characters of a text that is split while no other such text is. Splitting takes
# some 200 bytes for a character.
LARGE = 100_000
KINDS = 16  # largest number of kinds of messages of which the end is looked for
SIGN = "\ue000"  # a character of private use, put after contents to find them in a chat's text
Messages = list[dict[str, Any]]


class Prompt(BatchEncoding):
    """A prompt's tokens, as handlers pass them on.

    Attributes:
        marks: Numbers of tokens after which other requests are likely to branch.
        chat: Messages and options of the template from which it was rendered.
    """

    marks: tuple[int, ...] = ()
    chat: tuple[Messages, dict[str, Any]] | None = None

    @classmethod
    def of(cls, ids: np.ndarray) -> Prompt:
        ids_BT = torch.from_numpy(ids.astype(np.int64))[None]
        return cls({"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)})


class Prompts:
    """A tokenizer for the handlers of requests, which marks its chats."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer  # handlers read it by this name
        self._start, _ = document_ends(tokenizer)
        # If a tokenizer has a template, the template decides how texts begin.
        self._begins = tokenizer.chat_template is None
        if self._begins:
            tokenizer.chat_template = PLAIN_CHAT
        self._splits = Splits(tokenizer)
        self._large = threading.Lock()
        self._ended = False
        opens, closes = {"add_generation_prompt": True}, {"add_generation_prompt": False}
        self._splits.check(self._render([USER, ANSWER, USER], opens, strict=False))
        asked = self._render([USER], closes, strict=False)
        opened = self._render([USER], opens, strict=False)
        answered = self._render([USER, ANSWER], closes, strict=False)
        # The opening of an answer, if an answer follows it in a longer chat too, as in most
        # templates; else None.
        follow = bool(asked) and opened.startswith(asked) and answered.startswith(opened)
        self._opening = opened.removeprefix(asked) if follow else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def begin(self, ids: np.ndarray) -> np.ndarray:
        """These tokens after the start token, as documents in training began."""
        if len(ids) == 0 or (self._begins and ids[0] != self._start):
            return np.concatenate([np.array([self._start], ids.dtype), ids])
        return ids

    def apply_chat_template(self, messages: Messages, **options: Any) -> Prompt:
        """The tokens of a chat, with marks. The options are those of the tokenizer's own method."""
        options["add_generation_prompt"] = True
        return self._encode(messages, options)

    def answered(self, prompt: Prompt, answer: str) -> Prompt | None:
        """The chat with the answer, as the next turn begins; None if the prompt was no chat."""
        if prompt.chat is None:
            return None
        messages, options = prompt.chat
        messages = [*messages, {"role": "assistant", "content": answer}]
        options = {**options, "add_generation_prompt": False}
        return self._encode(messages, options)

    def ids(self, text: str) -> np.ndarray:
        """The tokens (T,) int32 of a text that is no chat, as the tokenizer itself splits it."""
        with self._turn(text):
            return np.array(self.tokenizer(text, return_attention_mask=False).input_ids, np.int32)

    def end(self) -> None:
        """Refuse the long texts that wait for their turn, because the server ends."""
        self._ended = True

    def _encode(self, messages: Messages, options: dict[str, Any]) -> Prompt:
        text = self._render(messages, options)
        with self._turn(text):
            ids, starts = self._splits.encode(text)
            marks = {starts(end - 1) for end in self._ends(text, messages, options)}
        prompt = Prompt.of(ids)
        # The token with the last character is left out: in a longer text it may be another token.
        prompt.chat, prompt.marks = (messages, options), tuple(sorted(filter(None, marks)))
        return prompt

    @contextlib.contextmanager
    def _turn(self, text: str) -> Iterator[None]:
        """Wait until no other long text is split, if this is one; then give its memory back.

        Raises:
            BadRequest: The server ends.
        """
        if len(text) < LARGE:
            yield
            return
        with self._large:
            if self._ended:
                raise BadRequest("the server ends", status=503)
            yield
            # glibc would keep what a thread has freed for that thread.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def _ends(self, text: str, messages: Messages, options: dict[str, Any]) -> Iterator[int]:
        """The end of each message in the text, or of the opening of the answer to it.

        To render the chat up to each message would take a time in proportion to its square. So a
        chat is rendered so far only for the first message of a kind: this says what the template
        writes between the content and the end of such a message.
        """
        closes = {**options, "add_generation_prompt": False}
        tails: dict[str, str | None] = {}
        looked = 0
        ends = self._content_ends(text, messages, options)
        for count, (message, end) in enumerate(zip(messages[:-1], ends, strict=False), 1):
            if end is None:
                continue
            kind = repr((message.get("role"), message.get("tool_calls")))
            if tails.get(kind) is None and looked < KINDS:
                looked += 1
                before = self._render(messages[:count], closes, strict=False)
                known = len(before) >= end and text.startswith(before)
                tails[kind] = before[end:] if known else None
            tail = tails.get(kind)
            if tail is None or not text.startswith(tail, end):
                continue
            place = end + len(tail)
            opening = self._opening if messages[count].get("role") == "assistant" else None
            if opening is not None and text.startswith(opening, place):
                place += len(opening)
            yield place
        if not options["add_generation_prompt"] or self._opening is not None:
            yield len(text)
        else:
            before = self._render(messages, closes, strict=False)
            if before and text.startswith(before):
                yield len(before)

    def _content_ends(
        self, text: str, messages: Messages, options: dict[str, Any]
    ) -> list[int | None]:
        """The place in the text after the content of each message; None where it is not known.

        The chat is rendered with a sign after each content. A template may strip contents, so the
        sign may have to be before white space; or it may leave empty ones out.
        """
        if SIGN in text:
            return [None] * len(messages)
        for empty, strips in itertools.product((True, False), (False, True)):
            signed = [_signed(message, strips, empty) for message in messages]
            parts = self._render(signed, options, strict=False).split(SIGN)
            found = [one is not message for one, message in zip(signed, messages, strict=True)]
            if len(parts) == sum(found) + 1 and "".join(parts) == text:
                places = itertools.accumulate(map(len, parts))
                return [next(places) if has else None for has in found]
        return [None] * len(messages)

    def _render(self, messages: Messages, options: dict[str, Any], *, strict: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # A template may accept a whole chat but refuse a part of it.
            if not strict:
                return ""
            said = f"messages: the model's chat template does not take them: {one_line(error)}"
            raise BadRequest(said, "messages") from None


def _signed(message: dict[str, Any], strips: bool, empty: bool) -> dict[str, Any]:
    """The message with a sign after its content, if this is a string."""
    content = message.get("content")
    if not isinstance(content, str) or not (content or empty):
        return message
    end = len(content.rstrip()) if strips else len(content)
    return {**message, "content": content[:end] + SIGN + content[end:]}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


class Splits:
    """Texts as tokens. Long texts that begin with a special token are remembered.

    A tokenizer first finds the special tokens of a text. It then splits each part between them
    separately. So the text can be cut before each special token, and its tokens stay the same.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special: list[str] = []
        if not getattr(tokenizer, "split_special_tokens", False):
            added = tokenizer.added_tokens_decoder.values()
            self._special = [
                token.content
                for token in added
                if token.special and not (token.lstrip or token.rstrip or token.single_word)
            ]
        # If one special token begins with another, the longer one matches.
        special = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._pattern = re.compile("|".join(special)) if special else None
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._length = 0
        self._lock = threading.Lock()  # of what is remembered

    def check(self, text: str) -> None:
        """Turn cutting off if this text gives other tokens when it is cut."""
        if self.encode(text)[0].tolist() != self._encoding(text).ids:
            self._special, self._pattern = [], None
            self._known.clear()

    def encode(self, text: str) -> tuple[np.ndarray, Any]:
        """The tokens (T,) int32, and a function: the number of tokens before that of a character.

        Any thread may call it, because the handlers and the loop that answers both split texts.
        """
        begins: list[int] = []  # of each part: its first character
        parts: list[tuple[str, int, Any]] = []  # its text, first token, encoding
        ids: list[np.ndarray] = []
        count = 0
        for begin, part in self._parts(text):
            known, encoding = self._split(part)
            begins.append(begin)
            parts.append((part, count, encoding))
            ids.append(known)
            count += len(known)

        def before(character: int) -> int | None:
            found = bisect.bisect_right(begins, character) - 1
            if found < 0:
                return None
            part, first, encoding = parts[found]
            if encoding is None:
                encoding = self._encoding(part)
                parts[found] = part, first, encoding
            inside = _token_at(encoding, character - begins[found])
            return None if inside is None else first + inside

        return np.concatenate(ids) if ids else np.zeros(0, np.int32), before

    def _parts(self, text: str) -> Iterator[tuple[int, str]]:
        """The parts of the text, cut before its special tokens, each with its first character."""
        starts = {0}
        if self._pattern is not None:
            starts |= {match.start() for match in self._pattern.finditer(text)}
        for begin, end in itertools.pairwise([*sorted(starts), len(text)]):
            yield begin, text[begin:end]

    def _split(self, text: str) -> tuple[np.ndarray, Any]:
        """The tokens, and the encoding if the text was not remembered."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
                return self._known[text], None
        encoding = self._encoding(text)
        ids = np.array(encoding.ids, np.int32)
        if len(text) >= LONG and self._special:
            with self._lock:
                self._length += 0 if text in self._known else len(text)
                self._known[text] = ids
                while self._length > REMEMBERED:
                    gone, _ = self._known.popitem(last=False)
                    self._length -= len(gone)
        return ids, encoding

    def _encoding(self, text: str) -> Any:
        return self._tokenizer([text], add_special_tokens=False).encodings[0]


def _token_at(encoding: Any, character: int) -> int | None:
    """The first token of a character. ``encoding.char_to_token`` looks at every token before it."""
    tokens = range(len(encoding))
    found = bisect.bisect_right(
        tokens, character, key=lambda token: encoding.token_to_chars(token)[1]
    )
    return None if found == len(tokens) or encoding.token_to_chars(found)[0] > character else found
