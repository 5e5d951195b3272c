"""An option of latents is declared once: everything that shows or takes it has it from there."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from latte.cli.parser import build_parser
from latte.conversion import convert
from latte.conversion.config import CONFIGS, MacchiatoFields
from latte.errors import LatteError
from latte.lab.baselines.catalogue import OURS_ALONE
from latte.lab.train.recipe import ConversionSection
from latte.layers.latent_fields import (
    ConversionOptions,
    ConvertedFields,
    LatentFields,
    PartitionFields,
    default_in_words,
    flag,
    options_of,
)
from latte.models import LatteConfig

ROOT = Path(__file__).parents[2]
HOME = ROOT / "src/latte/layers/latent_fields.py"
DECLARED = {each.name: each for each in options_of(ConversionOptions)}
HINTS = get_type_hints(ConversionOptions)
DECLARED |= dict.fromkeys(("local_window", "sliding_window"), DECLARED["window"])

# Default of LatteConfig, of a converted model's configuration and of a new conversion. A file that
# was saved before an option existed has the first two, so these never change.
DEFAULTS = {
    "num_latents": (128, 128, None),
    "latent_input": ("rglru", "rglru", "none"),
    "window_probability": (None, 0.95, 0.95),
    "rglru_decay_range": ((0.9, 0.999),) * 3,
    "forgetting": ("none",) * 3,
    "half_life_range": ((4.0, 512.0),) * 3,
    "num_sinks": (0, 0, 4),
    "delay_latents": (False, False, True),
    "joint_softmax": (False, False, True),
    "kept_tokens": (0,) * 3,
    "kept_block": (64,) * 3,
    "kept_half_life": (None,) * 3,
    "kept_dtype": ("auto",) * 3,
    "kept_window": ("", None, None),
    "far_sinks": ("", False, False),
    "kept_range": ("", None, None),
}


def plain(text):
    return " ".join(text.replace("`", "").lower().split())


def test_each_is_declared_once():
    """A class that has an inherited option again changes its default, and nothing else."""
    source = HOME.read_text(encoding="utf-8")
    for each in options_of(ConversionOptions):
        if each.name != "window":
            assert len(re.findall(rf"^    {each.name}: .* = option\(", source, re.M)) == 1
    for kind in (LatteConfig, ConversionSection, *CONFIGS.values()):
        shared = [each for each in options_of(kind) if each.name in DECLARED]
        assert len(shared) > len(fields(LatentFields))  # and the window's
        for each in shared:
            assert each.metadata["help"] == DECLARED[each.name].metadata["help"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    own, converted, new = DEFAULTS[name]
    if name in {each.name for each in fields(PartitionFields)}:
        assert getattr(LatteConfig(), name) == own
    else:
        assert not hasattr(LatteConfig(), name)
    for kind in CONFIGS.values():
        assert getattr(kind(), name) == converted
    for kind in (ConversionOptions, ConversionSection):
        assert getattr(kind(), name) == new


def test_all_options_have_their_defaults_pinned():
    assert DEFAULTS.keys() == {each.name for each in options_of(ConvertedFields)}


@pytest.mark.parametrize("each", options_of(ConversionOptions), ids=lambda each: each.name)
def test_what_a_conversion_takes(each):
    """`convert`, its help, a recipe's section, and `latte convert`."""
    parameter = inspect.signature(convert).parameters[each.name]
    assert (parameter.kind, parameter.default) == (parameter.KEYWORD_ONLY, each.default)
    described = re.findall(rf"^ +{each.name}: ", convert.__doc__, re.M)
    assert len(described) == 1 and plain(each.metadata["help"]) in plain(convert.__doc__)
    assert getattr(ConversionSection(), each.name) == each.default
    kinds = next(action for action in build_parser()._actions if action.dest == "command").choices
    action = next(a for a in kinds["convert"]._actions if flag(each) in a.option_strings)
    assert (action.dest, action.default) == (each.name, None)
    assert action.help.startswith(
        f"{each.metadata['help'].replace('`', '')} ({default_in_words(each)})"
    )
    hint = HINTS[each.name]
    if {int, float} & {hint, *get_args(hint)}:  # a number is not left as text
        assert action.type is not None


