"""`latte generate`: stream a continuation of a prompt, token by token.

A document before the prompt is read in pieces into a state of constant size. States are files too
(:mod:`latte.models.state_file`): read once, answer many prompts.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from latte.errors import LatteError, check_seed
from latte.lab.data.tokenizers import document_ends
from latte.lab.progress import progress
from latte.models.registry import carries_state

READ_AT_ONCE = 1024  # number of tokens of a document that one forward reads
LONG = 4096  # number of tokens from which on progress is shown


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
    document: str = "",
    state: Any = None,
    save_state: str | Path | None = None,
) -> str:
    """Continue `prompt`. Returns the continuation; with `stream`, prints it while it is generated.

    With `echo` the prompt is printed before it.

    The model reads the prompt after the start token, as it read documents in training. Temperature
    0 is greedy decoding. Generation ends early at the end-of-text token. Baselines read the
    whole text again for every token, because each library keeps its states in another way. With
    `compiled` a step of decoding is compiled first, and the time this took is printed.

    Args:
        document: Text before the prompt, of any length. It is tokenised separately.
        state: State before document and prompt: a file of `latte.models.save_state`, or a cache,
            which goes on with what is written.
        save_state: File to which the state after document and prompt is written. Then
            `max_new_tokens` may be 0, to read only.

    Raises:
        LatteError: Options do not fit, the model's step cannot be compiled, the model keeps no
            state, or a state is of another model.
    """
    from latte.lab.data.document_source import without_lone_surrogates
    from latte.models import LatteCache, state_file
    from latte.models.cache_name import CACHE_NAME

    check_sampling(max_new_tokens, temperature, top_k, top_p, seed, reads=save_state is not None)
    is_file = isinstance(state, str | Path)
    if (is_file or save_state) and not keeps_state(model):
        raise LatteError("state: this model is none of Latte's own, whose states can be files")
    if save_state and not Path(save_state).expanduser().parent.is_dir():
        raise LatteError(f"state {save_state} cannot be written: its folder does not exist")
    if compiled and not has_steps(model):
        raise LatteError("compile: this model has no step of decoding that can be compiled")
    prompt = without_lone_surrogates(prompt)  # bytes of the command line that are no UTF-8
    start = [] if state is not None else [document_ends(tokenizer)[0]]
    before = tokenizer.encode(document, add_special_tokens=False) if document else []
    before, ids = start + before, tokenizer.encode(prompt, add_special_tokens=False)
    if not document or not keeps_state(model):
        before, ids = [], before + ids
    elif not ids and max_new_tokens:
        before, ids = before[:-1], before[-1:]  # the last token predicts the next one
    if not before + ids:
        raise LatteError("prompt: expected some text to continue with after the state, got none")
    cache: Any = None
    room = len(before) + len(ids) + max_new_tokens if compiled else None
    if is_file:
        cache = state_file.load_state(state, model, static_room=room)
    elif state is not None:
        cache = state
    elif save_state or before or compiled:
        cache = LatteCache(model.config, max_cache_len=room)
    sampling = sampling_options(temperature, top_k, top_p)
    if compiled and max_new_tokens:
        sampling["compile_config"] = compile_step(model, cache.max_cache_len)
    if echo:
        print(prompt, end="", flush=True)
    read(model, before if max_new_tokens else before + ids, cache)

    def save() -> None:
        if save_state is not None:
            state_file.save_state(cache, save_state)
            size = f"{cache.get_seq_length():,} tokens, {cache.nbytes / 1000:,.0f} kB"
            print(f"the state of {size}, written to {save_state}", file=sys.stderr, flush=True)

    def after_prompt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == len(ids):
            if bool(scores.isnan().any()):
                raise LatteError(
                    "the model's logits are NaN after the prompt: its weights, or the state that it"
                    " continues, are damaged"
                )
            save()
        return scores

    if not max_new_tokens:
        save()
        return ""
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    if seed is not None:
        torch.manual_seed(seed)
    past = 0 if cache is None else cache.get_seq_length()
    output = model.generate(
        input_ids,
        attention_mask=input_ids.new_ones(1, past + len(ids)),
        max_new_tokens=max_new_tokens,
        **text_ends(model, tokenizer),
        use_cache=carries_state(model),
        **{CACHE_NAME: cache},
        logits_processor=[after_prompt],
        tokenizer=tokenizer,  # for the model's own strings that end a text
        streamer=_streamer(tokenizer) if stream else None,
        **sampling,
    )
    # A space before a word belongs to it in some tokenisers, and is lost where text begins.
    said = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode(output[0], skip_special_tokens=True)[len(said) :]


@torch.no_grad()
def read(model: Any, ids: list[int], cache: Any, label: str = "") -> None:
    """Read tokens into a cache, in pieces; prints the progress if it takes long."""
    from latte.models.cache_name import CACHE_NAME

    device = next(model.parameters()).device
    options: dict[str, Any] = {"use_cache": True, CACHE_NAME: cache}
    if model._supports_logits_to_keep():
        options["logits_to_keep"] = 1
    with progress(len(ids), "token", shown=len(ids) >= LONG, label=label) as bar:
        for first in range(0, len(ids), READ_AT_ONCE):
            piece = torch.tensor([ids[first : first + READ_AT_ONCE]], device=device)
            model(piece, **options)
            bar.update(piece.shape[1])


def text_ends(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The tokens that end and pad a text, as options of ``generate``."""
    _, end = document_ends(tokenizer)
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [end if named is None else named]
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {"eos_token_id": sorted({end, *named}), "pad_token_id": pad}


