"""Timing, memory, processes of their own, FLOPs and the description of the machine."""

from __future__ import annotations

import datetime
import os
from typing import Any

import pytest
import torch

import latte
from latte.errors import LatteError
from latte.lab import machine
from latte.lab.machine import WorkFailed, in_fresh_process
from latte.models import LatteForCausalLM, preset_config


def test_statistics() -> None:
    times = machine.Times.of([0.003, 0.001, 0.002, 0.005, 0.004])
    assert times == pytest.approx((3.0, 1.4, 4.6, 1.0, 5))


def test_sides_take_turns() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    times = machine.interleave(sides, budget=1e-9)
    # One call to warm up, as it is over the budget; then one call in each of three rounds.
    assert calls == ["a", "b"] * 4
    assert [t.calls for t in times.values()] == [3, 3]


def test_work_apart_returns_fails_and_dies_alone(capfd: Any) -> None:
    assert in_fresh_process(int, "3") == 3
    with pytest.raises(WorkFailed, match="ValueError: invalid literal"):
        in_fresh_process(int, "three")
    with pytest.raises(WorkFailed, match="killed by SIGABRT"):
        in_fresh_process(os.abort)
    with pytest.raises(LatteError, match="expected presets") as found:
        in_fresh_process(_refuse)
    assert not isinstance(found.value, WorkFailed)


def _refuse() -> None:
    raise LatteError("expected presets, got none")


def test_the_peak_of_memory_starts_anew() -> None:
    big = bytearray(os.urandom(1)) * 200_000_000
    high = machine.peak_memory_bytes()
    del big
    machine.reset_peak_memory()
    assert high - machine.peak_memory_bytes() > 100_000_000


def test_peak_memory_is_of_the_process_alone() -> None:
    ballast = bytearray(300_000_000)
    net = [in_fresh_process(_keep, n) for n in (1000, 50_000_000)]
    assert len(ballast) == 300_000_000
    assert net[0] < 10_000_000
    assert 49_000_000 < net[1] < 60_000_000


def _keep(count: int) -> int:
    """Bytes at the peak beyond what was there before."""
    before = machine.memory_bytes()
    machine.reset_peak_memory()
    kept = bytearray(count)
    peak = machine.peak_memory_bytes()
    assert len(kept) == count
    return peak - before


def test_gpu_names() -> None:
    assert machine.gpu_peak_flops("NVIDIA H200") == 989e12
    assert machine.gpu_peak_flops("NVIDIA H100 PCIe") == 756e12
    assert machine.gpu_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert machine.gpu_peak_flops("A card of the future") is None


def test_flops_of_a_plain_transformer() -> None:
    """6 per weight, and 2 * 2 * E * (keys seen) forward per layer, three times that in all."""
    config = preset_config("transformer++", "tiny")
    model = LatteForCausalLM(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    expected = 6 * matrices + 3 * config.num_hidden_layers * 4 * config.hidden_size * (257 / 2)
    assert machine.flops_per_token(model, 256) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("preset", "seen", "states"),
    [("swa++", 16, 0), ("latte++", 0, 64), ("latte-r-swa++", 16, 64), ("linear++", 0, 64)],
)
def test_flops_of_mixing(preset: str, seen: int, states: int) -> None:
    """Forward 2 * 2 * E per key of a window and 2 * 2 * D per state, of all layers."""
    sizes = {"sliding_window": 16 if seen else None, "num_latents": states or None}
    config = preset_config(preset, "tiny", **sizes)
    model = LatteForCausalLM(config)
    E, D = config.hidden_size, config.hidden_size // config.num_attention_heads
    weights = 6 * sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    mixing = 4 * config.num_hidden_layers * (E * seen + D * states)
    assert machine.flops_per_token(model, 256) == pytest.approx(weights + 3 * mixing)


def test_a_model_that_says_nothing_is_counted_by_its_weights() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = MambaForCausalLM(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    assert config.tie_word_embeddings
    assert machine.flops_per_token(model, 256) == 6 * matrices


def test_a_machine_says_what_it_is() -> None:
    found = machine.describe()
    assert list(found) == ["device", "threads", "torch", "date"]
    assert found["device"] == "cpu" and found["torch"] == torch.__version__
    assert datetime.date.fromisoformat(found["date"])
    versions = machine.describe(fields=("latte", "transformers", "no-such-package"))
    assert versions["latte"] == latte.__version__ and versions["transformers"]
    assert versions["no-such-package"] == ""
