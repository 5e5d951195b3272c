"""`latte generate`: stream a continuation of a prompt, token by token."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch

from latte.errors import LatteError, check_seed
from latte.models.registry import carries_state


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = 0.95,
    seed: int | None = None,
    stream: bool = True,
    echo: bool = False,
    compiled: bool = False,
) -> str:
    """Continue `prompt`; returns the continuation and, with `stream`, prints it as it comes.

    With `echo` the prompt is printed before it.

    The model sees the prompt as it saw documents in training, after the start token. Temperature
    0 is greedy decoding. Generation ends early at the end-of-text token. Comparators read the
    text anew for every token, since each library keeps its states in a way of its own. With
    `compiled` a step of decoding is compiled first, and said how long that took.

    Raises:
        LatteError: options that do not fit, or a model whose step cannot be compiled.
    """
    from latte.data.sources import without_lone_surrogates
    from latte.data.tokenizers import document_ends

    check_sampling(max_new_tokens, temperature, top_k, top_p, seed)
    start, end = document_ends(tokenizer)
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [end if named is None else named]
    prompt = without_lone_surrogates(prompt)  # bytes of the command line that are no UTF-8
    ids = [start, *tokenizer.encode(prompt, add_special_tokens=False)]
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        sampling["top_p"] = 1.0 if top_p is None else top_p
    if compiled:
        sampling |= _compile_step(model, input_ids, max_new_tokens)
    if echo:
        print(prompt, end="", flush=True)
    if seed is not None:
        torch.manual_seed(seed)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted({end, *named}),
        pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        use_cache=carries_state(model),
        streamer=_streamer(tokenizer) if stream else None,
        **sampling,
    )
    # A space before a word belongs to it in some tokenisers, and is lost where text begins.
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode(output[0], skip_special_tokens=True)[len(before) :]


def _compile_step(model: Any, input_ids: torch.Tensor, max_new_tokens: int) -> dict[str, Any]:
    """Compile a step of decoding and say how long it took; the options of `generate` to use it."""
    from transformers import CompileConfig

    from latte.models import LatteCache

    if not carries_state(model) or not getattr(getattr(model, "model", None), "steps", False):
        raise LatteError("compile: this model has no step of decoding that can be compiled")
    compile_config = CompileConfig(fullgraph=True)
    compile_config._compile_all_devices = True  # type: ignore[assignment]
    room, begun = input_ids.shape[1] + max_new_tokens, time.perf_counter()

    def options() -> dict[str, Any]:
        cache = LatteCache(model.config, max_cache_len=room)
        return {"past_key_values": cache, "compile_config": compile_config}

    ones = torch.ones_like(input_ids)
    model.generate(input_ids, attention_mask=ones, min_new_tokens=2, max_new_tokens=2, **options())
    seconds = time.perf_counter() - begun
    print(f"compiled a step of decoding in {seconds:.1f} s", file=sys.stderr, flush=True)
    return options()


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> None:
    """Raise LatteError for what `generate` cannot sample with."""
    if max_new_tokens < 1:
        raise LatteError(f"max-new-tokens: expected at least 1, got {max_new_tokens}")
    # Logits divided by much less are infinite in fp32.
    if temperature != 0 and not 1e-6 <= temperature < math.inf:
        raise LatteError(
            f"temperature: expected 0 (greedy) or a number from 1e-6 up, got {temperature}"
        )
    if top_k is not None and top_k < 1:
        raise LatteError(f"top-k: expected at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise LatteError(f"top-p: expected a number above 0 and up to 1, got {top_p}")
    if seed is not None:
        check_seed("seed", seed)


def _streamer(tokenizer: Any) -> Any:
    """Prints what follows the prompt, decoded together with it."""
    from transformers import TextStreamer

    class Continuation(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt:
                self.next_tokens_are_prompt = False
                self.token_cache = value[0].tolist()
                text: Any = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
                self.print_len = len(text)
            else:
                super().put(value)

    return Continuation(tokenizer, skip_prompt=True, skip_special_tokens=True)
