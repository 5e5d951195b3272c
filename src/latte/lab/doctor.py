"""The report of `latte doctor`: what runs here, on what hardware, and why nothing faster does.

Each section is made independently. An error in one section is reported there and stops no other.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latte import __version__
from latte.errors import one_line

Section = dict[str, Any]

PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy", "flash-linear-attention")
# Variables of the environment that change which code runs, and how.
VARIABLES = {
    "native": ("LATTE_NATIVE", "LATTE_CACHE", "CXX", "CXXFLAGS", "LDFLAGS"),
    "backends": ("LATTE_BACKEND", "TRITON_INTERPRET"),
    "gpu": ("TRITON_PTXAS_PATH",),
    "threads": ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    "malloc": ("LATTE_KEEP_MEMORY", "LD_PRELOAD", "MALLOC_ARENA_MAX"),
}


def report() -> dict[str, Section]:
    """The whole report, by section; a section that failed is {"error": one line}."""
    sections: dict[str, Callable[[], Section]] = {
        "versions": _versions,
        "native": _native,
        "backends": _backends,
        "quantised weights": _quantised,
        "malloc": _malloc,
        "threads": _threads,
        "gpu": _gpu,
    }
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they would warn of is in the report
        for name, section in sections.items():
            try:
                found[name] = section()
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {one_line(error)}"}
            found[name] |= {x: os.environ[x] for x in VARIABLES.get(name, ()) if x in os.environ}
    return found


def required_kernels() -> None:
    """Check that the native kernels are there if ``LATTE_NATIVE`` is require.

    Raises:
        LatteError: They are required and cannot be loaded, or ``LATTE_NATIVE`` has an unknown
            value.
    """
    library, _ = _native_modules()
    if os.environ.get("LATTE_NATIVE") not in (None, "", "auto", "skip"):
        library.load()


def text(found: dict[str, Section]) -> str:
    """The report for reading: a heading for each section, a line for each entry."""
    lines = []
    for name, section in found.items():
        lines.append(name)
        entries: list[tuple[str, Any]] = []
        for key, value in section.items():
            nested = value.items() if isinstance(value, dict) else [(None, value)]
            entries += [(key if k is None else f"{key} {k}", v) for k, v in nested]
        width = max((len(key) for key, _ in entries), default=0)
        lines += [f"  {key:{width}}  {_shown(value)}" for key, value in entries]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# ---- the sections


def _versions() -> Section:
    found: Section = {"latte": __version__}
    folder = Path(__file__).parents[1]
    commit = _commit(folder.parents[1])
    if commit is not None:
        found["commit"] = commit
    found |= {"folder": str(folder), "python": platform.python_version()}
    found |= {"executable": sys.executable, "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit(root: Path) -> str | None:
    """The commit of a clone, "-dirty" where files differ from it; None where this is no clone."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def _native_modules() -> tuple[Any, Any]:
    """:mod:`latte.ops.cpp_backend.library` and the package, which may be missing.

    ``latte.ops`` cannot be imported where LATTE_NATIVE=require cannot be met, or where its value is
    unknown. Here it must be imported, because the report says why.
    """
    wanted = os.environ.pop("LATTE_NATIVE", None)
    try:
        os.environ["LATTE_NATIVE"] = "skip" if wanted == "skip" else "auto"
        from latte.ops import cpp_backend
        from latte.ops.cpp_backend import library
    finally:
        del os.environ["LATTE_NATIVE"]
        if wanted is not None:
            os.environ["LATTE_NATIVE"] = wanted
    return library, cpp_backend


def _native() -> Section:
    _, cpp_backend = _native_modules()
    import torch

    from latte.ops.cpp_backend import build

    found: Section = {"kernels": cpp_backend.ABSENT is None}
    if cpp_backend.ABSENT is None:
        # The library chooses by the same questions as PyTorch, and heeds ATEN_CPU_CAPABILITY too.
        capability = torch.backends.cpu.get_cpu_capability().lower()
        instructions = capability if capability in ("avx512", "avx2") else "baseline"
        limited = os.environ.get("ATEN_CPU_CAPABILITY") == "avx512"
        if instructions == "avx512" and not limited and torch.cpu._is_avx512_bf16_supported():
            instructions = "avx512, bf16 in pairs"
        found |= {"library": str(cpp_backend.LIBRARY), "instructions": instructions}
    else:
        found["why not"] = cpp_backend.ABSENT
    try:
        found["compiler"] = shutil.which(build.find_compiler()[0])
    except build.BuildError as error:
        found["compiler"] = f"none: {error}"
    found["looked for in"] = [str(folder) for folder in build.folders()]
    return found


