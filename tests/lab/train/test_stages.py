"""`latte convert --recipe`: two stages from a base that was just trained, resumed, compared."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig

from latte.cli import main
from latte.errors import LatteError
from latte.lab.train.recipe import ConversionSection, load_recipe, recipe_from_dict
from latte.lab.train.run_folder import FolderInUse, lock_folder
from latte.lab.train.stages import convert_and_train, load_conversion_recipe
from latte.lab.train.trainer import SHARDS
from tests.helpers import python

RECIPES = Path(__file__).parents[3] / "recipes" / "conversion"
STAGE = ["max_tokens=null", "max_steps=3", "batch_size=2", "warmup_steps=1", "log_steps=1",
         "save_steps=2", "eval_steps=3"]  # fmt: skip
LAYERS = ["rows=4", "held_out_rows=1", "steps=3", "eval_steps=3", "processes=1"]


@pytest.fixture(scope="session")
def base(words, tmp_path_factory):
    """A Llama of one page, trained for three steps on bytes."""
    from latte.lab.train.run import train

    folder = tmp_path_factory.mktemp("base") / "base"
    shape = (
        "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,"
        " num_key_value_heads: 2}"
    )
    settings = [f"data.{key}={value}" for key, value in words.items()]
    settings += ["data.tokenizer=byte", "data.block_length=32", "data.max_validation_tokens=64"]
    settings += [f"training.{value}" for value in STAGE]
    settings += ["training.torch_compile=false", f"model.overrides={shape}"]
    train(load_recipe(RECIPES / "base.yaml", [*settings, f"output_dir={folder}"]), quiet=True)
    return folder


@pytest.fixture(scope="session")
def settings(words):
    """Overrides that make the small recipe smaller."""
    found = [f"data.{key}={value}" for key, value in words.items()]
    found += ["data.block_length=32", "data.max_validation_tokens=64"]
    found += ["conversion.window=8", "conversion.num_latents=8"]
    found += [f"layers.{value}" for value in LAYERS] + [f"training.{value}" for value in STAGE]
    return [*found, "evaluation.lengths=[32, 64]", "evaluation.max_tokens=100"]


@pytest.fixture(scope="session")
def small(settings):
    """small(*overrides) -> the small recipe, smaller."""
    return lambda *given: load_conversion_recipe(RECIPES / "small.yaml", [*settings, *given])


@pytest.fixture(scope="session")
def converted(base, settings, tmp_path_factory):
    """What `latte convert` makes of the base by that recipe."""
    out = tmp_path_factory.mktemp("converted") / "out"
    recipe = ["--recipe", str(RECIPES / "small.yaml"), *settings]
    assert main(["convert", str(base), str(out), *recipe, "--quiet"]) == 0
    return out


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_two_stages_change_the_latents_alone(base, converted):
    from transformers import AutoModelForCausalLM

    out = converted
    original, middle, final = weights(base), weights(out / "layers"), weights(out)
    for name, weight in original.items():
        assert torch.equal(weight, final[name]), name
    new = [name for name in final if ".latents." in name]
    assert new and set(final) == set(original) | set(new)
    assert all(not torch.equal(middle[name], final[name]) for name in new)
    assert torch.equal(weights(out / "next-token")[new[0]], final[new[0]])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "macchiato_llama"


def test_base_controls_and_result_are_compared(converted):
    out = converted
    lines = (out / "evaluation.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 * 2
    names = {line.rsplit(",", 9)[0].strip('"') for line in lines[1:]}
    assert "base" in names and "base, window only" in names
    assert (out / "evaluation.png").stat().st_size > 5000
    table = (out / "evaluation.md").read_text()
    assert table.startswith("| model | 32 | 64 |")
    # With the base frozen and no sinks, p(l=0) = 1 is the base with a window.
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    window, held = (
        rows[k].split(" | ")[1:] for k in ("base, window only", "converted, p(l=0) = 1")
    )
    assert window == held


def test_the_optimiser_holds_nothing_of_the_base(converted):
    file = converted / "next-token" / "checkpoint-2" / "optimizer.pt"
    state = torch.load(file, weights_only=True)["state"]
    held = sum(value["exp_avg"].numel() for value in state.values())
    assert held == sum(w.numel() for n, w in weights(converted).items() if ".latents." in n)


def test_low_rank_updates_are_merged_into_the_result(base, small, tmp_path):
    pytest.importorskip("peft")
    recipe = small("layers=null", "conversion.trainable=lora", "conversion.lora_rank=2",
                   "conversion.lora_targets=[q_proj, o_proj]", "training.learning_rate=0.01",
                   "conversion.distillation=0.5")  # fmt: skip
    out = convert_and_train(str(base), tmp_path / "out", recipe, quiet=True)
    original, final = weights(base), weights(out)
    changed = {n for n, w in original.items() if not torch.equal(w, final[n])}
    assert changed == {f"model.layers.{i}.self_attn.{p}.weight" for i in (0, 1)
                       for p in ("q_proj", "o_proj")}  # fmt: skip
    for name in changed:
        update = final[name] - original[name]
        assert torch.linalg.matrix_rank(update, rtol=1e-3) == 2
    assert not any("lora" in name or "base_layer" in name for name in final)


def test_stages_go_on_with_the_same_text_and_base(base, small, words, tmp_path):
    text = Path(words["corpus"]).read_text(encoding="utf-8")
    (tmp_path / "words.jsonl").write_text(text, encoding="utf-8")
    shutil.copytree(base, tmp_path / "own", ignore=shutil.ignore_patterns("checkpoint-*"))
    weights = tmp_path / "own" / "model.safetensors"
    kept = weights.read_bytes()

    def run(**changed):
        given = (f"data.corpus={tmp_path}/words.jsonl", "layers.steps=1")
        recipe = small(*given, *(f"{key}={value}" for key, value in changed.items()))
        convert_and_train(str(tmp_path / "own"), tmp_path / "out", recipe, quiet=True)

    with pytest.raises(LatteError, match="next-token was stopped at step 1"):
        run(**{"training.max_minutes": 1e-6})
    (tmp_path / "words.jsonl").write_text(text.replace("mean", "mass", 1), encoding="utf-8")
    with pytest.raises(LatteError, match="the training text.* since this conversion began"):
        run()
    (tmp_path / "words.jsonl").write_text(text, encoding="utf-8")
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(LatteError, match="the base has changed since this conversion began"):
        run()
    weights.write_bytes(kept)
    run()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_windows_are_hidden_at_a_falling_rate(base, small, tmp_path, monkeypatch):
    from latte.lab.train import conversion_trainer

    seen, hide = [], conversion_trainer.hidden_windows

    @contextlib.contextmanager
    def looked_at(model, probability, seed):
        with hide(model, probability, seed):
            layers = conversion_trainer.attention_layers(model)
            seen.append((round(probability, 6), seed, [layer.mixing for layer in layers]))
            yield

    monkeypatch.setattr(conversion_trainer, "hidden_windows", looked_at)
    recipe = small("layers=null", "conversion.window_dropout=1.0")
    out = convert_and_train(str(base), tmp_path / "out", recipe, quiet=True)
    probabilities, seeds, mixings = zip(*seen, strict=True)
    assert probabilities == (1.0, 0.666667, 0.333333)
    assert seeds == tuple((recipe.training.seed, step, 0) for step in range(3))
    assert mixings[0] == ["hidden", "hidden"]
    assert AutoConfig.from_pretrained(out).mixing == "learned"
    stages = small("conversion.window_dropout=0.5").stages("base", tmp_path)
    assert [stage.conversion.window_dropout for stage in stages.values()] == [0.0, 0.5]


def test_an_interrupted_conversion_ends_as_an_uninterrupted_one(base, converted, small, tmp_path):
    """Stopped in its second stage, and killed there; meanwhile nobody else goes on."""
    stopped = small("training.max_minutes=1e-6")
    with pytest.raises(LatteError, match="next-token was stopped at step 1 by its max_minutes"):
        convert_and_train(str(base), tmp_path / "out", stopped, quiet=True)
    held, _ = lock_folder(tmp_path / "out", "conversion.json", {}, {}, identity=dict)
    with pytest.raises(FolderInUse, match="another process is training in"):
        convert_and_train(str(base), tmp_path / "out", small(), quiet=True)
    held.lock.close()
    more = small("training.max_minutes=60", "evaluation.lengths=[32]")
    out = convert_and_train(str(base), tmp_path / "out", more, quiet=True)
    # As a kill during the second stage leaves it: a checkpoint and no result.
    for name in ("model.safetensors", "config.json", "finished.json"):
        (out / "next-token" / name).unlink()
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "next-token" / "checkpoint-3", ignore_errors=True)
    again = convert_and_train(str(base), tmp_path / "out", more, quiet=True)
    for name, weight in weights(converted).items():
        assert torch.equal(weight, weights(again)[name]), name
    with pytest.raises(LatteError, match="another conversion: layers.learning_rate is"):
        other = small("layers.learning_rate=0.5")
        convert_and_train(str(base), tmp_path / "out", other, quiet=True)


def test_a_hybrid_is_trained_and_every_table_says_so(base, settings, tmp_path):
    out = tmp_path / "out"
    recipe = ["--recipe", str(RECIPES / "small.yaml"), *settings, "conversion.keep_layers=[1]"]
    recipe += ["evaluation.lengths=[32]"]
    assert main(["convert", str(base), str(out), *recipe, "--quiet"]) == 0
    new = {name.split(".")[2] for name in weights(out) if ".latents." in name}
    assert new == {"0"}
    table = (out / "evaluation.md").read_text()
    assert "| base | " in table
    for name in ("base, window only", "converted", "converted, p(l=0) = 1"):
        assert f"| {name}, hybrid: layers 1 kept | " in table
    assert "hybrid: layers 1 kept" in (out / "evaluation.csv").read_text()
    command = ["evaluate", str(out), "--lengths", "32", "--max-tokens", "60"]
    assert main(command) == 0
    assert "hybrid: layers 1 kept" in (out / "evaluation" / "evaluation.csv").read_text()


def test_an_unfinished_run_with_low_rank_updates_says_so(base, small, tmp_path):
    from latte.lab.evaluate.checkpoint import load_checkpoint

    pytest.importorskip("peft")
    recipe = small("layers=null", "conversion.trainable=lora", "conversion.lora_rank=2",
                   "conversion.lora_targets=[q_proj]", "training.max_minutes=1e-6")  # fmt: skip
    with pytest.raises(LatteError, match="stopped at step 1"):
        convert_and_train(str(base), tmp_path / "out", recipe, quiet=True)
    with pytest.raises(LatteError, match="low-rank updates are not merged yet; expected a finis"):
        load_checkpoint(tmp_path / "out" / "next-token")


@pytest.mark.parametrize("trainable", ["latents", "lora", "all"])
def test_what_is_trained_of_a_half_precision_base_is_fp32(base, tmp_path, trainable):
    from transformers import AutoModelForCausalLM

    from latte.lab.train.conversion_trainer import starting_model

    if trainable == "lora":
        pytest.importorskip("peft")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "half"
    )
    section = ConversionSection(base=str(tmp_path / "half"), window=8, num_latents=8,
                                trainable=trainable, lora_targets=["q_proj"])  # fmt: skip
    model = starting_model(section, 0, [torch.arange(40)])
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert trained == {torch.float32}
    assert frozen == ({torch.bfloat16} if trainable != "all" else set())
    ids = torch.arange(20)[None]
    for bf16 in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert loss.isfinite()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_a_converted_base_is_gone_on_with(converted, small):
    from latte.lab.train.conversion_trainer import starting_config

    section = dataclasses.replace(small().conversion, base=str(converted))
    assert starting_config(section).local_window == 8
    section.window = 16
    with pytest.raises(LatteError, match="converted with local_window=8; expected that in the rec"):
        starting_config(section)


def test_no_stage_at_all_is_a_mistake(small):
    with pytest.raises(LatteError, match="needs a layers or a training section"):
        small("layers=null", "training=null")


@pytest.mark.parametrize("asked", ["transfer.max_steps=3", "conversion.objective=transfer"])
@pytest.mark.parametrize("read", [load_recipe, load_conversion_recipe])
def test_the_stage_that_was_removed_says_what_to_write(asked, read):
    recipe = RECIPES / ("base.yaml" if read is load_recipe else "small.yaml")
    with pytest.raises(LatteError, match="removed; expected a section layers in a recipe") as error:
        read(recipe, [asked])
    assert "\n" not in str(error.value) and str(error.value).startswith(asked.split(".max")[0])


def test_what_earlier_versions_saved_is_read(base, converted, small):
    """Recipes, runs and conversions had `transfer: null` and an objective of next tokens."""
    earlier = "transfer=null", "conversion.objective=next-token"
    assert small(*earlier) == small()
    files = converted / "conversion.json", converted / "next-token" / "run.json"
    before = [file.read_text() for file in files]
    for file, text in zip(files, before, strict=True):
        content = json.loads(text)
        for recipe in (content["recipe"], content.get("identity", {}).get("recipe", {})):
            recipe["transfer"] = None
            recipe.setdefault("conversion", {})["objective"] = "next-token"
        file.write_text(json.dumps(content))
    convert_and_train(str(base), converted, small("evaluation.lengths=[32]"), quiet=True)
    for file, text in zip(files, before, strict=True):
        file.write_text(text)
    saved = json.loads((converted / "recipe.json").read_text())
    plain = recipe_from_dict(saved)
    for objective in ("next-token", "transfer"):
        saved["conversion"]["objective"] = objective
        assert recipe_from_dict(saved) == plain


def test_a_teacher_that_is_trained_itself_is_a_mistake(base, small, tmp_path):
    recipe = small("layers=null", "conversion.trainable=all", "conversion.distillation=0.5")
    with pytest.raises(LatteError, match="expected conversion.trainable=latents or lora, got all"):
        convert_and_train(str(base), tmp_path / "out", recipe, quiet=True)
    assert not (tmp_path / "out").exists()


def test_recipes_load():
    expected = {
        "ablation.yaml": ["layers"],
        "own-base.yaml": ["layers", "next-token"],
        "gemma2-2b.yaml": ["layers", "next-token"],
        "gemma3-270m.yaml": ["layers"],
        "small.yaml": ["layers", "next-token"],
        "smollm2.yaml": ["layers", "next-token"],
        "smollm2-gpu.yaml": ["layers", "next-token"],
        "smollm2-kept-tokens.yaml": ["layers", "next-token"],
    }
    runs = {"base.yaml", "smollm2-kept.yaml"}  # of `latte train`
    assert set(expected) == {path.name for path in RECIPES.glob("*.yaml")} - runs
    for name, wanted in expected.items():
        stages = load_conversion_recipe(RECIPES / name).stages("base", Path("out"))
        assert list(stages) == wanted
        if len(wanted) == 2:
            assert stages[wanted[1]].conversion.base == f"out/{wanted[0]}"


def pieces(stage):
    """In how many pieces a sharded run's checkpoints hold the weights; none if it is not one."""
    folder = stage / "checkpoint-2" / SHARDS
    if not folder.exists():
        return set()
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {len(e.chunks) for name, e in entries.items() if name.startswith("model.model.layers")}


