"""Decoding on a GPU: time per token at contexts of 1k to 1M tokens, batches of 1 and 64.

``latte-r-swa++`` at "paper" size beside a transformer of the same size, bf16, random weights.

* Latte's state has one size: it comes from 256 processed tokens, and its position is set to the
  context.
* The transformer is Transformers' Llama with ``StaticCache``, which writes in place, its keys and
  values random numbers: their values do not change the work. Contexts that do not fit say so.
* ``eager``: the model's forward as ``generate`` calls it. ``graph``: the same captured as a CUDA
  graph and replayed; what cannot be captured says so.

    python benchmarks/gpu_decode.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_common as gpu
import torch
from records import Goal, Row, say
from torch import Tensor
from torch.utils._pytree import tree_leaves

from latte.layers.state import map_tensors
from latte.models import LatteCache
from latte.ops import use_backend

OURS, RIVAL = "latte-r-swa++", "llama"
CONTEXTS = (1024, 8192, 32768, 131072, 1048576)
LONGEST_OF_RIVAL = 131072
FED = 256
Call = Callable[[], Any]


class Latte:
    """One more token for a state of constant size, which every call starts from and replaces."""

    def __init__(self, at: gpu.Place, model: Any, B: int, context: int) -> None:
        self.at, self.model, self.context = at, model, context
        ids = gpu.tokens(at, model.config.vocab_size, B, FED)
        self.token = ids[:, :1].contiguous()
        self.cache = LatteCache(model.config)
        with torch.inference_mode(), use_backend(at.backend):
            model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        with torch.no_grad():
            for layer in self.cache.layers:
                position = torch.full_like(layer.state.position, context)
                layer.state = map_tensors(torch.clone, layer.state._replace(position=position))
                layer.seen_tokens = context
        self.start = [layer.state for layer in self.cache.layers]

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def __call__(self) -> Tensor:
        """The state is copied back into its own memory: a replayed graph goes on from it."""
        with torch.no_grad(), use_backend(self.at.backend):
            out = self.model(self.token, past_key_values=self.cache, use_cache=True)
            for layer, start in zip(self.cache.layers, self.start, strict=True):
                for old, new in zip(tree_leaves(start), tree_leaves(layer.state), strict=True):
                    if old is not None:
                        old.copy_(new)
                layer.state, layer.seen_tokens = start, self.context
        return out.logits


class Llama:
    """One more token for keys and values of a fixed number of tokens."""

    def __init__(self, at: gpu.Place, model: Any, B: int, context: int) -> None:
        from transformers import StaticCache

        self.model, self.context = model, context
        self.token = gpu.tokens(at, model.config.vocab_size, B, 1)
        self.position = torch.full_like(self.token, context - 1)
        self.cache = StaticCache(config=model.config, max_cache_len=context)
        self()
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def __call__(self) -> Tensor:
        """The token before the cache is full: it sees all of it."""
        with torch.no_grad():
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.context - 1)
            return self.model(
                self.token,
                past_key_values=self.cache,
                position_ids=self.position,
                use_cache=True,
            ).logits


def make_llama(at: gpu.Place, size: str) -> Any:
    """Transformers' Llama of the sizes of ``transformer++``: the same parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from latte.models import preset_config

    like = preset_config("transformer++", size)
    config = LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=like.hidden_size,
        intermediate_size=like.intermediate_size,
        num_hidden_layers=like.num_hidden_layers,
        num_attention_heads=like.num_attention_heads,
        max_position_embeddings=2 * max(CONTEXTS),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device(at.device):
        model = LlamaForCausalLM(config)
    return model.to(at.dtype).eval()


def steps_of(
    at: gpu.Place, models: dict[str, Any], B: int, contexts: Sequence[int]
) -> tuple[dict[tuple[str, int, str], Call], dict[tuple[str, int], int]]:
    """A call of every (model, context, eager or graph), and the bytes of each cache."""
    calls: dict[tuple[str, int, str], Call] = {}
    sizes: dict[tuple[str, int], int] = {}
    for context in contexts:
        for name, kind in ((OURS, Latte), (RIVAL, Llama)):
            if name == RIVAL and context > LONGEST_OF_RIVAL:
                continue
            with gpu.tried(at, f"{name}, B = {B}, context {context}"):
                step: Any = kind(at, models[name], B, context)
                sizes[name, context] = step.cache_bytes
                calls[name, context, "eager"] = step
                step()
                graph = gpu.replayed(at, f"{name}, B = {B}, context {context}", step)
                if graph is not step:
                    calls[name, context, "graph"] = graph
    return calls, sizes


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Latte's slowest context over its fastest."""
    goals = []
    for B in sorted({row["B"] for row in rows}):
        for how in ("graph", "eager"):
            ours = [r for r in rows if (r["side"], r["B"], r["how"]) == (OURS, B, how)]
            if len(ours) > 1:
                ms = [row["median_ms"] for row in ours]
                span = f"{ours[0]['context']} to {ours[-1]['context']} tokens"
                name = f"decoding, B = {B}, {how}: slowest context over fastest, {span}"
                note = f"{min(ms):.3f} to {max(ms):.3f} ms"
                goals.append(Goal(name, 1.05, max(ms) / min(ms), False, note))
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = gpu.place(gpu.options(__doc__, 80).parse_args(argv))
    say(f"decode: {at.dtype}, {at.device}, backend {at.backend}")
    size = "tiny" if at.quick else "paper"
    contexts = (300, 600) if at.quick else CONTEXTS
    models = {OURS: gpu.make_model(at, OURS, size, at.dtype), RIVAL: make_llama(at, size)}
    table = at.table("gpu_decode.csv")
    # All contexts in turns, so that a slow moment meets them all; a batch of 64 holds many keys
    # and values, and takes the long contexts one by one.
    few, many = (1, 2) if at.quick else (1, 64)
    points = [(few, contexts), (many, contexts[:2]), *((many, (c,)) for c in contexts[2:])]
    for B, together in at.while_time(points):
        calls, sizes = steps_of(at, models, B, together)
        names = {f"{n} {c} {h}": (n, c, h) for n, c, h in calls}
        sides = {text: calls[key] for text, key in names.items()}
        times, _ = gpu.measure(at, sides, budget=0.05 if at.quick else 0.3, cold_cache=False)
        for text, t in times.items():
            name, context, how = names[text]
            row: Row = {"side": name, "how": how, "size": size, "B": B, "context": context}
            row |= {
                "parameters": models[name].num_parameters(),
                "cache_bytes": sizes[name, context],
            }
            row |= {"dtype": at.precision, **t.row()}
            row |= {"tokens_per_s": round(B / (t.median / 1e3), 1)}
            table.add(row)
            say(
                f"B = {B:2} context {context:7} {name:13} {how:5} {t.median:8.3f} ms per token "
                f"(p10 {t.p10:.3f}, p90 {t.p90:.3f}), {row['tokens_per_s']:.0f} tokens/s, "
                f"cache {row['cache_bytes'] / 2**20:.1f} MB"
            )
        del calls, sides
    at.goals("gpu_decode", goals_of(table.rows))


if __name__ == "__main__":
    main()
