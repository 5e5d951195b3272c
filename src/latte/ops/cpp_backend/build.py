"""Compile the native CPU kernels. This needs a C++ compiler, but not PyTorch.

    python -m latte.ops.cpp_backend [--force]

builds the library if it is not there yet. It is put beside its sources, or in the user's cache
folder if that place cannot be written. The build hook of the package calls the same functions. This
file also runs without the package, before its dependencies are installed.

The name of the library contains the system, the architecture and a digest of the sources and flags.
So a library of other sources is never loaded. ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` are used. If
the library exists already, they are used only with ``--force``. ``LATTE_NATIVE`` has three values:
``auto`` builds if a compiler works, ``require`` fails if none does, ``skip`` builds nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
# Contraction to fused multiply-adds as GCC does it; no architecture: see each_isa.h.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"),
)
# System and architecture, as Python names them, and the suffix of its libraries.
SYSTEMS = {
    ("linux", "x86_64"): ".so",
    ("linux", "aarch64"): ".so",
    ("darwin", "arm64"): ".dylib",
}
MODES = ("auto", "require", "skip")
# Loads a library in a separate process. Without PyTorch, as in pip's build environment, the
# stand-in has the names of its functions. The check reports nothing if there is neither, or if the
# stand-in is in a folder from which nothing can be loaded.
LOAD = """
import ctypes, sys
library, *stand_in = sys.argv[1:]
try:
    import torch
except Exception:
    try:
        ctypes.CDLL(stand_in[0], ctypes.RTLD_GLOBAL)
    except (IndexError, OSError):
        sys.exit()
try:
    ctypes.CDLL(library)
except OSError as error:
    sys.exit(str(error))
"""


class BuildError(Exception):
    """The kernels cannot be compiled here. The message is one line."""


def native_mode() -> str:
    """``LATTE_NATIVE``: auto, require or skip.

    Raises:
        BuildError: It has another value.
    """
    mode = os.environ.get("LATTE_NATIVE") or "auto"
    if mode not in MODES:
        raise BuildError(f"LATTE_NATIVE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def unsupported() -> str | None:
    """Why the kernels do not support this system, or None if they do."""
    if (sys.platform, platform.machine()) in SYSTEMS:
        return None
    return (
        "the native kernels are made for Linux on x86-64 and ARM64 and for macOS on ARM64,"
        f" this is {sys.platform} on {platform.machine()}"
    )


# ---- the place of the library


def _stem() -> str:
    return f"native-{sys.platform}-{platform.machine()}-"


def library_name() -> str:
    """The library's file name, from system, architecture, sources and flags."""
    found = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cpp")):
        found.update(path.read_bytes())
    suffix = SYSTEMS.get((sys.platform, platform.machine()), ".so")
    return f"{_stem()}{found.hexdigest()[:12]}{suffix}"


