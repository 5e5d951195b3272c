"""`latte doctor`: a report that never fails, for people and for programs."""

import json
import sys

import pytest
import torch
import transformers

import latte
from latte.cli import main
from latte.ops import cpp_backend, default_backend
from tests.helpers import ROOT, python


@pytest.fixture
def found(capsys):
    assert main(["doctor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_tells_versions_threads_malloc_and_gpu(found):
    versions = found["versions"]
    assert versions["latte"] == latte.__version__ and versions["folder"] == str(ROOT / "src/latte")
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["transformers"] == transformers.__version__ and "triton" in versions
    assert versions["python"] == sys.version.split()[0]
    if (ROOT / ".git").exists():
        assert versions["commit"].removesuffix("-dirty").isalnum()
    assert found["threads"]["PyTorch"] == torch.get_num_threads()
    assert found["malloc"]["keeps freed memory"] is False  # LATTE_KEEP_MEMORY=0 of these tests
    assert found["malloc"]["LATTE_KEEP_MEMORY"] == "0"
    assert found["gpu"]["available"] is torch.cuda.is_available() and "ptxas" in found["gpu"]
    assert not [name for name, section in found.items() if "error" in section]


def test_it_tells_which_backend_serves(found):
    native = "cpu" if cpp_backend.ABSENT is None else "torch"
    backends = found["backends"]
    assert backends["default"]["cpu"] == default_backend()
    if backends["named"] is None:
        assert backends["rg_lru"]["cpu"] == backends["latte_attention"]["cpu"] == native
    assert backends["linear_attention"]["cpu"] == "torch"


def test_what_fails_is_said_and_stops_nothing(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no driver\nat all")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setenv("LATTE_BACKEND", "nonsense")
    monkeypatch.setattr("latte.ops.backend.default", "nonsense")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "error  RuntimeError: no driver at all" in out and "\nthreads\n" in out


def test_kernels_that_are_required_and_absent_are_an_error():
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
    done = python("-c", code, LATTE_NATIVE="require")
    native = json.loads(done.stdout)["native"]
    assert native["kernels"] is False and native["LATTE_NATIVE"] == "require"
    line = f"latte: error: LATTE_NATIVE=require: {native['why not']}\n"
    assert done.stderr == line * 2 and "riscv64" in line
