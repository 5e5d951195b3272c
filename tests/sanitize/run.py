"""The native CPU kernels under sanitizers: ``make sanitize``, a few minutes.

Compiles the kernels with AddressSanitizer and UndefinedBehaviorSanitizer beside a copy of the
package, and runs ``fuzz.py`` on them once per instruction set that this processor has: random calls
of every op, forward and backward, wrong arguments, several threads at once. Needs GCC on Linux.
What is found ends the run with the sanitizer's report and the calls that were under way.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined"
# What a program that is run by Python may leave behind is Python's affair: no leaks are looked for.
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# ATEN_CPU_CAPABILITY for each instruction set, and the processor's flag; "": the best there is.
LEVELS = {"default": "sse2", "avx2": "avx2", "avx512": "avx512vl", "": "avx512_bf16"}


def copy_package(folder: Path) -> Path:
    """The package without its library, in ``folder``; the path of its kernels."""
    ignored = shutil.ignore_patterns("native-*", "__pycache__")
    shutil.copytree(ROOT / "src", folder, ignore=ignored, dirs_exist_ok=True)
    return folder / "latte" / "ops" / "cpp_backend"


def compile_sanitized(kernels: Path) -> Path:
    """The library, where the copied package looks for it; kept for the next time."""
    sys.path.insert(0, str(kernels))
    import build

    target = kernels / build.library_name()
    if target.exists():
        return target
    for other in kernels.glob("native-*"):
        other.unlink()
    flags = [*(f for f in build.FLAGS if not f.startswith("-O")), "-O1", "-g", SANITIZERS]
    flags += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-w"]
    sources = sorted(kernels.glob("*.cpp"))
    objects = [source.with_suffix(".o") for source in sources]
    commands = [
        [*build.find_compiler(), *flags, "-c", str(source), "-o", str(to)]
        for source, to in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    # PyTorch's library by name, so that the kernels find the one that is loaded.
    torch = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
    link = ["-shared", SANITIZERS, *map(str, objects), "-Wl,--no-as-needed", str(torch)]
    subprocess.run([*build.find_compiler(), *link, "-o", str(target)], check=True)
    for made in objects:
        made.unlink()
    return target


def preloaded(compiler: list[str]) -> str:
    """Libraries that have to be there before Python: the sanitizer's, and C++'s that it wraps."""
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [*compiler, f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_absolute():
            sys.exit(f"sanitize: {compiler[0]} has no {name}; GCC with its sanitizers is needed")
        paths.append(str(Path(found).resolve()))
    return " ".join(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each instruction set")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitized")
    options = parser.parse_args()
    library = compile_sanitized(copy_package(options.folder))
    import build

    flags = Path("/proc/cpuinfo").read_text().split() if sys.platform == "linux" else []
    log = options.folder / "calls.log"
    log.unlink(missing_ok=True)
    environment = os.environ | SETTINGS | {"LD_PRELOAD": preloaded(build.find_compiler())}
    environment |= {"PYTHONPATH": f"{options.folder}:{ROOT}", "OMP_NUM_THREADS": "2"}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    for level, flag in LEVELS.items():
        if flag not in flags and level != "default":
            print(f"sanitize: this processor has no {flag}", flush=True)
            continue
        arguments = [str(options.seconds), str(options.first_seed), str(log), str(library)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.sanitize.fuzz", *arguments],
            env=environment | ({"ATEN_CPU_CAPABILITY": level} if level else {}),
        )
        if done.returncode:
            last = log.read_text().splitlines()[-4:] if log.exists() else ["none"]
            print("sanitize: the last calls that began:", *last, sep="\n")
            sys.exit(f"sanitize: {flag} failed with status {done.returncode}")


if __name__ == "__main__":
    main()
