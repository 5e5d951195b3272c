"""Latte's models in vLLM (experimental): all states of a sequence are one page of bytes.

vLLM schedules, batches, samples and owns the memory. The layers are Latte's own. vLLM has pages for
Mamba-like layers; here each sequence has one such page, of constant size. The page has the states
of all layers, each tensor in its own dtype. No page is a number of tokens.

Shape suffixes: N sequences, T tokens of all sequences in a row, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from latte.layers import MixerState
from latte.layers.state import map_tensors
from latte.models import LatteCache
from latte.models.cache import tensors_in

LAYER = "layers.0.states"  # vLLM reads a layer's number from its name
ALIGNMENT = 8  # each tensor begins at a multiple of these bytes, the widest element, int64


class States(nn.Module, MambaBase):
    """The only layer of the model for vLLM: pages of bytes, one per sequence.

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

    def write(self, slots: list[int], states: tuple[MixerState, ...]) -> None:
        """Put the states of N sequences into these pages."""
        pages = self.kv_cache[0].new_empty(len(slots), self.bytes)
        for part, x in zip(tensors_in(self._cut(pages)), tensors_in(states), strict=True):
            part.copy_(x)
        self.kv_cache[0][slots] = pages


class LatteForVLLM(nn.Module):
    """A causal language model, as vLLM calls it."""

    has_inner_state = True
    is_attention_free = True

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
        bounds, ends = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        # Sequences are in any order, with padding after them. Only the number of earlier tokens
        # says whether a page already has a sequence's state, because a prompt of one token counts
        # as decoding.
        for row, slot in enumerate(batch.state_indices_tensor.tolist()):
            begin, end = bounds[row : row + 2]
            before = ends[row] - (end - begin)
            if end - begin == 1 and before:
                places.append(begin)
                steps.append((slot, before))
            elif end > begin:
                pieces.append((begin, end, slot, before))
        if steps != self.expected:
            self._put_back()
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

    def _write(self, slots: list[int], cache: LatteCache) -> None:
        self.states.write(slots, tuple(layer.state for layer in cache.layers))

    def _put_back(self) -> None:
        """Write the states that a step has changed in place to their pages.

        The page of an ended sequence may belong to another sequence by now. That sequence has not
        written to the page yet: in this forward it reads and writes later than this call.
        """
        if self.stepping is not None:
            self._write([slot for slot, _ in self.expected], self.stepping)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.latte.lm_head(hidden_states)
        cap = getattr(self.latte.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)
