"""Comparisons, by one seed and by several: intervals, resuming, failures, the report."""

import math
from pathlib import Path

import pytest

from latte.errors import LatteError
from latte.lab.compare import compare as module
from latte.lab.compare import report
from latte.lab.compare.compare import MEASURED_FILE, Comparison, preset_recipe, runs_of
from latte.lab.compare.grid import FAILED_FILE
from latte.lab.compare.intervals import Mean, holm, mean_of, student_t
from latte.lab.compare.report import excludes_zero, found_order, losses, paired
from latte.lab.evaluate.lengths import Row
from latte.lab.machine import WorkFailed
from latte.lab.train.metrics import read_metrics
from latte.lab.train.run import model_config
from latte.lab.train.run_folder import FolderInUse, claim
from latte.lab.train.trainer import Diverged
from latte.models import count_parameters
from latte.models.atomic_files import write_json
from tests.helpers import read_csv


def compare(recipe, report_only=False, **options):
    """Do what is due, in this process; where the runs stand, and the report."""
    grid = Comparison(recipe, **{"quiet": True, "apart": False, **options})
    return grid.sweep(report_only=report_only)


def list_runs(recipe):
    return Comparison(recipe).listing()


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert student_t(0.95, freedom) == pytest.approx(quantile, abs=5e-5)


def test_a_mean_carries_its_interval():
    three = mean_of([1.0, 2.0, 3.0])
    assert (three.value, three.count) == (2.0, 3)
    assert three.half_width == pytest.approx(4.302653 / math.sqrt(3))
    assert three.sign == 0 and mean_of([5.0, 5.1, 5.2]).sign == 1
    assert mean_of([-5.0, -5.1, -5.2]).sign == -1
    assert mean_of([7.0]) == Mean(7.0, None, 1) and mean_of([7.0]).sign == 0


@pytest.mark.parametrize("count", [2, 3, 6])
def test_p_is_one_minus_the_confidence_whose_interval_ends_at_zero(count):
    values = [0.3 + 0.2 * n for n in range(count)]
    found = mean_of(values)
    assert found.p is not None and found.half_width is not None
    narrow = student_t(1 - found.p, count - 1) / student_t(0.95, count - 1) * found.half_width
    assert narrow == pytest.approx(found.value, rel=1e-6)
    assert mean_of([-value for value in values]).p == found.p


def test_p_at_the_edges():
    assert mean_of([0.0, 1.0]).p == pytest.approx(0.5)  # t = 1 with one degree of freedom
    assert mean_of([-1.0, 1.0]).p == 1.0 and mean_of([0.0, 0.0]).p == 1.0
    assert mean_of([2.0, 2.0, 2.0]).p == 0.0 and mean_of([2.0]).p is None


def test_holm_multiplies_the_smallest_by_their_number_and_keeps_the_order():
    # Steps: 4 x 0.005, 3 x 0.01, 2 x 0.03, 1 x 0.04, of which the last is not below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.7]) == [1.0, 1.0] and holm([]) == [] and holm([0.02]) == [0.02]


# ---- the harness, with made-up measurements


def fake(perplexities, done):
    """In the place of training: writes what was measured, or raises."""

    def train_and_measure(run, section, quiet):
        done.append(run.label)
        found = perplexities[run.preset, run.seed]
        run.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(found, Exception):
            raise found
        parts = [(0, 500, math.log(found) + 1), (8, 500, math.log(found))]
        parts = parts if section.positions else []
        rows = [
            Row(length, 1000, 4000.0, math.log(found), found, 2.0, 1.0, 1000.0, 10**6, parts)
            for length in sorted(section.lengths)
        ]
        values = {
            "wanted": module._wanted(run, section),
            "parameters": 10**6,
            "steps": 10,
            "tokens": 640,
            "seconds": 1.0,
            "tokens_per_second": 640.0 + run.seed,
            "peak_memory_bytes": 10**9,
            "hardware": {"device": "cpu", "threads": 1, "torch": "2", "date": "2026-01-01"},
            "rows": [vars(row) for row in rows],
        }
        write_json(run.folder / MEASURED_FILE, values)
        (run.folder / FAILED_FILE).unlink(missing_ok=True)

    return train_and_measure


