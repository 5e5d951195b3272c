"""What a training step costs and what the machine could do: FLOPs, peak FLOP/s, memory."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn

from latte.machine import memory
from latte.rivals.catalogue import is_comparator

# Dense bf16 peak, FLOP/s, from the makers' data sheets; the longest matching name wins.
GPU_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def gpu_peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, FLOP/s; None if it is not in the table."""
    matches = [key for key in GPU_PEAK_FLOPS if all(word in name for word in key.split())]
    return GPU_PEAK_FLOPS[max(matches, key=len)] if matches else None


@functools.cache
def cpu_matmul_flops(bf16: bool) -> float:
    """FLOP/s of the best of several 512x512x512 matrix products here and now (about 0.1 s)."""
    size = 512
    a = torch.randn(size, size, dtype=torch.bfloat16 if bf16 else torch.float32)
    b = a.clone()
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def peak_flops(device: torch.device, bf16: bool, processes: int) -> tuple[float | None, str]:
    """(FLOP/s of all processes together or None, where the figure comes from).

    The measurement draws no random number that training would notice.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        single = gpu_peak_flops(name)
        return (None if single is None else single * processes), f"{name}, dense bf16 data sheet"
    with torch.random.fork_rng(devices=[]):
        single = cpu_matmul_flops(bf16)
    return single * processes, f"CPU, measured {'bf16' if bf16 else 'fp32'} matmul"


def flops_per_token(model: nn.Module, length: int) -> float:
    """Training FLOPs per token, 6 per weight used in a product plus the mixers' own.

    Forward costs 2 per weight and token, backward twice that. The mixers, per layer, forward:
    softmax attention 2 * 2 * H * K * (mean number of keys seen), Latte 2 * 2 * num_latents * D.
    Gradient checkpointing's second forward is not counted (model FLOPs, not hardware FLOPs), nor
    the comparators' own mixing.
    """
    config: Any = model.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not tied:
        weights -= config.vocab_size * config.hidden_size  # the input embedding is a look-up
    if is_comparator(config.model_type):
        return 6.0 * weights
    head_dim = config.hidden_size // config.num_attention_heads
    mixer = getattr(config, "mixer", "softmax")
    seen = 0.0
    if mixer == "softmax":
        seen = (length + 1) / 2
    elif mixer in ("swa", "macchiato"):
        seen = min(config.sliding_window, (length + 1) / 2)
    own = 4.0 * config.hidden_size * seen
    if mixer in ("latte", "macchiato"):
        own += 4.0 * config.num_latents * head_dim
    elif mixer == "linear":
        own += 4.0 * config.hidden_size * head_dim
    return 6.0 * weights + 3.0 * own * config.num_hidden_layers


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used since the start or `reset_peak_memory`.

    Allocated on a GPU; on a CPU resident in this process, libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory.peak_bytes()


def reset_peak_memory(device: torch.device) -> None:
    """Start the peak anew from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory.reset_peak()
