"""Names of a package that load when first used, and modules under the names that they had."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: The package's ``__name__``.
        names: Public names, the package's ``__all__``.
        modules: Modules of the package, which are names too, in the order in which they are loaded
            and searched for a name: light ones first.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        for module in modules if name in names else ():
            home = importlib.import_module(f"{package}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def shown() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names, *modules})

    return get, shown


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that were moved are found under their old names too, with a DeprecationWarning."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        """moved: new names of packages by their old names, such as ``latte.lab.data``."""
        self.moved = moved

    def new_name(self, name: str) -> str | None:
        for old, new in self.moved.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if self.new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        new = self.new_name(module.__name__)
        assert new is not None
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(new)  # the very same module
