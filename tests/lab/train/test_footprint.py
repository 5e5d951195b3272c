"""What does not fit into memory is refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from latte.errors import LatteError
from latte.lab.machine import memory_there_is, size_text
from latte.lab.train import footprint
from latte.lab.train.run import check_model, model_config


def test_a_model_that_fits_is_counted_exactly(make_recipe: Any) -> None:
    from latte.models import count_parameters

    config = model_config(make_recipe(), {})
    assert footprint.number_of_parameters(config) == count_parameters(config)
    config.num_hidden_layers = 300  # by two and one of them
    assert footprint.number_of_parameters(config) == count_parameters(config)
    check_model(make_recipe())


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_a_model_that_does_not_fit(make_recipe: Any, preset: str) -> None:
    recipe = make_recipe(preset)
    recipe.model.overrides |= {"hidden_size": 4_000_000, "num_hidden_layers": 10**9}
    with pytest.raises(LatteError, match="parameters need at least .* EB for weights, .* memory"):
        check_model(recipe)


@pytest.mark.parametrize("key", ["batch_size", "gradient_accumulation"])
def test_a_batch_that_does_not_fit(make_recipe: Any, key: str) -> None:
    with pytest.raises(LatteError, match="training.batch_size=.* tokens needs at least .* TB"):
        check_model(make_recipe(**{key: 10**10}))


def test_the_bound_is_one_from_below(make_recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and averages of exactly the memory that there is are let through."""
    recipe = make_recipe()
    parameters = footprint.number_of_parameters(model_config(recipe, {}))
    assert parameters is not None
    there = footprint.TRAINED_BYTES * parameters
    monkeypatch.setattr(footprint, "memory_there_is", lambda device: there)
    check_model(recipe)
    monkeypatch.setattr(footprint, "memory_there_is", lambda device: there - 1)
    with pytest.raises(LatteError, match="parameters need at least"):
        check_model(recipe)


def test_memory_in_words() -> None:
    there = memory_there_is()
    assert there is None or there > 2**28
    assert [size_text(x) for x in (7, 23_400_000_000, 8e21)] == [
        *("7 bytes", "23.4 GB", "8,000.0 EB")
    ]
