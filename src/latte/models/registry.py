"""What a name stands for: token mixers, and whole models, of the library's own and of others.

    register_mixer("average", Average)              # LatteConfig(mixer="average")
    register_preset("average++", mixer="average")   # preset_config("average++", "tiny")
    register_model(Griffin("griffin"))              # a ModelEntry: a model that is none of Latte's
    register_provider("my_models")                  # a module that registers models when imported

Nothing is imported before its name is asked for, so that this module is light.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import LatteError

_OWN_PRESETS = "latte.models.config"  # registers the library's own when it is imported

# Classes, or where they are: "module:name".
_mixers: dict[str, Any] = {
    "latte": "latte.layers:LatteAttention",
    "macchiato": "latte.layers:LatteMacchiato",
    "gated": "latte.layers:GatedMacchiato",
    "swa": "latte.layers:SlidingWindowAttention",
    "softmax": "latte.layers:SoftmaxAttention",
    "linear": "latte.layers:LinearAttention",
    "recurrent": "latte.layers:RecurrentBlock",
}
_presets: dict[str, dict[str, Any]] = {}  # fields of LatteConfig
_models: dict[str, ModelEntry] = {}  # whole models of another kind
_providers: list[str] = []


# --- token mixers ----------------------------------------------------------------------------


def register_mixer(name: str, mixer: type | str) -> None:
    """Register a mixer, so that ``LatteConfig(mixer=name)`` uses it. A second call replaces it.

    Args:
        name: Name of the mixer.
        mixer: Subclass of :class:`latte.layers.Mixer`, or its place as ``"module:name"``.
    """
    _mixers[name] = mixer


def mixer_names() -> tuple[str, ...]:
    """The names that :func:`find_mixer` knows."""
    return tuple(_mixers)


def find_mixer(name: str) -> Any:
    """The class of a mixer.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in _mixers:
        raise ValueError(
            f"Field 'mixer' expected one of {mixer_names()}, got {name!r} (a mixer of your own is "
            "registered first: latte.models.registry.load_plugin, or 'plugins' in a recipe)"
        )
    mixer = _mixers[name]
    if isinstance(mixer, str):
        module, _, attribute = mixer.partition(":")
        mixer = _mixers[name] = getattr(importlib.import_module(module), attribute)
    return mixer


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelEntry:
    """A model that a recipe can name; a class to derive from, which defines :meth:`config`.

    Args:
        name: Name in ``model.preset`` of a recipe.
        model_type: Model type of its configurations.
        causal: Whether it can be a language model. If not, it is bidirectional and only classifies.
        carries_state: Whether it can continue a text from a cache, and read packed sequences.
    """

    name: str
    model_type: str = "latte"
    causal: bool = True
    carries_state: bool = True

    def config(self, size: str, **overrides: Any) -> Any:
        """Its configuration at one of the named sizes, with fields of LatteConfig or its own set.

        Raises:
            LatteError: A size or field is unknown, or values do not fit.
        """
        raise TypeError(f"{type(self).__name__} must define config: ModelEntry is only a base")

    def missing(self) -> str | None:
        """What keeps the model from running here, with the way to get it, or None."""
        return None

    def prepare(self) -> None:
        """Let Transformers' Auto classes know its model type. Raises LatteError if they cannot."""

    def add_dropout(self, model: Any) -> None:
        """Let a model of this entry drop out in training what its code does not drop out itself."""

    def check(self, *, causal: bool | None = None) -> None:
        """Raise LatteError if it cannot run here, or is to be causal and is not."""
        if causal and not self.causal:
            raise LatteError(
                f"comparator {self.name!r} reads both ways: it classifies, but is no language model"
            )
        if lacks := self.missing():
            raise LatteError(f"comparator {self.name!r} needs {lacks}")


class Preset(ModelEntry):
    """A preset of Latte's own, by its name."""

    def config(self, size: str, **overrides: Any) -> Any:
        return importlib.import_module(_OWN_PRESETS).preset_config(self.name, size, **overrides)


