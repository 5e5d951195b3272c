"""Hatch's build hook: a wheel carries the native CPU kernels where a C++ compiler works.

Where none does the package is built without them, with one line that says why; LATTE_NATIVE=require
makes that an error, and LATTE_NATIVE=skip builds none. An installation in editable mode gets them
beside their sources.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "latte/ops/cpp_backend"


def load_build(root: str) -> ModuleType:
    """The module that compiles the kernels, without the package, which imports PyTorch."""
    path = Path(root, "src", KERNELS, "build.py")
    spec = importlib.util.spec_from_file_location("latte_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """Of a wheel with the library: the system and architecture that it was compiled for.

    On macOS not Python's own, which may be built for two architectures and an older system.
    """
    tag = sysconfig.get_platform()
    if sys.platform == "darwin":
        oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or "11.0"
        tag = f"macosx-{oldest if '.' in oldest else f'{oldest}.0'}-{platform.machine()}"
    return tag.replace("-", "_").replace(".", "_")


class CustomBuildHook(BuildHookInterface):
    """Compile the kernels for a wheel or for an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.made = tempfile.mkdtemp()
        build = load_build(self.root)
        try:
            mode = build.native_mode()
        except build.BuildError as error:
            self.app.abort(f"latte: {error}")
        if mode == "skip":
            return
        try:
            if version == "editable":
                build.build_library()
                return
            library = build.compile_library(Path(self.made))
        except (build.BuildError, OSError) as error:
            if mode == "require":
                self.app.abort(f"latte: LATTE_NATIVE=require, no native CPU kernels: {error}")
            self.app.display_warning(f"latte: built without the native CPU kernels: {error}")
            return
        build_data["force_include"][str(library)] = f"{KERNELS}/{library.name}"
        # The library knows PyTorch's stable interface alone, and nothing of Python's.
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.made)
