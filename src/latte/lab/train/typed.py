"""Plain mappings (YAML, dotted overrides) into nested dataclasses, with one clear line per mistake.

Only what recipes need: int, float, bool, str, `X | None`, `list[X]`, `Sequence[X]` (a tuple),
`dict[str, Any]`, `Literal[...]` and nested dataclasses. Nothing here imports torch, so that a
recipe is checked before anything slow starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from latte.errors import LatteError

D = TypeVar("D")
# What reading YAML raises: also for a number of thousands of digits, or too many brackets.
NOT_READ = (yaml.YAMLError, ValueError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, a date is text, and a key stands once in a section."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping. `where` names the source in the error."""
    try:
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader: builds plain values alone
    except NOT_READ as error:
        detail = " ".join(str(error).split())
        raise LatteError(f"{where} is not valid YAML: {detail}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise LatteError(
            f"{where}: expected a mapping of sections, got {type(content).__name__} {content!r}"
        )
    return content


def apply_override(tree: dict[str, Any], assignment: str) -> None:
    """Set `a.b.c=value` in a nested mapping, in place; the value is read as YAML."""
    key, equals, value = assignment.partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise LatteError(
            f"override {assignment!r}: expected key=value with a dotted key, such as"
            " training.max_steps=200"
        )
    try:
        parsed = yaml.load(value, Loader=_Loader) if value else ""
    except NOT_READ:
        parsed = value
    if isinstance(parsed, str) and " #" in value and value[0] not in "\"'":
        parsed = value  # on a command line this begins no comment
    *sections, last = key.split(".")
    node = tree
    for depth, section in enumerate(sections):
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise LatteError(
                f"override {assignment!r}: {'.'.join(sections[: depth + 1])} is a value"
                f" ({child!r}), not a section"
            )
        node = child
    node[last] = parsed


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, `over` winning key by key."""
    result = dict(base)
    for key, value in over.items():
        previous = result.get(key)
        both = isinstance(previous, Mapping) and isinstance(value, Mapping)
        result[key] = merge(previous, value) if both else value  # type: ignore[arg-type]
    return result


def build(kind: type[D], values: Any, path: str = "") -> D:
    """Build the dataclass `kind` from a mapping.

    Raises LatteError naming the dotted key, what was expected and, for an unknown key, the
    nearest valid one.
    """
    if not isinstance(values, Mapping):
        raise LatteError(f"{path or 'recipe'}: expected a section, got {_show(values)}")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in names:
            nearest = _nearest(str(key), names, prefix, hints)
            raise LatteError(f"unknown key {f'{prefix}{key}'!r}{nearest}")
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        wanted = field.default is field.default_factory is dataclasses.MISSING
        if wanted and field.name in names and field.name not in values:
            full = f"{prefix}{field.name}"
            raise LatteError(f"missing key {full!r}: expected {describe(hints[field.name])}")
    return kind(**{key: convert(hints[key], values[key], f"{prefix}{key}") for key in values})


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type `hint`, or a LatteError that names `path`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if not _fits(hint, value):
        close = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
        nearest = f"; did you mean {close[0]!r}?" if close and origin is Literal else ""
        raise LatteError(f"{path}: expected {describe(hint)}, got {_show(value)}{nearest}")
    if origin in (Union, types.UnionType):
        return convert(next(a for a in arguments if _fits(a, value)), value, path)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type, type-var]
    if origin in (list, Sequence):
        items = [convert(arguments[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
        return items if origin is list else tuple(items)
    if origin is dict:
        return dict(value)
    return float(value) if hint is float else value


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of an annotated type, its parts aside."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(option, value) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in (list, Sequence):
        return isinstance(value, Sequence) and not isinstance(value, str)
    if origin is dict or dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    if hint in (int, float):  # a bool is an int, but not where a number is meant
        kinds = int | float if hint is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def describe(hint: Any) -> str:
    """A type annotation in words for an error line."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("nothing (null)" if a is type(None) else describe(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in arguments)
    if origin in (list, Sequence):
        return f"a list of {describe(arguments[0])}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a section"
    words = {int: "an integer (int)", float: "a number (float)", str: "text (str)"}
    return {**words, bool: "true or false (bool)"}.get(hint, str(hint))


def _show(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {value!r}"


def _nearest(key: str, names: list[str], prefix: str, hints: dict[str, Any]) -> str:
    by_name = {name: prefix + name for name in names}
    for name in names:  # also look one level down: `max_steps` means `training.max_steps`
        if dataclasses.is_dataclass(hints[name]):
            for field in dataclasses.fields(hints[name]):
                by_name.setdefault(field.name, f"{prefix}{name}.{field.name}")
    close = difflib.get_close_matches(key, list(by_name), n=1, cutoff=0.5)
    if close:
        return f"; the nearest valid key is {by_name[close[0]]!r}"
    return f"; valid keys are {', '.join(prefix + name for name in names)}"
