"""How the native library comes to be: compiler, flags, name and place, and a wheel with it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from latte.ops import cpp_backend
from latte.ops.cpp_backend import build

ROOT = Path(__file__).parents[3]
INCLUDE = Path(torch.__file__).parent / "include"


SOURCE = 'extern "C" __attribute__((visibility("default"))) int number() { return NUMBER; }\n'


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A folder with one small source, which is compiled in the place of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text(SOURCE.replace("NUMBER", "7"))
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    for name in ("LATTE_NATIVE", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    # As in pip's build environment, and quicker: the library is loaded without PyTorch.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    return folder


def libraries(folder):
    return sorted(path.name for path in folder.glob("native-*"))


def test_the_name_tells_system_architecture_and_sources(tiny):
    path = build.build_library()
    assert path == tiny / build.library_name() and libraries(tiny) == [path.name]
    assert path.name.startswith(f"native-{sys.platform}-{platform.machine()}-")
    assert ctypes.CDLL(path).number() == 7
    elsewhere = tiny / path.name.replace(platform.machine(), "riscv64")
    elsewhere.touch()  # of another machine that shares this folder
    (tiny / "one.cpp").write_text("// other sources\n")
    assert build.build_library().name != path.name
    assert not path.exists() and elsewhere.exists()


def test_flags_of_the_environment_are_respected(tiny, monkeypatch):
    (tiny / "one.cpp").write_text(SOURCE)
    monkeypatch.setenv("CXXFLAGS", "-DNUMBER=8")
    assert ctypes.CDLL(build.build_library()).number() == 8
    monkeypatch.setenv("LDFLAGS", "-lno_such_library")
    build.build_library()  # which is there
    with pytest.raises(build.BuildError, match="no_such_library"):
        build.build_library(force=True)


def test_what_cannot_be_loaded_is_no_success(tiny, capsys):
    (tiny / "one.cpp").write_text("void nowhere();\nvoid call() { nowhere(); }\n")
    build.main([])
    said = capsys.readouterr().out
    assert said.startswith("no native CPU kernels") and "nowhere" in said and said.count("\n") == 1
    assert libraries(tiny) == []


def test_a_library_that_is_there_but_does_not_load_is_built_anew(tiny, tmp_path):
    path = tiny / build.library_name()
    path.write_text("damaged")
    stand_in = build._stand_in(build.find_compiler(), tmp_path)
    torch = f"import ctypes\nctypes.CDLL({str(stand_in)!r}, ctypes.RTLD_GLOBAL)\n"
    (tmp_path / "hidden" / "torch.py").write_text(torch)
    assert build.build_library() == path and ctypes.CDLL(path).number() == 7


def test_two_builds_at_once_do_not_meet(tiny, monkeypatch):
    both, copy = threading.Barrier(2, timeout=60), build.shutil.copy

    def slow_copy(*args):
        copy(*args)
        both.wait()

    monkeypatch.setattr(build.shutil, "copy", slow_copy)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(build.compile_library, tiny) for _ in range(2)]
        assert {x.result() for x in done} == {tiny / build.library_name()}
    assert libraries(tiny) == [build.library_name()]


def read_only(monkeypatch, *folders):
    """Nothing can be written there, also not by root."""
    temporary = build.tempfile.TemporaryFile

    def refuse(dir):
        if dir in folders:
            raise PermissionError(13, "Permission denied", str(dir))
        return temporary(dir=dir)

    monkeypatch.setattr(build.tempfile, "TemporaryFile", refuse)


def test_where_the_sources_cannot_be_written_the_users_folder_is_taken(tiny, monkeypatch):
    read_only(monkeypatch, tiny)
    path = build.build_library()
    assert path == tiny.parent / "cache" / "native" / build.library_name()
    assert libraries(tiny) == [] and build.found_libraries() == [path]
    assert build.build_library() == path
    if os.getuid() == 0:  # who else can give files away?
        os.chown(path, 12345, -1)
        assert build.found_libraries() == []


def test_that_nothing_can_be_written_is_found_out_before_compiling(tiny, monkeypatch):
    read_only(monkeypatch, *build.folders())
    monkeypatch.setattr(build, "compile_library", lambda folder: pytest.fail("compiled"))
    with pytest.raises(build.BuildError, match=f"not to be written: {tiny} and "):
        build.build_library()


def test_the_users_folder(monkeypatch):
    monkeypatch.delenv("LATTE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/here")
    assert build.folders() == [build.HERE, Path("/here/latte/native")]
    monkeypatch.setenv("LATTE_CACHE", "~/there")
    monkeypatch.setenv("HOME", "/home/me")
    assert build.folders() == [build.HERE, Path("/home/me/there/native")]
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert build.folders() == [build.HERE]


@pytest.mark.absent
def test_on_macos(tiny, monkeypatch):
    """What a compiler there is told, and what the wheel is called: macOS itself is not here."""
    compiler, log = tiny.parent / "compiler", tiny.parent / "log"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then : > "$2"; fi; shift; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "macosx-10.9-universal2")
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "12")
    path = build.compile_library(tiny, check=False)
    assert re.fullmatch(r"native-darwin-arm64-[0-9a-f]{12}\.dylib", path.name)
    lines = log.read_text().splitlines()
    assert len(lines) == 3  # the stand-in, the source, the library
    assert all("-arch arm64 -mmacosx-version-min=12" in line for line in lines)
    assert "-undefined dynamic_lookup" in lines[2] and "-Wl," not in "".join(lines)
    assert load_hook(monkeypatch).platform_tag() == "macosx_12_0_arm64"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(build.BuildError, match="macOS on ARM64, this is darwin on x86_64"):
        build.compile_library(tiny)


def test_huge_pages_are_asked_for_only_where_there_are_such(tmp_path):
    source = tmp_path / "without.cpp"
    source.write_text("#include <sys/mman.h>\n#undef MADV_HUGEPAGE\n#include <torch_abi.h>\n")
    command = [*build.find_compiler(), "-std=c++17", "-fsyntax-only", "-I", str(build.HERE)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.absent
@pytest.mark.parametrize("wrong", ["/bin/false", "/no/such/compiler"])
def test_without_a_compiler_there_is_one_line(tiny, monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.setenv("CXX", wrong)
    with pytest.raises(build.BuildError) as told:
        build.compile_library(tiny)
    assert wrong in str(told.value) and "\n" not in str(told.value)
    assert build.main([]) == 0 and libraries(tiny) == []
    said = capsys.readouterr().out
    assert said.startswith("no native CPU kernels, ") and said.count("\n") == 1


@pytest.mark.absent
def test_what_an_installation_wants(tiny, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/bin/false")
    for mode, code, said in (
        ("require", 1, "error: LATTE_NATIVE=require, no native CPU kernels: /bin/false failed"),
        ("skip", 0, "no native CPU kernels: LATTE_NATIVE=skip"),
        ("always", 1, "error: LATTE_NATIVE must be one of auto, require, skip, got 'always'"),
    ):
        monkeypatch.setenv("LATTE_NATIVE", mode)
        assert build.main([]) == code
        out, err = capsys.readouterr()
        assert (out + err).startswith(said) and (out + err).count("\n") == 1
    assert libraries(tiny) == []


def load_hook(monkeypatch):
    """The file of the package's build hook, without hatchling."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = type(
        "Hook", (), {"__init__": lambda self, root, app: vars(self).update(root=root, app=app)}
    )
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(monkeypatch):
    """The package's build hook; what it says is in ``said``."""
    said = []

    class App:
        display_warning = said.append

        @staticmethod
        def abort(message):
            said.append(message)
            raise SystemExit(1)

    made = load_hook(monkeypatch).CustomBuildHook(str(ROOT), App())
    made.said = said
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.delenv("LATTE_NATIVE", raising=False)
    return made


