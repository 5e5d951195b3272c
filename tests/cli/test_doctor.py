"""`latte doctor`: a report that never fails, for people and for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import latte
from latte.cli import main
from latte.lab import doctor
from latte.ops import cpp_backend, default_backend, use_backend

SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def found(capsys: Any) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_tells_versions_threads_malloc_and_gpu(found: dict[str, Any]) -> None:
    versions = found["versions"]
    assert versions["latte"] == latte.__version__ and versions["folder"] == str(SOURCES / "latte")
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["transformers"] == transformers.__version__ and "triton" in versions
    assert versions["python"] == sys.version.split()[0]
    if (SOURCES.parent / ".git").exists():
        assert versions["commit"].removesuffix("-dirty").isalnum()
    assert found["threads"]["PyTorch"] == torch.get_num_threads()
    assert found["malloc"]["keeps freed memory"] is False  # LATTE_KEEP_MEMORY=0 of these tests
    assert found["malloc"]["LATTE_KEEP_MEMORY"] == "0"
    assert found["gpu"]["available"] is torch.cuda.is_available() and "ptxas" in found["gpu"]
    assert not [name for name, section in found.items() if "error" in section]


def test_it_tells_that_the_assembler_is_old(monkeypatch: Any) -> None:
    monkeypatch.setattr("latte.ops.triton_backend.launch.assembler", lambda: "12.8")
    assert doctor.report()["gpu"]["ptxas"].startswith("12.8: on an H100 expected 12.9 or newer")


def test_it_tells_which_backend_serves(found: dict[str, Any]) -> None:
    native = "cpu" if cpp_backend.ABSENT is None else "torch"
    backends = found["backends"]
    assert backends["default"]["cpu"] == default_backend()
    if backends["named"] is None:
        assert backends["rg_lru"]["cpu"] == backends["latte_attention"]["cpu"] == native
    assert backends["linear_attention"]["cpu"] == "torch"


def test_it_tells_the_backend_that_was_named() -> None:
    with use_backend("reference"):
        backends = doctor.report()["backends"]
    assert backends["named"] == "reference" and backends["rg_lru"]["cpu"] == "reference"
    with use_backend("triton"):
        backends = doctor.report()["backends"]
    assert backends["linear_attention"]["cpu"] == "torch"
    assert backends["rg_lru"]["cpu"].startswith(("none: rg_lru: backend 'triton'", "triton"))


def test_it_tells_of_the_native_library(monkeypatch: Any) -> None:
    path = Path("/somewhere/native.so")
    monkeypatch.setattr(cpp_backend, "LIBRARY", path)
    monkeypatch.setattr(cpp_backend, "ABSENT", None)
    native = doctor.report()["native"]
    assert native["kernels"] is True and native["library"] == str(path)
    known = ("avx512, bf16 in pairs", "avx512", "avx2", "baseline")
    assert native["instructions"] in known
    monkeypatch.setattr(cpp_backend, "ABSENT", "they are not built; this builds them: x")
    native = doctor.report()["native"]
    assert native["kernels"] is False and "library" not in native
    assert native["why not"] == "they are not built; this builds them: x"


def test_for_reading(capsys: Any) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^  latte +{latte.__version__}$", out, re.M) and "\nbackends\n" in out
    assert "Traceback" not in out


def test_what_fails_is_said_and_stops_nothing(monkeypatch: Any, capsys: Any) -> None:
    def broken() -> Any:
        raise RuntimeError("no driver\nat all")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setenv("LATTE_BACKEND", "nonsense")
    monkeypatch.setattr("latte.ops.backend._default", "nonsense")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "error  RuntimeError: no driver at all" in out and "\nthreads\n" in out


def test_kernels_that_are_required_and_absent_are_an_error() -> None:
    """After the report, in one line; the same line stops every other command at once."""
    code = (
        "import platform, sys; platform.machine = lambda: 'riscv64'\n"
        "from latte.cli import main\n"
        "from latte.lab.command_line import exit_code\n"
        "doctor = main(['doctor', '--json'])\n"
        "for name in [x for x in sys.modules if x.startswith('latte.ops.cpp_backend')]:\n"
        "    del sys.modules[name]\n"
        "def work(): import latte.ops.cpp_backend\n"
        "assert (doctor, exit_code('latte', work, '')) == (2, 2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "LATTE_NATIVE": "require"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    native = json.loads(done.stdout)["native"]
    assert native["kernels"] is False and native["LATTE_NATIVE"] == "require"
    line = f"latte: error: LATTE_NATIVE=require: {native['why not']}\n"
    assert done.stderr == line * 2 and "riscv64" in line
