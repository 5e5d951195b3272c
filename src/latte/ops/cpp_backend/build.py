"""Compile the native CPU kernels: needs a C++ compiler for Linux, and nothing of PyTorch.

    python -m latte.ops.cpp_backend.build

builds the library beside its sources if it is not there yet; the build hook of the package calls
the same function. Imported without the package, before anything that the package needs exists.
The file's name carries a digest of the sources: a library of other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
# Contraction to fused multiply-adds as GCC does it; no architecture: see each_isa.h.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas"),
)


class BuildError(Exception):
    """The kernels cannot be compiled here, said in one line."""


def library_name() -> str:
    """The library's file name, which follows from its sources."""
    found = hashlib.sha256()
    for path in sorted(HERE.glob("*.h")) + sorted(HERE.glob("*.cpp")) + [Path(__file__)]:
        found.update(path.read_bytes())
    return f"native-{found.hexdigest()[:12]}.so"


def find_compiler() -> list[str]:
    """``CXX``, else the first C++ compiler on the path.

    Raises:
        BuildError: there is none, or this is no system that the kernels are built for.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise BuildError(f"they are built for Linux on x86-64 and ARM64, not {sys.platform} "
                         f"on {platform.machine()}")  # fmt: skip
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise BuildError(f"{command[0]} failed with status {done.returncode} {reason}".strip())


def compile_library(folder: Path) -> Path:
    """Compile the library into ``folder``; return its path.

    Raises:
        BuildError: there is no compiler, or it does not work.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        # A stand-in of that name, so that the kernels find the PyTorch that is loaded.
        torch = scratch / "libtorch_cpu.so"
        (scratch / "none.cpp").touch()
        stand_in = ["-shared", f"-Wl,-soname,{torch.name}", str(scratch / "none.cpp")]
        _run([*compiler, *stand_in, "-o", str(torch)])
        sources = sorted(HERE.glob("*.cpp"))
        objects = [str(scratch / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, *FLAGS, "-c", str(source), "-o", to]
            for source, to in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = scratch / library_name()
        link = ["-shared", "-Wl,--no-as-needed", str(torch), "-Wl,--as-needed"]
        _run([*compiler, *objects, *link, "-o", str(linked)])
        target = folder / linked.name
        # By a rename within the folder: a process that has the old file open keeps it.
        shutil.copy(linked, target.with_suffix(".part"))
        target.with_suffix(".part").replace(target)
    return target


def build_in_place() -> Path:
    """Compile the library beside its sources, and remove those of other sources.

    Raises:
        BuildError: there is no compiler, or it does not work.
    """
    target = HERE / library_name()
    if not target.exists():
        compile_library(HERE)
        for other in HERE.glob("native-*.so"):
            if other != target:
                other.unlink()
    return target


def main() -> None:
    """Build, and say in one line what is there now."""
    try:
        print(f"native CPU kernels: {build_in_place()}")
    except (BuildError, OSError) as error:
        print(f"no native CPU kernels, PyTorch's operations do their work: {error}")


if __name__ == "__main__":
    main()
