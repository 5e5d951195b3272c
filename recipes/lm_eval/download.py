"""Fetch the data of harness tasks once, as JSONL, to evaluate later without a network.

    python recipes/lm_eval/download.py recipes/lm_eval/table5.yaml data/lm_eval
    latte evaluate CHECKPOINT --tasks data/lm_eval/local.yaml

Writes OUT/TASK/SPLIT.jsonl for every split that a task uses, and OUT/local.yaml: the same tasks
and groups with `dataset_path: json`. Everything else (prompts, choices, metrics) stays the
harness's. Paths in local.yaml are as OUT was typed, relative to where `latte evaluate` runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from latte.errors import LatteError
from latte.lab.evaluate.tasks import load_tasks


def save_task(task: Any, out: Path) -> dict[str, Any]:
    """Write the splits of a task; what replaces its data set in a group."""
    config = task.config
    used = (config.training_split, config.validation_split, config.test_split)
    fewshot = config.fewshot_split
    files = {}
    for split in dict.fromkeys(name for name in (*used, fewshot) if name):
        path = out / task.task_name / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        task.dataset[split].to_json(path)
        files[split] = str(path)
    entry: dict[str, Any] = {"task": task.task_name, "dataset_path": "json", "dataset_name": None}
    entry["dataset_kwargs"] = {"data_files": files}
    if config.num_fewshot is not None:
        entry["num_fewshot"] = config.num_fewshot
    return entry


def save_group(group: Any, out: Path) -> dict[str, Any]:
    """The group with its tasks replaced, under a name that the harness does not have."""
    members = [
        save_group(child, out) if hasattr(child, "get_all_tasks") else save_task(child, out)
        for child in group
    ]
    name = group.name.rpartition("::")[2]
    entry: dict[str, Any] = {"group": f"{name}_local", "task": members}
    if group.aggregate_metric_list:
        entry["aggregate_metric_list"] = [
            {"metric": found.metric, "weight_by_size": found.weight_by_size}
            for found in group.aggregate_metric_list
        ]
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", help="names of the harness's and YAML files, by commas")
    parser.add_argument("out", type=Path, help="folder for the data, such as data/lm_eval")
    options = parser.parse_args()
    try:
        loaded = load_tasks(options.tasks.split(","))
    except LatteError as error:
        raise SystemExit(f"download.py: error: {' '.join(str(error).split())}") from None
    groups = loaded.get("groups") or {}
    inner = {sub.name for group in groups.values() for sub in group.get_all_groups()}
    grouped = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    members = [
        save_group(group, options.out) for name, group in groups.items() if name not in inner
    ]
    members += [
        save_task(task, options.out)
        for name, task in loaded["tasks"].items()
        if name not in grouped
    ]
    file = options.out / "local.yaml"
    whole = members[0] if len(members) == 1 else {"group": "local", "task": members}
    file.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
