"""The Trainer's glue: losses, accumulation, divergence, schedules, resumes, reports."""

import dataclasses
import json
import math
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from latte.errors import LatteError
from latte.lab.train import speed
from latte.lab.train.metrics import duration, read_metrics
from latte.lab.train.run import train
from latte.lab.train.run_folder import checkpoints
from latte.lab.train.trainer import LatteTrainer, learning_rate_factor


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="session")
def whole(recipe_in, tmp_path_factory):
    """The run of a recipe as `make_recipe()` gives it, to be looked at or copied."""
    return train(recipe_in(tmp_path_factory.mktemp("whole") / "run"), quiet=True)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_a_run_reports_and_exports(make_recipe, preset, whole):
    own = preset == "latte-r-swa++"
    result = whole if own else train(make_recipe(preset), quiet=True)
    assert result.finished and result.steps == 6 and result.tokens == 6 * 2 * 32
    records = read_metrics(result.folder, "train")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert record["tokens_per_second"] > 0 and record["grad_norm"] > 0
        assert record["peak_memory_bytes"] > 2**20 and 0 < record["mfu"] < 10
    evaluations = read_metrics(result.folder, "eval")
    assert [record["step"] for record in evaluations] == [3, 6]
    assert result.validation["eval_loss"] == evaluations[-1]["eval_loss"]
    assert any(result.folder.joinpath("tensorboard").iterdir())
    assert [p.name for p in checkpoints(result.folder)] == ["checkpoint-4", "checkpoint-6"]
    for folder in (result.folder, result.folder / "checkpoint-4"):  # off while training alone
        assert json.loads((folder / "config.json").read_text())["use_cache"] is True


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(make_recipe, whole):
    """`training.torch_compile`, packed documents included; the export has plain names."""
    compiled = train(make_recipe(name="compiled", torch_compile=True), quiet=True)
    assert compiled.steps == 6
    assert_same(weights(compiled.folder), weights(whole.folder), atol=2e-3)


def test_a_finished_run_is_left_alone(make_recipe, whole):
    result = dataclasses.replace(whole, folder=Path(make_recipe().output_dir))
    shutil.copytree(whole.folder, result.folder)
    before = {p: p.stat().st_mtime_ns for p in result.folder.rglob("*") if p.name != ".lock"}
    assert train(make_recipe(), quiet=True) == result
    after = {p: p.stat().st_mtime_ns for p in result.folder.rglob("*") if p.name != ".lock"}
    assert after == before


@pytest.mark.parametrize("which", ["corpus", "validation"])
def test_a_stopped_run_goes_on_with_its_own_text_alone(make_recipe, words, whole, tmp_path, which):
    file = tmp_path / "words.jsonl"
    text = Path(words[which]).read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    recipe = make_recipe(name="edited", max_minutes=1e-6)
    setattr(recipe.data, which, str(file))
    train(recipe, quiet=True)
    folder = Path(recipe.output_dir)
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    recipe.training.max_minutes = None
    file.write_text(text.replace("mean", "mass", 1), encoding="utf-8")
    name = "training" if which == "corpus" else "held-out"
    with pytest.raises(LatteError, match=f"the {name} text.* has changed since this run began"):
        train(recipe, quiet=True)
    assert before == {path: path.read_bytes() for path in before}
    file.write_text(text, encoding="utf-8")  # what is in it counts, not its date
    resumed = train(recipe, quiet=True)
    assert_same(weights(whole.folder), weights(resumed.folder), atol=0)