def register_model(entry: ModelEntry) -> None:
    """:func:`find_model` knows ``entry.name`` from now on."""
    _models[entry.name] = entry


def register_preset(name: str, **fields: Any) -> None:
    """``preset_config(name, size)`` sets these fields of LatteConfig on top of the size's.

    A field can be a function of the size's fields, a dict.
    """
    _presets[name] = fields


def register_provider(module: str) -> None:
    """A module to import, once a name is asked for that is unknown: it registers models then."""
    if module not in _providers:
        _providers.append(module)


def preset_names() -> tuple[str, ...]:
    """The library's presets, and those registered beside them."""
    importlib.import_module(_OWN_PRESETS)
    return tuple(_presets)


def preset_fields(name: str) -> dict[str, Any] | None:
    """The fields of LatteConfig that make a preset, or None."""
    return _presets.get(name)


def find_model(name: str) -> ModelEntry:
    """The model of a name: a preset, or what a provider or plugin has registered.

    Raises:
        LatteError: The name is unknown.
    """
    if name in preset_names():
        return Preset(name)
    if name not in _models:
        _load_providers()
    if name not in _models:
        others = f", or of the models to compare with: {', '.join(_models)}" if _models else ""
        raise LatteError(
            f"unknown preset {name!r}, expected one of {', '.join(preset_names())}{others}"
        )
    return _models[name]


def other_models() -> dict[str, ModelEntry]:
    """All models that are no presets, by name; loads the providers."""
    _load_providers()
    return dict(_models)


def entry_of_type(model_type: str) -> ModelEntry | None:
    """The registered model with this model type; None for Latte's own and for unknown types."""
    return next((e for e in other_models().values() if e.model_type == model_type), None)


def make_known(model_type: str) -> None:
    """Let Transformers' Auto classes know a model type, before a configuration of it is read.

    Raises:
        LatteError: The library, or a device that it needs, is missing.
    """
    if entry := entry_of_type(model_type):
        entry.prepare()


def carries_state(model: Any) -> bool:
    """Whether a model can continue from what it has read. True if it has no entry."""
    entry = entry_of_type(getattr(getattr(model, "config", None), "model_type", ""))
    return entry is None or entry.carries_state


def _load_providers() -> None:
    for module in _providers:
        importlib.import_module(module)


# --- code of a user ----------------------------------------------------------------------------


def is_loaded(plugin: str) -> bool:
    """Whether a plugin has been imported here. A file may be in another folder than it was."""
    if not plugin.endswith(".py"):
        return plugin in sys.modules
    return any(name[:-8] == _of_file(Path(plugin)) for name in sys.modules)


def plugin_files(plugin: str) -> list[Path]:
    """The Python files of a plugin: a file, or those of a module that has been imported."""
    if plugin.endswith(".py"):
        return [Path(plugin).expanduser()]
    file = getattr(sys.modules.get(plugin), "__file__", None)
    if file is None:
        return []
    path = Path(file)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def _of_file(path: Path) -> str:
    """The beginning of the names of a file's modules; 8 digits for its folder follow."""
    return f"latte_plugin_{path.stem}_"


def load_plugin(path_or_module: str | Path) -> Any:
    """Import a user's module, by its name or as a ``.py`` file, so that it registers its classes.

    A file is imported once, whatever way its path is written.

    Raises:
        LatteError: There is no such file or module, or its import fails.
    """
    text = str(path_or_module)
    try:
        if not text.endswith(".py"):
            return importlib.import_module(text)
        path = Path(text).expanduser().resolve()
        if not path.is_file():
            raise LatteError(f"plugin {text}: no such file")
        name = _of_file(path) + hashlib.sha1(str(path).encode()).hexdigest()[:8]
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except LatteError:
        raise
    except Exception as error:  # a user's code may fail in any way
        raise LatteError(f"plugin {text}: {type(error).__name__}: {error}") from error