@pytest.fixture
def made_up(make_recipe, monkeypatch):
    """A recipe for measurements that are made up; no figure, which takes longest here."""
    monkeypatch.setattr(report, "seeds_figure", lambda *_: None)
    recipe = make_recipe(name="seeds")
    recipe.comparison.presets = ["latte", "latte++", "latte-r-swa++", "transformer++"]
    recipe.comparison.seeds = [0, 1, 2]
    recipe.comparison.lengths = [32, 64]
    return recipe


VALUES = {
    ("latte", 0): 130.0, ("latte", 1): 150.0, ("latte", 2): 140.0,
    ("latte++", 0): 120.0, ("latte++", 1): 139.0, ("latte++", 2): 129.0,
    ("latte-r-swa++", 0): 100.0, ("latte-r-swa++", 1): 121.0, ("latte-r-swa++", 2): 109.0,
    ("transformer++", 0): 99.0, ("transformer++", 1): 119.0, ("transformer++", 2): 111.0,
}  # fmt: skip


def test_presets_get_as_many_parameters_as_a_model(made_up):
    made_up.comparison.equal_parameters = "griffin"
    runs = runs_of(made_up)
    like = count_parameters(model_config(preset_recipe(made_up, "griffin"), {}))
    for run in runs:
        assert count_parameters(model_config(run.recipe, {})) == pytest.approx(like, rel=0.005)
    widths = {run.preset: run.recipe.model.overrides["intermediate_size"] for run in runs}
    assert widths["latte-r-swa++"] < widths["transformer++"]
    made_up.model.overrides["intermediate_size"] = 1  # nothing is left to take away
    made_up.comparison.equal_parameters = "latte"
    with pytest.raises(LatteError, match="^equal_parameters: .* at the nearest intermediate_size"):
        runs_of(made_up)


def test_differences_are_paired_by_seed(made_up, monkeypatch):
    done = []
    monkeypatch.setattr(module, "train_and_measure", fake(dict(VALUES), done))
    statuses, text = compare(made_up)
    # seed by seed, so that an early end leaves whole rounds
    assert done[:4] == [f"{p}, seed 0" for p in made_up.comparison.presets] and len(done) == 12
    found = losses(statuses, 32)
    difference = paired(found, "latte", "latte++")
    assert difference is not None and difference.value == pytest.approx(32 / 3)
    # Seeds differ by 20, their differences by 1: unpaired intervals would include 0.
    assert difference.half_width == pytest.approx(4.302653 * math.sqrt(1 / 3) / math.sqrt(3), 1e-5)
    assert excludes_zero(difference) == "yes"
    last = paired(found, "transformer++", "latte-r-swa++")
    assert last is not None and last.sign == 0 and excludes_zero(last) == "no"
    assert excludes_zero(mean_of([-3.0])) == "one seed"
    assert found_order(found) == ["latte", "latte++", "latte-r-swa++", "transformer++"]
    # t is 32 here, and this is the smallest of three p-values.
    assert difference.p == pytest.approx(1 - 32 / math.sqrt(32**2 + 2), rel=1e-6)  # 0.000975
    assert "| `latte`, `latte++` | +10.67 ± 1.43 | 3 | yes | 0.003 |" in text
    assert "| `latte-r-swa++`, `transformer++` | +0.33 ± 5.17 | 3 | no | 0.808 |" in text
    assert "Perplexity minus that of `transformer++`" in text
    # Three models at two lengths with equal scores: six p-values, the smallest twice.
    assert "| model | at 32 | at 64 | seeds | p at 32 | p at 64 |" in text
    p = [0.0] * 6
    for place, name in enumerate(("latte", "latte++", "latte-r-swa++")):
        one = paired(found, name, "transformer++")
        assert one is not None and one.p is not None
        p[2 * place] = p[2 * place + 1] = one.p
    corrected = [f"{value:.3f}" for value in holm(p)]
    assert f"(+27.7%) | 3 | {corrected[0]} | {corrected[1]} |" in text
    assert f"(+0.3%) | 3 | {corrected[4]} | {corrected[5]} |" in text
    folder = Path(made_up.output_dir)
    assert (folder / "seeds.md").read_text() == text
    rows = read_csv(folder / "seeds.csv")
    assert len(rows) == 24 and {row["device"] for row in rows} == {"cpu"}
    assert "by position" not in text and not (folder / "positions.csv").exists()
    # Again: nothing is due. By other lengths: all are, though they are trained.
    compare(made_up)
    assert len(done) == 12
    made_up.comparison.lengths = [16]
    compare(made_up, report_only=True)
    assert len(done) == 12
    made_up.comparison.positions = [8]
    _, text = compare(made_up)
    assert len(done) == 24
    assert "Perplexity by position in windows of 16:" in text
    assert "| model | 0 to 7 | 8 to 15 |" in text
    assert "| `latte` | 380.56 ± 67.53 | 140.00 ± 24.84 |" in text
    rows = read_csv(folder / "positions-3.csv")
    assert len(rows) == 24 and {row["last"] for row in rows} == {"7", "15"}


