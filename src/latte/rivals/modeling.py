"""Models of the family whose mixer is one of the paper's comparators, for equal comparisons.

Embedding, norms, feed-forward network, head and pooling are those of the Latte models; only what
mixes the tokens is another (:mod:`latte.rivals`). They read whole rows: no cache, no
packed sequences, and ``generate`` reads the text anew for every token.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.models.auto import register_family
from latte.models.modeling import (
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
    make_mlp,
    make_norm,
)
from latte.rivals.base import ComparatorMixer
from latte.rivals.config import ComparatorConfig
from latte.rivals.low_rank import Linformer, Luna
from latte.rivals.mega import Mega
from latte.rivals.state_spaces import H3, S5


def make_comparator(config: ComparatorConfig) -> ComparatorMixer:
    """The token mixer of a configuration. Raises ValueError for sizes that do not fit."""
    size, heads = config.hidden_size, config.num_attention_heads
    causal: dict[str, Any] = {"causal": config.is_causal}
    names = {"mega": "num_averages", "h3": "num_states", "s5": "num_states"}
    names |= {"luna": "num_memories", "linformer": "projected_length"}
    if config.state_size is not None:
        causal[names[config.mixer]] = config.state_size
    match config.mixer:
        case "mega":
            return Mega(size, chunk_size=config.chunk_size, **causal)
        case "h3":
            return H3(size, head_dim=config.head_dim or 1, **causal)
        case "s5":
            return S5(size, num_blocks=heads, **causal)
        case "luna":
            return Luna(size, heads, **causal)
        case "linformer":
            return Linformer(size, heads, max_length=config.max_position_embeddings, **causal)
    raise ValueError(f"unknown mixer {config.mixer!r}")


class ComparatorBlock(GradientCheckpointingLayer):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``, called as :class:`LatteBlock` is."""

    def __init__(self, config: ComparatorConfig) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer = make_comparator(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        for output in (getattr(self.mixer, "o_proj", None), self.mlp.down_proj):
            if output is not None:
                output.writes_residual = True  # type: ignore[union-attr]

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotary: None = None,
        state: Any = None,
        output_final_state: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None, None]:
        """Hidden states (B, T, E); there is neither a state nor attention weights to return.

        Raises:
            ValueError: a cache, packed sequences or attention weights are asked for.
        """
        for asked, what in (
            (state is not None or output_final_state, "cache (leave use_cache out)"),
            (cu_seqlens is not None, "packed sequences (give each a row of its own)"),
            (output_attentions, "output_attentions: their weights are not attention alone"),
        ):
            if asked:
                raise ValueError(f"{type(self.mixer).__name__} models take no {what}")
        options = {"residual": x_BTE} if self.mixer.gates_residual else {}
        x_BTE = x_BTE + self.dropout(self.mixer(self.mixer_norm(x_BTE), key_mask, **options))
        return x_BTE + self.dropout(self.mlp(self.mlp_norm(x_BTE))), None, None


class ComparatorModel(LatteModel):
    """Embeddings, blocks and the final norm."""

    config: ComparatorConfig
    block_class = ComparatorBlock
    _no_split_modules = ["ComparatorBlock"]


class ComparatorForCausalLM(LatteForCausalLM):
    """A language model of a causal comparator."""

    config: ComparatorConfig
    backbone_class = ComparatorModel
    _no_split_modules = ["ComparatorBlock"]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """``generate`` gets no cache: the whole text is read for every new token."""


class ComparatorForSequenceClassification(LatteForSequenceClassification):
    """A classifier over the mean of the real tokens' hidden states."""

    config: ComparatorConfig
    backbone_class = ComparatorModel
    _no_split_modules = ["ComparatorBlock"]


def register_models() -> None:
    """Transformers' Auto classes know the models. Calling it again does no harm."""
    models = ComparatorModel, ComparatorForCausalLM, ComparatorForSequenceClassification
    register_family(ComparatorConfig, *models)
