"""The reference says what the code says: names, fields, presets, recipe keys."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re

import pytest

import latte
from latte.conversion.config import CONFIGS, MacchiatoFields
from latte.conversion.modeling import FAMILIES
from latte.models import PRESETS, SIZES, LatteConfig, count_parameters, preset_config
from latte.ops.backend import BACKENDS
from latte.train.layers import LayersSection
from latte.train.recipe import (
    ComparisonSection,
    ConversionSection,
    DataSection,
    ModelSection,
    TrainingSection,
)

PAGES = {
    "latte.ops": "docs/reference/ops.md",
    "latte.layers": "docs/reference/layers.md",
    "latte.models": "docs/reference/models.md",
    "latte.conversion": "docs/reference/conversion.md",
    "latte.data": "docs/reference/data.md",
    "latte.parallel": "docs/context-parallel.md",
}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
MLPS = {"gelu": "GELU", "swiglu": "SwiGLU"}
INPUTS = {"none": "x", "conv": "convolution", "rglru": "RG-LRU"}


def directives(text):
    """The names whose docstrings a page shows."""
    return re.findall(r"^::: ([\w.]+)$", text, re.M)


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_is_there(module, read):
    """By its docstring, or in words where it has none of its own: tables, and PyTorch's classes."""
    text = read(PAGES[module]).text
    home = importlib.import_module(module)
    shown = {name.removeprefix(f"{module}.") for name in directives(text)}
    assert shown <= set(home.__all__)
    for name in set(home.__all__) - shown:
        assert f"`{name}`" in text, name
    assert all(inspect.getdoc(getattr(home, name)) for name in shown)


def test_names_at_the_top(read):
    documented = "\n".join(read(page).text for page in PAGES.values())
    modules = {*latte._MODULES, "__version__"}
    missing = [n for n in latte.__all__ if n not in modules and f"{n}" not in documented]
    assert not missing


def preset_rows(document):
    return next(
        table for table in document.tables() if "preset" in table[0] and "mixer" in table[0]
    )


@pytest.mark.parametrize("name", ["README.md", "docs/reference/models.md"])
def test_presets_are_those_of_the_code(name, read):
    rows = preset_rows(read(name))
    assert [row["preset"].strip("`") for row in rows] == list(PRESETS)
    for row in rows:
        config = preset_config(row["preset"].strip("`"), "paper")
        assert row == {
            "preset": row["preset"],
            "mixer": f"`{config.mixer}`",
            "q, k logits from": INPUTS[config.latent_input],
            "window": str(config.sliding_window or "-"),
            "norm, MLP": f"{NORMS[config.norm]}, {MLPS[config.mlp]}",
            "positions": config.position,
            "parameters": f"{count_parameters(config) / 1e6:.2f}M",
        }


def test_sizes_are_those_of_the_code(read):
    rows = next(t for t in read("docs/reference/models.md").tables() if "size" in t[0])
    assert [row["size"].strip("`") for row in rows] == list(SIZES)
    for row in rows:
        config = preset_config("latte-r-swa++", row["size"].strip("`"))
        assert [
            row[key] for key in ("hidden", "layers", "heads", "MLP", "latents", "vocabulary")
        ] == [
            str(value)
            for value in (
                config.hidden_size,
                config.num_hidden_layers,
                config.num_attention_heads,
                config.intermediate_size,
                config.num_latents,
                config.vocab_size,
            )
        ]
        assert row["`latte-r-swa++`"] == f"{count_parameters(config) / 1e6:.2f}M"


def test_config_fields_and_defaults(read):
    rows = next(t for t in read("docs/reference/models.md").tables() if "field" in t[0])
    documented = {row["field"].strip("`"): row["default"] for row in rows}
    own = {
        field.name: str(field.default)
        if not isinstance(field.default, str)
        else f"'{field.default}'"
        for field in dataclasses.fields(LatteConfig)
        if field.name in LatteConfig.__annotations__
    }
    assert documented == own


def test_converted_models_are_those_of_the_code(read):
    tables = read("docs/reference/conversion.md").tables()
    families = next(t for t in tables if "converted" in t[0])
    assert [tuple(cell.strip("`") for cell in row.values()) for row in families] == [
        (family, CONFIGS[family].model_type, model.__name__)
        for family, (_, model) in FAMILIES.items()
    ]
    fields = next(t for t in tables if "added field" in t[0])
    assert {row["added field"].strip("`"): row["default"] for row in fields} == {
        field.name: repr(field.default) for field in dataclasses.fields(MacchiatoFields)
    }


@pytest.mark.parametrize(
    "section",
    [
        *(ModelSection, DataSection, TrainingSection, ComparisonSection),
        *(ConversionSection, LayersSection),
    ],
)
def test_recipe_keys_are_those_of_the_code(section, read):
    title = section.__name__.removesuffix("Section").lower()
    text = read("docs/guide.md").text.split(f"\n`{title}`\n")[1].lstrip().split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(section))
    for names, default, _ in rows:
        for name, shown in zip(
            re.findall(r"`(\w+)`", names), re.split(r", (?![^\[]*\])", default), strict=False
        ):
            value = getattr(section(), name)
            if isinstance(value, bool):
                assert shown == str(value).lower(), name
            elif isinstance(value, int | float):
                assert float(shown) == value, name
            elif value:
                assert shown.strip("`") == str(value), name


def test_every_backend_is_named_where_one_is_chosen(read):
    rows = [
        *re.findall(r"^\| `backend` .*", read("docs/reference/ops.md").text, re.M),
        *re.findall(r"^\| `--backend` .*", read("docs/reference/command-line.md").text, re.M),
    ]
    assert len(rows) == 2
    for row in rows:
        assert all(re.search(rf'`"?{name}"?`', row) for name in BACKENDS), row