@pytest.mark.slow
def test_sharded_and_replicated_processes_agree(base, words, tmp_path):
    """FSDP2 and DDP train next tokens to the same weights on two processes, the base frozen."""
    found = {}
    for strategy in ("ddp", "fsdp2"):
        settings = [f"data.{key}={value}" for key, value in words.items()]
        settings += ["data.block_length=32", "data.max_validation_tokens=64"]
        settings += ["conversion.window=8", "conversion.num_latents=8"]
        settings += ["conversion.window_dropout=0.5"]
        settings += ["evaluation.lengths=[32]", "evaluation.max_tokens=50"]
        settings += [f"layers.{value}" for value in LAYERS]
        settings += [f"training.{value}" for value in (*STAGE, "bf16=false")]
        settings += [f"training.strategy={strategy}"]
        out = tmp_path / strategy
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "latte.cli", "convert", base, out, *settings]
        python(*command, "--recipe", RECIPES / "small.yaml", "--quiet")
        found[strategy] = {stage: weights(out / stage) for stage in ("layers", "next-token")}
        assert (out / "evaluation.csv").is_file()
        for stage in found[strategy]:  # on a CPU FSDP2 may be DDP without a word
            sharded = strategy == "fsdp2" and stage == "next-token"
            assert pieces(out / stage) == ({2} if sharded else set())
    original = weights(base)
    for stage, trained in found["ddp"].items():
        for name, weight in trained.items():
            torch.testing.assert_close(found["fsdp2"][stage][name], weight, rtol=1e-4, atol=1e-6)
            assert name not in original or torch.equal(original[name], weight)
    first, second = found["ddp"].values()
    new = [name for name in first if ".latents." in name]
    assert new and not any(torch.equal(first[name], second[name]) for name in new)


def test_a_missing_peft_is_found_out_before_any_stage(base, small, tmp_path, monkeypatch):
    monkeypatch.setattr("latte.lab.train.conversion_trainer.find_spec", lambda name: None)
    recipe = small("conversion.trainable=lora")
    with pytest.raises(LatteError, match="needs peft, which is not installed"):
        convert_and_train(str(base), tmp_path / "out", recipe, quiet=True)
    assert not (tmp_path / "out").exists()
