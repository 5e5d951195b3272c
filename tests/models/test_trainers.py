"""What Transformers' Trainer, TRL's SFTTrainer and peft do with Latte's models."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

from tests.conversion import bases
from tests.models import modeldb

datasets = pytest.importorskip("datasets")
TINY = {"num_hidden_layers": 1, "initializer_range": 0.1}
MODELS = {
    name: functools.partial(modeldb.made, name, **TINY)
    for name in ("latte-r-swa++", "latte-gated", "latte-hybrid", "transformer++")
}
MODELS["converted"] = lambda: bases.converted("llama").float()
LENGTHS = (5, 9, 3, 12, 7, 4, 6, 8)
ROWS = [modeldb.tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]
DATA = datasets.Dataset.from_dict({"input_ids": ROWS, "labels": ROWS})


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def options(tmp_path):
    """Arguments of a Trainer that writes into the test's folder."""
    fixed = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}

    def make(kind=TrainingArguments, **given):
        return kind(str(tmp_path / "run"), **(fixed | given))

    return make


def mean_loss(model, rows=ROWS):
    """The mean over all predicted tokens, each text read alone."""
    model.eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:]), reduction="sum"
            )
            for row in rows
        ]
    return float(sum(losses)) / sum(len(row) - 1 for row in rows)


# --- Trainer --------------------------------------------------------------------------------------


def padded(features):
    """A batch padded on the right, its labels with -100."""
    most = max(len(row["input_ids"]) for row in features)

    def pad(name, value):
        rows = [row[name] + [value] * (most - len(row[name])) for row in features]
        return torch.tensor(rows)

    ids, labels = pad("input_ids", -1), pad("labels", -100)
    return {"input_ids": ids.clamp_min(0), "attention_mask": (ids >= 0).long(), "labels": labels}


FLAT = {
    "positions": {},
    "bounds": {"return_flash_attn_kwargs": True},
    "positions and indices": {"return_seq_idx": True},
    "indices": {"return_seq_idx": True, "return_position_ids": False},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}
COLLATORS = {name: DataCollatorWithFlattening(**given) for name, given in FLAT.items()}
COLLATORS["padding"] = padded


@pytest.mark.parametrize("collator", COLLATORS)
def test_evaluation_gives_the_mean_over_tokens(model, options, collator):
    args = options(per_device_eval_batch_size=len(ROWS), include_for_metrics=["loss"])
    seen = []

    def metrics(found):
        seen.append((found.predictions.shape[-1], found.label_ids.shape))
        return {"texts": len(found.label_ids)}

    trainer = Trainer(
        model,
        args,
        eval_dataset=DATA,
        data_collator=COLLATORS[collator],
        compute_metrics=metrics,
    )
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(mean_loss(model), rel=1e-5)
    assert found["eval_texts"] == (len(ROWS) if collator == "padding" else 1)
    assert seen[0][0] == model.config.vocab_size  # logits, and no states


@pytest.mark.parametrize("collator", ["padding", "all"])
def test_steps_that_are_accumulated_are_one_step(model, options, collator):
    """The gradient is that of the mean over the tokens of all parts, which are of all lengths."""
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    ends = []
    for batch, parts in ((8, 1), (2, 4)):
        model.load_state_dict(weights)
        args = options(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=parts,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
        )
        trainer = Trainer(model, args, train_dataset=DATA, data_collator=COLLATORS[collator])
        loss = trainer.train().training_loss
        ends.append((loss, {name: x.clone() for name, x in model.state_dict().items()}))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    changed = [not torch.equal(x, weights[name]) for name, x in ends[0][1].items()]
    model.load_state_dict(weights)
    assert any(changed) and ends[0][0] == pytest.approx(mean_loss(model), rel=1e-5)


def test_training_stops_early_and_ends_with_the_best_weights(model, options):
    """At this rate the loss grows at once, so the first of the evaluations is the best."""
    args = options(
        per_device_train_batch_size=8,
        max_steps=6,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        learning_rate=30.0,
        optim="sgd",
        max_grad_norm=0.0,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=DATA,
        eval_dataset=DATA,
        data_collator=COLLATORS["all"],
        callbacks=[EarlyStoppingCallback(1)],
    )
    trainer.train()
    losses = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
    assert 2 <= len(losses) < 6 and min(losses) == trainer.state.best_metric
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    torch.testing.assert_close(dict(model.state_dict()), dict(best.state_dict()), rtol=0, atol=0)


def test_smoothed_labels_are_those_of_the_next_tokens(model, options):
    args = options(label_smoothing_factor=0.2, per_device_eval_batch_size=8)
    found = Trainer(model, args, eval_dataset=DATA, data_collator=padded).evaluate()["eval_loss"]
    batch = padded(list(DATA))
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    wanted = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.2
    )
    assert found == pytest.approx(float(wanted), rel=1e-5)


def test_a_classifier_is_trained_and_evaluated(options):
    model = modeldb.made("latte-r-swa++", "classifier", is_causal=False, num_labels=2, **TINY)
    classes = [i % 2 for i in range(len(ROWS))]
    data = datasets.Dataset.from_dict({"input_ids": ROWS, "label": classes})

    def together(features):
        rows = [{"input_ids": x["input_ids"], "labels": [x["label"]]} for x in features]
        batch = padded(rows)
        return batch | {"labels": batch["labels"][:, 0]}

    args = options(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, optim="sgd"
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        data_collator=together,
        compute_metrics=lambda x: {"right": (x.predictions.argmax(-1) == x.label_ids).mean()},
    )
    trainer.train()
    found = trainer.evaluate()
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([row])).logits for row in ROWS])
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(classes))
    assert found["eval_loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert found["eval_right"] == float((logits.argmax(-1) == torch.tensor(classes)).float().mean())


# --- TRL ------------------------------------------------------------------------------------------


PACKING = {
    "padded": {},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 64},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
}


@pytest.mark.parametrize("kind", PACKING)
def test_supervised_fine_tuning_reads_every_text_alone(model, options, kind):
    trl = pytest.importorskip("trl")
    texts = ["abcdefgh", "hello", "padding", "xyz"]
    args = options(
        trl.SFTConfig, max_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        gradient_checkpointing=False, bf16=False, **PACKING[kind],
    )  # fmt: skip
    letters = modeldb.tokenizer()
    data = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(
        model, args, train_dataset=data, eval_dataset=data, processing_class=letters
    )
    rows = [letters(text + "<eos>")["input_ids"] for text in texts]
    if kind == "wrapped":  # one text after the other, cut into rows
        together = sum(rows, [])
        rows = [together[i : i + 16] for i in range(0, len(together), 16)]
    before = mean_loss(model, rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean_loss(model, rows), rel=1e-4)
    assert mean_loss(model, rows) != before


# --- peft -----------------------------------------------------------------------------------------


def test_low_rank_updates_are_trained_saved_loaded_and_merged(model, options, tmp_path):
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    model.save_pretrained(base)
    wanted = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=wanted, task_type="CAUSAL_LM")
    )
    args = options(max_steps=1, learning_rate=0.5, optim="sgd", per_device_train_batch_size=8)
    trainer = Trainer(
        adapted, args, train_dataset=DATA, eval_dataset=DATA, data_collator=COLLATORS["all"]
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after != before
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = modeldb.tokens(2, 11)
    adapted.eval()
    with torch.no_grad():
        expected = adapted(ids).logits
        torch.testing.assert_close(merged.eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert mean_loss(merged) == pytest.approx(after, rel=1e-4)
