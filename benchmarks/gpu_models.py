"""Models for the GPU benchmarks: random weights, which do not change the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_common import Place

from latte.models import LatteForCausalLM, preset_config


def make_model(
    at: Place, name: str, size: str, dtype: torch.dtype, **overrides: Any
) -> LatteForCausalLM:
    """A model on the device, in inference mode; every run draws the same weights."""
    torch.manual_seed(0)
    with torch.device(at.device):
        model = LatteForCausalLM(preset_config(name, size, **overrides))
    return model.to(dtype).eval()


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tokens(at: Place, vocabulary: int, B: int, T: int) -> torch.Tensor:
    """Random tokens (B, T)."""
    generator = torch.Generator(at.device).manual_seed(1)
    return torch.randint(vocabulary, (B, T), generator=generator, device=at.device)


@contextmanager
def attention_by(at: Place, kind: str) -> Iterator[None]:
    """Softmax attention held to PyTorch's ``flash`` backend, or to ``standard``: T x T weights."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.MATH if kind == "standard" else SDPBackend.FLASH_ATTENTION]
    if not at.cuda:
        backends = [*backends, SDPBackend.MATH]
    with sdpa_kernel(backends):
        yield
