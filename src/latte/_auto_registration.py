"""Make Transformers' Auto classes know Latte, without importing Transformers to say so.

``import latte`` installs a finder that lets a few of Transformers' modules load as ever and, once
the Auto classes are there and nothing they lean on is half loaded, registers Latte with them. If
they are there already, it registers at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
AUTO_MODELS = "transformers.models.auto.modeling_auto"
# Latte's models import these two; the second imports AUTO_MODELS while it is itself half loaded.
NEEDED = ("transformers.modeling_utils", "transformers.modeling_layers")
# These are half loaded when they pull Transformers in.
OWN = ("latte.models.", "latte.conversion.", "latte.rivals.")

# Converted models derive from these, which may be what the user is importing.
BASES = tuple(
    f"transformers.models.{family}.modeling_{family}"
    for family in ("gemma", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3")
)

_loading: set[str] = set()
_done: set[str] = set()


def _watched(name: str) -> bool:
    return name in (AUTO_CONFIG, AUTO_MODELS, *NEEDED, *BASES) or name.startswith(OWN)


def _ready(name: str) -> bool:
    return name in sys.modules and name not in _loading


def register_what_is_ready() -> None:
    """Register the configuration and the models as soon as each of them can be."""
    if any(name.startswith(OWN) for name in _loading):
        return
    if _ready(AUTO_CONFIG) and "config" not in _done:
        _done.add("config")
        from latte.models.auto import register_config
        from latte.rivals.config import register_config as register_rivals

        register_config()
        register_rivals()
    # The configurations of other models read AUTO_MODELS' tables while they load.
    if _ready(AUTO_CONFIG) and AUTO_MODELS not in _loading and "converted" not in _done:
        _done.add("converted")
        from latte.conversion.config import register_configs

        register_configs()
    if _ready(AUTO_MODELS) and not _loading & set(NEEDED) and "models" not in _done:
        _done.add("models")
        from latte.models.auto import register_models
        from latte.rivals.modeling import register_models as register_rivals

        register_models()
        register_rivals()
    if "models" in _done and not _loading & set(BASES) and "converted models" not in _done:
        _done.add("converted models")
        from latte.conversion.modeling import register_models as register_converted

        register_converted()


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by :func:`register_what_is_ready`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _loading.add(module.__name__)
        try:
            self._loader.exec_module(module)
        finally:
            _loading.discard(module.__name__)
        register_what_is_ready()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _watched(fullname):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def install() -> None:
    """Register now what can be, and the rest when Transformers gets that far."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    register_what_is_ready()
