"""The native library of a running process: who serves where it is there, and what is said where it
is not.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

from latte.errors import LatteError
from latte.layers import RMSNorm
from latte.ops import causal_conv1d, cpp_backend, notices, rg_lru, step, use_backend
from latte.ops.cpp_backend import build, library
from tests.ops.helpers import randn

SOURCES, SYSTEMS = Path(build.__file__).parent, build.SYSTEMS


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
    monkeypatch.setattr(cpp_backend, "WARNS", False)
    torch.testing.assert_close(conv(), conv(backend="torch"), rtol=0, atol=0)
    with pytest.raises(ValueError, match="backend 'cpu' is not available here: the native"):
        conv(backend="cpu")


# ---- loading


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A folder with a source and no library, on a system for which the kernels are made."""
    (tmp_path / "one.cpp").write_text("// a source\n")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "SYSTEMS", {(sys.platform, build.platform.machine()): ".so"})
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LATTE_NATIVE", raising=False)
    monkeypatch.setenv("CXX", "c++")
    return tmp_path


@pytest.mark.absent
def test_why_it_is_not_there(place, monkeypatch):
    command = f"; this builds them: {sys.executable} -m latte.ops.cpp_backend"
    assert library.load() == (None, f"the native kernels are not built{command}")
    other = place / build.library_name()
    other.touch()
    (place / "one.cpp").write_text("// changed, as by git pull\n")
    why = f"the native kernels' sources have changed since {other.name} was built{command}"
    assert library.load() == (None, why)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    _, why = library.load()
    assert "no C++ compiler was found" in why and "install one, such as g++, then this" in why
    monkeypatch.setattr(build, "SYSTEMS", {})
    _, why = library.load()
    assert why.startswith("the native kernels are made for Linux") and "builds" not in why


@pytest.mark.absent
def test_the_loaders_reason_is_kept(place):
    """Of a file here, and of one in the user's folder, which is looked at next."""
    files = [folder / build.library_name() for folder in build.folders()]
    files[1].parent.mkdir(parents=True)
    for path in files:
        path.write_text("no library")
    _, why = library.load()
    for path in files:
        with pytest.raises(OSError) as told:
            ctypes.CDLL(path)
        assert f"{path} cannot be loaded: {str(told.value).removeprefix(f'{path}: ')};" in why
    assert why.endswith(f"; this builds them: {sys.executable} -m latte.ops.cpp_backend")


@pytest.mark.absent
def test_what_is_wanted_of_it(place, monkeypatch):
    monkeypatch.setenv("LATTE_NATIVE", "skip")
    assert library.load() == (None, "LATTE_NATIVE=skip") and not library.warns()
    monkeypatch.setenv("LATTE_NATIVE", "require")
    with pytest.raises(LatteError) as told:
        library.load()
    assert str(told.value) == (
        "LATTE_NATIVE=require: the native kernels are not built; this builds them: "
        f"LATTE_NATIVE=auto {sys.executable} -m latte.ops.cpp_backend"
    )
    monkeypatch.setenv("LATTE_NATIVE", "always")
    with pytest.raises(LatteError, match="must be one of auto, require, skip, got 'always'"):
        library.load()
    monkeypatch.setenv("LATTE_NATIVE", "auto")
    assert library.warns()
    monkeypatch.setenv("RANK", "1")  # of torchrun, whose first process speaks
    assert not library.warns()
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(build, "SYSTEMS", {})
    assert not library.warns()


def test_it_is_found_in_the_users_folder(place, monkeypatch):
    """Where the package has the sources alone."""
    (place / "one.cpp").unlink()
    for source in [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]:
        shutil.copy(source, place)
    monkeypatch.setattr(build, "SYSTEMS", SYSTEMS)
    path = build.folders()[1] / build.library_name()
    path.parent.mkdir(parents=True)
    path.symlink_to(cpp_backend.LIBRARY)
    assert library.load() == (path, None)


# ---- the warning


@pytest.fixture
def silent_fallback(monkeypatch):
    """The library is not there, and nothing has been said yet."""
    monkeypatch.setattr(cpp_backend, "ABSENT", "the native kernels are not built; this: x")
    monkeypatch.setattr(cpp_backend, "WARNS", True)
    monkeypatch.setattr(notices, "_given", set())
    monkeypatch.setattr("latte.ops.backend.default", None)


def said(call):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in seen if "native" in str(w.message)]


def norm():
    with torch.no_grad():
        RMSNorm(4, eps=1e-6)(torch.zeros(1, 1, 4))


COULD_BE_NATIVE = {
    "an op": conv,
    "a step of decoding": lambda: step.conv_step(torch.ones(1, 2), torch.ones(2, 3), None,
                                                 torch.zeros(1, 2, 2)),
    "what lies between the ops": norm,
}  # fmt: skip


@pytest.mark.absent
@pytest.mark.parametrize("call", COULD_BE_NATIVE.values(), ids=COULD_BE_NATIVE)
def test_the_first_op_that_could_have_been_native_warns_once(silent_fallback, call):
    told = said(lambda: [call(), call(), conv(), norm()])
    assert told == [
        "latte: PyTorch's operations do the work of the native CPU kernels: the native kernels are"
        " not built; this: x (LATTE_NATIVE=skip: without them, and without this warning)"
    ]


@pytest.mark.absent
def test_it_warns_in_a_compiled_function_too(silent_fallback):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: causal_conv1d(x, w)[0], fullgraph=True, backend="eager")
    x, w = torch.ones(1, 5, 2), torch.ones(2, 3)
    assert len(said(lambda: [compiled(x, w), compiled(x, w)])) == 1


@pytest.mark.absent
def test_nothing_is_said_where_no_native_kernel_is_expected(silent_fallback, monkeypatch):
    x = torch.zeros(1, 4, 2, device="meta")
    assert said(lambda: conv(backend="torch")) == []
    assert said(lambda: rg_lru(x, x, x, torch.zeros(2, device="meta"))) == []
    with use_backend("torch"):
        assert said(lambda: [conv(), norm()]) == []
    monkeypatch.setattr(cpp_backend, "WARNS", False)  # LATTE_NATIVE=skip, another system
    assert said(lambda: [call() for call in COULD_BE_NATIVE.values()]) == []
