"""Parts of a sequence on several processes against the whole on one; see `processes.py`."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import latte  # noqa: F401  (registers the names)
from latte.models import LatteForCausalLM, LatteForSequenceClassification, preset_config
from latte.models.modeling import language_model
from latte.models.registry import find_model
from latte.parallel import context_parallel, shard_batch
from tests.helpers import python

HERE = Path(__file__).parent
TINY = {
    "vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16,
    "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case found, by the number of processes."""
    out = tmp_path_factory.mktemp("processes")
    python(HERE / "processes.py", out, MKL_NUM_THREADS="1")
    return {world: json.loads((out / f"{world}.json").read_text()) for world in (2, 3, 4)}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_are_the_whole(found, world):
    """Losses, logits and gradients, of the largest: to 1e-10 in fp64."""
    special = {"ten_steps", "data_parallel", "exchanged", "mistakes"}
    cases = {name: max(x) for name, x in found[world].items() if name not in special}
    assert len(cases) >= 6
    for name, difference in cases.items():
        # Gemma rounds to fp32 within its norms, and single precision is what it is.
        rounded = name.startswith("converted gemma") or "fp32" in name
        assert difference <= (2e-5 if rounded else 1e-10), (name, difference)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_is_reproducible_and_that_of_one_process(found, world):
    again, same, alone = found[world]["ten_steps"]
    assert again == 0.0 and same == 0.0  # a second run, and the other processes
    assert alone <= 1e-10


def test_gradients_are_the_mean_over_groups(found):
    """DDP and FSDP2, over the other dimension of a 2 x 2 mesh and over all four processes."""
    assert max(found[4]["data_parallel"]) <= 1e-10


def test_bytes_do_not_depend_on_the_length(found):
    short, long = found[3]["exchanged"][:2], found[3]["exchanged"][2:]
    assert short == long
    # Two layers, a batch of 2, fp32. Latte: 2 heads x 4 latents x (1 + 8) numbers; with the
    # RG-LRU 2 x 16 channels, and then a window's 8 keys, values and marks besides.
    assert [x for x in short[0] if x > 100] == [2 * 4 * 2 * 4 * 9] * 2
    window = 8 * (8 + 8 + 1)
    assert [x for x in short[1] if x > 100] == [2 * 4 * 2 * 16, 2 * 4 * (2 * 4 * 9 + window)] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("labels", "expected shift_labels, as shard_batch makes them"),
        ("use_cache", "use_cache goes with whole sequences alone"),
        ("tuple", "expected return_dict=True, got a tuple"),
        ("attentions", "output_attentions goes with whole sequences alone"),
        ("rows", "expected parts of the same rows, of at least one token, on every process, got 1"),
        ("none", "of at least one token, on every process, got 2 x 0; 2 x 5"),
        ("tokens", "2 processes cannot share 1 tokens; expected at least one token each"),
        ("unknown", "cannot tell whether token_type_ids (2, 23) is to be cut"),
        ("nothing", "expected a batch with input_ids (B, T) or inputs_embeds (B, T, E)"),
        ("mesh", "needs one dimension of a mesh, such as mesh['cp'], got 2 dimensions"),
        ("nested", "is in such a context already"),
    ],
)
def test_mistakes_are_one_line_on_every_process(found, name, message):
    assert message in found[2]["mistakes"][name] and "\n" not in found[2]["mistakes"][name]


# --- one process ---------------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny(preset, **fields):
    return LatteForCausalLM(preset_config(preset, "tiny", **TINY, **fields))


def test_without_a_process_group():
    for act in (lambda: shard_batch({}), lambda: context_parallel(tiny("swa++")).__enter__()):
        with pytest.raises(ValueError, match="needs a process group: start the program with torch"):
            act()


def refused():
    """Models that cannot be cut, by what is said of them."""
    compiled = tiny("swa++")
    compiled.model.layers[0].compile()
    comparator = find_model("mega").config("tiny", vocab_size=40)
    bidirectional = preset_config("latte", "tiny", **TINY, is_causal=False)
    from latte.conversion.modeling import FAMILIES

    kind = FAMILIES["llama"][1]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_latents": 4}
    hybrid = kind(
        kind.config_class(vocab_size=40, num_hidden_layers=2, converted_layers=[1], **sizes)
    )
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    stretched = kind(
        kind.config_class(vocab_size=40, num_hidden_layers=2, rope_parameters=rope, **sizes)
    )
    return {
        "the rotary frequencies of Macchi.* depend on the length of the text": stretched,
        r"MacchiatoAttention \(.*, mixing='base', base_window=None\) passes no state": hybrid,
        "SoftmaxAttention .* passes no state of constant size": tiny("transformer++"),
        "Mega .* passes no state of constant size": language_model(comparator),
        "LatteForCausalLM is compiled": compiled,
        "OptimizedModule is compiled": torch.compile(tiny("swa++")),
        "expected a language model of Latte's or its decoder, got LatteForSequenceCl": (
            LatteForSequenceClassification(bidirectional)
        ),
        "expected a language model of Latte's or its decoder, got Linear": torch.nn.Linear(2, 2),
    }


def test_models_that_cannot_be_cut_are_refused(alone):
    for message, model in refused().items():
        with pytest.raises(ValueError, match=message) as error, context_parallel(model):
            pass
        assert "\n" not in str(error.value)


def test_a_mixer_of_ones_own_is_not_cut_unless_it_says_so():
    from latte.layers import LatteAttention

    class Own(LatteAttention):
        def _attend(self, projected, piece):
            return super()._attend(projected, piece)

    class Renamed(LatteAttention):
        pass

    assert LatteAttention.splits and Renamed.splits and not Own.splits


def test_one_process_holds_the_whole(alone):
    model = tiny("latte-r-swa++").double()
    ids = torch.randint(40, (2, 9))
    expected = model(input_ids=ids, labels=ids)
    with context_parallel(model) as same:
        out = same(**shard_batch({"input_ids": ids, "labels": ids}))
    assert same is model
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-12, atol=1e-14)


def test_transformers_own_context_parallelism_is_refused_by_all_models():
    """It would cut rows and start every state anew."""
    from latte.conversion.modeling import FAMILIES

    kinds = [LatteForCausalLM, LatteForSequenceClassification]
    kinds += [kind for family in FAMILIES.values() for kind in family]
    assert not any(kind._supports_context_parallel for kind in kinds)
    for name in ("mega", "h3", "s5", "griffin", "mamba"):
        assert not language_model(find_model(name).config("tiny")).supports_context_parallel, name
