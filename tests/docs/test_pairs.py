"""The differences between models on the results pages are those of their runs."""

import re

import pytest

from tests.helpers import read_csv

NAMES = {
    "`latte-conv-swa-f++`, 64 latents a head": "latte-conv-swa-f++, num_latents=256",
    "`latte-conv-swa-f++`, 1.57M": "latte-conv-swa-f++, intermediate_size=445",
    "`r-r-r-r`": (
        "trial, recurrent_layers=[0,1,2,3] rglru_decay_range=[0.43,0.992] intermediate_size=531"
    ),
    "`latte-conv-swa-f++`, shorter half-lives": "latte-conv-swa-f++, half_life_range=[1.0,64.0]",
    "`latte-r-swa++`, `window_probability` 0.9": "latte-r-swa++, window_probability=0.9",
}
PAST_PARTS = {"at 1,024": "1024", "0 to 63": "1024: 0 to 63", "256 to 1,023": "1024: 256 to 1023"}


@pytest.fixture
def script(script_of):
    return script_of("experiments/figures/pairs.py")


@pytest.fixture
def pairs(root):
    """The rows of pairs.csv by table, left model, right model and part."""
    rows = read_csv(root / "experiments/figures/pairs.csv")
    return {(row["table"], row["left"], row["right"], row["part"]): row for row in rows}


def name_of(cell):
    return NAMES.get(cell, cell.strip("`"))


def shown(row, digits, sign=1):
    difference, half = sign * float(row["difference"]), float(row["half_width"])
    return f"{difference:+.{digits}f} ± {half:.{digits}f}"


def table_with(page, *columns):
    """The tables of a page whose head has these columns."""
    return [each for each in page.tables() if set(columns) <= set(each[0])]


def test_the_file_is_what_its_script_writes_from_the_runs(script, pairs):
    rows = script.all_rows()
    assert rows == list(pairs.values()) and len(rows) == len(pairs)


def test_a_pair_is_seen_over_the_seeds_that_both_have(script):
    scores = {("a", "1"): {0: 3.0, 1: 6.0, 2: 9.0}, ("b", "1"): {1: 4.0, 2: 5.0}}
    both = script.difference(scores, "a", "b", "1", "nats")
    assert both.value == 3.0 and both.count == 2
    assert script.difference(scores, "a", "b", "1", "%").value == pytest.approx((50 + 80) / 2)


def test_where_the_past_matters(read, pairs):
    tables = table_with(read("experiments/results/books.md"), "control", *PAST_PARTS)
    names = ("past", "past, equal parameters", "past, recurrence", "past, hybrid", "past, on a GPU")
    for name, table in zip(names, tables, strict=True):
        expected = {key[:3] for key in pairs if key[0] == name}
        assert len(table) == len(expected)
        for line in table:
            for column, part in PAST_PARTS.items():
                row = pairs[name, name_of(line["model"]), name_of(line["control"]), part]
                text = shown(row, 1)
                assert line[column] == (f"**{text}**" if float(row["p_holm"]) < 0.05 else text)


def test_the_claims_of_table_1(read, pairs):
    (table,) = table_with(read("experiments/results/README.md"), "claimed, at 256")
    assert len(table) == sum(key[0] == "claims" for key in pairs)
    for line in table:
        left, right = re.findall(r"`([^`]+)`", line["claimed, at 256"])
        row = pairs["claims", left, right, "256"]
        assert line["difference"] == shown(row, 2) and line["seeds"] == row["seeds"]
        assert line["p"] == f"{float(row['p_holm']):.3f}"
        holds = float(row["p_holm"]) < 0.05 and float(row["difference"]) > 0
        assert line["verdict"].startswith("holds" if holds else "undecided")


def test_the_claims_of_long_range_arena(read, pairs):
    tables = table_with(
        read("experiments/results/lra.md"), "claimed, test accuracy, paired by seed"
    )
    for task, table in zip(("listops", "text"), tables, strict=True):
        for line in table:
            left, right = re.findall(r"`([^`]+)`", line["claimed, test accuracy, paired by seed"])
            row = pairs[task, left, right, "all"]
            assert line["difference"] == shown(row, 3, sign=-1)
            assert line["p"] == f"{float(row['p_holm']):.3f}"
            assert line["verdict"] == ("holds" if float(row["p_holm"]) < 0.05 else "undecided")


def test_other_models_on_listops(read, pairs):
    (table,) = table_with(
        read("experiments/results/lra.md"), "model", "minus `latte++`", "minus `latte-r++`"
    )
    name = "listops, other models"
    assert 2 * len(table) == sum(key[0] == name for key in pairs)
    for line in table:
        for own in ("latte++", "latte-r++"):
            row = pairs[name, name_of(line["model"]), own, "all"]
            text = shown(row, 3)
            bold = f"**{text}**" if float(row["p_holm"]) < 0.05 else text
            assert line[f"minus `{own}`"] == bold