@pytest.mark.absent
def test_the_build_hook_goes_on_without_a_compiler(hook):
    data = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}} and len(hook.said) == 1 and "/bin/false" in hook.said[0]


@pytest.mark.absent
def test_the_build_hook_does_as_it_is_told(hook, monkeypatch):
    data = {"force_include": {}}
    monkeypatch.setenv("LATTE_NATIVE", "skip")
    hook.initialize("standard", data)
    hook.finalize("standard", data, "")
    assert data == {"force_include": {}} and hook.said == []
    for mode, told in (("require", "LATTE_NATIVE=require.*/bin/false"), ("x", "got 'x'")):
        monkeypatch.setenv("LATTE_NATIVE", mode)
        with pytest.raises(SystemExit):
            hook.initialize("standard", data)
        assert re.search(told, hook.said.pop()) and hook.said == []


def test_the_stand_in_has_all_of_pytorch_that_the_library_needs(tiny, monkeypatch, tmp_path):
    """So that pip's build environment, which has no PyTorch, can try what it made."""
    monkeypatch.setattr(build, "HERE", Path(build.__file__).parent)
    build.check_loads(cpp_backend.LIBRARY, build._stand_in(build.find_compiler(), tmp_path))


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
            env={**os.environ, "CXX": compiler, "LATTE_NATIVE": "auto"},
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
