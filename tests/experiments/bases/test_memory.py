"""The bytes of a converted model's state, and the control that has as many."""

import pytest
import torch

from experiments.bases.results import read_rows
from experiments.sides import side


@torch.no_grad()
def bytes_of(spec):
    model, _ = side(spec).load()
    return model(torch.zeros(1, 300, dtype=torch.long), use_cache=True).past_key_values.nbytes


def test_a_window_with_as_many_bytes(folders, measure, capsys):
    ours = f"converted={folders['converted']}"
    folder = measure("memory", models=[ours])
    sizes = {row["part"]: int(row["bytes"]) for row in read_rows(folder / "memory.csv")}
    assert sizes["all"] == bytes_of(ours) and sizes["local_window"] == 8
    line = [x for x in (folder / "memory.md").read_text().splitlines() if "converted" in x][0]
    least, most = (int(cell) for cell in line.strip("| ").split(" | ")[-2:])
    # The control's state is as large, but for less than a key (and its masks, a byte a key).
    for window, parts in ((least, ("latent",)), (most, ("latent", "pending"))):
        extra = bytes_of(f"{ours},mixing=window,local_window={window}")
        extra -= bytes_of(f"{ours},mixing=window")
        wanted = sum(sizes[part] for part in parts)
        room = sizes["key"] + 2 * 2 * (window - 8)
        assert extra == pytest.approx(wanted, abs=room)


def test_a_window_with_as_many_bytes_as_kept_tokens(folders, measure):
    ours = f"converted={folders['kept']}"
    folder = measure("memory", models=[ours])
    sizes = {row["part"]: int(row["bytes"]) for row in read_rows(folder / "memory.csv")}
    assert sizes["all"] == bytes_of(ours) and sizes["kept"] > 8 * sizes["key"]
    line = [x for x in (folder / "memory.md").read_text().splitlines() if "converted" in x][0]
    window = int(line.strip("| ").split(" | ")[-1])
    found = bytes_of(f"{ours},mixing=window,kept_tokens=0,local_window={window}")
    assert 0 <= found - sizes["all"] <= sizes["key"] + 2 * 2 * window  # masks: a byte a key


def test_bytes_are_of_a_converted_model(folders, measure, capsys):
    measure("memory", models=[f"base={folders['base']}"], code=2)
    assert "expected a converted model" in capsys.readouterr().err
