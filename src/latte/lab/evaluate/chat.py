"""`latte chat`: a conversation in which every turn reads only its new tokens.

The state after a turn is kept. The next turn costs its own question and answer, whatever was said
or read before. The cache of a model of Transformers grows with the conversation. Baselines keep
nothing, and read the whole conversation at every turn.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latte.errors import LatteError
from latte.lab.data.document_source import without_lone_surrogates
from latte.lab.evaluate.documents import ReadDocument, asked_about, opening
from latte.lab.evaluate.generate import (
    check_sampling,
    new_cache,
    read,
    sampling_options,
    text_ends,
)
from latte.models.registry import carries_state


class Chat:
    """A conversation with a model.

    Args:
        model: Causal language model.
        tokenizer: Tokenizer of the model, with a chat template.
        system: System message; if empty, the template's own.
        document: Text to talk about. It is placed before the first message. Or one that was read
            before, with the same system message: a conversation then begins with its state.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Temperature of sampling. 0 is greedy decoding.
        top_k: Number of most likely tokens to sample from.
        top_p: Probability mass of the most likely tokens to sample from.
        seed: Seed of the answers. With None they differ every time.

    Raises:
        LatteError: The tokenizer has no chat template, or an option of sampling is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str = "",
        document: str | ReadDocument = "",
        max_new_tokens: int = 512,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = 0.95,
        seed: int | None = None,
    ) -> None:
        check_sampling(max_new_tokens, temperature, top_k, top_p, seed)
        check_template(tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.known = document if isinstance(document, ReadDocument) else None
        self.document = document.document if isinstance(document, ReadDocument) else document
        self.sampling = {"max_new_tokens": max_new_tokens}
        self.sampling |= sampling_options(temperature, top_k, top_p)
        self.ends = text_ends(model, tokenizer)
        self.seed = seed
        self.opening = opening(system)
        self.clear()

    def clear(self) -> None:
        """Forget what was said. The next message begins a new conversation."""
        known = self.known
        self.messages = list(self.opening)
        # What has been read, as the template has it, without the last answer.
        self.prompt = "" if known is None else known.text
        # The conversation's tokens, with the answers as they were sampled.
        self.tokens = [] if known is None else list(known.ids)
        self.cache = new_cache(self.model) if known is None else known.cache()
        if self.seed is not None:
            torch.manual_seed(self.seed)

    def stop(self) -> None:
        """End the answer that is being sampled, after its next token. From any thread."""
        self.stopped = True

    def say(self, message: str, on_text: Callable[[str], Any] = lambda _: None) -> str:
        """The model's answer to a message.

        Args:
            message: Message of the user.
            on_text: Function that is called with each new piece of the answer.

        Raises:
            LatteError: The template changes the text before the new message.
        """
        if self.document and self._begins:
            message = asked_about(self.document, message)
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        new = self.tokenizer.encode(self._unread(prompt), add_special_tokens=False)
        if self.tokens and self.tokens[-1] in self.ends["eos_token_id"]:
            self.tokens.pop()  # sampled, but not read: the template says what ends an answer
        self.tokens += new
        answer = self.tokenizer.decode(self._sample(on_text), skip_special_tokens=True)
        self.messages, self.prompt = [*messages, {"role": "assistant", "content": answer}], prompt
        return answer

    @property
    def _begins(self) -> bool:
        """Whether nothing has been said yet."""
        return len(self.messages) == len(self.opening)

    def _unread(self, prompt: str) -> str:
        """What the prompt adds to what was read and to the last answer.

        Some templates strip an answer's white space.
        """
        answer = "" if self._begins else self.messages[-1]["content"]
        for kept in (answer, answer.strip()):
            if prompt.startswith(self.prompt + kept):
                return prompt[len(self.prompt + kept) :]
        raise LatteError(
            "chat: expected a template that keeps earlier messages as they are, this one changes "
            "them when one is added; latte serve reads the whole conversation at every turn"
        )

    def _sample(self, on_text: Callable[[str], Any]) -> list[int]:
        """Sample an answer. Its tokens are appended to the conversation's."""
        from transformers import StoppingCriteriaList, TextStreamer

        from latte.models.cache_name import CACHE_NAME

        class Pieces(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                on_text(text)

        def stops(ids: Tensor, _: Any) -> Tensor:
            return torch.full(ids.shape[:1], self.stopped, device=ids.device)

        self.stopped = False
        past = 0 if self.cache is None else self.cache.get_seq_length()
        unread = self.tokens[past:]
        if self.cache is not None:
            read(self.model, unread[:-1], self.cache)
            unread = unread[-1:]
        ids = torch.tensor([unread], device=next(self.model.parameters()).device)
        output = self.model.generate(
            ids,
            attention_mask=ids.new_ones(1, len(self.tokens)),
            **self.ends,
            **self.sampling,
            use_cache=carries_state(self.model),
            **{CACHE_NAME: self.cache},
            stopping_criteria=StoppingCriteriaList([stops]),
            tokenizer=self.tokenizer,
            streamer=Pieces(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
        new: list[int] = output[0, len(unread) :].tolist()
        self.tokens += new
        return new


def printed(piece: str) -> None:
    """Print a piece of an answer."""
    print(piece, end="", flush=True)


def check_template(tokenizer: Any) -> None:
    """Raise LatteError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise LatteError(
            "chat: expected a tokenizer with a chat template, this one has none; latte generate "
            "continues a text, also one that it has read (--read)"
        )


def converse(chat: Chat, *, apart: bool = False) -> None:
    """Answer the lines of standard input until it ends; Ctrl-C ends an answer.

    Args:
        apart: Whether each message begins a new conversation.
    """
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys edit the line)
    while True:
        try:
            line = input("> " if asks else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            chat.clear()
        elif line:
            if apart:
                chat.clear()
            handler = signal.signal(signal.SIGINT, lambda *_: chat.stop())
            try:
                message = without_lone_surrogates(line)  # bytes that are no UTF-8
                chat.say(message, printed)
            finally:
                signal.signal(signal.SIGINT, handler)
            print("\n", flush=True)
