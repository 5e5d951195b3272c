"""Install Latte as users do, and see which backend serves: kernels, or else one warning.

    python tools/check_install.py dist                    everything; `make wheels` has made dist
    python tools/check_install.py dist wheel pure         some of it
    python tools/check_install.py dist --constraints constraints-oldest.txt

* wheel: the wheel with the kernels. They serve.
* pure: the wheel without. A warning; its command builds the library, and as the package's folder
  cannot be written, in the user's.
* sdist: with a compiler. The kernels serve.
* sdist-bare: without a compiler, then again with one, where pip takes the wheel that it has kept. A
  warning; its command builds the library in its place.
* clone: editable, with a compiler. The kernels serve; where sources change, a warning.
* clone-bare: without a compiler. A warning.

Each has an environment of its own, but for PyTorch and the other dependencies, which the first one
has installed. Where there is no native library, LATTE_NATIVE=skip must be silent and
LATTE_NATIVE=require one line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "latte-attention"
PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import torch
    from latte.ops import cpp_backend, default_backend, latte_attention
    q, k, v = torch.randn(3, 1, 300, 2, 8)
    outs = [latte_attention(q, k, v, backend=b)[0] for b in (None, None, "reference")]
print(json.dumps({
    "torch": torch.__version__,
    "default": default_backend(),
    "library": str(cpp_backend.LIBRARY),
    "error": (outs[0] - outs[2]).abs().max().item(),
    "warnings": [str(x.message) for x in seen if "native CPU kernels" in str(x.message)],
}))
"""


def run(*command: object, environment: Mapping[str, str], folder: Path) -> str:
    """The standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


class Place:
    """An environment with Latte's dependencies and nothing else, in a folder of its own.

    Attributes:
        folder: where commands run.
        variables: what processes find in their environment: no folder of the user is looked into.
    """

    def __init__(self, folder: Path, beside: Place | None = None) -> None:
        folder.mkdir()
        self.folder, self.beside = folder, beside
        self.variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX")}
        self.variables |= {"LATTE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        run(sys.executable, "-m", "venv", folder / "venv", environment=os.environ, folder=folder)
        self.bin = folder / "venv" / "bin"
        self.python = self.bin / "python"
        if beside is not None:
            (self.packages / "beside.pth").write_text(f"{beside.packages}\n")

    @property
    def packages(self) -> Path:
        (packages,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return packages

    def without_a_compiler(self) -> dict[str, str]:
        """The variables, with the environment's own programs alone on the path."""
        return self.variables | {"PATH": str(self.bin)}

    def pip(self, *words: object, environment: dict[str, str] | None = None) -> None:
        variables = self.variables if environment is None else environment
        run(self.python, "-m", "pip", *words, environment=variables, folder=self.folder)

    def probe(self, **variables: str) -> dict[str, Any]:
        """What serves there, as a new process finds it."""
        environment = self.variables | variables
        out = run(self.python, "-c", PROBE, environment=environment, folder=self.folder)
        return json.loads(out.splitlines()[-1])

    def expect_native(self, under: Path) -> None:
        """The kernels serve, silently, from a library in that folder."""
        found = self.probe(LATTE_NATIVE="require")
        assert found["default"] == "cpu" and found["warnings"] == [], found
        assert found["error"] < 1e-5 and Path(found["library"]).is_relative_to(under), found
        print(f"    native: {found['library']}, torch {found['torch']}")

    def expect_warning(self, reason: str) -> str:
        """PyTorch serves, with one warning; the command in it that builds the kernels."""
        found = self.probe()
        assert found["default"] == "torch" and found["error"] < 1e-5, found
        assert len(found["warnings"]) == 1 and reason in found["warnings"][0], found
        print(f"    warning: {found['warnings'][0]}")
        assert self.probe(LATTE_NATIVE="skip")["warnings"] == []
        for mode, code in (("auto", 0), ("require", 2)):
            words = [str(self.bin / "latte"), "doctor"]
            environment = self.variables | {"LATTE_NATIVE": mode}
            done = subprocess.run(
                words, env=environment, cwd=self.folder, capture_output=True, text=True
            )
            lines = done.stderr.splitlines()
            assert done.returncode == code and len(lines) == (mode == "require"), done
        return found["warnings"][0].partition("this builds them: ")[2].partition(" (")[0]

    def mend(self, command: str) -> None:
        out = run(*shlex.split(command), environment=self.variables, folder=self.folder)
        assert out.startswith("native CPU kernels: "), out