def test_what_fails_is_reported_and_costs_the_rest_nothing(made_up, monkeypatch):
    values = dict(VALUES)
    values["latte", 1] = Diverged("training diverged: loss is not finite at step 7")
    values["latte++", 1] = WorkFailed("its process was killed by SIGKILL")
    values["transformer++", 2] = FolderInUse("another process is training in it")
    done = []
    monkeypatch.setattr(module, "train_and_measure", fake(values, done))
    statuses, text = compare(made_up)
    assert len(done) == 12 and sum(o.result is not None for o in statuses) == 9
    assert "- `latte`, seed 1: diverged: training diverged: loss is not finite at step 7" in text
    assert "- `latte++`, seed 1: failed: its process was killed by SIGKILL" in text
    assert "- `transformer++`, seed 2: another process is at it" in text
    found = losses([o for o in statuses if o.result is not None], 32)
    difference = paired(found, "latte", "latte++")
    assert difference is not None and difference.count == 2  # the seeds that both have
    # Again: what diverged would diverge again; the others are worth another try.
    values["latte++", 1] = 139.0
    done.clear()
    _, text = compare(made_up)
    assert done == ["latte++, seed 1", "transformer++, seed 2"]
    assert "`latte++`, seed 1" not in text and "`latte`, seed 1" in text
    assert "latte, seed 1" in list_runs(made_up)


