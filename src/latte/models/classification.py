"""Sequence classification by masked mean pooling. Shape suffixes: B batch, T tokens, E hidden."""

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.config import LatteConfig


class LatteForSequenceClassification(LattePreTrainedModel):
    """A classifier over the mean of the real tokens' hidden states.

    With ``is_causal=False`` in the configuration the layers are bidirectional, which is what a
    classifier trained from scratch wants; a pretrained language model keeps its causal ones.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch; Trainer scales it
    backbone_class = LatteModel

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.model = self.backbone_class(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutputWithPast:
        """Logits (B, labels), and the loss if there are labels.

        Args:
            labels: (B,) classes, (B,) or (B, labels) targets of a regression, or (B, labels) for
                several classes at once; ``config.problem_type`` decides, as in Hugging Face.

        The rest is as for :class:`LatteModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        pooled = mean_over_tokens(outputs.last_hidden_state, attention_mask)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def mean_over_tokens(hidden_BTE: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over real tokens, (B, E); zero for a row without any."""
    if attention_mask is None:
        return hidden_BTE.mean(1)
    real_BT1 = attention_mask.bool().unsqueeze(-1)
    # where, not a product: what stands at padding must not matter, even if it is not finite.
    total_BE = hidden_BTE.where(real_BT1, 0.0).sum(1)
    return total_BE / real_BT1.sum(1).clamp_min(1)