@pytest.mark.parametrize("kind", [LatteConfig, MacchiatoFields, ConversionOptions])
def test_a_page_has_the_meaning(kind):
    text = (ROOT / "docs/reference/conversion.md").read_text(encoding="utf-8")
    for each in (each for each in options_of(kind) if each.name != "sliding_window"):
        rows = re.findall(rf"^\| `{each.name}` \|.*", text, re.M)
        assert any(each.metadata["help"] in row for row in rows), each.name


def test_the_command_line_names_each_option():
    text = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    for each in options_of(ConversionOptions):
        assert re.search(rf"^\| `{flag(each)}` \|.* `{each.name}` \|$", text, re.M)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_latents", "8", "num_latents must be a whole number, got '8'"),
        ("num_latents", 0, "num_latents must be at least 1, got 0"),
        ("latent_input", "lstm", "latent_input must be one of .*, got 'lstm'"),
        ("window_probability", "half", "window_probability must be between 0 and 1, got 'half'"),
        ("rglru_decay_range", (0.5,), "rglru_decay_range must be two numbers with 0 < low"),
        ("forgetting", True, "forgetting must be one of .*, got True"),
        ("half_life_range", (8, 4), r"half_life_range must be two numbers .*, got \(8, 4\)"),
        ("num_sinks", 1.0, "num_sinks must be a whole number, got 1.0"),
        ("num_sinks", -1, "num_sinks must be 0 or more, got -1"),
        ("delay_latents", "yes", "delay_latents must be True or False, got 'yes'"),
        ("joint_softmax", 1, "joint_softmax must be True or False, got 1"),
        ("kept_tokens", -1, "kept_tokens must be 0 or more, got -1"),
        ("kept_block", 0, "kept_block must be at least 1 token, got 0"),
        ("local_window", 0, "local_window must be at least 1 key, got 0"),
        ("mixing", "both", "mixing must be one of .*, got 'both'"),
    ],
)
def test_every_configuration_checks_an_option_alike(field, value, message):
    kinds = [CONFIGS["llama"], CONFIGS["gemma3_text"]]
    if field in {each.name for each in fields(PartitionFields)}:
        kinds.append(LatteConfig)
    for kind in kinds:
        with pytest.raises(LatteError, match=f"^{kind.__name__}: {message}") as caught:
            kind(**{field: value})
        assert "\n" not in str(caught.value)


def test_a_converted_model_has_latents_and_a_bias_of_its_window():
    config = CONFIGS["llama"]
    with pytest.raises(LatteError, match="num_latents must be a multiple of .*num_latents=None"):
        config(num_latents=None)
    with pytest.raises(LatteError, match="window_probability must be between 0 and 1, got None"):
        config(window_probability=None)


@pytest.mark.parametrize("kind", [LatteConfig, CONFIGS["llama"]])
def test_a_file_from_before_an_option_loads_with_the_default(kind, tmp_path):
    kind(half_life_range=(2, 9), num_hidden_layers=3).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    assert kind.from_pretrained(tmp_path).half_life_range == (2, 9)
    old = {name: value for name, value in values.items() if name not in DECLARED}
    assert len(values) - len(old) == sum(each.name in DECLARED for each in options_of(kind))
    file.write_text(json.dumps(old), encoding="utf-8")
    loaded = kind.from_pretrained(tmp_path)
    assert loaded.num_hidden_layers == 3
    for each in options_of(kind):
        assert getattr(loaded, each.name) == each.default


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        convert("base", windw=4)


def test_comparators_ignore_what_only_latents_have():
    assert {"num_latents", "half_life_range", "conv_kernel_size"} <= set(OURS_ALONE)
    assert "latent_input" not in OURS_ALONE and "num_sinks" not in OURS_ALONE
