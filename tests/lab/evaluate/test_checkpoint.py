"""Which folder a checkpoint's path means, and that no other is taken in its place."""

from pathlib import Path

import pytest
import torch

from latte.conversion.pretrained import load_base, read_config
from latte.errors import LatteError
from latte.lab.evaluate.checkpoint import find_checkpoint, load_checkpoint
from latte.lab.train.run_folder import FINISHED_FILE, write_manifest


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of the steps 2 and 4."""
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        write_manifest(folder, [folder / "config.json"])
    return tmp_path


def test_an_unfinished_run_has_its_newest_checkpoint(run):
    assert find_checkpoint(run) == run / "checkpoint-4"
    assert find_checkpoint(run / "checkpoint-2") == run / "checkpoint-2"
    (run / "config.json").write_text("{}")
    assert find_checkpoint(run) == run


def test_a_finished_run_without_its_config_is_no_checkpoint_of_an_earlier_step(run):
    (run / FINISHED_FILE).write_text("{}")
    (run / "model.safetensors").write_bytes(b"weights")
    for answer in (find_checkpoint, load_checkpoint):
        with pytest.raises(LatteError) as caught:
            answer(run)
        assert str(caught.value) == f"{run} is not a checkpoint: {run}/config.json is missing"


def test_a_damaged_newest_checkpoint_is_named_with_the_one_before(run):
    (run / "checkpoint-4" / "config.json").write_text("{ }")
    with pytest.raises(LatteError, match="checkpoint-4/config.json has 3 bytes, expected 2") as it:
        find_checkpoint(run)
    assert str(it.value).endswith(f"to use an earlier checkpoint, name it: {run / 'checkpoint-2'}")
    (run / "checkpoint-2" / "config.json").unlink()
    with pytest.raises(LatteError, match="is not a checkpoint: .*checkpoint-4/config.json has 3"):
        find_checkpoint(run)


def in_files(model):
    """The names of weights and buffers that lie in a mapped file."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        if path.strip().endswith(".safetensors"):
            ranges.append([int(end, 16) for end in span.split("-")])
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, x in named if any(a <= x.data_ptr() < b for a, b in ranges)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="says what is mapped on Linux")
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_read_into_memory_of_their_own(tmp_path, tied):
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers import PreTrainedTokenizerFast as Fast

    from latte.conversion import convert

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    base, made = tmp_path / "base", tmp_path / "made"
    config = LlamaConfig(**sizes, tie_word_embeddings=tied)
    LlamaForCausalLM(config).bfloat16().save_pretrained(base)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    Fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(base)
    convert(base, made, initial="random", num_latents=4)
    mapped = AutoModelForCausalLM.from_pretrained(made)
    assert in_files(mapped)  # else there is nothing to do
    for model in (load_checkpoint(made, "cpu")[0], load_base(made, read_config(made))):
        assert in_files(model) == []
        assert all(x.data_ptr() % 64 == 0 for x in model.parameters() if x.numel() > 1)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        state, given = model.state_dict(), mapped.state_dict()
        assert state.keys() == given.keys()
        assert all(torch.equal(state[name], given[name]) for name in given)
        assert {x.dtype for x in state.values()} == {x.dtype for x in given.values()}