@pytest.fixture
def ctrl_c(monkeypatch):
    """Steps in whose middle Ctrl-C is pressed, once each time that the step is listed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    presses = []
    step = LatteTrainer.training_step

    def training_step(self, *arguments):
        for _ in range(presses.count(self.state.global_step + 1)):
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(LatteTrainer, "training_step", training_step)
    yield presses
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [2, 6])
def test_ctrl_c_saves_after_the_step(make_recipe, whole, ctrl_c, capsys, at):
    ctrl_c[:] = [at]
    recipe = make_recipe(name="interrupted", save_steps=100, log_steps=5)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, quiet=True)
    assert "stopping after this step, with a checkpoint" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    folder = Path(recipe.output_dir)
    assert [path.name for path in checkpoints(folder)] == [f"checkpoint-{at}"]
    ctrl_c.clear()
    assert train(recipe, quiet=True).finished
    assert_same(weights(whole.folder), weights(folder), atol=0)
    logged = read_metrics(folder, "train")
    assert sum(record["step"] for record in logged) == {2: 2 + 5 + 6, 6: 5 + 6}[at]


def test_ctrl_c_twice_stops_at_once(make_recipe, ctrl_c):
    ctrl_c[:] = [2, 2]
    recipe = make_recipe(name="at-once", save_steps=100)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, quiet=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert checkpoints(Path(recipe.output_dir)) == []


@pytest.mark.parametrize("where", ["another thread", "a program with a handler"])
def test_ctrl_c_is_the_program_s_own_elsewhere(make_recipe, where):
    results = []
    recipe = make_recipe(max_steps=1)
    thread = threading.Thread(target=lambda: results.append(train(recipe, quiet=True)))
    if where == "another thread":
        thread.start()
        thread.join()
    else:
        own = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            thread.run()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, own)
    assert results[0].finished


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": 3}'])
def test_a_damaged_mark_of_the_end_is_one_line(make_recipe, whole, content):
    folder = Path(make_recipe().output_dir)
    shutil.copytree(whole.folder, folder)
    (folder / "finished.json").write_text(content)
    with pytest.raises(LatteError, match="finished.json is damaged .*remove it"):
        train(make_recipe(), quiet=True)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(make_recipe, whole, capsys):
    folder = Path(make_recipe().output_dir)
    shutil.copytree(whole.folder, folder)
    for name in ("finished.json", "model.safetensors", "manifest.json"):
        (folder / name).unlink()
    newest = folder / "checkpoint-6" / "optimizer.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = train(make_recipe(), quiet=False)
    assert "passing over a damaged checkpoint" in capsys.readouterr().err
    assert_same(weights(whole.folder), weights(resumed.folder), atol=0)


def test_a_cpu_without_bf16_computes_in_fp32_and_says_so(make_recipe, monkeypatch, capsys):
    emulated = [True]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(speed, "emulates", lambda dtype: emulated[0] and dtype == torch.bfloat16)
    train(make_recipe(name="asked", bf16=True, max_steps=2))
    assert "training.bf16: this CPU has no bf16 products" in capsys.readouterr().err
    plain = train(make_recipe(name="plain", bf16=False, max_steps=2))
    assert_same(weights(plain.folder.parent / "asked"), weights(plain.folder), atol=0)
    emulated[0] = False
    train(make_recipe(name="quick", bf16=True, max_minutes=1e-6))
    assert "bf16" not in capsys.readouterr().err


def test_accumulation_over_uneven_batches_equals_one_big_batch(make_recipe):
    """Documents end within blocks, so micro-batches count different tokens."""
    settings = {"max_steps": 3, "warmup_steps": 0, "max_grad_norm": 0.0}
    big = train(make_recipe(name="big", batch_size=4, **settings), quiet=True)
    parts = train(
        make_recipe(name="parts", batch_size=1, gradient_accumulation=4, **settings), quiet=True
    )
    ours, theirs = read_metrics(big.folder, "train"), read_metrics(parts.folder, "train")
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-5)
    norms = [r["grad_norm"] for r in ours]
    assert norms == pytest.approx([r["grad_norm"] for r in theirs], rel=1e-3)


def test_the_logged_loss_is_summed_nll_over_tokens(make_recipe, whole):
    """A log window of three steps weighs each step by its tokens."""
    three = train(make_recipe(name="three", log_steps=3), quiet=True)
    from latte.lab.data.preparing import prepare_text

    recipe = make_recipe()
    text = prepare_text(recipe.data, progress=False)
    blocks = text.blocks(recipe.data, 12, recipe.training.seed)
    tokens = [
        sum(int((blocks[2 * step + i]["labels"] != -100).sum()) for i in range(2))
        for step in range(6)
    ]
    losses = [record["loss"] for record in read_metrics(whole.folder, "train")]
    nll = [n * loss for n, loss in zip(tokens, losses, strict=True)]
    expected = [sum(nll[i : i + 3]) / sum(tokens[i : i + 3]) for i in (0, 3)]
    found = [record["loss"] for record in read_metrics(three.folder, "train")]
    assert found == pytest.approx(expected, rel=1e-6)


PRESETS = "latte-r-swa++", "latte-r-swa-f++", "latte-gated", "latte-hybrid"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loss_that_is_not_finite_stops_the_run(make_recipe, preset):
    recipe = make_recipe(preset, learning_rate=1e30, warmup_steps=0, max_grad_norm=0.0)
    with pytest.raises(LatteError, match=r"diverged: .* not finite at step \d .*1e\+30"):
        train(recipe, quiet=True)
    for checkpoint in checkpoints(Path(recipe.output_dir)):  # nothing broken was saved
        assert all(bool(w.isfinite().all()) for w in weights(checkpoint).values())


def test_text_that_is_too_short_leaves_the_folder_free(make_recipe):
    recipe = make_recipe(max_steps=1)
    recipe.data.block_length = 10**6
    with pytest.raises(LatteError, match="too few for a single block"):
        train(recipe, quiet=True)
    assert train(make_recipe(max_steps=1), quiet=True).finished  # the folder was given back


@pytest.mark.parametrize(("bf16", "checkpointing"), [(False, True), (True, False)])
def test_precision_and_checkpointing_train(make_recipe, bf16, checkpointing):
    settings = {"bf16": bf16, "gradient_checkpointing": checkpointing, "max_steps": 4}
    result = train(make_recipe(**settings), quiet=True)
    losses = [record["loss"] for record in read_metrics(result.folder, "train")]
    assert losses[-1] < losses[0]
    assert all(w.dtype == torch.float32 for w in weights(result.folder).values())


def test_learning_rate():
    def at(step, schedule="cosine", floor=0.1):
        return learning_rate_factor(step, 110, warmup=10, schedule=schedule, floor=floor)

    assert at(0) == pytest.approx(1 / 11) and at(9) == pytest.approx(10 / 11)
    assert at(10) == 1.0 and at(110) == pytest.approx(0.1) and at(500) == pytest.approx(0.1)
    assert at(60) == pytest.approx(0.55) and at(60, "linear") == pytest.approx(0.55)
    assert at(35, "linear") == pytest.approx(0.775)
    assert at(100, "constant") == 1.0


def test_durations():
    assert [duration(s) for s in (9, 125, 3725)] == ["9s", "2m05s", "1h02m"]


# ---- plain models of Transformers, such as a base to convert


def test_an_encoder_becomes_a_decoder():
    """BERT's own default would let a token see the one that it is to predict."""
    import torch
    from transformers import AutoModelForCausalLM

    from latte.lab.train.run import architecture_config

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = architecture_config("bert", {"vocab_size": 9, "num_attention_heads": 2, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        one, other = model(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])).logits
    torch.testing.assert_close(one[:3], other[:3])
    assert architecture_config("xlm", {}).causal


def test_a_field_may_have_the_name_that_all_models_share():
    """A recipe's block length is GPT-2's n_positions; its own name wins."""
    from latte.lab.train.run import architecture_config

    assert architecture_config("gpt2", {"max_position_embeddings": 64}).n_positions == 64
    both = {"max_position_embeddings": 64, "n_positions": 32, "n_embd": 16}
    config = architecture_config("gpt2", both)
    assert (config.n_positions, config.hidden_size) == (32, 16)
