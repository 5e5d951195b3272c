"""The rooms import one way, and no files import in a circle.

The library: ops <- layers <- models <- {conversion, parallel}. The workbench, lab, on top of it:
{baselines, data, machine} <- train <- evaluate <- {compare, inspect}; then serve <- cli. What is
outside of the package imports it: {experiments, examples}.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = ("experiments", "examples")  # of the package, which they import
MODEL = {"ops", "layers", "models"}
LIBRARY = MODEL | {"conversion", "parallel"}
TOOLS = {"lab.results", "lab.progress", "lab.machine", "lab.malloc", "lab.command_line"}
TRAIN = LIBRARY | TOOLS | {"lab.data"}
EVALUATE = TRAIN | {"lab.train"}
MAY_IMPORT = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "conversion": MODEL,
    "parallel": MODEL,
    "lab.results": MODEL,
    "lab.progress": set(),
    "lab.malloc": {"ops"},
    "lab.machine": MODEL | {"lab.malloc"},
    "lab.command_line": MODEL,
    "lab.doctor": {"ops", "lab.malloc"},
    "lab.baselines": MODEL,
    "lab.data": MODEL | TOOLS | {"conversion"},
    "lab.train": TRAIN,
    "lab.evaluate": EVALUATE,
    "lab.compare": EVALUATE | {"lab.evaluate"},
    "lab.inspect": EVALUATE | {"lab.evaluate"},
    "serve": LIBRARY | TOOLS | {"lab.data", "lab.evaluate"},
    "cli": EVALUATE
    | {"lab.evaluate", "lab.compare", "lab.inspect", "lab.baselines", "lab.doctor", "serve"},
}
# Third-party packages that only some rooms may touch, anywhere in a file.
RESERVED = {
    "transformers": set(MAY_IMPORT) - {"ops", "layers", "lab.machine", "cli"},
    "datasets": {"lab.data"},
    "accelerate": {"lab.train"},
    "tokenizers": {"conversion", "lab.data"},
    "gguf": {"conversion"},
    "matplotlib": {"lab.evaluate", "lab.compare", "lab.inspect"},
    "lm_eval": {"lab.evaluate"},
    "peft": {"lab.train"},
    "uvicorn": {"serve"},
    "fastapi": {"serve"},
    "prometheus_client": {"serve"},
    "vllm": set(),  # integrations/vllm, a package of its own
    "latte_vllm": set(),
}


def module_of(path: Path) -> str:
    """`latte.ops.api` for src/latte/ops/api.py; a package for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_of(path): path
    for folder in ("src/latte", *OUTSIDE)
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def room_of(module: str) -> str:
    """`ops`, `lab.data`, `experiments`: the part that the rules are about."""
    top, *rest = module.split(".")
    if top != "latte" or not rest:
        return top
    return ".".join(rest[:2]) if rest[0] == "lab" else rest[0]


def imported(module: str) -> set[str]:
    """Dotted names of all that a file imports, at any depth of its code.

    What a package names for type checkers counts too: it loads when it is asked for.
    """
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            root = ".".join([*base, *([node.module] if node.module else [])])
            found = {f"{root}.{alias.name}" for alias in node.names}
            names |= found if found <= FILES.keys() else {root, *found}
    return names


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    room = room_of(module)
    if room not in MAY_IMPORT:
        return
    allowed = MAY_IMPORT[room] | {room}
    names = imported(module)
    for name in names:
        top = name.split(".")[0]
        assert top not in OUTSIDE, f"{room} imports {name}"
        if top == "latte" and room_of(name) in MAY_IMPORT:
            assert room_of(name) in allowed, f"{room} imports {name}"
        if top in RESERVED:
            assert room in RESERVED[top], f"{room} imports {name}"
    if room == "ops":
        third = {n.split(".")[0] for n in names} - {"latte", "torch", "triton"}
        assert third <= sys.stdlib_module_names, third


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1 or node in arrows[node]:
                found.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


def test_no_files_import_in_a_circle():
    arrows = {}
    for module in FILES:
        found = {longest(name) for name in imported(module)}
        arrows[module] = found - {module, None}
    assert not circles(arrows)


def longest(name: str) -> str | None:
    """The file that an imported name lives in."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


def test_torchruns_variables_are_read_in_one_place():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    readers = {
        module
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert readers == {"latte.ops.processes"}


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_the_package_has_few_rooms_and_each_has_a_rule():
    """Ten at most on the top plan; the library's five rooms never import the workbench's."""
    entries = {p.name for p in (ROOT / "src/latte").iterdir() if p.name != "__pycache__"}
    assert len(entries - {"py.typed"}) <= 10
    rooms = {room_of(module) for module in FILES} - {*OUTSIDE, "latte", "lab", "errors"}
    assert rooms == MAY_IMPORT.keys()
    assert all(MAY_IMPORT[room] <= LIBRARY for room in LIBRARY)
