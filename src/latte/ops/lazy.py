"""Names of a package that load when first used, and old names of its modules."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
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


class RenamedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under names that they had before: the same modules, with a warning.

    Args:
        names: New names of packages, by the old ones.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        old = next((x for x in self.names if f"{fullname}.".startswith(f"{x}.")), None)
        if old is None:
            return None
        new = self.names[old] + fullname.removeprefix(old)
        if fullname == old:
            warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        return importlib.util.spec_from_loader(fullname, self, origin=new)

    def create_module(self, spec: Any) -> Any:
        module = importlib.import_module(spec.origin)
        self.own = module.__spec__  # the import sets another one
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self.own