def test_comparators_that_cannot_run_here_say_so(made_up, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made_up.comparison.presets = ["latte", "gla"]
    made_up.model.overrides = {}
    monkeypatch.setattr(module, "train_and_measure", fake(dict(VALUES), []))
    statuses, text = compare(made_up)
    assert [o.result is not None for o in statuses] == [True, False] * 3
    assert "- `gla`, seeds 0, 1, 2: cannot run here, it needs" in text
    made_up.comparison.presets = ["longformer"]
    with pytest.raises(LatteError, match="reads both ways"):
        list_runs(made_up)


def test_a_damaged_file_says_so(made_up):
    folder = Path(made_up.output_dir) / "latte" / "seed-0"
    folder.mkdir(parents=True)
    (folder / MEASURED_FILE).write_text('{"wanted":')
    with pytest.raises(LatteError, match="measured.json is damaged"):
        list_runs(made_up)


# ---- the harness at work


def test_seeds_change_initialisation_and_order_alike_and_resume(make_recipe):
    recipe = make_recipe("latte++", name="seeds", max_steps=3, eval_steps=3)
    recipe.comparison.presets = ["latte-r-swa++", "transformer++"]  # overrides fit each
    recipe.comparison.seeds = [0, 1]
    recipe.comparison.max_tokens = 200
    statuses, text = compare(recipe)
    assert [o.problem for o in statuses] == [""] * 4
    folder = Path(recipe.output_dir)
    first = [read_metrics(folder / "transformer++" / f"seed-{n}", "train") for n in (0, 1)]
    assert first[0][0]["loss"] != first[1][0]["loss"]
    assert "Perplexity minus that of `transformer++`" in text
    assert (folder / "seeds.png").read_bytes().startswith(b"\x89PNG")
    measured = statuses[0].result
    assert measured is not None and measured.tokens == 3 * 64 and measured.rows[0].length == 32
    assert measured.peak_memory_bytes > 2**20 and measured.tokens_per_second > 0
    # A run without its measurement is scored again, not trained again.
    weights = folder / "transformer++" / "seed-1" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    (weights.parent / MEASURED_FILE).unlink()
    assert "transformer++, seed 1: " + str(weights.parent) + " (trained, not sc" in list_runs(
        recipe
    )
    again, _ = compare(recipe)
    assert all(o.result is not None for o in again) and weights.stat().st_mtime_ns == before
    assert again[3].result.rows[0].loss == statuses[3].result.rows[0].loss


def test_a_run_that_diverges_apart_is_reported(make_recipe):
    recipe = make_recipe(name="seeds", learning_rate=1e30, warmup_steps=0)
    recipe.comparison.presets, recipe.comparison.seeds = ["latte-gated"], [3]
    statuses, text = compare(recipe, apart=True)
    assert statuses[0].problem.startswith("diverged: training diverged") and "seed 3" in text
    assert (statuses[0].run.folder / FAILED_FILE).exists()
    recipe.training.learning_rate = 1e-3  # as it advises: not the run that diverged
    with pytest.raises(LatteError, match=r"holds another run: training.learning_rate is 1e\+30 t"):
        compare(recipe, apart=True)


def test_a_run_of_another_process_is_left_to_it(make_recipe):
    recipe = make_recipe("swa++", name="seeds", max_steps=2)
    recipe.comparison.presets, recipe.comparison.seeds = ["swa++"], [0, 1]
    theirs = claim(module.runs_of(recipe)[0].recipe)
    statuses, _ = compare(recipe)
    assert [o.result is not None for o in statuses] == [False, True]
    assert theirs.lock is not None
    theirs.lock.close()
    statuses, _ = compare(recipe)
    assert all(o.result is not None for o in statuses)


def test_one_seed_is_a_grid_too(make_recipe, capsys):
    """The same tokens for all, in the order of the presets; what was finished is read again."""
    recipe = make_recipe("latte++", name="both", max_steps=2)
    recipe.comparison.presets, recipe.comparison.lengths = ["latte++", "swa++"], [16]
    recipe.comparison.max_tokens = 200
    statuses, text = compare(recipe)
    assert [status.run.label for status in statuses] == ["latte++", "swa++"]
    assert len({status.result.tokens for status in statuses}) == 1
    first, second = (read_metrics(status.run.folder, "train") for status in statuses)
    assert [r["tokens"] for r in first] == [r["tokens"] for r in second]
    # An untrained model is near uniform: the first step's loss tells of the same number of tokens.
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=0.05)
    folder = Path(recipe.output_dir)
    assert (folder / "comparison.md").read_text() == text
    assert "swa++: " + str(folder / "swa++") + " (finished)" in list_runs(recipe)
    assert compare(recipe)[1] == text  # read again
    # At other lengths it is scored again, and not trained again.
    recipe.comparison.lengths, before = [32], (folder / "swa++/model.safetensors").stat()
    assert "ppl at 32" in compare(recipe)[1]
    assert (folder / "swa++/model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_by_one_seed_all_have_to_get_through(make_recipe):
    recipe = make_recipe("swa++", name="both", max_minutes=1e-6)
    recipe.comparison.presets = ["swa++"]
    with pytest.raises(LatteError, match="a comparison needs equal tokens"):
        compare(recipe)
    recipe = make_recipe("swa++", name="diverging", learning_rate=1e30, warmup_steps=0)
    recipe.comparison.presets = ["swa++"]
    with pytest.raises(Diverged):
        compare(recipe)
    recipe.comparison.presets = ["swa++", "swa++"]
    with pytest.raises(LatteError, match="presets: expected different names"):
        compare(recipe)


def test_a_run_stopped_by_its_minutes_goes_on(make_recipe):
    recipe = make_recipe("swa++", name="seeds", max_minutes=1e-6, max_steps=3)
    recipe.comparison.presets, recipe.comparison.seeds = ["swa++"], [0]
    statuses, text = compare(recipe)
    assert statuses[0].problem == "stopped at step 1" and "`swa++`, seed 0: stopped at" in text
    recipe.training.max_minutes = None
    statuses, _ = compare(recipe)
    assert statuses[0].result is not None and statuses[0].result.steps == 3


def test_a_table_without_its_baseline_is_left_out(made_up, monkeypatch):
    values = dict(VALUES)
    for seed in (0, 1, 2):
        values["transformer++", seed] = WorkFailed("it was killed")
    monkeypatch.setattr(module, "train_and_measure", fake(values, []))
    _, text = compare(made_up)
    assert "Perplexity minus" not in text
    assert "The order found, best first, by mean perplexity at" in text
    order = text.split("(lower is better): ")[1].splitlines()[0].replace("`", "").split(", ")
    means = {name: sum(v for (n, _), v in VALUES.items() if n == name) for name in order}
    assert order == sorted(order, key=lambda name: means[name])


def test_a_mistake_is_not_a_failed_run(made_up, monkeypatch):
    values = dict(VALUES)
    values["latte", 0] = LatteError("output folder holds another run")
    monkeypatch.setattr(module, "train_and_measure", fake(values, []))
    with pytest.raises(LatteError, match="holds another run"):
        compare(made_up)
