"""A state as a file: what goes on from it is what would have gone on from the cache itself."""

import copy
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from latte.errors import LatteError
from latte.models import LatteCache, LatteForCausalLM, load_state, save_state


def read(model, ids, mask=None):
    cache = LatteCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def go_on(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_many_prompts_are_answered_from_one_file(build, tokens, tmp_path, preset):
    model, document = build(preset), tokens(1, 30)
    save_state(read(model, document), tmp_path / "state")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for seed in (1, 2):
        prompt = tokens(1, 4, seed)
        whole = torch.cat([document, prompt], 1)
        anew = model.generate(whole, past_key_values=read(model, document), **options)
        cache = load_state(tmp_path / "state", model)
        # The new tokens alone, with the mask of all; or all of them.
        mask = torch.ones_like(whole)
        short = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(short[:, 4:], anew[:, 34:])
        cache = load_state(tmp_path / "state", model)
        assert torch.equal(model.generate(whole, past_key_values=cache, **options), anew)


def test_the_decoder_and_a_copied_cache_serve_too(build, tokens, tmp_path):
    model = build("latte-r-swa++")
    branch = copy.deepcopy(read(model, tokens(1, 9)))
    assert pickle.loads(pickle.dumps(branch)).get_seq_length() == 9
    save_state(branch, tmp_path / "state")
    loaded = load_state(tmp_path / "state", model.model)
    ours, wanted = (go_on(model, c, tokens(1, 3)) for c in (loaded, branch))
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize(("before", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_model_in_another_dtype_goes_on(config, tokens, tmp_path, before, now):
    torch.manual_seed(0)
    model = LatteForCausalLM(config("latte-r-swa++")).to(getattr(torch, before)).eval()
    save_state(read(model, tokens(2, 12)), tmp_path / "state")
    wanted = go_on(model, load_state(tmp_path / "state", model), tokens(2, 3, seed=1)).float()
    model.to(getattr(torch, now))
    loaded = load_state(tmp_path / "state", model)
    layer = loaded.layers[0]
    assert layer.keys.dtype == model.dtype and layer.mean.dtype == torch.float32
    ours = go_on(model, loaded, tokens(2, 3, seed=1)).float()
    assert (ours - wanted).norm() < 0.05 * wanted.norm()


def test_recording_is_not_written_and_goes_on(build, tokens, tmp_path):
    model, ids = build("latte-r-swa++"), tokens(1, 14)
    cache = read(model, ids[:, :8])
    cache.activate_past_recording()
    go_on(model, cache, ids[:, 8:12])
    save_state(cache, tmp_path / "state")
    loaded = load_state(tmp_path / "state", model)
    with pytest.raises(ValueError, match="not recorded"):
        loaded.crop(-2)
    cache.crop(-2)
    loaded.activate_past_recording()
    go_on(model, loaded, ids[:, 12:])
    loaded.crop(-2)
    assert cache.get_seq_length() == 10 and loaded.get_seq_length() == 12


def test_the_state_of_another_model_is_refused(build, config, tokens, tmp_path):
    model, path = build("latte-r-swa++"), tmp_path / "state"
    save_state(read(model, tokens(1, 9)), path)
    wider = build("latte-r-swa++", sliding_window=5)
    with pytest.raises(LatteError, match="another model: its sliding_window is 4, this one's 5"):
        load_state(path, wider)
    other = LatteForCausalLM(config("latte-r-swa++")).double().eval()
    other.load_state_dict(model.state_dict())
    assert load_state(path, other).get_seq_length() == 9
    with torch.no_grad():
        other.model.layers[1].mixer.o_proj.weight.mul_(1.001)
    with pytest.raises(LatteError, match="another model: its weights are not this one's"):
        load_state(path, other)


def test_what_cannot_be_saved_or_read_is_one_line(build, tokens, tmp_path):
    model, path = build("latte-r-swa++"), tmp_path / "state"
    with pytest.raises(LatteError, match="this cache is of no model"):
        save_state(LatteCache(model.config), path)
    with pytest.raises(LatteError, match="expected a LatteCache to save, got dict"):
        save_state({}, path)
    cache = read(model, tokens(1, 9))
    with pytest.raises(LatteError, match="cannot be written"):
        save_state(cache, tmp_path / "no" / "such")
    with pytest.raises(LatteError, match="does not exist; expected a file written by save_state"):
        load_state(path, model)
    save_state(cache, path)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(LatteError, match="found another kind of file"):
        load_state(tmp_path / "model" / "model.safetensors", model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "state"]
    cache.reset()
    for unused in (cache, LatteCache(model.config)):
        with pytest.raises(LatteError, match="has read nothing"):
            save_state(unused, path)


def opened(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}


def replace_by(change):
    """Harm: another tensor in the place of one."""
    return lambda held, about, name: held.update({name: change(held[name])})


KEYS = "layers.1.window.keys"
HARMS = {
    "no weights": ("weights", lambda held, about, name: held.pop(name)),
    "weights of another dtype": ("weights", replace_by(lambda x: x.long())),
    "a tensor is missing": (KEYS, lambda held, about, name: held.pop(name)),
    "a name": (KEYS, lambda held, about, name: held.update({"layers.9.x": held.pop(name)})),
    "an unknown part": (
        KEYS,
        lambda held, about, name: held.update({"layers.0.undo": held[name] + 1}),
    ),
    "a dtype": (KEYS, replace_by(lambda x: x.to(torch.int32))),
    "a state in half precision": ("layers.0.latent.mean", replace_by(lambda x: x.bfloat16())),
    "a wider tensor": (KEYS, replace_by(lambda x: torch.cat([x, x], -1))),
    "more slots": (KEYS, replace_by(lambda x: torch.cat([x, x], 1))),
    "another batch": (KEYS, replace_by(lambda x: torch.cat([x, x]))),
    "one dimension": (KEYS, replace_by(lambda x: x.flatten())),
    "no dimension": ("layers.0.position", replace_by(lambda x: x[0].clone())),
    "a position": ("layers.0.position", replace_by(lambda x: x + 1000)),
    "not a number": (KEYS, replace_by(lambda x: x * torch.nan)),
    "infinity": ("layers.0.latent.log_mass", replace_by(lambda x: x + torch.inf)),
    "ids": ("ids", replace_by(lambda x: x.bfloat16())),
    "tokens": ("", lambda held, about, name: about.update(tokens="x")),
    "no tokens": ("", lambda held, about, name: about.update(tokens="-3")),
    "a configuration": ("", lambda held, about, name: about.update(config="{")),
    "the model's dtype": ("", lambda held, about, name: about.update(dtype="no")),
    "the name of a function": ("", lambda held, about, name: about.update(dtype="save")),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("checksum", [True, False])
def test_a_damaged_state_is_refused_in_one_line(build, tokens, tmp_path, harm, checksum):
    """Also a file of format 1, which has no checksum."""
    model, path = build("latte-r-swa++"), tmp_path / "state"
    save_state(read(model, tokens(2, 9)), path, tokens(2, 9))
    about, held = opened(path)
    if not checksum:
        del about["sha256"]
        about["format"] = "latte state 1"
        save_file(held, path, about)
        assert load_state(path, model).get_seq_length() == 9
    name, change = HARMS[harm]
    change(held, about, name)
    save_file({name: x.contiguous() for name, x in held.items()}, path, about)
    said = "checksum" if checksum else "damaged|another model"
    with pytest.raises(LatteError, match=said) as error:
        load_state(path, model)
    assert "\n" not in str(error.value)
