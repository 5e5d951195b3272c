"""The commands at work, on a checkpoint of a few steps."""

import pytest

from latte.cli import main
from latte.cli.parser import parse
from tests.helpers import python, read_csv

COMMANDS = ("", "train", "evaluate", "generate", "serve", "compare", "convert", "inspect",
            "benchmark", "doctor")  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command):
    """It is quick: PyTorch alone takes seconds."""
    script = (
        "import sys; from latte.cli import main\n"
        f"try: main({[*command.split(), '--help']!r})\n"
        "except SystemExit as stop: code = stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert code == 0 and not heavy, (code, heavy)"
    )
    assert "usage: latte" in python("-c", script).stdout


def test_overrides_may_stand_anywhere_after_the_recipe(capsys):
    options = parse(["train", "r.yaml", "model.size=tiny", "--quiet", "training.max_steps=3"])
    assert options.overrides == ["model.size=tiny", "training.max_steps=3"] and options.quiet
    for wrong in (["train", "r.yaml", "--quiet", "x"], ["train", "r.yaml", "--lr=3"]):
        with pytest.raises(SystemExit) as stop:
            parse(wrong)
        assert stop.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_version_and_module_entry():
    import latte

    assert python("-m", "latte.cli", "--version").stdout == f"latte {latte.__version__}\n"


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_evaluate_writes_a_table_a_csv_and_a_plot(place, preset, tmp_path, capsys):
    arguments = ["evaluate", str(place.trained(preset)), "--lengths", "64,16", "--segment", "16"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "bits/byte" in out and "every row scores the same" in out
    rows = read_csv(tmp_path / "evaluation.csv")
    assert [row["length"] for row in rows] == ["16", "64"]
    assert len({(row["tokens"], row["text_bytes"]) for row in rows}) == 1
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_scores_whole_files(place, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("state of the latent mean\n" * 20)
    arguments = ["evaluate", str(place.trained()), "--corpus", str(text), "--lengths", "32"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    # 500 bytes and the document's end
    assert "the same 501 tokens (500 bytes)" in capsys.readouterr().out


def test_generate_streams_the_same_text_for_a_seed(place, capsys):
    arguments = ["generate", str(place.trained()), "--prompt", "latent", "--max-new-tokens", "12"]
    assert main([*arguments, "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("latent")
    assert main([*arguments, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("latent")


def test_a_document_is_read_once_and_answers_prompts(place, tmp_path, capsys, refused):
    (tmp_path / "document.txt").write_text("state of the latent mean\n" * 20)
    start = ["generate", str(place.trained())]
    document, state = ["--file", str(tmp_path / "document.txt")], str(tmp_path / "state")
    assert main([*start, *document, "--save-state", state, "--max-new-tokens", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "the state of 501 tokens, " in captured.err
    prompt = ["--prompt", "window", "--max-new-tokens", "8", "--temperature", "0"]
    assert main([*start, *document, *prompt]) == 0
    anew = capsys.readouterr().out
    assert anew.startswith("window") and main([*start, "--state", state, *prompt]) == 0
    assert capsys.readouterr().out == anew
    other = ["generate", place.trained("transformer++"), "--state", state, *prompt]
    assert "is the state of another model: its mixer is 'macchiato'" in refused(*other)
    assert "does not exist" in refused(*start, "--state", tmp_path / "none", *prompt)


def test_compare_puts_presets_side_by_side(place, tmp_path, capsys):
    output = f"output_dir={tmp_path / 'both'}"
    arguments = ["compare", str(place.recipe()), output, "--presets", "latte-r-swa++,swa++"]
    assert main([*arguments, "--lengths", "16,32"]) == 0
    table = capsys.readouterr().out
    assert "| `latte-r-swa++` |" in table and "| `swa++` |" in table
    for name in ("comparison.csv", "comparison.md", "comparison.png"):
        assert (tmp_path / "both" / name).stat().st_size > 0
    weights = tmp_path / "both" / "swa++" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert main([*arguments, "--lengths", "16,32"]) == 0  # goes on where it stopped: at the end
    assert weights.stat().st_mtime_ns == before


def test_compare_lists_and_reports_several_seeds(place, tmp_path, capsys):
    output = tmp_path / "many"
    presets = ["compare", str(place.recipe()), f"output_dir={output}", "--presets"]
    assert main([*presets, "swa++,latte++", "--seeds", "3,5", "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert f"swa++, seed 3: {output / 'swa++' / 'seed-3'} (not run yet)" in listed
    assert "4 runs of 4 steps, 256 tokens each" in listed and not output.exists()
    assert main([*presets, "swa++,latte++", "--seeds", "3,5", "--report"]) == 0
    assert "- `latte++`, seeds 3, 5: not run yet" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        *("seeds.csv", "seeds.md", "seeds.settings.json")
    }


@pytest.mark.slow
def test_torchrun_compares_several_seeds(place, tmp_path):
    """One process speaks and writes; each run uses both."""
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "latte.cli", "compare", place.recipe(), f"output_dir={tmp_path / 'two'}"),
        *("--presets", "latte++,swa++", "--seeds", "0,1"),
        LATTE_CACHE=str(place.folder / "cache"),
    )
    assert done.stdout.count("on 2 processes") == 4 and done.stdout.count("written: ") == 1
    rows = read_csv(tmp_path / "two" / "seeds.csv")
    assert len(rows) == 4 and not any(row["problem"] for row in rows)


def test_evaluate_scores_nothing_that_was_trained_on(place, tmp_path, capsys, monkeypatch):
    """Without `data.validation` a hundredth of the documents, or the end of a text, is held out."""
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "all.txt"
    text.write_text("state of the latent mean\n" * 400)
    overrides = [f"data.corpus={text}", "data.validation=null", "training.max_steps=1"]
    run = tmp_path / "run"
    assert main(["train", str(place.recipe()), *overrides, f"output_dir={run}", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--lengths", "32", "--output", str(tmp_path / "out")]) == 0
    assert "the same 101 tokens (100 bytes)" in capsys.readouterr().out
