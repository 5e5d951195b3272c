"""The language model: next-token loss, and Hugging Face's ``generate``."""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from latte.errors import LatteError
from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.cache import LatteCache
from latte.models.config import LatteConfig
from latte.models.generation import StateGenerationMixin
from latte.models.inputs import packed_bounds
from latte.models.loss import IGNORED, chunked_loss


class LatteForCausalLM(StateGenerationMixin, LattePreTrainedModel):
    """A decoder with a language-modelling head, tied to the embeddings by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # forward() divides by num_items_in_batch itself, which Trainer would otherwise not know.
    accepts_loss_kwargs = True
    # In training, compute the loss in chunks and return no logits (see latte.train.speed).
    chunked_loss = False
    backbone_class = LatteModel

    def __init__(self, config: LatteConfig) -> None:
        if not config.is_causal:
            raise LatteError("LatteForCausalLM needs is_causal=True, got False")
        super().__init__(config)
        self.model = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, vocabulary), and the loss if there are labels.

        Args:
            labels: (B, T), shifted here; -100 is not predicted. The first token of a packed
                sequence is not predicted either: its past belongs to another text.
            logits_to_keep: compute logits of the last so many tokens only (0: of all), or of the
                positions in a 1-D tensor.
            num_items_in_batch: divide the summed loss by this, not by this batch's own count.
            cu_seq_lens_k, max_length_q, max_length_k: what Hugging Face's packing collator sends
                along; ``cu_seq_lens_q`` says it all.

        The rest is as for :class:`LatteModel`.

        Raises:
            ValueError: the arguments do not fit together.
        """
        if labels is not None and use_cache is None and past_key_values is None:
            use_cache = False  # a loss is no reason to compute states
        if labels is not None and cu_seq_lens_q is None:  # the loss needs the bounds too
            cu_seq_lens_q = packed_bounds(position_ids, attention_mask, past_key_values)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=cu_seq_lens_q,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        loss = logits = None
        in_chunks = self.chunked_loss and self.training and labels is not None
        if not in_chunks:
            logits = self.lm_head(hidden)
        if labels is not None:
            if hidden.shape[:2] != labels.shape:
                raise ValueError(
                    f"labels must be {tuple(hidden.shape[:2])}, one per logit (labels and "
                    f"logits_to_keep do not go together), got {tuple(labels.shape)}"
                )
            if cu_seq_lens_q is not None:
                # index_fill, not assignment: the caller's labels stay as they are. The last
                # bound is T, where no sequence starts; 0 is never predicted anyway.
                starts = cu_seq_lens_q[:-1].long()
                labels = labels.index_fill(1, starts.clamp_max(labels.shape[1] - 1), IGNORED)
            if in_chunks:
                loss = chunked_loss(hidden, self.lm_head.weight, labels, num_items_in_batch)
            else:
                loss = self.loss_function(
                    logits=logits,
                    labels=labels,
                    vocab_size=self.config.vocab_size,
                    num_items_in_batch=num_items_in_batch,
                )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def count_parameters(config: LatteConfig) -> int:
    """Parameters of the language model (tied ones once), without allocating any."""
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
