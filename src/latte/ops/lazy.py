"""Names of a package that load when first used."""

from __future__ import annotations

import importlib
import sys
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
