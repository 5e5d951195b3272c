"""From a request to tokens, with the places where other requests are likely to branch.

A client sends the whole chat at every turn. The chat template turns it into text. This text begins
with the text of the turn before, which ends where a message ends or where an answer begins. These
places are marked, so that states are kept there (:mod:`latte.serve.states`).

Long texts between special tokens are remembered with their tokens, because splitting a document of
32,000 tokens again takes longer than reading the question after it.
"""

from __future__ import annotations

import bisect
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding

from latte.data.tokenizers import document_ends
from latte.errors import one_line
from latte.serve.requests import BadRequest

# For tokenizers without a template. The start token is added elsewhere.
PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LONG = 2000  # least number of characters of a text that is remembered
REMEMBERED = 16_000_000  # largest number of characters in all
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
        sample = self._render([USER, ANSWER, USER], {"add_generation_prompt": True}, strict=False)
        self._splits.check(sample)
        self._answers_follow = self._begin_alike()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def begin(self, ids: np.ndarray) -> np.ndarray:
        """These tokens after the start token, as documents in training began."""
        if len(ids) == 0 or (self._begins and ids[0] != self._start):
            return np.concatenate([np.array([self._start], ids.dtype), ids])
        return ids

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = "pt",
        load_audio_from_video: bool = False,
        **options: Any,
    ) -> Prompt:
        """The tokens of a chat, with marks. The options are those of the tokenizer's own method."""
        options["add_generation_prompt"] = True
        text = self._render(messages, options)
        return self._encode(text, messages, options)

    def answered(self, prompt: Prompt, answer: str) -> Prompt | None:
        """The chat with the answer, as the next turn begins; None if the prompt was no chat."""
        if prompt.chat is None:
            return None
        messages, options = prompt.chat
        messages = [*messages, {"role": "assistant", "content": answer}]
        options = {**options, "add_generation_prompt": False}
        return self._encode(self._render(messages, options), messages, options)

    def _encode(self, text: str, messages: Messages, options: dict[str, Any]) -> Prompt:
        ids, starts = self._splits.encode(text)
        prompt = Prompt.of(ids)
        prompt.chat = messages, options
        marks = (starts(end - 1) for end in self._ends(text, messages, options))
        # The token with the last character is left out: in a longer text it may be another token.
        prompt.marks = tuple(sorted({mark for mark in marks if mark}))
        return prompt

    def _ends(self, text: str, messages: Messages, options: dict[str, Any]) -> Iterator[int]:
        """The end of each message in the text, or of the opening of the answer to it."""
        roles = [message.get("role") for message in messages]
        answered = options["add_generation_prompt"]
        for count in range(1, len(messages) + 1):
            last = count == len(messages)
            opens = roles[count] == "assistant" if not last else answered
            if last and not opens:
                yield len(text)
                return
            opens = opens and self._answers_follow
            begun = {**options, "add_generation_prompt": opens}
            before = self._render(messages[:count], begun, strict=False)
            if before and text.startswith(before):
                yield len(before)

    def _begin_alike(self) -> bool:
        """Whether, in a longer chat too, an answer follows its opening, as in most templates."""
        opening = self._render([USER], {"add_generation_prompt": True}, strict=False)
        after = self._render([USER, ANSWER], {"add_generation_prompt": False}, strict=False)
        return bool(opening) and after.startswith(opening)

    def _render(self, messages: Messages, options: dict[str, Any], *, strict: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            # A template may accept a whole chat but refuse a part of it.
            if not strict:
                return ""
            said = f"messages: the model's chat template does not take them: {one_line(error)}"
            raise BadRequest(said, "messages") from None


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
        self._lock = threading.RLock()

    def check(self, text: str) -> None:
        """Turn cutting off if this text gives other tokens when it is cut."""
        if self.encode(text)[0].tolist() != self._encoding(text).ids:
            self._special, self._pattern = [], None
            self._known.clear()

    def encode(self, text: str) -> tuple[np.ndarray, Any]:
        """The tokens (T,) int32, and a function: the number of tokens before that of a character.

        Any thread may call it, because the handlers and the loop that answers both split texts.
        """
        with self._lock:
            return self._encode(text)

    def _encode(self, text: str) -> tuple[np.ndarray, Any]:
        parts: list[tuple[int, str, int, Any]] = []  # first character, text, first token, encoding
        ids: list[np.ndarray] = []
        count = 0
        for begin, part in self._parts(text):
            known, encoding = self._split(part)
            parts.append((begin, part, count, encoding))
            ids.append(known)
            count += len(known)

        def before(character: int) -> int | None:
            found = bisect.bisect_right([begin for begin, *_ in parts], character) - 1
            if found < 0:
                return None
            begin, part, first, encoding = parts[found]
            encoding = encoding or self._encoding(part)
            inside = encoding.char_to_token(character - begin)
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
        if text in self._known:
            self._known.move_to_end(text)
            return self._known[text], None
        encoding = self._encoding(text)
        ids = np.array(encoding.ids, np.int32)
        if len(text) >= LONG and self._special:
            self._known[text] = ids
            self._length += len(text)
            while self._length > REMEMBERED:
                gone, _ = self._known.popitem(last=False)
                self._length -= len(gone)
        return ids, encoding

    def _encoding(self, text: str) -> Any:
        with self._lock:
            return self._tokenizer([text], add_special_tokens=False).encodings[0]
