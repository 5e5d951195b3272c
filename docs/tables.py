"""Tables of options, recipe keys and public names, written into the pages from the code.

    python docs/tables.py

rewrites every block between ``<!-- generated: NAME -->`` and ``<!-- /generated -->`` of the pages
below. Names, values and defaults of options and keys come from the code. Their meaning is the help
of the option, or the comment of the field. The options of latents have their meaning in
`latte.layers.latent_fields`, and nowhere else. A public name of a reference page gets the first
sentence of its docstring, so that the page can be read in the repository, where nothing fills in
the whole docstrings.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latte.cli.parser import build_parser, meaning_of
from latte.conversion.config import MacchiatoFields
from latte.lab.data.preparing import DataSection
from latte.lab.train.layers import LayersSection
from latte.lab.train.recipe import (
    ComparisonSection,
    ConversionSection,
    ModelSection,
    TrainingSection,
)
from latte.lab.train.stages import EvaluationSection
from latte.layers.latent_fields import ConversionOptions, default_in_words, flag, options_of
from latte.models import LatteConfig

DOCS = Path(__file__).parent
OPTIONS_PAGE = DOCS / "reference/command-line.md"
KEYS_PAGE = DOCS / "reference/recipes.md"
MODULES = ("ops", "layers", "models", "conversion", "data")  # each has a page in reference/
SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "training": TrainingSection,
    "comparison": ComparisonSection,
    "conversion": ConversionSection,
    "layers": LayersSection,
    "evaluation": EvaluationSection,
}


def marked(each: dataclasses.Field[Any]) -> str:
    """The default of an option of latents, in words; text in backticks."""
    words = default_in_words(each)
    return f"`{words}`" if isinstance(each.default, str) else words


def meaning(each: dataclasses.Field[Any]) -> str:
    """What an option of latents is, and what it means that its default is None."""
    none = each.metadata["none"] if each.default is None else ""
    return each.metadata["help"] + (f"; None: {none}" if none else "")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


# ---- options


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = build_parser()
    kinds = next(action for action in parser._actions if action.dest == "command").choices
    assert isinstance(kinds, dict)
    return kinds


def option_rows(name: str, parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """(option, default, meaning) of a command's arguments, as its help lists them."""
    elsewhere = {flag(each): each for each in options_of(ConversionOptions)}  # conversion_table
    rows: list[tuple[str, ...]] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        (meaning, shown), each = meaning_of(action), elsewhere.get(names(action)[0])
        if name == "convert" and each is not None:
            meaning, shown = f"`{each.name}`", marked(each)
        for option in names(action):
            if option.startswith("--no-") and len(names(action)) > 1:
                rows.append((f"`{option}`", "", f"turns `{names(action)[0]}` off"))
            else:
                rows.append((f"`{option}`", shown, meaning))
    return rows


def option_tables() -> dict[str, str]:
    """The arguments of each command; a first table has the options that commands share."""
    rows = {name: option_rows(name, parser) for name, parser in commands().items()}
    users: dict[tuple[str, ...], list[str]] = {}
    for name, each in rows.items():
        for row in each:
            users.setdefault(row, []).append(name)
    shared = {row: by for row, by in users.items() if len(by) > 1 and row[0].startswith("`--")}
    tables = {
        name: table(("argument", "default", "meaning"), [row for row in each if row not in shared])
        for name, each in rows.items()
    }
    head = ("option", "default", "meaning", "of the commands")
    return {"shared": table(head, [(*row, ", ".join(by)) for row, by in shared.items()])} | tables


def names(action: argparse.Action) -> list[str]:
    """What is typed: the long option and its opposite, or the argument's own name."""
    return [text for text in action.option_strings if text.startswith("--")] or [action.dest]


# ---- recipe keys


def comments(section: type) -> dict[str, str]:
    """The comment of each field of a dataclass: beside it, or in the lines above it."""
    found, above = dict[str, str](), list[str]()
    for line in inspect.getsource(section).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        else:
            if named := re.match(r"    (\w+): [^#]*(?:# (.*))?", line):
                found[named[1]] = (named[2] or " ".join(above)).replace("None:", "null:")
            above = []
    return found


