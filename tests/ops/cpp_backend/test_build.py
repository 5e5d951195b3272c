"""The native library: who serves where it is there, where it is not, and how it comes to be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers import randn

from latte.ops import causal_conv1d, cpp_backend, rg_lru, use_backend
from latte.ops.cpp_backend import build

ROOT = Path(__file__).parents[3]
INCLUDE = Path(torch.__file__).parent / "include"


def conv(**options):
    return causal_conv1d(randn(1, 5, 2), randn(2, 3), **options)[0]


def test_it_serves_cpu_tensors_unless_somebody_says_otherwise():
    assert cpp_backend.serves(randn(1))
    with use_backend("torch"):
        torch_says = conv()
    assert torch.equal(conv(), conv(backend="cpu"))
    torch.testing.assert_close(conv(), torch_says)
    x = torch.zeros(1, 4, 2, device="meta")
    with pytest.raises(ValueError, match="'cpu' is not available for tensors on meta"):
        rg_lru(x, x, x, torch.zeros(2, device="meta"), backend="cpu")


@pytest.mark.absent
def test_without_the_library_pytorch_serves_and_asking_for_it_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(cpp_backend, "ABSENT", "the native kernels are not built: python -m x")
    torch.testing.assert_close(conv(), conv(backend="torch"), rtol=0, atol=0)
    with pytest.raises(ValueError, match="backend 'cpu' is not available here: the native"):
        conv(backend="cpu")


@pytest.mark.absent
def test_without_a_compiler_there_is_one_line(monkeypatch, tmp_path, capsys):
    for wrong in ("/bin/false", "/no/such/compiler"):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(build.BuildError) as told:
            build.compile_library(tmp_path)
        assert wrong in str(told.value) and "\n" not in str(told.value)
    monkeypatch.setattr(build, "library_name", lambda: "native-other.so")
    build.main()
    assert capsys.readouterr().out.startswith("no native CPU kernels, ") and not any(
        tmp_path.iterdir()
    )


@pytest.mark.absent
def test_the_build_hook_goes_on_without_a_compiler(monkeypatch):
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = type(
        "Hook", (), {"__init__": lambda self, root, app: vars(self).update(root=root, app=app)}
    )
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = []

    class App:
        display_warning = said.append

    hook = module.CustomBuildHook(str(ROOT), App())
    monkeypatch.setenv("CXX", "/bin/false")
    data = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}} and len(said) == 1 and "/bin/false" in said[0]


def test_declarations_are_pytorchs(tmp_path):
    """The stable C interface is declared anew: a difference from the headers does not compile."""
    source = tmp_path / "both.cpp"
    source.write_text('#include <torch/csrc/stable/c/shim.h>\n#include "torch_abi.h"\n')
    places = ["-I", str(INCLUDE), "-I", str(build.HERE)]
    command = [*build.find_compiler(), "-std=c++17", "-fsyntax-only", *places, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.absent
def test_a_wheel_carries_the_library_or_is_pure(tmp_path):
    """A real `pip wheel`, isolated, with a compiler and without a working one."""
    names = {}
    for kind, compiler in (("native", os.environ.get("CXX", "g++")), ("pure", "/bin/false")):
        command = ["pip", "wheel", "-v", "--no-deps", "-w", str(tmp_path / kind), str(ROOT)]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, "CXX": compiler},
            capture_output=True,
            text=True,
        )
        if "hatchling" in done.stderr and done.returncode:
            pytest.skip("pip cannot fetch hatchling here")
        assert done.returncode == 0, done.stderr
        names[kind] = next((tmp_path / kind).iterdir()).name
        assert (done.stdout + done.stderr).count("built without the native CPU kernels") == (
            kind == "pure"
        )
    assert "-py3-none-linux_" in names["native"] and names["pure"].endswith("-py3-none-any.whl")
