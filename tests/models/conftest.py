"""Small models of every preset, at a weight scale where a broken cache is seen."""

import functools

import pytest
import torch

from tests.models import modeldb


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