def kind(hint: Any) -> str:
    """A field's type as a recipe's reader would say it."""
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in given)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in given if each is not type(None))
    if origin in (list, Sequence) or hint is list:
        return f"list of {kind(given[0])}s" if given else "list"
    if origin is dict or hint is dict:
        return "fields"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(hint, "any")


def yaml_value(value: Any) -> str:
    """A default as YAML has it; nothing for null and for what is empty."""
    if value is None or value == {} or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def key_rows(name: str) -> list[tuple[str, ...]]:
    section = SECTIONS[name]
    elsewhere = {each.name for each in options_of(ConversionOptions)}  # conversion_table
    hints, words, blank = typing.get_type_hints(section), comments(section), section()
    return [
        (
            f"`{field.name}`",
            kind(hints[field.name]),
            yaml_value(getattr(blank, field.name)),
            words[field.name],
        )
        for field in dataclasses.fields(section)
        if name != "conversion" or field.name not in elsewhere
    ]


# ---- options of latents, in Python


def field_table(kind: type) -> str:
    """Name and default of each option of a class; `conversion_table` has their meaning."""
    rows: list[tuple[str, ...]] = [
        (f"`{each.name}`", repr(each.default)) for each in options_of(kind)
    ]
    return table(("field", "default"), rows)


def conversion_table() -> str:
    """The options of `convert` and the fields of a converted model, with the default of each."""
    options, fields = (
        {each.name: each for each in options_of(kind)}
        for kind in (ConversionOptions, MacchiatoFields)
    )
    rows: list[tuple[str, ...]] = [
        (
            f"`{name}`",
            *(repr(held[name].default) if name in held else "-" for held in (options, fields)),
            meaning((fields | options)[name]),
        )
        for name in options | fields
    ]
    return table(("name", "default of the option", "of the field", "meaning"), rows)


# ---- public names


def name_rows(page: Path) -> list[tuple[str, ...]]:
    """(name, what it is) of each name whose docstring a page shows."""
    rows: list[tuple[str, ...]] = []
    for path in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.M):
        module, name = path.rsplit(".", 1)
        found = getattr(importlib.import_module(module), name)
        first = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
        first = re.sub(r":\w+:`([^`]*)`", r"`\1`", first).replace("``", "`")
        rows.append((f"`{name}`", first))
    return rows


# ---- pages


def blocks() -> dict[Path, dict[str, str]]:
    """What stands in each generated block of each page."""
    head = ("key", "value", "default", "meaning")
    keys = {name: table(head, key_rows(name)) for name in SECTIONS}
    pages = {OPTIONS_PAGE: option_tables(), KEYS_PAGE: keys}
    for module in MODULES:
        page = DOCS / f"reference/{module}.md"
        pages[page] = {"names": table(("name", "what it is"), name_rows(page))}
    pages[DOCS / "reference/models.md"] |= {"latents": field_table(LatteConfig)}
    pages[DOCS / "reference/conversion.md"] |= {
        "options": conversion_table(),
    }
    return pages


def written(text: str, parts: dict[str, str]) -> str:
    """A page's text with its generated blocks as they should be."""
    for name, body in parts.items():
        mark = f"<!-- generated: {name} -->"
        pattern = re.compile(re.escape(mark) + r"\n.*?<!-- /generated -->", re.S)
        found = list(pattern.finditer(text))
        if len(found) != 1:
            raise ValueError(f"expected one block {mark} on the page, got {len(found)}")
        whole = f"{mark}\n{body}\n<!-- /generated -->"
        text = text[: found[0].start()] + whole + text[found[0].end() :]
    return text


def main() -> None:
    for page, parts in blocks().items():
        page.write_text(written(page.read_text("utf-8"), parts), "utf-8")


if __name__ == "__main__":
    main()
