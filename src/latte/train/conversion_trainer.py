"""Training a converted model: attention transfer, and next-token training beside its base."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from latte.conversion.transfer import Teacher
from latte.train import sharding
from latte.train.conversion_model import merged_lora, mixing
from latte.train.trainer import LatteTrainer

KL_ROWS = 2**24  # elements of the two distributions compared at a time


class ConversionTrainer(LatteTrainer):
    """The Trainer, with the objectives of `conversion.objective`.

    The teacher is the model itself, mixing as its base does: no second copy of the weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = self.recipe.conversion
        # Sums since the last log line: output error, mass divergence, passes.
        self._errors = torch.zeros(3, dtype=torch.float64, device=self.args.device)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.section.objective == "transfer":
            return self._transfer_loss(model, inputs, num_items_in_batch)
        if self.section.distillation:
            return self._distilled_loss(model, inputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _share(self, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        """This batch's part of the step's tokens, times the processes that will be averaged."""
        own = (inputs["labels"] != -100).sum()
        return own / num_items_in_batch * self.args.world_size

    def _transfer_loss(self, model: Any, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        teacher = Teacher()
        given = {name: value for name, value in inputs.items() if name != "labels"}
        model(**given, teacher=teacher, use_cache=False, logits_to_keep=1)
        output, mass = teacher.errors()
        self._errors += torch.stack([output.detach(), mass.detach(), torch.ones_like(mass)])
        return (output + self.section.mass_weight * mass) * self._share(inputs, items)

    def _distilled_loss(self, model: Any, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        """(1 - d) NLL + d KL(base || model), both summed over tokens that are predicted."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad(), mixing(self.accelerator.unwrap_model(model), "base"):
            base = model(**given, use_cache=False).logits
        logits = model(**given, use_cache=False).logits
        targets = inputs["labels"][:, 1:].flatten()
        wanted = targets != -100
        own, teacher = (x[:, :-1].flatten(0, 1)[wanted] for x in (logits, base))
        nll = F.cross_entropy(own.float(), targets[wanted], reduction="sum")
        kl = nll.new_zeros(())
        rows = max(1, KL_ROWS // own.shape[-1])
        for start in range(0, len(own), rows):
            p = F.log_softmax(teacher[start : start + rows].float(), -1)
            q = F.log_softmax(own[start : start + rows].float(), -1)
            kl = kl + F.kl_div(q, p, reduction="sum", log_target=True)
        d = self.section.distillation
        return ((1 - d) * nll + d * kl) / items * self.args.world_size

    def loss_parts(self, loss: float) -> dict[str, float]:
        """The parts of the transfer's loss; a likelihood only where the loss is one."""
        if self.section.objective == "next-token":
            return {} if self.section.distillation else super().loss_parts(loss)
        errors = self._errors.clone()
        if self.args.world_size > 1:
            dist.all_reduce(errors)
        output, mass, passes = errors.tolist()
        self._errors.zero_()
        return {"output_error": output / passes, "mass_divergence": mass / passes}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Checkpoints keep low-rank updates apart, to go on with; the result has them merged in."""
        if self.section.trainable != "lora" or _internal_call or output_dir is None:
            return super().save_model(output_dir, _internal_call)
        if self._sharded:
            state = sharding.full_state_dict(self.model)
        else:
            state = self.accelerator.unwrap_model(self.model).state_dict()
        if self.args.should_save:
            self.export(output_dir, merged_lora(state, self.section))
