"""Imports point one way: ops <- layers <- models <- conversion <- experiments <- cli.

And data <- experiments.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "latte"
MAY_IMPORT = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "data": set(),
    "conversion": {"ops", "layers", "models"},
    "experiments": {"ops", "layers", "models", "conversion", "data"},
    "cli": {"ops", "layers", "models", "conversion", "data", "experiments"},
}
# Third-party packages that only some parts may touch, anywhere in a file.
RESERVED = {
    "transformers": {"models", "conversion", "data", "experiments"},
    "datasets": {"data"},
    "accelerate": {"experiments"},
    "tokenizers": {"conversion", "data"},
    "matplotlib": {"experiments"},
    "lm_eval": {"experiments"},
    "peft": {"experiments"},
}
FILES = sorted(path for part in MAY_IMPORT for path in (SOURCE / part).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth of its code."""
    package = ("latte", *path.relative_to(SOURCE).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            root = ".".join([*base, *([node.module] if node.module else [])])
            names |= {root, *(f"{root}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    part = path.relative_to(SOURCE).parts[0]
    names = imported(path)
    for name in names:
        pieces = name.split(".")
        if pieces[0] == "latte" and len(pieces) > 1 and pieces[1] in MAY_IMPORT:
            assert pieces[1] == part or pieces[1] in MAY_IMPORT[part], f"{part} imports {name}"
        if pieces[0] in RESERVED:
            assert part in RESERVED[pieces[0]], f"{part} imports {name}"
    if part == "ops":
        third = {n.split(".")[0] for n in names} - {"latte", "torch", "triton", "__future__"}
        assert third <= {"math", "typing", "collections", "functools", "contextlib", "os"}, third


def test_files_stay_small():
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > 500}
    assert not long