def folders() -> list[Path]:
    """The folders of libraries: the sources' folder, then the user's folder if there is a home.

    The user's folder is $LATTE_CACHE/native, else $XDG_CACHE_HOME/latte/native, else
    ~/.cache/latte/native.
    """
    base = os.environ.get("LATTE_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "latte")
    own = os.path.join(os.path.expanduser(base), "native")
    return [HERE] if own.startswith("~") else [HERE, Path(own)]


def found_libraries() -> list[Path]:
    """The libraries of these sources that exist, those beside the sources first.

    In the user's folder, only files that the user or root owns are used, because other users may be
    able to write to $LATTE_CACHE.
    """
    name, owners = library_name(), (0, os.getuid() if hasattr(os, "getuid") else 0)
    found = []
    for path in (folder / name for folder in folders()):
        with contextlib.suppress(OSError):
            if path.is_file() and (path.parent == HERE or path.stat().st_uid in owners):
                found.append(path)
    return found


def of_other_sources() -> list[Path]:
    """Libraries for this machine in the sources' folder that were built from other sources."""
    name = library_name()
    return [x for x in HERE.glob(f"{_stem()}*{Path(name).suffix}") if x.name != name]


def writable_folder() -> Path:
    """The folder of the sources if it can be written, else the user's.

    Raises:
        BuildError: Neither can be written.
    """
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # permissions are not enough to know
                return folder
    raise BuildError(f"not to be written: {' and '.join(map(str, folders()))} (see LATTE_CACHE)")


# ---- compiling


def find_compiler() -> list[str]:
    """``CXX``, else the first C++ compiler on the path.

    Raises:
        BuildError: There is none, or the kernels do not support this system.
    """
    reason = unsupported()
    if reason is not None:
        raise BuildError(reason)
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found (g++, clang++, c++, or CXX)")


def _from_environment(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def _for_system() -> list[str]:
    """The flags of the compiler and the linker for this system."""
    if sys.platform != "darwin":
        return []
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or "11.0"
    return ["-arch", platform.machine(), f"-mmacosx-version-min={oldest}"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        # Lines of collect2 only repeat that the linker failed.
        lines = [line for line in said if not line.startswith("collect2:")]
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"{command[0]} failed with status {done.returncode} {reason}".strip())


def _stand_in(compiler: list[str], scratch: Path) -> Path:
    """A library with PyTorch's name, whose functions do nothing. It is used to link and to load."""
    header = HERE / "torch_abi.h"
    text = header.read_text(encoding="utf-8") if header.exists() else ""
    names = re.findall(r"^\w[\w* ]*\b((?:aoti_)?torch_\w+)\(", text, re.M)
    source, made = scratch / "stand_in.cc", scratch / "libtorch_cpu.so"
    lines = [f'extern "C" int {name}() {{ return 0; }}' for name in names]
    source.write_text("\n".join([*lines, ""]), encoding="utf-8")
    soname = [] if sys.platform == "darwin" else [f"-Wl,-soname,{made.name}"]
    command = [*compiler, *_for_system(), "-shared", "-fPIC", *soname, str(source)]
    _run([*command, "-o", str(made)])
    return made


def check_loads(library: Path, stand_in: Path | None = None) -> None:
    """Load the library in another process, with PyTorch if it is installed.

    Raises:
        BuildError: It cannot be loaded.
    """
    command = [sys.executable, "-c", LOAD, library, *([] if stand_in is None else [stand_in])]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"the library was built but cannot be loaded: {said[-1]}")


def compile_library(folder: Path, *, check: bool = True) -> Path:
    """Compile the library into ``folder``; return its path.

    Args:
        check: Whether to load it first, and to keep it only if it loads.

    Raises:
        BuildError: There is no compiler, it does not work, or the library cannot be loaded.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        stand_in = _stand_in(compiler, scratch)
        sources = sorted(HERE.glob("*.cpp"))
        objects = [str(scratch / f"{source.stem}.o") for source in sources]
        flags = [*FLAGS, *_for_system(), *_from_environment("CXXFLAGS")]
        commands = [
            [*compiler, *flags, "-c", str(source), "-o", to]
            for source, to in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = scratch / library_name()
        if sys.platform == "darwin":  # symbols are found in the PyTorch that is loaded
            torch = ["-undefined", "dynamic_lookup"]
        else:  # by its name, which the stand-in has
            torch = ["-Wl,--no-as-needed", str(stand_in), "-Wl,--as-needed"]
        link = ["-shared", *_for_system(), *torch, *_from_environment("LDFLAGS")]
        _run([*compiler, *objects, *link, "-o", str(linked)])
        # The library appears in one step, and has a unique name before that. So two builds at the
        # same time do not disturb each other.
        target = folder / linked.name
        handle, name = tempfile.mkstemp(prefix=f"{linked.name}.", suffix=".part", dir=folder)
        os.close(handle)
        part = Path(name)
        try:
            shutil.copy(linked, part)  # keeps permissions: a temporary file is for its owner only
            if check:  # in its own folder, because some systems load nothing from /tmp
                check_loads(part, stand_in)
            part.replace(target)  # a process that has the old file open keeps it
        finally:
            part.unlink(missing_ok=True)
    return target


def build_library(*, force: bool = False) -> Path:
    """The library of these sources: an existing one that loads, else a new one.

    It is compiled into the folder of its sources, where libraries of other sources are removed. If
    that folder cannot be written, it is compiled into the user's folder.

    Args:
        force: Whether to compile it again in any case.

    Raises:
        BuildError: There is no compiler, it does not work, the library cannot be loaded, or no
            folder can be written.
    """
    for library in [] if force else found_libraries():
        with contextlib.suppress(BuildError):
            check_loads(library)
            return library
    folder = writable_folder()  # checked before minutes of compiling
    target = compile_library(folder)
    if folder == HERE:
        for other in of_other_sources():
            other.unlink(missing_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and print the result in one line. Returns 1 if LATTE_NATIVE=require and it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m latte.ops.cpp_backend", description="Build Latte's native CPU kernels."
    )
    parser.add_argument("--force", action="store_true", help="compile them anew in any case")
    options = parser.parse_args(arguments)
    try:
        mode = native_mode()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if mode == "skip":
        print("no native CPU kernels: LATTE_NATIVE=skip")
        return 0
    try:
        print(f"native CPU kernels: {build_library(force=options.force)}")
    except (BuildError, OSError) as error:
        if mode == "require":
            print(f"error: LATTE_NATIVE=require, no native CPU kernels: {error}", file=sys.stderr)
            return 1
        print(f"no native CPU kernels, PyTorch's operations do their work: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
