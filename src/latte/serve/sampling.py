"""Chooses the next token, by each request's own parameters and random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from latte.serve.prefix_cache import Ids


class TokenScore(NamedTuple):
    """A token with the logarithm of its probability, and the most likely tokens with theirs.

    Probabilities are those of the model, before temperature and penalties.
    """

    token: int
    logprob: float | None  # None for the first token of a text, which follows nothing
    top: tuple[tuple[int, float], ...]


def scores_of(logits_TV: Tensor, tokens: Sequence[int], most: int) -> list[TokenScore]:
    """The scores of tokens, each with the ``most`` most likely ones in its place."""
    # The API says -9999 for tokens that are impossible, since JSON has no infinity.
    logprobs_TV = torch.log_softmax(logits_TV.float(), -1).clamp(min=-9999.0)
    own = logprobs_TV.gather(-1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])
    values, likely = logprobs_TV.topk(min(most, logprobs_TV.shape[-1]))
    pairs = zip(likely.tolist(), values.tolist(), strict=True)
    tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
    return [TokenScore(*one) for one in zip(tokens, own[:, 0].tolist(), tops, strict=True)]


class Penalties(NamedTuple):
    """OpenAI's penalties: a token's logit loses one per use in the answer, the other only once."""

    frequency: float = 0.0
    presence: float = 0.0


NO_PENALTIES = Penalties()


class Sampler:
    """Chooses tokens as ``generate`` does, with Transformers' own logits processors.

    Args:
        model: Language model. Its defaults replace values that ``config`` does not set.
        config: Settings of the request: temperature, nucleus, penalties, bias.
        ids: Ids of the prompt, which penalties count too.
        seed: Seed of this request's random numbers. The same seed gives the same answer.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        ids: Ids,
        seed: int | None = None,
        penalties: Penalties = NO_PENALTIES,
    ) -> None:
        config, _ = model._prepare_generation_config(config)
        model._prepare_special_tokens(config, device=model.device)
        self.config = config
        self._processors = model._get_logits_processor(
            config, input_ids_seq_length=len(ids), device=model.device, model_kwargs={}
        )
        self._generator: torch.Generator | None = None
        if config.do_sample:
            self._generator = torch.Generator(model.device)
            if seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(seed)
        self._penalties, self._counts = penalties, Counter[int]()
        # Processors read all tokens. These are in a buffer whose size doubles when it is full.
        self._length = len(ids)
        self._ids: Tensor | None = None
        if len(self._processors):
            self._ids = torch.from_numpy(ids.astype("int64"))[None].to(model.device)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self._generator is None and not len(self._processors) and not any(self._penalties)

    def __call__(self, logits_1V: Tensor) -> int:
        """The next token, from the logits (1, V) in fp32."""
        if any(self._penalties) and self._counts:
            tokens = torch.tensor(list(self._counts), device=logits_1V.device)
            counts = torch.tensor(list(self._counts.values()), device=logits_1V.device)
            logits_1V = logits_1V.clone()
            lost = counts * self._penalties.frequency + self._penalties.presence
            logits_1V[0, tokens] -= lost
        if self._ids is not None:
            logits_1V = self._processors(self._ids[:, : self._length], logits_1V)
        if self._generator is None:
            return int(logits_1V.argmax(-1))
        probabilities = torch.softmax(logits_1V, -1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def took(self, token: int) -> None:
        """Add this token to the answer."""
        self._counts[token] += 1
        if self._ids is not None:
            if self._length == self._ids.shape[1]:
                self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], 1)
            self._ids[0, self._length] = token
        self._length += 1