def _backends() -> Section:
    """For each op and device, the backend of a call that names none (causal, if there is a
    choice); on a GPU in bf16 with 16 latents and heads of 64, also one token at a time.
    """
    _native_modules()
    import torch

    from latte.ops import api
    from latte.ops.backend import choose, default_backend, named_backend
    from latte.ops.triton_backend.checked import WIDTHS
    from latte.ops.triton_backend.launch import unavailable_for

    sizes = {"L": 16, "K": 64, "D": 64}

    tables: dict[str, Any] = {
        "latte_attention": api.LATTE,
        "macchiato_attention": api.MACCHIATO,
        "sliding_window_attention": api.WINDOW,
        "linear_attention": api.LINEAR,
        "rg_lru": api.RG_LRU,
        "causal_conv1d": api.CONVOLUTION,
    }
    with_step = {"latte_attention", "macchiato_attention", "rg_lru", "causal_conv1d"}
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found: Section = {"named": named_backend()}
    found["default"] = {device: default_backend(device) for device in devices}
    for op, table in tables.items():
        found[op] = {}
        for device in devices:
            x = torch.zeros(1, device=device)
            inputs: tuple[torch.Tensor, ...] = (x,)
            if device == "cuda":
                places = {place: sizes[name] for name, place in WIDTHS.get(op, {}).items()}
                width = max(places, default=0)
                inputs = tuple(x.new_zeros(places.get(i, 1)).bfloat16() for i in range(width + 1))
            for step in (False, True) if device == "cuda" and op in with_step else (False,):
                place = f"{device}, a token" if step else device
                try:
                    found[op][place] = choose(
                        *(op, None, table, x.device, lambda x=x: unavailable_for(x)),
                        step=step,
                        inputs=inputs,
                        form=(True, None, False),
                    )
                except ValueError as error:  # the backend that was named cannot serve it
                    found[op][place] = f"none: {one_line(error)}"
    return found


def _quantised() -> Section:
    """By what the weights of `latte convert --weights` are multiplied, for few rows on a CPU."""
    _native_modules()
    import torch

    from latte.ops import cpp_backend
    from latte.ops.quantised import BLOCKS, instructions

    if cpp_backend.ABSENT is None:
        return dict.fromkeys(("int4", "int8"), "native kernels")
    capability, four = torch.backends.cpu.get_cpu_capability(), instructions()
    slow = f"PyTorch has fast kernels for {' and '.join(BLOCKS)}, this CPU has {capability}"
    return {
        "int4": f"dequantised: {slow}" if four is None else f"PyTorch's kernel, {four}",
        "int8": "dequantised: the native kernels are missing",
    }


def _malloc() -> Section:
    from latte.lab.malloc import keep_memory

    name, version = platform.libc_ver()
    return {"library": f"{name} {version}".strip() or None, "keeps freed memory": keep_memory()}


def _threads() -> Section:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "PyTorch": torch.get_num_threads(),
        "between operations": torch.get_num_interop_threads(),
        "cores": cores,
    }


def _gpu() -> Section:
    import torch

    found: Section = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    available = torch.cuda.is_available()
    found["available"] = available
    for number in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        found[f"device {number}"] = f"{properties.name}, {memory}, {capability}"
    from latte.ops.triton_backend import checked, launch

    if available:
        for products, kernels in ((True, "kernels"), (False, "kernels of single tokens")):
            reason = checked.refused_card(torch.device("cuda"), products)
            found[kernels] = "the default where checked" if reason is None else f"off: {reason}"
    found["triton"] = launch.triton_mode()
    found["ptxas"] = launch.assembler()
    if launch.old_assembler():
        oldest = launch.OLDEST_ASSEMBLER
        found["ptxas"] += f": on an H100 expected {oldest} or newer (docs/gpu.md)"
    return found
