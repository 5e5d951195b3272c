"""FSDP2 by plain `fully_shard`: the same code on GPUs and on CPUs.

Accelerate turns FSDP into DDP on a CPU without a word, so the model is sharded here, before the
Trainer sees an optimiser, and `assert_sharded` checks that it stayed so. Checkpoints are
distributed (each process writes its shards); the exported model is gathered once, in full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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

SHARDS = "shards"


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard every transformer block, then what is left, over all processes. In place."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_sharded(model)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the longest ModuleList: the transformer blocks."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def assert_sharded(model: nn.Module) -> None:
    """Raise if a parameter is a plain tensor: it would be trained as under DDP."""
    plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if plain:
        raise RuntimeError(f"FSDP2 left {len(plain)} parameters unsharded, such as {plain[0]}")


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights in full on the CPU of process 0 (empty elsewhere). Every process must call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def save_shards(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write model and optimiser shards. Every process must call."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / SHARDS)


def load_shards(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Read what `save_shards` wrote, in place. Every process must call."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / SHARDS)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
