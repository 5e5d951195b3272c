"""The Hugging Face Trainer, made exact: atomic checkpoints, data by index, exact losses.

The changes, and their reasons:

- Example i is a function of (seed, i), read in order, so that a resumed run sees the same data.
- A checkpoint is written to a temporary folder and renamed. A killed process never leaves an
  incomplete one.
- The logged loss is the summed NLL since the last log line, divided by its number of tokens. If
  the loss or a gradient norm is not finite, the run stops before the weights change.
- FSDP2 is applied here by plain `fully_shard`, before an optimiser is made. Accelerate would use
  DDP instead on a CPU, without a warning. FSDP2's checkpoints are distributed: each process writes
  its shards. The exported model is gathered once, in full.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import PrinterCallback

from latte.errors import LatteError, why_not_written
from latte.lab.data.preparing import Text
from latte.lab.train.recipe import Recipe
from latte.lab.train.run_folder import STAGING, rotate, seal
from latte.lab.train.scoring import score
from latte.lab.train.speed import apply_speed_options, autocasts, of_own_blocks
from latte.models.atomic_files import write_json
from latte.parallel import context_parallel, shard_batch
from latte.parallel.batch import context_group

# Parameters of other libraries with more than one dimension that are not matrices: biases by head,
# Mamba's decay rates, RWKV's rates, mixing shares and bonuses.
_RATES = re.compile(r"(bias|bonus|A_log|time_\w+)$")


SHARDS = "shards"  # folder of a checkpoint with each process's part


class Diverged(LatteError):
    """The loss or a gradient is not finite. The same run diverges again at the same step."""


class LatteTrainer(Trainer):
    """Trains one model by one recipe. See the module docstring.

    Args:
        recipe: Checked recipe.
        model: Model to train.
        text: Text of the run. Its held-out part is scored every `eval_steps` and at the end, at
            the training length.
        train_dataset: Training blocks.
        collate: Function that makes a batch of blocks.
        steps: Number of optimiser steps of the whole run.
        callbacks: Callbacks of the Trainer.
    """

    # The Trainer declares these as possibly None. They are not None during training.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        text: Text,
        train_dataset: Dataset,
        collate: Callable[[list[Any]], dict[str, Any]],
        *,
        steps: int,
        callbacks: list[Any],
    ) -> None:
        self.recipe, self.text = recipe, text
        self.held_out = text.held_out(recipe.data.max_validation_tokens)
        self._sharded, self.group = False, None
        self._use_cache = getattr(model.config, "use_cache", False)
        apply_speed_options(model, recipe)
        # The loss of some libraries is a mean over the batch, that of others over all
        # micro-batches, and some accept `num_items_in_batch` without using it. So the loss is
        # computed here from the logits, unless a baseline declares that it divides by this number.
        logits_alone = recipe.model.is_comparator and not getattr(
            model, "accepts_loss_kwargs", False
        )
        super().__init__(
            model=model,
            args=training_arguments(recipe, steps),
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=train_dataset,  # `evaluate` below scores `held_out` instead
            callbacks=callbacks,
            compute_loss_func=next_token_loss if logits_alone else None,
        )
        if logits_alone:
            self.model_accepts_loss_kwargs = False

        self.remove_callback(PrinterCallback)
        # [summed NLL, tokens] since the last log line, and whether anything was not finite
        self._window = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self._not_finite = torch.zeros((), dtype=torch.bool, device=self.args.device)
        if (together := recipe.training.context_parallel) > 1:
            self.group = context_group(self.args.device, together)
        if recipe.training.strategy == "fsdp2" and self.args.world_size > 1:
            self._sharded = True
            shard(self.model, self.args.device)
            # FSDP2 moves the model and reduces its gradients, so Accelerate must not wrap it.
            self.is_distributed_loading_by_transformers = True

    # ---- data, optimiser, schedule

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            section = self.recipe.training

            def factor(step: int) -> float:
                return learning_rate_factor(
                    step,
                    num_training_steps,
                    warmup=section.warmup_steps,
                    schedule=section.schedule,
                    floor=section.min_learning_rate / section.learning_rate,
                )

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer, factor
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, *arguments: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments)
        if self._sharded:
            assert_sharded(prepared[0])
            if isinstance(prepared[0], nn.parallel.DistributedDataParallel):
                raise RuntimeError("FSDP2 was asked for, but the Trainer wrapped the model in DDP")
        return prepared

    # ---- loss and gradient norm

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        # All processes of a group count the same labels; DDP's mean over processes corrects that.
        if self.group is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            with context_parallel(model, self.group):
                part = shard_batch(inputs, self.group)
                loss = super().training_step(model, part, num_items_in_batch)
        if num_items_in_batch is None:
            raise RuntimeError("the loss must be normalised by num_items_in_batch")
        # loss = (this process's summed NLL) / (tokens of the step, all processes) * processes
        items = num_items_in_batch / self.args.world_size
        share = items / self.current_gradient_accumulation_steps
        # Tokens are counted in equal shares. Over processes and micro-batches they sum to the
        # step's number of tokens.
        self._window += torch.stack([loss.double() * items, share.double()])
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Check the gradient norm between the backward pass and the optimiser's step."""
        norm = super()._get_grad_norm(model, grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._not_finite |= ~torch.isfinite(torch.as_tensor(norm, device=self.args.device))
        # Reading the flag waits for a GPU, so there it is read only at some steps.
        step = self.state.global_step + 1
        looked_at = (step % k == 0 for k in (self.args.logging_steps, self.args.save_steps))
        if self.args.device.type == "cpu" or any(looked_at) or step >= self.state.max_steps:
            if bool(self._not_finite):
                section = self.recipe.training
                raise Diverged(
                    f"training diverged: loss or gradient is not finite at step {step} (peak"
                    f" training.learning_rate {section.learning_rate:g}, bf16 {self.args.bf16});"
                    " nothing was saved since the last checkpoint; try a lower learning rate"
                )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Replace the mean of step means by the window's summed NLL over its tokens."""
        if "loss" in logs:
            total, tokens = self.accelerator.reduce(self._window, "sum").tolist()
            self._window.zero_()
            logs["loss"] = total / tokens
            logs.update(self.loss_parts(total / tokens))
        super().log(logs, start_time)

    def loss_parts(self, loss: float) -> dict[str, float]:
        """The values that are logged besides the loss (in nats per token)."""
        return {
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2) / self.text.bytes_per_token,
        }

    # ---- held-out text

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Score the held-out documents at the training length (see `scoring`)."""
        found = score(
            self.model,
            self.held_out,
            self.recipe.data.block_length,
            bf16=self.args.bf16,
            rank=self.args.process_index,
            processes=self.args.world_size,
        )
        metrics = {
            f"{metric_key_prefix}_loss": found.loss,
            f"{metric_key_prefix}_perplexity": found.perplexity,
            f"{metric_key_prefix}_bits_per_byte": found.bits_per_byte,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    # ---- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the Trainer's checkpoint to a temporary folder, and rename it when all are done."""
        folder = Path(self.recipe.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder / STAGING, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(folder / STAGING)
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # each writer's own
            raise LatteError(
                f"checkpoint {folder / name} cannot be written: {why_not_written(error)}; nothing"
                " is lost: run again to continue from the one before"
            ) from error
        finally:
            self.args.output_dir = str(folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(folder / STAGING / name, folder / name)
            (folder / STAGING).rmdir()
            rotate(folder / name, self.recipe.training.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export for `from_pretrained`: weights in safetensors, config, tokeniser, recipe."""
        folder = self.recipe.output_dir if output_dir is None else output_dir
        state = full_state_dict(self.model) if self._sharded else None
        if self.args.should_save:
            self.export(folder, state)

    def export(self, folder: str, state: dict[str, torch.Tensor] | None) -> None:
        """Write a model folder. `state` are its weights if they must be gathered, else None."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if state is not None and model.config.tie_word_embeddings:
            for name in model._tied_weights_keys:  # gathered twice, saved once
                state.pop(name, None)
        # The Trainer turns the cache off during training. A loaded model should have one.
        training, model.config.use_cache = model.config.use_cache, self._use_cache
        try:
            model.save_pretrained(folder, state_dict=state)
        except SafetensorError as error:
            raise LatteError(f"{folder} cannot be written: {why_not_written(error)}") from error
        finally:
            model.config.use_cache = training
        self.text.tokenizer.save_pretrained(folder)
        write_json(Path(folder, "recipe.json"), self.recipe.as_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        model, optimizer = get_state_dict(self.model, self._plain_optimizer())
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=Path(output_dir, SHARDS))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._sharded:  # sharded weights come with the optimiser's, below
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        state = get_state_dict(self.model, self._plain_optimizer())
        read: dict[str, Any] = dict(zip(("model", "optimizer"), state, strict=True))
        dcp.load(read, checkpoint_id=Path(checkpoint, SHARDS))
        set_state_dict(
            self.model,
            self._plain_optimizer(),
            model_state_dict=read["model"],
            optim_state_dict=read["optimizer"],
        )
        schedule = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


def decayed_names(model: nn.Module) -> list[str]:
    """The names of the parameters with weight decay: matrices.

    Norms, biases and decay rates, of any library, have no weight decay, nor have parameters that a
    layer lists in its ``undecayed``.
    """
    spared = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name not in spared and not _RATES.search(name)
    ]


def next_token_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    """The summed NLL divided by the number of tokens of the step, as in Latte's own models."""
    vocab_size = outputs.logits.shape[-1]
    return ForCausalLMLoss(outputs.logits, labels, vocab_size, num_items_in_batch)


def learning_rate_factor(
    step: int, steps: int, *, warmup: int, schedule: str, floor: float = 0.0
) -> float:
    """The learning rate at a step, relative to its peak: linear warmup, then decay to `floor`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "constant":
        return 1.0
    left = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * left


def training_arguments(recipe: Recipe, steps: int) -> TrainingArguments:
    """The recipe as Hugging Face TrainingArguments."""
    section = recipe.training
    return TrainingArguments(
        output_dir=recipe.output_dir,
        max_steps=steps,
        per_device_train_batch_size=section.batch_size,
        gradient_accumulation_steps=section.gradient_accumulation,
        learning_rate=section.learning_rate,
        optim="adamw_torch_fused",
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_epsilon=section.epsilon,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        bf16=autocasts(section),
        torch_compile=section.torch_compile and not of_own_blocks(recipe),
        gradient_checkpointing=section.gradient_checkpointing,
        seed=section.seed,
        logging_steps=section.log_steps,
        logging_nan_inf_filter=False,
        train_sampling_strategy="sequential",  # item i of the blocks is that of (seed, i)
        save_strategy="steps",
        save_steps=section.save_steps,
        eval_strategy="steps",
        eval_steps=section.eval_steps,
        # The window of a layer has no gradient in a step that hides it.
        ddp_find_unused_parameters=recipe.conversion.window_dropout > 0,
        average_tokens_across_devices=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,  # our own bar and line: see `metrics`
        report_to="none",
        log_level="error",
        log_level_replica="error",
        use_cpu=not torch.cuda.is_available(),
    )


# --- FSDP2 ----------------------------------------------------------------------------------------


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard every transformer block, then the rest of the model, over all processes, in place."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in max(lists, key=len, default=[]):  # the transformer blocks
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_sharded(model)
    return model


def assert_sharded(model: nn.Module) -> None:
    """Raise an error if a parameter is not sharded."""
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise RuntimeError(f"FSDP2 left {len(plain)} parameters unsharded, such as {plain[0]}")


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights on the CPU of process 0 (empty elsewhere). Every process must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state
