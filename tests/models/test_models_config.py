"""Configurations: checks, presets, parameter counts."""

import pytest

from latte.errors import LatteError
from latte.models import PRESETS, SIZES, LatteConfig, count_parameters, preset_config
from latte.models.parameters import nearest_size

MILLION = 1e6
EXACT = {"latte": 111.83, "latte++": 140.07, "latte-conv++": 140.11, "transformer++": 151.87}
WITHIN = {"latte-conv-swa++": (153, 0.02), "latte-r++": (139, 0.025), "latte-r-swa++": (153, 0.025)}


@pytest.mark.parametrize("preset", EXACT)
def test_parameters_at_paper_size(preset):
    count = count_parameters(preset_config(preset, "paper"))
    assert round(count / MILLION, 2) == EXACT[preset]


@pytest.mark.parametrize("preset", WITHIN)
def test_parameters_at_paper_size_within_a_band(preset):
    target, band = WITHIN[preset]
    count = count_parameters(preset_config(preset, "paper")) / MILLION
    assert abs(count - target) <= band * target


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("size", "target"), [("small", 10), ("400m", 400), ("2.6b", 2600)])
def test_other_sizes_are_what_they_are_called(preset, size, target):
    count = count_parameters(preset_config(preset, size)) / MILLION
    if preset == "latte":  # two matrices in the MLP where the others have three
        target *= 0.7
    assert 0.85 * target < count < 1.15 * target


def test_the_size_nearest_to_a_number_of_parameters():
    assert nearest_size(lambda size: 100 + 7 * size, 100 + 7 * 12 + 3) == 12
    assert nearest_size(lambda size: 100 + 7 * size, 100 + 7 * 12 + 3, step=4) == 12
    assert nearest_size(lambda size: 100 + 7 * size, 50, step=4) == 4
    assert nearest_size(lambda size: 100, 50, step=4) == 4


def test_presets_are_those_of_the_design():
    assert PRESETS == (
        "latte",
        "latte++",
        "latte-conv++",
        "latte-conv-swa++",
        "latte-r++",
        "latte-r-swa++",
        "r-swa++",
        "swa++",
        "transformer++",
        "linear++",
    )
    assert SIZES == ("tiny", "small", "paper", "400m", "2.6b")
    paper = preset_config("latte-r-swa++", "paper")
    assert (paper.vocab_size, paper.hidden_size, paper.num_hidden_layers) == (50267, 768, 12)
    assert (paper.num_attention_heads, paper.num_latents) == (8, 128)
    assert (paper.intermediate_size, paper.sliding_window) == (3072, 128)
    assert paper.tie_word_embeddings and paper.hidden_dropout == 0.1


def test_overrides():
    config = preset_config("latte++", "tiny", vocab_size=99, num_latents=8, hidden_dropout=0)
    assert (config.vocab_size, config.num_latents, config.hidden_dropout) == (99, 8, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "latte+++"}, "unknown preset 'latte\\+\\+\\+', expected one of latte, "),
        ({"name": "latte", "size": "huge"}, "unknown size 'huge', expected one of tiny, "),
        ({"name": "latte", "hiden_size": 3}, "unknown field 'hiden_size'"),
        ({"name": "latte", "num_latents": 30}, "num_latents=30 and num_attention_heads=4"),
    ],
)
def test_wrong_presets(arguments, message):
    with pytest.raises(LatteError, match=message):
        preset_config(**arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_latents": 130}, "num_latents must be a multiple of num_attention_heads"),
        ({"hidden_size": 100}, "hidden_size must be a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        (
            {"hidden_size": 30, "num_attention_heads": 4},
            "hidden_size must be a multiple of num_attention_heads, got hidden_size=30 and num_att",
        ),
        ({"hidden_size": "768"}, "Field 'hidden_size' expected int, got str"),
        ({"mixer": "mamba"}, "Field 'mixer' expected one of"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_latents": None}, "num_latents must be given for mixer='macchiato'"),
        ({"sliding_window": None}, "sliding_window must be given for mixer='macchiato'"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"mixer": "softmax"}, "latent_input must be 'none' for mixer='softmax'"),
        ({"mixer": "latte"}, "position='rope' needs a mixer with local queries and keys"),
        ({"hidden_size": 24}, "heads of an even width, got 3"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout must be in \[0, 1\), got 1.0"),
        ({"initializer_range": 0.0}, "initializer_range must be positive"),
        ({"embedding_initializer_range": 0}, "embedding_initializer_range must be positive, got 0"),
        ({"norm_eps": float("inf")}, "norm_eps must be finite, got inf"),
        ({"embedding_multiplier": 0}, "embedding_multiplier must be positive, got 0"),
        ({"rglru_decay_range": (0.9, 1.0)}, "rglru_decay_range must be two numbers with 0 < low"),
        ({"rglru_decay_range": [0.9, 0.5]}, r"0 < low <= high < 1, got \(0.9, 0.5\)"),
        ({"rglru_decay_range": 0.5}, "0 < low <= high < 1, got 0.5"),
        ({"window_probability": 1}, "window_probability must be between 0 and 1, got 1"),
        (
            {"window_probability": 0.5, "mixer": "swa"},
            "window_probability must be None for mixer='swa', got 0.5",
        ),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be positive"),
        ({"pad_token_id": -1}, "pad_token_id must be in the vocabulary, from 0 to 50266, got -1"),
        ({"pad_token_id": 50267}, "in the vocabulary, from 0 to 50266, got 50267"),
        ({"sliding_windows": 3}, "unknown field 'sliding_windows', did you mean 'sliding_window'"),
    ],
)
def test_wrong_configurations_are_one_clear_line(fields, message):
    with pytest.raises(LatteError, match=message) as caught:
        LatteConfig(**fields)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("LatteConfig: ")


def test_fields_that_loading_changes_are_checked(tmp_path):
    LatteConfig().save_pretrained(tmp_path)
    assert LatteConfig.from_pretrained(tmp_path, sliding_window=3).sliding_window == 3
    with pytest.raises(LatteError, match="sliding_window must be at least 1 key, got 0"):
        LatteConfig.from_pretrained(tmp_path, sliding_window=0)


def test_assignment_is_checked_too():
    config = LatteConfig()
    with pytest.raises(LatteError, match="Field 'hidden_size' expected int"):
        config.hidden_size = 1.5


def test_hugging_faces_own_keywords_are_kept():
    config = LatteConfig(num_labels=7, output_attentions=True, name_or_path="here")
    assert config.num_labels == 7 and config.output_attentions is True
    assert LatteConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
