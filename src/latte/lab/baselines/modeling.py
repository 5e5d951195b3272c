"""Models of the family whose mixer is one of the paper's baselines, for equal comparisons.

Embedding, norms, feed-forward network, head and pooling are those of the Latte models. Only the
token mixer differs (:mod:`latte.lab.baselines`). The models read whole rows. They have no cache and
no packed sequences, and ``generate`` reads the whole text again for every token.
"""

from typing import Any

from torch import Tensor

from latte.lab.baselines.base import BaselineMixer
from latte.lab.baselines.config import ComparatorConfig
from latte.lab.baselines.low_rank import Linformer, Luna
from latte.lab.baselines.mega import Mega
from latte.lab.baselines.state_spaces import H3, S5
from latte.layers import Context
from latte.models.modeling import (
    LatteBlock,
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
)

# The layers, and the argument of each that `state_size` sets.
MIXERS: dict[str, tuple[Any, str]] = {
    "mega": (Mega, "num_averages"),
    "h3": (H3, "num_states"),
    "s5": (S5, "num_states"),
    "luna": (Luna, "num_memories"),
    "linformer": (Linformer, "projected_length"),
}


def make_comparator(config: ComparatorConfig, layer_idx: int = 0) -> BaselineMixer:
    """The token mixer of each layer. Raises ValueError for sizes that do not fit."""
    kind, memory = MIXERS[config.mixer]
    heads = config.num_attention_heads
    own: dict[str, dict[str, Any]] = {
        "mega": {"chunk_size": config.chunk_size},
        "h3": {"head_dim": config.head_dim or 1},
        "s5": {"num_blocks": heads},
        "luna": {"num_heads": heads},
        "linformer": {"num_heads": heads, "max_length": config.max_position_embeddings},
    }
    size = {} if config.state_size is None else {memory: config.state_size}
    return kind(config.hidden_size, causal=config.is_causal, **own[config.mixer], **size)


class ComparatorBlock(LatteBlock):
    """A block of Latte with a baseline as its mixer, which has no state and no weights."""

    make_mixer = staticmethod(make_comparator)

    def forward(
        self,
        x_BTE: Tensor,
        context: Context,
        state: Any = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None, None]:
        """Hidden states (B, T, E), without a state and without attention weights.

        Raises:
            ValueError: A cache, packed sequences or attention weights are wanted.
        """
        for asked, what in (
            (state is not None or context.output_final_state, "cache (leave use_cache out)"),
            (context.cu_seqlens is not None, "packed sequences (give each a row of its own)"),
            (output_attentions, "output_attentions: their weights are not attention alone"),
        ):
            if asked:
                raise ValueError(f"{type(self.mixer).__name__} models take no {what}")
        options = {"residual": x_BTE} if self.mixer.gates_residual else {}
        mixed = self.mixer(self.mixer_norm(x_BTE), context.key_mask, **options)
        return self._feed_forward(x_BTE, self.dropout(mixed)), None, None


class ComparatorModel(LatteModel):
    """Embeddings, blocks and the final norm."""

    config: ComparatorConfig
    block_class = ComparatorBlock
    _no_split_modules = ["ComparatorBlock"]


class ComparatorForCausalLM(LatteForCausalLM):
    """A language model of a causal baseline."""

    config: ComparatorConfig
    backbone_class = ComparatorModel
    _no_split_modules = ["ComparatorBlock"]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """No cache: ``generate`` reads the whole text for every new token."""


class ComparatorForSequenceClassification(LatteForSequenceClassification):
    """A classifier over the mean of the valid tokens' hidden states."""

    config: ComparatorConfig
    backbone_class = ComparatorModel
    _no_split_modules = ["ComparatorBlock"]
