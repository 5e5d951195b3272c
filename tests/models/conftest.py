"""Small models of every preset, at a weight scale where a broken cache is seen."""

import functools
import sys
from pathlib import Path

import pytest
import torch

# Make ``modeldb`` importable, and what it imports, whatever pytest's import mode.
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("models", "conversion")]

import modeldb  # noqa: E402


@functools.cache
def _shared(preset, kind, dtype, overrides):
    return modeldb.made(preset, kind, **dict(overrides)).to(dtype)


@pytest.fixture(scope="session")
def config():
    return modeldb.tiny_config


@pytest.fixture(scope="session")
def build():
    """A model in eval mode, shared between tests: do not train it."""

    def make(preset, kind="lm", dtype=torch.float64, **overrides):
        return _shared(preset, kind, dtype, tuple(sorted(overrides.items())))

    return make


@pytest.fixture(scope="session")
def tokens():
    return modeldb.tokens


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """No progress bars of Transformers between the tests' dots."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
