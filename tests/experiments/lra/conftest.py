"""A Long Range Arena recipe that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

TINY: dict[str, Any] = {
    "task": "listops",
    "data": {
        "min_length": 3,
        "max_length": 12,
        "max_depth": 2,
        "max_args": 6,
        "train_examples": 40,
        "validation_examples": 16,
        "test_examples": 16,
    },
    "models": {
        "both": {"preset": "latte-r-swa++"},
        "window": {"preset": "swa++"},
    },
    "shared": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "num_latents": 4,
        "sliding_window": 4,
        "hidden_dropout": 0.1,
    },
    "training": {
        "max_steps": 8,
        "batch_size": 8,
        "eval_steps": 2,
        "log_steps": 2,
        "warmup_steps": 2,
        "bucket_batches": 2,
    },
}


@pytest.fixture
def tiny() -> dict[str, Any]:
    """The recipe, to build others from."""
    return TINY


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """The recipe's file; its runs and their data go into the same folder."""
    path = tmp_path / "tiny.yaml"
    folders = {"output_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    path.write_text(yaml.safe_dump(TINY | folders))
    return path
