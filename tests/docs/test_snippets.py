"""Every Python snippet runs: those of one file in order, in one namespace and an empty folder."""

from __future__ import annotations

import struct
import subprocess
import sys

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
    picture = tmp_path / "weights.png"
    script = root / "docs/figures/weights.py"
    subprocess.run(
        [sys.executable, str(script), str(picture)],
        check=True,
        env={
            "PYTHONPATH": str(root / "src"),
            "OMP_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(tmp_path),
        },
    )

    def size(path):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 200_000
        return struct.unpack(">II", data[16:24])

    assert size(picture) == size(root / "docs/figures/weights.png")
