"""The models of the paper's tables, by name, in the same harness as our own."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.utils import logging

from experiments.loop import adamw
from experiments.lra.pairs import check_pairs
from latte.errors import LatteError
from latte.lab.baselines import dropout
from latte.lab.baselines.__main__ import main
from latte.lab.baselines.catalogue import BASELINES
from latte.lab.train.metrics import read_metrics
from latte.lab.train.trainer import LatteTrainer, decayed_names
from latte.models import count_parameters, preset_config
from latte.models.registry import find_model
from tests.lab.baselines.baselines import MIXERS
from tests.lab.baselines.training import losses, next_token_loss

logging.set_verbosity_error()  # Mamba says that its kernels are not there

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "sliding_window": 8, "max_position_embeddings": 64,
}  # fmt: skip
HERE = [name for name, comparator in BASELINES.items() if not comparator.missing()]
CAUSAL = [name for name in HERE if BASELINES[name].causal]
READS_BOTH_WAYS = [name for name in HERE if not BASELINES[name].causal]
OF_TRANSFORMERS = [name for name in CAUSAL if BASELINES[name].library == "transformers"]
ON_A_GPU = [name for name, c in BASELINES.items() if c.library == "flash-linear-attention"]


def comparator_config(name, size="tiny", **overrides):
    return find_model(name).config(size, **overrides)


def build(name, kind=AutoModelForCausalLM, **overrides):
    torch.manual_seed(0)
    return kind.from_config(comparator_config(name, **{**SMALL, **overrides}))


def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("size", ["tiny", "paper"])
@pytest.mark.parametrize("name", HERE)
def test_parameters_match_those_of_transformer(name, size):
    target = count_parameters(preset_config("transformer++", size))
    found = BASELINES[name].count(comparator_config(name, size))
    assert found == pytest.approx(target, rel=0.03)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_few_steps_lower_the_loss(name):
    """In our own mixers every parameter has its share of it."""
    model = build(name).train()
    ids = torch.randint(3, 20, (2, 16), generator=torch.Generator().manual_seed(1))
    found = losses(model, lambda: next_token_loss(logits(model, ids), ids), steps=6, rate=1e-2)
    assert found[-1] < found[0] - 0.3
    for parameter_name, parameter in model.named_parameters():
        grad = parameter.grad
        assert name not in MIXERS or (grad is not None and grad.abs().max() > 0), parameter_name


LOOPS = {
    "mamba": (modeling_mamba, "mamba_selective_scan"),
    "mamba2": (modeling_mamba2, "mamba2_chunk_scan"),
    "griffin": (RecurrentGemmaRglru, "_rnn_scan"),
}
MIXER_CLASSES = ("MambaMixer", "Mamba2Mixer", "RecurrentGemmaRglru")
SEVERAL_CHUNKS = {"mamba2": {"chunk_size": 8}}  # of 37 tokens, the last one with padding


@pytest.mark.parametrize("name", LOOPS)
def test_scans_are_the_librarys_loops(name, monkeypatch):
    """Outputs and all gradients, and it is the scan that runs."""
    if name.startswith("mamba") and importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("Mamba's own kernels are there")
    owner, function_name = LOOPS[name]
    model = build(name, **SEVERAL_CHUNKS.get(name, {})).train()
    ids = torch.randint(3, 300, (2, 37), generator=torch.Generator().manual_seed(1))
    layers = sum(type(x).__name__ in MIXER_CLASSES for x in model.modules())
    scan = getattr(owner, function_name)
    results = []
    for function in (scan, scan.looping):
        calls = []

        def counted(*arguments, _run=function, _calls=calls, **rest):
            _calls.append(1)
            return _run(*arguments, **rest)

        monkeypatch.setattr(owner, function_name, counted)
        model.zero_grad()
        found = logits(model, ids)
        found.square().mean().backward()
        assert len(calls) == layers
        results.append([found.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_dropout_is_where_ours_is(name, monkeypatch):
    """In training alone: of embeddings, and of all that the blocks add."""
    rates = []

    def all_of_it(x, rate):
        rates.append(rate)
        return x * 0

    monkeypatch.setattr(dropout, "F", SimpleNamespace(dropout=all_of_it))
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    others = torch.cat([ids[:, :1] ^ 1, ids[:, 1:]], 1)
    plain = build(name).eval()
    wanted = logits(plain, ids)
    assert not torch.equal(wanted[:, -1], logits(plain, others)[:, -1])
    for rate in ("hidden_dropout", "embedding_dropout"):
        model = build(name, **{rate: 0.25}).eval()
        BASELINES[name].add_dropout(model)
        assert torch.equal(logits(model, ids), wanted) and not rates
        model.train()
        found = logits(model, ids)
        assert set(rates) == {0.25}
        rates.clear()
        if rate == "hidden_dropout":  # no token sees another
            assert torch.equal(found[:, 1:], logits(model, others)[:, 1:])
        else:  # all tokens are alike
            assert torch.equal(found[0], found[1])
        rates.clear()
    BASELINES[name].add_dropout(plain)
    logits(plain.train(), ids)
    assert not rates


@pytest.mark.parametrize("name", READS_BOTH_WAYS)
def test_a_few_steps_teach_a_classifier(name):
    model = build(name, AutoModelForSequenceClassification, num_labels=3).train()
    ids = torch.randint(3, 300, (6, 16), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(6) % 3
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    found = losses(model, lambda: model(**given).loss, steps=12, rate=3e-3)
    assert found[-1] < found[0] - 0.2


def test_recipes_take_comparators_beside_presets(make_recipe):
    """The same tokens in the same steps, whichever way a model keeps documents apart."""
    from latte.lab.compare.compare import Comparison
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.generate import generate

    recipe = make_recipe("latte++", name="table", max_steps=2)
    for field in ("num_latents", "sliding_window"):
        recipe.model.overrides.pop(field, None)
    names = ["swa++", "mamba", "griffin", "s5"]
    section = recipe.comparison
    section.presets, section.lengths, section.max_tokens = names, [16, 1500], 100
    outcomes, _ = Comparison(recipe, quiet=True).sweep()
    assert [outcome.run.preset for outcome in outcomes] == names
    found = [outcome.result.rows for outcome in outcomes]
    assert all(math.isfinite(row.loss) for rows in found for row in rows)
    assert len({rows[0].tokens for rows in found}) == 1
    logged = [read_metrics(outcome.run.folder, "train") for outcome in outcomes]
    assert len({tuple(row["tokens"] for row in rows) for rows in logged}) == 1
    # Untrained models are near uniform over 260 bytes, if the loss is over the right tokens.
    assert all(rows[0]["loss"] == pytest.approx(math.log(260), rel=0.15) for rows in logged)
    assert "`griffin`" in Path(recipe.output_dir, "comparison.md").read_text()
    for name in names[1:]:  # and they write
        model, tokenizer = load_checkpoint(Path(recipe.output_dir, name))
        generate(model, tokenizer, "of the", max_new_tokens=3, seed=0, stream=False)


def test_documents_of_a_block_are_rows_of_their_own(make_recipe):
    """Packed or padded, a model that can do both computes the same loss."""
    from latte.lab.data.preparing import prepare_text
    from latte.models import LatteForCausalLM

    recipe = make_recipe()
    text = prepare_text(recipe.data, progress=False)
    blocks = [block for block in text.blocks(recipe.data, 4, 0)]
    packed = text.collator(recipe.data)(blocks)
    padded = text.collator(recipe.data, pack=False)(blocks)
    assert set(padded) == {"input_ids", "labels"}
    assert len(padded["labels"]) == len(packed["cu_seq_lens_q"]) - 1 > 4
    torch.manual_seed(0)
    config = preset_config("latte-r-swa++", **{**SMALL, "num_latents": 8})
    model = LatteForCausalLM(config).double().eval()
    with torch.no_grad():
        one, two = (model(**batch, num_items_in_batch=1).loss for batch in (packed, padded))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("griffin", {"hidden_sice": 3}, "unknown field 'hidden_sice' of comparator 'griffin'"),
        ("griffin", {"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ("griffin", {"conv1d_width": "four"}, "comparator 'griffin': .*conv1d_width"),
        ("mamba", {"hidden_act": "nope"}, "'mamba': KeyError: 'nope'; got hidden_act='nope'$"),
    ],
)
def test_bad_fields_are_one_line(name, overrides, message):
    with pytest.raises(LatteError, match=message) as error:
        comparator_config(name, **overrides)
    assert "\n" not in str(error.value)


def test_directions_are_what_they_are():
    longformer = comparator_config("longformer", is_causal=False, max_position_embeddings=400)
    assert (longformer.vocab_size, longformer.pad_token_id) == (261, 260)  # 0 is a byte
    assert longformer.max_position_embeddings == 260 + 1 + 400
    with pytest.raises(LatteError, match="'longformer' reads both ways, and cannot do otherwise"):
        comparator_config("longformer", is_causal=True)
    with pytest.raises(LatteError, match="'mamba' is causal, and cannot do otherwise"):
        comparator_config("mamba", is_causal=False)
    with pytest.raises(ValueError, match="H3: expected causal=True"):
        comparator_config("h3", is_causal=False)
    with pytest.raises(LatteError, match="'griffin' has no classifier in transformers"):
        comparator_config("griffin", num_labels=2)
    with pytest.raises(LatteError, match="'longformer' classifies single texts, not pairs"):
        check_pairs(comparator_config("longformer", **SMALL, num_labels=2))
    both_ways = comparator_config("mega", is_causal=False, num_labels=7)
    assert (both_ways.is_causal, both_ways.num_labels) == (False, 7)


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("griffin", {"input_gate_bias", "recurrent_gate_bias"}),
        ("mamba", {"A_log"}),
        ("rwkv4", {"time_mix_key", "time_mix_value", "time_mix_receptance"}),
        ("mega", {"alpha_logit", "delta_logit"}),
        ("h3", {"log_real", "imaginary"}),
        ("s5", set()),
        ("lightning", set()),
    ],
)
def test_weight_decay_is_for_matrices_in_every_optimiser(name, spared):
    model = build(name)
    decayed = set(decayed_names(model))
    assert (
        set(LatteTrainer.get_decay_parameter_names(object.__new__(LatteTrainer), model)) == decayed
    )
    left = {n.split(".")[-1] for n, p in model.named_parameters() if p.ndim >= 2} - {
        n.split(".")[-1] for n in decayed
    }
    assert left == spared
    optimizer = adamw(model, lambda _: 1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    names = {id(p): n for n, p in model.named_parameters()}
    rates = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n for n, rate in rates.items() if rate} == decayed
    assert set(rates) == set(names.values())


def test_a_multiplier_of_embeddings_holds_for_models_that_have_one():
    wanted = {**SMALL, "embedding_multiplier": 4.0, "embedding_initializer_range": 0.5}
    mega = comparator_config("mega", **wanted)
    assert (mega.embedding_scale, mega.embedding_initializer_range) == (4.0, 0.5)
    for name in ("mamba", "griffin"):  # none, or always sqrt(width)
        assert not hasattr(comparator_config(name, **wanted), "embedding_multiplier")


def test_a_model_says_itself_whether_it_carries_a_state():
    from latte.models import LatteForCausalLM
    from latte.models.registry import carries_state, entry_of_type

    assert not carries_state(build("s5")) and not carries_state(build("griffin"))
    config = preset_config("latte++", **{**SMALL, "num_latents": 8, "sliding_window": None})
    assert carries_state(LatteForCausalLM(config)) and carries_state(object())
    assert entry_of_type("recurrent_gemma") is BASELINES["griffin"]
    assert entry_of_type("latte") is None and entry_of_type("llama") is None


def test_any_model_can_be_registered(monkeypatch):
    """A name that nobody knew stands for a model from then on, in recipes too."""
    from latte.lab.train.recipe import ModelSection
    from latte.models import registry

    class Narrow(registry.ModelEntry):
        def config(self, size, **overrides):
            return preset_config("swa++", size, **{"hidden_size": 32, **overrides})

    monkeypatch.setattr(registry, "_models", {**registry.other_models()})
    assert not ModelSection(preset="narrow").is_comparator
    registry.register_model(Narrow("narrow", causal=False))
    assert ModelSection(preset="narrow").is_comparator
    assert find_model("narrow").config("tiny", vocab_size=50).hidden_size == 32
    with pytest.raises(LatteError, match="'narrow' reads both ways: .* no language model"):
        find_model("narrow").check(causal=True)


def test_what_cannot_be_trained_says_why_before_anything_is_written(make_recipe, monkeypatch):
    from latte.lab.train.run import train
    from latte.models import registry

    # Without the models of plugins that other tests have imported.
    monkeypatch.setattr(registry, "_models", dict(BASELINES))
    recipe = make_recipe()
    recipe.model.preset = "longformer"
    with pytest.raises(LatteError, match="'longformer' reads both ways: .* no language model"):
        train(recipe, quiet=True)
    assert not Path(recipe.output_dir).exists()
    recipe.model.preset = "grifin"
    with pytest.raises(
        LatteError, match="unknown preset 'grifin', .* compare with: griffin, mamba"
    ):
        train(recipe, quiet=True)


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_missing_library_or_gpu_is_one_line(name, monkeypatch, make_recipe):
    from latte.lab.train.run import train

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = make_recipe()
    recipe.model.preset = name
    with pytest.raises(LatteError) as error:
        train(recipe, quiet=True)
    assert str(error.value) == (
        f"model: comparator {name!r} needs flash-linear-attention (pip install"
        " 'latte-attention[baselines]'), Triton (pip install 'latte-attention[gpu]') and a GPU that"
        " Triton compiles for"
    )
    assert not Path(recipe.output_dir).exists()


def test_the_table_prints_what_there_is(capsys):
    assert main(["tiny"]) == 0
    out = capsys.readouterr().out
    assert all(f"`{name}`" in out for name in BASELINES)
    assert main(["huge"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "expected one of the sizes tiny" in told.err


def test_a_run_gives_the_libraries_models_its_dropout(make_recipe):
    from latte.lab.train.run import train

    first = {}
    for rate in (0.0, 0.5):
        recipe = make_recipe("mamba2", name=str(rate), max_steps=1)
        for field in ("num_latents", "sliding_window"):
            recipe.model.overrides.pop(field, None)
        recipe.model.overrides["hidden_dropout"] = rate
        train(recipe, quiet=True)
        first[rate] = read_metrics(Path(recipe.output_dir), "train")[0]["grad_norm"]
    assert first[0.0] != first[0.5]


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in MIXERS])
def test_the_future_cannot_change_the_past(name):
    """Of other libraries' models; our own layers have this law."""
    model = build(name).eval()
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 25:] = 7
    with torch.no_grad():
        one, two = logits(model, ids), logits(model, other)
    assert torch.equal(one[:, :25], two[:, :25])
    assert not torch.equal(one[:, 25:], two[:, 25:])
