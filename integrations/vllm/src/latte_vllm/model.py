"""Latte's models in vLLM (experimental): all states of a sequence are one page of bytes.

vLLM schedules, batches, samples and owns the memory. The layers are Latte's own. vLLM has pages for
Mamba-like layers. Such a page has a constant size: it has the states of all layers of one sequence,
each tensor in its own dtype.

Without prefix caching a sequence has one page. With it vLLM counts a sequence's tokens in blocks
("align" mode). The state after a whole number of blocks stays in its page, and vLLM copies it to
the page of the next block before it calls the model. So other sequences can start from that state.

Shape suffixes: N sequences, T tokens of all sequences in a row, E hidden size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from latte.layers import MixerState
from latte.layers.rollback import map_tensors
from latte.models import LatteCache
from latte.models.cache import tensors_in

LAYER = "layers.0.states"  # vLLM reads a layer's number from its name
ALIGNMENT = 8  # each tensor begins at a multiple of these bytes, the widest element, int64


class States(nn.Module, MambaBase):
    """The only layer of the model for vLLM: pages of bytes.

    Args:
        like: States of all layers of one sequence, with the shapes and dtypes.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR

    def __init__(self, like: tuple[MixerState, ...]) -> None:
        super().__init__()
        self.like = map_tensors(lambda x: x.to("meta"), like)
        self.kv_cache: tuple[Tensor, ...] = ()  # one (pages, bytes) uint8, when vLLM has bound it
        self.bytes = 0
        self.spans = []
        for x in tensors_in(self.like):
            size = x.numel() * x.element_size()
            self.spans.append((self.bytes, self.bytes + size))
            self.bytes += math.ceil(size / ALIGNMENT) * ALIGNMENT

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def _cut(self, pages: Tensor) -> tuple[MixerState, ...]:
        """Views of pages (N, bytes) as states of N sequences."""
        spans = iter(self.spans)

        def view(like: Tensor) -> Tensor:
            begin, end = next(spans)
            return pages[:, begin:end].view(like.dtype).view(-1, *like.shape[1:])

        return map_tensors(view, self.like)

    def read(self, slots: list[int]) -> tuple[MixerState, ...]:
        """The states in these N pages, copied."""
        return self._cut(self.kv_cache[0][slots])

    def write(self, slots: list[int], states: tuple[MixerState, ...]) -> Tensor:
        """Put the states of N sequences into these pages. Returns what they are now, (N, bytes)."""
        pages = self.kv_cache[0].new_empty(len(slots), self.bytes)
        for part, x in zip(tensors_in(self._cut(pages)), tensors_in(states), strict=True):
            part.copy_(x)
        self.kv_cache[0][slots] = pages
        return pages