def keeps_state(model: Any) -> bool:
    """Whether the model keeps what it reads in a LatteCache."""
    return carries_state(model) and hasattr(model.config, "state_grows")


def new_cache(model: Any) -> Any:
    """An empty cache for what a model reads; None if it reads every text as a whole.

    That of a model of Transformers has all keys and values, so it grows with the text.
    """
    from transformers import DynamicCache

    from latte.models import LatteCache

    if keeps_state(model):
        return LatteCache(model.config)
    grows = getattr(model, "_supports_default_dynamic_cache", None)
    if carries_state(model) and grows is not None and grows():
        return DynamicCache(config=model.config)
    return None


def has_steps(model: Any) -> bool:
    """Whether a step of decoding can be compiled."""
    return keeps_state(model) and getattr(getattr(model, "model", None), "steps", False)


def compile_step(model: Any, room: int) -> Any:
    """Compile a step of decoding for static caches of such a length, and say how long it took.

    Returns the ``compile_config`` with which ``generate`` uses it.
    """
    from transformers import CompileConfig

    from latte.models import LatteCache
    from latte.models.cache_name import CACHE_NAME

    compile_config = CompileConfig(fullgraph=True)
    compile_config._compile_all_devices = True  # type: ignore[assignment]
    begun = time.perf_counter()
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=2,
        max_new_tokens=2,
        compile_config=compile_config,
        **{CACHE_NAME: LatteCache(model.config, max_cache_len=room)},
    )
    seconds = time.perf_counter() - begun
    print(f"compiled a step of decoding in {seconds:.1f} s", file=sys.stderr, flush=True)
    return compile_config


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    *,
    reads: bool = False,
) -> None:
    """Raise LatteError for options that `generate` cannot use.

    reads: the state will be saved, so that the answer may be empty.
    """
    least = 0 if reads else 1
    if max_new_tokens < least:
        raise LatteError(f"max-new-tokens: expected at least {least}, got {max_new_tokens}")
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


def sampling_options(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """The options of Transformers' ``generate`` for what :func:`check_sampling` has checked."""
    one = {"num_beams": 1}  # whatever the model's own defaults are: text is printed as it comes
    if temperature == 0:
        return {"do_sample": False, **one}
    top_p = 1.0 if top_p is None else top_p
    drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
    return {**drawn, **one}


def _streamer(tokenizer: Any) -> Any:
    """Prints the text after the prompt. Both are decoded together."""
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
