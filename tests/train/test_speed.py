"""A recipe's choices of speed: checked before anything starts, applied to the model."""

from typing import Any

import pytest
import torch
from torch import nn

from latte.errors import LatteError
from latte.ops import default_backend
from latte.train import speed
from latte.train.recipe import recipe_from_dict
from latte.train.run import train


def a_recipe(preset: str = "latte-r-swa++", **training: Any) -> Any:
    return recipe_from_dict({"model": {"preset": preset}, "training": {"max_steps": 1, **training}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("choice", [{"backend": "triton"}, {"liger": True}])
@pytest.mark.parametrize("mode", ["missing", "compiler"])
def test_what_is_not_there_is_told_before_anything_starts(choice, mode, monkeypatch, tmp_path):
    monkeypatch.setattr("latte.ops.triton_backend.launch.triton_mode", lambda: mode)
    recipe = a_recipe(**choice)
    recipe.output_dir = str(tmp_path / "run")
    name = "training.backend=triton" if "backend" in choice else "training.liger=true"
    found = "needs Triton, which is not installed" if mode == "missing" else "needs a GPU"
    with pytest.raises(LatteError, match=f"{name} {found}"):
        train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("choice", ["liger", "chunked_loss"])
def test_liger_and_the_chunked_loss_are_for_own_models(choice, monkeypatch):
    monkeypatch.setattr("latte.ops.triton_backend.launch.triton_mode", lambda: "interpreter")
    monkeypatch.setattr(nn, "LinearCrossEntropyOptions", object, raising=False)
    recipe = a_recipe(**{choice: True})
    recipe.model.architecture = "llama"
    with pytest.raises(LatteError, match="serves Latte's own models"):
        speed.check_speed(recipe)


def test_the_backend_holds_for_the_training_alone():
    with speed.chosen_backend(a_recipe(backend="torch")):
        assert default_backend() == "torch"
    with speed.chosen_backend(a_recipe(backend="triton")):
        assert default_backend() == "triton"
    with speed.chosen_backend(a_recipe()):
        assert default_backend() == "torch"
    assert default_backend() == "torch"


def test_blocks_are_compiled_for_own_models_alone(monkeypatch):
    called = []
    monkeypatch.setattr("latte.train.quicker.compile_blocks", lambda model: called.append("blocks"))
    monkeypatch.setattr("latte.train.quicker.use_liger", lambda model: called.append("liger"))
    model = torch.nn.Linear(1, 1)
    speed.quicken(model, a_recipe())
    assert called == []
    speed.quicken(model, a_recipe(torch_compile=True, liger=True))
    assert called == ["liger", "blocks"]
    converted = a_recipe(torch_compile=True)
    converted.conversion.base = "a base"
    speed.quicken(model, converted)
    assert called == ["liger", "blocks"]
