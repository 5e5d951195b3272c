"""Compare models of the results pages pair by pair, with p-values for the number of comparisons.

    python experiments/figures/pairs.py [pairs.csv]

reads the runs beside this file and writes a row per pair of models and part of a text: the
difference, paired by seed, with its 95% interval; the p-value of the paired t-test; and this
p-value corrected by Holm's method for all rows of the same table.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from latte.lab.compare.intervals import Mean, holm, mean_of
from latte.lab.evaluate.tables import csv_text

FIGURES = Path(__file__).parent
COLUMNS = ("table", "part", "left", "right", "unit", "seeds", "difference", "half_width", "p",
           "p_holm")  # fmt: skip
MANY = "latte-conv-swa-f++, num_latents=256"
NARROW = "latte-conv-swa-f++, intermediate_size=445"  # as many parameters as `swa++`
SHORT = "latte-conv-swa-f++, half_life_range=[1.0,64.0]"
HYBRID = "latte-hybrid"
RECURRENT = "trial, recurrent_layers=[0,1,2,3] rglru_decay_range=[0.43,0.992] intermediate_size=531"
WIDE = "latte-r-swa++, window_probability=0.9"
# Perplexities claimed by Tables 1 and 2: the left one above the right one (for the last pair: or
# equal).
CLAIMS = (
    ("latte", "latte++"),
    ("latte++", "latte-conv++"),
    ("latte-conv++", "latte-r++"),
    ("latte-conv++", "latte-conv-swa++"),
    ("latte-r++", "latte-conv-swa++"),
    ("latte-r++", "latte-r-swa++"),
    ("latte-conv-swa++", "latte-r-swa++"),
    ("r-swa++", "latte-r-swa++"),
    ("transformer++", "latte-r-swa++"),
)
PAST_PAIRS = (
    ("latte-conv-swa-f++", "swa++"),
    ("latte-conv-swa-f++", "transformer++"),
    ("latte-conv-swa-f++", "griffin"),
    (MANY, "griffin"),
    (MANY, "latte-conv-swa-f++"),
    ("latte-r-swa-f++", "swa++"),
    ("latte-r-swa-f++", "latte-r-swa++"),
    ("latte-r-swa++", "swa++"),
    ("latte-r-swa++", "transformer++"),
    ("latte-conv-swa++", "swa++"),
    (WIDE, "latte-r-swa++"),
)
GPU_PAIRS = (
    ("latte-conv-swa-f++", "swa++"),
    ("latte-conv-swa-f++", "transformer++"),
    ("latte-conv-swa-f++", "griffin"),
    (SHORT, "griffin"),
    (SHORT, "latte-conv-swa-f++"),
)
OURS = ("latte-conv-swa-f++", "latte-r-swa++", "latte-conv-swa++")
OTHERS = ("mamba2", "griffin", "swa++", "transformer++")
SHAKESPEARE_EQUAL_PAIRS = (
    *itertools.product(OURS, OTHERS),
    *itertools.combinations(OURS, 2),
)
FORGETTING_PAIRS = (
    ("latte-conv-swa-f++", "swa++"),
    ("latte-conv-swa-f++", "latte-conv-swa++"),
    ("latte-conv-swa-f++", "griffin"),
    ("latte-conv-swa++", "swa++"),
    ("griffin", "swa++"),
)
FORGETTING_EQUAL_PAIRS = (*FORGETTING_PAIRS, ("r-swa++", "swa++"))
RECURRENCE_PAIRS = (
    ("r-swa++", "swa++"),
    ("latte-r-swa++", "r-swa++"),
    (NARROW, "r-swa++"),
)
HYBRID_PAIRS = (
    *((HYBRID, name) for name in ("griffin", "mamba2", NARROW, "swa++", "transformer++")),
    (HYBRID, RECURRENT),
    (RECURRENT, "griffin"),
    (RECURRENT, "mamba2"),
)

Scores = dict[tuple[str, str], dict[int, float]]  # (model, part) -> seed -> score


def read(
    file: str, model: str, score: str, part: str | None = None, rate: str | None = None
) -> Scores:
    """The scores of a file by model, part and seed.

    Args:
        file: Name of the CSV file.
        model: Name of the column with the model.
        score: Name of the column with the score.
        part: Name of the column that divides the scores, such as `length`. Without one, and without
            a column `first`, all scores are of one part, "all".
        rate: Value of the column `rate` of the rows to read. None: all rows.
    """
    found: Scores = {}
    with open(FIGURES / file, newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if not row[score]:
                continue  # a run without a result
            if rate is not None and row["rate"] != rate:
                continue
            name = row[part] if part else "all"
            if "first" in row:
                name += f": {row['first']} to {row['last']}"
            found.setdefault((row[model], name), {})[int(row["seed"])] = float(row[score])
    return found


def difference(scores: Scores, left: str, right: str, part: str, unit: str) -> Mean:
    """The mean over seeds of left minus right, in the scores' unit or in percent of right."""
    one, other = scores[left, part], scores[right, part]
    seeds = sorted(set(one) & set(other))
    if unit == "%":
        return mean_of([100 * (one[seed] / other[seed] - 1) for seed in seeds])
    return mean_of([one[seed] - other[seed] for seed in seeds])


