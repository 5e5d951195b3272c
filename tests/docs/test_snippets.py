"""Every Python snippet runs: those of one file in order, in one namespace and an empty folder."""

from __future__ import annotations

import importlib.util

import matplotlib.image
import torch


def test_python_snippets_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, object] = {"__name__": "snippets"}
    blocks = document.blocks("python")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for line, block in blocks:
            # Blank lines, so that a traceback names the line of the document.
            exec(compile("\n" * (line - 1) + block, str(document.path), "exec"), namespace)
    assert document.text.count("```python") == len(blocks)


def test_the_tour_has_snippets(read):
    counts = {name: len(read(name).blocks("python")) for name in ("README.md", "docs/guide.md")}
    assert counts["README.md"] >= 8 and counts["docs/guide.md"] >= 8


def test_the_figure_is_what_its_script_draws(root, tmp_path):
    """Fonts may differ from machine to machine, the picture does not."""
    spec = importlib.util.spec_from_file_location("weights", root / "docs/figures/weights.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    p_TL, window_TS, latents_TLS = script.probabilities()
    rows_T = (window_TS + latents_TLS.sum(1)).sum(-1)
    torch.testing.assert_close(rows_T, torch.ones_like(rows_T))
    torch.testing.assert_close(window_TS.sum(-1), p_TL[:, 0])
    script.draw(tmp_path / "weights.png")
    committed = root / "docs/figures/weights.png"
    assert committed.stat().st_size < 200_000
    drawn, kept = (matplotlib.image.imread(path) for path in (tmp_path / "weights.png", committed))
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 0.02
