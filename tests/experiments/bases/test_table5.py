"""The table of tasks beside the paper's, and a run of a task of the harness's from a file."""

import json

import pytest

from experiments.bases import table5
from experiments.bases.results import read_rows


def line(model, task, value, *, samples=100, seed="", metric="acc", items=""):
    error = 0.05
    return {"model": model, "seed": seed, "task": task, "metric": metric, "filter": "none",
            "value": str(value), "stderr": str(error), "samples": str(samples),
            "items": items}  # fmt: skip


def test_columns_and_the_papers_numbers(tmp_path):
    rows = [
        line("base", "mmlu_law", 0.2, samples=300),
        line("base", "mmlu_art", 0.6, samples=100),
        line("base", "hellaswag", 0.3),
        line("base", "hellaswag", 0.4, metric="acc_norm"),
        line("ours", "hellaswag", 0.31, metric="acc_norm", seed="0"),
        line("ours", "hellaswag", 0.35, metric="acc_norm", seed="1"),
    ]
    text = table5.report(tmp_path, rows, order=["base", "ours"])
    # MMLU: weighted by items, and so its standard error.
    error = 100 * ((300 * 0.05) ** 2 + (100 * 0.05) ** 2) ** 0.5 / 400
    assert f"| base | 30.0 ({error:.1f}) | 40.0 (5.0) | 35.0 |" in text
    assert "| ours | - | 33.0 (5.0) | - |" in text, "seeds: their mean, the items' error"
    assert "| Gemma-Macchiato 2B (paper) | 46.8 | 73.1 | 60.0 |" in text
    summary = {(r["model"], r["column"]): r for r in read_rows(tmp_path / "table5.csv")}
    assert summary["base", "MMLU"]["samples"] == "400"
    assert summary["ours", "HellaSwag"]["seeds"] == "2"


def test_models_are_compared_item_by_item(tmp_path):
    rows = [
        line("base", "arc_easy", 0.5, items="1010"),
        line("ours", "arc_easy", 0.75, items="1110"),
        line("base", "mmlu_law", 0.5, items="10"),
        line("base", "mmlu_art", 0.0, items="0"),
        line("ours", "mmlu_law", 0.5, items="01", seed="0"),
        line("ours", "mmlu_law", 0.5, items="10", seed="1"),
        line("ours", "mmlu_art", 0.0, items="0", seed="0"),
        line("ours", "mmlu_art", 0.0, items="0", seed="1"),
        line("ours", "mmlu_law", 1.0, items="11", seed="2"),  # its other task is not done
    ]
    text = table5.report(tmp_path, rows, order=["base", "ours"])
    # Student's 95% of 2 and 3 degrees of freedom: 4.3027, 3.1824. Items differ by -1/2, 1/2, 0
    # and by 0, 1, 0, 0.
    mmlu, easy = 4.3027 * 0.5 / 3**0.5, 3.1824 * 0.5 / 4**0.5
    both = (mmlu**2 + easy**2) ** 0.5 / 2
    expected = f"| ours | +0.0 ± {100 * mmlu:.1f} | +25.0 ± {100 * easy:.1f} | +12.5 ± "
    assert expected + f"{100 * both:.1f} |" in text
    alone = table5.report(tmp_path, rows[:1], order=["base"])
    assert "Difference" not in alone


def test_tasks_of_several_models(folders, measure, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = [
        {"question": f"{a} and {b}:", "choices": ["one", "two", "three"], "label": a % 3}
        for a, b in zip(range(6), range(3, 9), strict=True)
    ]
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = tmp_path / "easy.yaml"
    task.write_text(
        "task: arc_easy\ndataset_path: json\noutput_type: multiple_choice\n"
        f"dataset_kwargs:\n  data_files:\n    validation: {data}\n"
        "validation_split: validation\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    given = ("--tasks", str(task), "--limit", "5", "--batch-size", "2", "--max-length", "64")
    folder = measure("tasks", *given)
    rows = read_rows(folder / "tasks.csv")
    assert {(row["model"], row["task"]) for row in rows} == {
        (model, "arc_easy") for model in ("base", "converted", "window")
    }
    assert {row["samples"] for row in rows} == {"5"} and {row["limit"] for row in rows} == {"5"}
    for row in rows:
        if row["metric"] == "acc":
            assert len(row["items"]) == 5
            assert row["items"].count("1") / 5 == pytest.approx(float(row["value"]))
    text = (folder / "table5.md").read_text()
    assert "Difference from base on the same items" in text
    assert "| model | ARC-E | mean |" in text and "| Gemma 2 2B (paper) | 80.2 | 80.2 |" in text
    before = (folder / "tasks.csv").read_text()
    monkeypatch.setattr(table5, "score_task", None)  # nothing is run again
    measure("tasks", *given)
    assert (folder / "tasks.csv").read_text() == before