class LatteForVLLM(nn.Module, SupportsMambaPrefixCaching):
    """A causal language model, as vLLM calls it."""

    has_inner_state = True
    is_attention_free = True

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """How vLLM copies a page to the page of a sequence's next block: whole."""
        return (get_temporal_copy_spec,)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        self.latte: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for name, module in self.latte.named_modules():  # as from_pretrained does
            if name.rpartition(".")[2] in self.latte._keep_in_fp32_modules_strict:
                module.float()
        cache = LatteCache(config)
        with torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.long, device=self.latte.device)
            self.latte.model(one, past_key_values=cache)
        self.states = States(tuple(layer.state for layer in cache.layers))
        vllm_config.compilation_config.static_forward_context[LAYER] = self.states
        # The cache of the last step is used again if the next step has the same sequences, because
        # gathering and scattering their states takes longer than the step.
        self.stepping: LatteCache | None = None
        self.expected: list[tuple[int, int]] = []  # their pages and numbers of tokens
        self.block = vllm_config.cache_config.mamba_block_size  # tokens
        self.full: dict[int, Tensor] = {}  # pages of the rows whose block is full, (bytes,) each

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy a checkpoint's weights. Returns their names."""
        found = AutoWeightsLoader(self.latte).load_weights(weights)
        return {f"latte.{name}" for name in found}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.latte.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (T, E) of a batch's new tokens (T,). The states are updated.

        If each sequence has one token, all of them are one step, in place. Prompts are read one
        sequence after the other, because packed sequences have no cache.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory, and there are no pages yet
            return self._run(input_ids[None], None)[0]
        batch, places, steps, pieces = metadata[LAYER], [], [], []
        held: dict[int, int] = {}  # pages of this forward's sequences, and tokens read before it
        bounds, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        # Sequences are in any order, with padding after them. Only the number of earlier tokens
        # says whether a page already has a sequence's state, because a prompt of one token counts
        # as decoding.
        for row, slot in enumerate(batch.state_indices_tensor.tolist()):
            begin, end = bounds[row : row + 2]
            before = ends[row] - (end - begin)
            if end > begin:
                held[slot] = before
            if end - begin == 1 and before:
                places.append(begin)
                steps.append((slot, before))
            elif end > begin:
                pieces.append((begin, end, slot, before))
        if not self._is_next(steps):
            self._put_back(held)
            self.stepping = self._read([slot for slot, _ in steps]) if steps else None
        width, dtype = self.latte.config.hidden_size, self.latte.dtype
        hidden = torch.zeros(*input_ids.shape, width, dtype=dtype, device=input_ids.device)
        for begin, end, slot, before in pieces:
            cache = self._read([slot]) if before else LatteCache(self.latte.config)
            hidden[begin:end] = self._run(input_ids[None, begin:end], cache)[0]
            self._write([slot], cache)
        if steps:
            hidden[places] = self._run(input_ids[places, None], self.stepping)[:, 0]
        self.expected = [(slot, before + 1) for slot, before in steps]
        self._keep_full()
        return hidden

    def _run(self, ids: Tensor, cache: LatteCache | None) -> Tensor:
        given = {"past_key_values": cache, "use_cache": cache is not None}
        return self.latte.model(ids.long(), **given).last_hidden_state

    def _read(self, slots: list[int]) -> LatteCache:
        """A cache with the states in these pages."""
        cache = LatteCache(self.latte.config)
        for layer, state in zip(cache.layers, self.states.read(slots), strict=True):
            layer.update(state, 1)
        return cache

    def _write(self, slots: list[int], cache: LatteCache) -> Tensor:
        return self.states.write(slots, tuple(layer.state for layer in cache.layers))

    def _write_rows(self, rows: list[int]) -> Tensor:
        """Write these rows of the step's cache to their pages."""
        chosen = copy.copy(self.stepping)
        assert chosen is not None
        chosen.layers = [copy.copy(layer) for layer in chosen.layers]
        chosen.batch_select_indices(torch.tensor(rows))
        return self._write([self.expected[row][0] for row in rows], chosen)

    def _is_next(self, steps: list[tuple[int, int]]) -> bool:
        """Whether the step's cache already has the states of these sequences, in this order.

        A page and a number of tokens name a sequence, except after a full block: there every
        sequence has another page, in which vLLM has put a copy of its state. If its bytes are those
        that this row has written, its state is that of this row.
        """
        if [count for _, count in steps] != [count for _, count in self.expected]:
            return False
        pages = self.states.kv_cache[0]
        return all(
            torch.equal(pages[now], self.full[row]) if row in self.full else now == then
            for row, ((now, _), (then, _)) in enumerate(zip(steps, self.expected, strict=True))
        )

    def _keep_full(self) -> None:
        """Write the states after a full block to their pages: other sequences start from there."""
        rows = [row for row, (_, count) in enumerate(self.expected) if count % self.block == 0]
        self.full = dict(zip(rows, self._write_rows(rows), strict=True)) if rows else {}

    def _put_back(self, held: dict[int, int]) -> None:
        """Write the states that a step has changed in place to their pages.

        The page of an ended sequence may belong to another sequence by now, and vLLM may have
        copied a state there. So a page is written only if it still has the same number of tokens,
        or if no sequence of this forward has it.

        Args:
            held: The pages of the sequences of this forward, and how many tokens each has read.
        """
        rows = [
            row
            for row, (slot, count) in enumerate(self.expected)
            if row not in self.full and held.get(slot, count) == count
        ]
        if rows:
            self._write_rows(rows)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.latte.lm_head(hidden_states)
        cap = getattr(self.latte.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)
