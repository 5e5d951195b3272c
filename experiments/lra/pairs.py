"""How two texts relate, by one encoder for both. B batch, T tokens, E hidden, M MLP width.

Source of the head: the two-tower model of Long Range Arena (Tay et al., arXiv 2011.04006).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from latte.errors import LatteError
from latte.models import LatteConfig, LattePreTrainedModel
from latte.models.modeling import mean_over_tokens


def check_pairs(config: Any) -> None:
    """Raise LatteError for a model that classifies single texts alone: another library's."""
    if not isinstance(config, LatteConfig):
        raise LatteError(f"model type {config.model_type!r} classifies single texts, not pairs")


class LatteForPairClassification(LattePreTrainedModel):
    """A classifier of pairs: both texts are encoded alike, each by the mean of its real tokens.

    The encoder is the model of the config, ours or a rival's of ours. With the two means u and v,
    the logits are an MLP of ``[u, v, u * v, u - v]`` with two hidden layers, of M and M / 2 (M is
    ``intermediate_size``).
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch; Trainer scales it

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        # Latte's backbone, or that of a model in the same family.
        self.model = MODEL_MAPPING[type(config)](config)  # type: ignore[operator]
        self._no_split_modules = self.model._no_split_modules
        width = config.intermediate_size
        self.head = nn.Sequential(
            nn.Linear(4 * config.hidden_size, width),
            nn.ReLU(),
            nn.Dropout(config.classifier_dropout),
            nn.Linear(width, max(1, width // 2)),
            nn.ReLU(),
            nn.Dropout(config.classifier_dropout),
            nn.Linear(max(1, width // 2), self.num_labels),
        )
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """As all models of Transformers; the config's own class is that of the folder's model."""
        if config is None:
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path)
        return super().from_pretrained(
            pretrained_model_name_or_path, *model_args, config=config, **kwargs
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Logits (B, labels), and the loss if there are labels.

        Args:
            input_ids: (B, 2, T), both texts padded to one length.
            attention_mask: (B, 2, T), 1 = a real token.
            labels: (B,) classes.

        Raises:
            ValueError: ids of another shape.
        """
        if input_ids.ndim != 3 or input_ids.shape[1] != 2:
            raise ValueError(
                f"input_ids must be (B, 2, T), two texts of each pair, got {tuple(input_ids.shape)}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must be {tuple(input_ids.shape)}, as input_ids, got"
                f" {tuple(attention_mask.shape)}"
            )
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        hidden = self.model(input_ids.flatten(0, 1), mask, use_cache=False).last_hidden_state
        u_BE, v_BE = mean_over_tokens(hidden, mask).unflatten(0, (-1, 2)).unbind(1)
        logits = self.head(torch.cat([u_BE, v_BE, u_BE * v_BE, u_BE - v_BE], dim=-1))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