def rows_of(
    table: str, scores: Scores, pairs: Iterable[tuple[str, str]], parts: Iterable[str], unit: str
) -> list[dict[str, str]]:
    """A table's rows: each pair in each part."""
    cases = [(left, right, part) for left, right in pairs for part in parts]
    found = [difference(scores, left, right, part, unit) for left, right, part in cases]
    p_values = [each.p for each in found if each.p is not None]
    return [
        {
            "table": table, "part": part, "left": left, "right": right, "unit": unit,
            "seeds": str(each.count), "difference": f"{each.value:.6f}",
            "half_width": f"{each.half_width:.6f}", "p": f"{p:.6f}", "p_holm": f"{corrected:.6f}",
        }
        for (left, right, part), each, p, corrected in zip(
            cases, found, p_values, holm(p_values), strict=True
        )
    ]  # fmt: skip


def all_rows() -> list[dict[str, str]]:
    """The rows of every table, in the order of the pages."""
    ablation = read("ablation_equal.csv", "preset", "perplexity", "length")
    own_sizes = read("ablation.csv", "preset", "perplexity", "length")
    forgetting = read("forgetting.csv", "preset", "perplexity", "length")
    forgetting_equal = read("forgetting_equal.csv", "preset", "perplexity", "length")
    past = read("past.csv", "preset", "perplexity", "length")
    past |= read("past_positions.csv", "preset", "perplexity", "length")
    past_gpu = read("past_gpu.csv", "preset", "perplexity", "length")
    past_gpu |= read("past_gpu_positions.csv", "preset", "perplexity", "length")
    shakespeare = read("shakespeare.csv", "preset", "loss", "length")
    shakespeare_equal = read("shakespeare_equal.csv", "preset", "loss", "length")
    searched = read("shakespeare_searched.csv", "preset", "loss", "length")
    ingredients = read("ingredients_shakespeare.csv", "model", "loss_at_64", rate="0.003")
    searched |= {(name, "64"): ingredients[name, "all"] for name in ("slim", "mamba2")}
    listops = read("lra_listops.csv", "model", "test_accuracy")
    rivals = read("lra_listops_rivals.csv", "model", "test_accuracy")
    text = read("lra_text_scratch.csv", "model", "test_accuracy")
    others = [name for name, part in ablation if part == "256"]
    past_parts = ("1024", "1024: 0 to 63", "1024: 64 to 255", "1024: 256 to 1023", "4096")
    lra = ("r-swa++", "latte++", "latte-r++", "latte-r-swa++", "swa++", "transformer++")
    return [
        *rows_of("claims", ablation, CLAIMS, ["256"], "perplexity"),
        *rows_of(
            "ablation",
            ablation,
            [(name, "transformer++") for name in others if name != "transformer++"],
            ["256", "1024"],
            "perplexity",
        ),
        *rows_of(
            "window alone",
            ablation,
            [(name, "swa++") for name in others if name != "swa++"],
            ["256", "1024"],
            "perplexity",
        ),
        *rows_of("claims, own sizes", own_sizes, CLAIMS, ["256"], "perplexity"),
        *rows_of(
            "shakespeare",
            shakespeare,
            itertools.combinations([name for name, part in shakespeare if part == "64"], 2),
            ["64"],
            "nats",
        ),
        *rows_of(
            "shakespeare, equal parameters",
            shakespeare | shakespeare_equal,
            SHAKESPEARE_EQUAL_PAIRS,
            ["64"],
            "nats",
        ),
        *rows_of(
            "shakespeare, searched rates",
            searched,
            [*itertools.product(["slim"], OTHERS), *SHAKESPEARE_EQUAL_PAIRS],
            ["64"],
            "nats",
        ),
        *rows_of("forgetting", forgetting, FORGETTING_PAIRS, ["512", "2048"], "perplexity"),
        *rows_of(
            "forgetting, equal parameters",
            forgetting_equal,
            FORGETTING_EQUAL_PAIRS,
            ["512", "2048"],
            "perplexity",
        ),
        *rows_of("past", past, PAST_PAIRS, past_parts, "%"),
        *rows_of(
            "past, equal parameters",
            past,
            [(NARROW, name) for name in ("swa++", "transformer++", "griffin", "mamba2")],
            past_parts,
            "%",
        ),
        *rows_of("past, recurrence", past, RECURRENCE_PAIRS, past_parts, "%"),
        *rows_of(
            "past, hybrid",
            past,
            HYBRID_PAIRS,
            past_parts,
            "%",
        ),
        *rows_of("past, on a GPU", past_gpu, GPU_PAIRS, past_parts, "%"),
        *rows_of(
            "listops",
            listops,
            itertools.combinations(lra, 2),
            ["all"],
            "accuracy",
        ),
        *rows_of(
            "listops, other models",
            listops | rivals,
            [(name, own) for name, _ in rivals for own in ("latte++", "latte-r++")],
            ["all"],
            "accuracy",
        ),
        *rows_of(
            "text",
            text,
            itertools.combinations(lra, 2),
            ["all"],
            "accuracy",
        ),
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES / "pairs.csv"
    target.write_text(csv_text(COLUMNS, all_rows()), encoding="utf-8")
    print(f"written: {target}")