# ---- the checks


def wheel(place: Place, files: dict[str, Path]) -> None:
    place.pip("install", "-q", "--no-deps", files["wheel"])
    place.expect_native(place.packages)


def pure(place: Place, files: dict[str, Path]) -> None:
    place.pip("install", "-q", "--no-deps", files["pure"])
    command = place.expect_warning("the native kernels are not built")
    package = place.packages / "latte/ops/cpp_backend"
    if os.geteuid() == 0:  # who may write everywhere
        place.mend(command)
        place.expect_native(place.packages)
        return
    package.chmod(0o555)
    place.mend(command)
    place.expect_native(place.folder / "cache")
    package.chmod(0o755)


def sdist(place: Place, files: dict[str, Path]) -> None:
    place.pip("install", "-q", "--no-deps", "--no-cache-dir", files["sdist"])
    place.expect_native(place.packages)


def sdist_bare(place: Place, files: dict[str, Path]) -> None:
    kept = {"PIP_CACHE_DIR": str(place.folder / "pip")}
    # By name, as from an index: what is installed by its path alone pip builds anew each time.
    install = ("install", "-q", "--no-deps", f"{PACKAGE} @ {files['sdist'].as_uri()}")
    required = place.without_a_compiler() | {"LATTE_NATIVE": "require"}
    words = [str(place.python), "-m", "pip", *map(str, install)]
    done = subprocess.run(words, env=required, cwd=place.folder, capture_output=True, text=True)
    reason = "latte: LATTE_NATIVE=require, no native CPU kernels: no C++ compiler was found"
    assert done.returncode and done.stderr.count(reason) == 1, done
    place.pip(*install, environment=place.without_a_compiler() | kept)
    place.pip("uninstall", "-q", "-y", PACKAGE)
    place.pip(*install, environment=place.variables | kept)
    place.mend(place.expect_warning("the native kernels are not built"))
    place.expect_native(place.packages)


def clone(place: Place, files: dict[str, Path]) -> None:
    sources = _clone(place)
    place.pip("install", "-q", "--no-deps", "-e", sources)
    place.expect_native(sources)
    changed = sources / "src/latte/ops/cpp_backend/rg_lru.cpp"
    changed.write_text(changed.read_text() + "// as git pull brings it\n")
    place.expect_warning("sources have changed since native-")


def clone_bare(place: Place, files: dict[str, Path]) -> None:
    sources = _clone(place)
    place.pip("install", "-q", "--no-deps", "-e", sources, environment=place.without_a_compiler())
    place.expect_warning("the native kernels are not built")


def _clone(place: Place) -> Path:
    sources = place.folder / "clone"
    run("git", "clone", "-q", ROOT, sources, environment=place.variables, folder=place.folder)
    return sources


CHECKS: dict[str, Callable[[Place, dict[str, Path]], None]] = {
    "wheel": wheel,
    "pure": pure,
    "sdist": sdist,
    "sdist-bare": sdist_bare,
    "clone": clone,
    "clone-bare": clone_bare,
}


def files_of(dist: Path) -> dict[str, Path]:
    """The sdist, the pure wheel and the wheel with the kernels, by the names of the checks."""
    found = {}
    for path in dist.resolve().iterdir():
        if path.name.endswith(".tar.gz"):
            found["sdist"] = path
        elif path.name.endswith("-none-any.whl"):
            found["pure"] = path
        elif path.suffix == ".whl":
            found["wheel"] = path
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="the folder of `make wheels`")
    parser.add_argument("checks", nargs="*", help=f"{', '.join(CHECKS)}; all")
    parser.add_argument("--constraints", type=Path, help="versions of PyTorch and the others")
    options = parser.parse_intermixed_args()
    unknown = [name for name in options.checks if name not in CHECKS]
    if unknown:
        parser.error(f"expected {', '.join(CHECKS)}, got {unknown[0]}")
    files = files_of(options.dist)
    scratch = Path(tempfile.mkdtemp(prefix="latte-install-"))
    try:
        # With its dependencies, as its metadata have them, in an environment that has nothing.
        base = Place(scratch / "base")
        chosen = ["-c", options.constraints.resolve()] if options.constraints else []
        base.pip("install", "-q", *chosen, files["pure"])
        base.pip("uninstall", "-q", "-y", PACKAGE)
        for name in options.checks or CHECKS:
            print(f"{name}:", flush=True)
            start = time.perf_counter()
            CHECKS[name](Place(scratch / name, beside=base), files)
            print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
