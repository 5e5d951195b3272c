"""Figures: what a panel shows."""

from __future__ import annotations

import math

from latte.lab.evaluate.plots import canvas, draw_curves


def test_learning_curves_show_where_models_differ() -> None:
    """Not the first fall, which is alike for all; a run that diverged does not hide the others."""
    values = {"a": [8.0, 8.0, 3.0, 2.5, 2.2], "b": [8.0, 8.0, 3.1, math.nan, math.inf]}
    curves = {
        label: [
            {"tokens": tokens, "eval_bits_per_byte": value}
            for tokens, value in zip((50, 90, 100, 200, 400), entries, strict=True)
        ]
        for label, entries in values.items()
    }
    _, [axis] = canvas(1, (4.0, 3.0))
    draw_curves(axis, curves)
    bottom, top = axis.get_ylim()
    assert 2.1 < bottom < 2.2 and 3.1 < top < 3.2
