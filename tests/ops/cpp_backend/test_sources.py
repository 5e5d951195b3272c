"""The C++ itself: no warnings, at any level of optimisation."""

from __future__ import annotations

import subprocess

import pytest

from latte.ops.cpp_backend import build

SOURCES = sorted(build.HERE.glob("*.cpp"))
# Vectors are passed by value between functions of one file; clang's pragmas are not GCC's.
IGNORED = ("-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-unknown-warning-option")
FLAGS = ("-std=c++17", "-O1", "-fPIC", *IGNORED)


def compile_one(source, *more):
    command = [*build.find_compiler(), *FLAGS, *more, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_warnings(source):
    compile_one(source, "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fsyntax-only")


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_compiles_without_the_best_optimisations(source, tmp_path):
    """At -O1 no function that must be inlined may have its address taken."""
    compile_one(source, "-c", "-o", str(tmp_path / "one.o"))
