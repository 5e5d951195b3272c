"""What the plug-ins' tests share."""

import sys
from unittest import mock

import pytest
import torch

from latte.models import modeling, registry


@pytest.fixture(scope="module")
def plugin(request):
    """The file's ``PLUGIN``, registered for as long as its tests last."""
    presets = mock.patch.dict(registry._mixers), mock.patch.dict(registry._presets)
    with presets[0], presets[1], mock.patch.object(modeling, "make_mlp", modeling.make_mlp):
        module = registry.load_plugin(request.module.PLUGIN)
        yield
    del sys.modules[module.__name__]


@pytest.fixture
def looks_back():
    """Asserts that a model's logits do not depend on what comes after."""

    def check(model):
        ids = torch.randint(64, (1, 40))
        with torch.no_grad():
            early, whole = model(ids[:, :30]).logits, model(ids).logits[:, :30]
        torch.testing.assert_close(early, whole)

    return check
