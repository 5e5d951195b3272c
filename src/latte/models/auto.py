"""Make Transformers' Auto classes know Latte's models, without importing either to say so.

Transformers keeps names of classes by model type, and the modules that it has loaded them from.
Latte's names are added to those tables, and in the place of a module of Transformers stands one
that loads a name when it is read. The tables are filled when Transformers has made them, be that
before or after ``import latte``: importing them takes seconds, and ``latte --help`` needs none.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

CONFIGS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
QUANTIZERS = "transformers.quantizers.auto"
KINDS = ("MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION")

_configs: dict[str, str] = {}  # model type -> name of the class
_models: dict[str, tuple[str, ...]] = {}  # model type -> names of the classes, in KINDS' order
_homes: dict[str, str] = {}  # name of a class -> its module
_classes: Any = ModuleType("latte_classes", "Classes of Latte's models, loaded when first read.")


def _load(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"{name} is no class of Latte's")
    return getattr(importlib.import_module(_homes[name]), name)


_classes.__getattr__ = _load


def register_family(model_type: str, room: str, config: str, *models: str) -> None:
    """Register a model type with the Auto classes, now or when they are loaded.

    Args:
        model_type: Model type.
        room: Package that has the classes in its modules ``config`` and ``modeling``.
        config: Name of its configuration class.
        models: Names of its decoder, language model and classifier; fewer if it has not all.
    """
    _homes[config] = f"{room}.config"
    _homes.update(dict.fromkeys(models, f"{room}.modeling"))
    _configs[model_type], _models[model_type] = config, models


def _fill_configs() -> None:
    auto: Any = sys.modules[CONFIGS]
    for model_type, name in _configs.items():
        auto.CONFIG_MAPPING_NAMES[model_type] = name  # of which CONFIG_MAPPING is a view
        auto.CONFIG_MAPPING._modules[auto.model_type_to_module_name(model_type)] = _classes


def _fill_models() -> None:
    auto, to_module = sys.modules[MODELS], sys.modules[CONFIGS].model_type_to_module_name
    for model_type, models in _models.items():
        for kind, name in zip(KINDS, models, strict=False):
            mapping = getattr(auto, f"{kind}_MAPPING")
            getattr(auto, f"{kind}_MAPPING_NAMES")[model_type] = name
            mapping._reverse_config_mapping[_configs[model_type]] = model_type
            mapping._modules[to_module(model_type)] = _classes


def _fill_quantizers() -> None:
    importlib.import_module("latte.models.quantizer")  # which registers itself


_FILL: dict[str, Callable[[], None]] = {
    CONFIGS: _fill_configs,
    MODELS: _fill_models,
    QUANTIZERS: _fill_quantizers,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules with the tables as usual, and fills them after they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FILL:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_fill(module: ModuleType) -> None:
                run(module)
                _FILL[fullname]()

            spec.loader.exec_module = run_and_fill  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Fill the tables that are loaded, and the others when they are loaded."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    last_names = ((CONFIGS, "AutoConfig"), (MODELS, "AutoModelForCausalLM"))
    for name, last in (*last_names, (QUANTIZERS, "get_hf_quantizer")):
        if hasattr(sys.modules.get(name), last):  # not only begun
            _FILL[name]()
