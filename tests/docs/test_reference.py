"""The reference says what the code says: names, fields, presets, recipe keys."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import latte
from latte.conversion.config import CONFIGS
from latte.conversion.modeling import FAMILIES
from latte.layers.latent_fields import LatentFields
from latte.models import PRESETS, SIZES, LatteConfig, count_parameters, preset_config
from latte.ops.backend import BACKENDS

ROOT = Path(__file__).parents[2]
PAGES = {
    "latte.ops": "docs/reference/ops.md",
    "latte.layers": "docs/reference/layers.md",
    "latte.models": "docs/reference/models.md",
    "latte.conversion": "docs/reference/conversion.md",
    "latte.lab.data": "docs/reference/data.md",
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


def test_presets_are_those_of_the_code(read):
    rows = preset_rows(read("docs/reference/models.md"))
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
    tables = [t for t in read("docs/reference/models.md").tables() if "field" in t[0]]
    documented = {row["field"].strip("`"): row["default"] for rows in tables for row in rows}
    own = {
        field.name: str(field.default)
        if not isinstance(field.default, str)
        else f"'{field.default}'"
        for field in dataclasses.fields(LatteConfig)
        if field.name in {*LatteConfig.__annotations__, *LatentFields.__annotations__}
    }
    assert documented == own


def test_converted_models_are_those_of_the_code(read):
    tables = read("docs/reference/conversion.md").tables()
    families = next(t for t in tables if "converted" in t[0])
    assert [tuple(cell.strip("`") for cell in row.values()) for row in families] == [
        (family, CONFIGS[family].model_type, model.__name__)
        for family, (_, model) in FAMILIES.items()
    ]


@pytest.fixture(scope="module")
def tables(script_of):
    """The script that writes the tables of options and recipe keys."""
    return script_of("docs/tables.py")


def test_tables_of_options_and_keys_are_fresh(tables):
    """`python docs/tables.py` would change nothing."""
    for page, parts in tables.blocks().items():
        text = page.read_text("utf-8")
        marks = re.findall(r"<!-- generated: (\w+) -->", text)
        assert sorted(marks) == sorted(parts), page
        assert tables.written(text, parts) == text, f"{page}: run python docs/tables.py"


def test_every_option_and_key_has_a_meaning(tables):
    for parts in tables.blocks().values():
        for body in parts.values():
            for line in body.splitlines()[2:]:
                assert re.search(r"\w", re.split(r"(?<!\\)\|", line)[-2]), line


def test_words_are_of_options_and_keys_that_exist(tables):
    known = {
        name: {n for action in parser._actions for n in tables.names(action)}
        for name, parser in tables.commands().items()
    }
    for name, words in tables.OPTION_WORDS.items():
        if name != "*":
            assert words.keys() <= known[name], name
    for name, words in tables.KEY_WORDS.items():
        assert words.keys() <= {field.name for field in dataclasses.fields(tables.SECTIONS[name])}


def test_every_backend_is_named_where_one_is_chosen(read):
    rows = [
        *re.findall(r"^\| `backend` .*", read("docs/reference/ops.md").text, re.M),
        *re.findall(r"^\| `--backend` .*", read("docs/reference/command-line.md").text, re.M),
    ]
    assert len(rows) == 2
    for row in rows:
        assert all(re.search(rf'`"?{name}"?`', row) for name in BACKENDS), row


def test_every_extra_is_on_the_page_of_installing(read):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = next(table for table in read("docs/install.md").tables() if "extra" in table[0])
    assert [row["extra"].strip("`") for row in rows[1:]] == list(project["optional-dependencies"])
