"""Compile the native CPU kernels: needs a C++ compiler, and nothing of PyTorch.

    python -m latte.ops.cpp_backend [--force]

builds the library if it is not there yet: beside its sources, or in the user's cache folder where
that place cannot be written. The build hook of the package calls the same functions. This file is
run without the package too, before anything that the package needs exists.

The file's name carries the system, the architecture and a digest of the sources and flags: a
library of other sources is never loaded. ``CXX``, ``CXXFLAGS`` and ``LDFLAGS`` are respected (of a
library that is there already only with ``--force``). ``LATTE_NATIVE`` says what an installation
wants: ``auto`` builds where a compiler works, ``require`` fails where none does, ``skip`` builds
nothing.
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
# System and architecture, as Python names them, and what its libraries' names end with.
SYSTEMS = {
    ("linux", "x86_64"): ".so",
    ("linux", "aarch64"): ".so",
    ("darwin", "arm64"): ".dylib",
}
MODES = ("auto", "require", "skip")
# Loads a library in a process of its own. Where there is no PyTorch, as in pip's build environment,
# the stand-in has its functions' names. The check says nothing if there is neither, or if the
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
        BuildError: it is something else.
    """
    mode = os.environ.get("LATTE_NATIVE") or "auto"
    if mode not in MODES:
        raise BuildError(f"LATTE_NATIVE must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def unsupported() -> str | None:
    """Why the kernels are not made for this system, or None if they are."""
    if (sys.platform, platform.machine()) in SYSTEMS:
        return None
    return (
        "the native kernels are made for Linux on x86-64 and ARM64 and for macOS on ARM64,"
        f" this is {sys.platform} on {platform.machine()}"
    )


# ---- where the library is


def _stem() -> str:
    return f"native-{sys.platform}-{platform.machine()}-"


def library_name() -> str:
    """The library's file name, which follows from system, architecture, sources and flags."""
    found = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cpp")):
        found.update(path.read_bytes())
    suffix = SYSTEMS.get((sys.platform, platform.machine()), ".so")
    return f"{_stem()}{found.hexdigest()[:12]}{suffix}"


def folders() -> list[Path]:
    """The folders of libraries: beside the sources, then the user's folder, if there is a home.

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

    In the user's folder, only files that the user or root owns count: other users may be able to
    write to $LATTE_CACHE.
    """
    name, owners = library_name(), (0, os.getuid() if hasattr(os, "getuid") else 0)
    found = []
    for path in (folder / name for folder in folders()):
        with contextlib.suppress(OSError):
            if path.is_file() and (path.parent == HERE or path.stat().st_uid in owners):
                found.append(path)
    return found


def of_other_sources() -> list[Path]:
    """Libraries for this machine beside the sources that were built from others.

    Also those whose name has no system and architecture yet, which nothing loads any more.
    """
    name = library_name()
    found = [*HERE.glob(f"{_stem()}*{Path(name).suffix}"), *HERE.glob(f"native-{'?' * 12}.so")]
    return [path for path in found if path.name != name]


def writable_folder() -> Path:
    """The folder of the sources if it can be written, else the user's.

    Raises:
        BuildError: none can be.
    """
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # permissions do not tell all
                return folder
    raise BuildError(f"not to be written: {' and '.join(map(str, folders()))} (see LATTE_CACHE)")


# ---- compiling


def find_compiler() -> list[str]:
    """``CXX``, else the first C++ compiler on the path.

    Raises:
        BuildError: there is none, or this is no system that the kernels are built for.
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
        lines = [
            line for line in said if not line.startswith("collect2:")
        ]  # that the linker failed
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"{command[0]} failed with status {done.returncode} {reason}".strip())


def _stand_in(compiler: list[str], scratch: Path) -> Path:
    """A library named as PyTorch's, with functions that do nothing: to link with, and to load."""
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
    """Load the library in another process, with PyTorch where there is one.

    Raises:
        BuildError: it cannot be loaded.
    """
    command = [sys.executable, "-c", LOAD, library, *([] if stand_in is None else [stand_in])]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise BuildError(f"the library was built but cannot be loaded: {said[-1]}")


def compile_library(folder: Path, *, check: bool = True) -> Path:
    """Compile the library into ``folder``; return its path.

    Args:
        check: load it first, and put nothing there that does not load.

    Raises:
        BuildError: there is no compiler, it does not work, or what it made cannot be loaded.
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
        # The library appears in one step, and has a unique name before that: two builds at the same
        # time do not disturb each other.
        target = folder / linked.name
        handle, name = tempfile.mkstemp(prefix=f"{linked.name}.", suffix=".part", dir=folder)
        os.close(handle)
        part = Path(name)
        try:
            shutil.copy(linked, part)  # with its permissions: a temporary file is its owner's alone
            if check:  # in its own folder: nothing can be loaded from some systems' /tmp
                check_loads(part, stand_in)
            part.replace(target)  # a process that has the old file open keeps it
        finally:
            part.unlink(missing_ok=True)
    return target


def build_library(*, force: bool = False) -> Path:
    """The library of these sources: one that is there and loads, else a new one.

    It is compiled beside its sources, and those of other sources are removed there; where that
    folder cannot be written, in the user's.

    Args:
        force: compile it anew in any case.

    Raises:
        BuildError: there is no compiler, it does not work, what it made cannot be loaded, or no
            folder can be written.
    """
    for library in [] if force else found_libraries():
        with contextlib.suppress(BuildError):
            check_loads(library)
            return library
    folder = writable_folder()  # before minutes of compiling
    target = compile_library(folder)
    if folder == HERE:
        for other in of_other_sources():
            other.unlink(missing_ok=True)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, and say in one line what is there now; 1 if LATTE_NATIVE=require and it is not."""
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
