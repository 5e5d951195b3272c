"""Means over texts, with intervals, of measurements that are paired by text.

Texts differ far more than models do: differences are taken text by text, and a model is compared on
those texts alone that both have.
"""

from __future__ import annotations

from collections.abc import Mapping

from latte.lab.compare.intervals import Mean, mean_of

Losses = Mapping[str, float]  # text -> nats a token


def difference(losses: Losses, reference: Losses) -> Mean | None:
    """Mean of losses minus the reference's, over the texts that both have."""
    common = [text for text in losses if text in reference]
    return mean_of([losses[text] - reference[text] for text in common]) if common else None


def won_back(losses: Losses, control: Losses, base: Losses) -> Mean | None:
    """The share of the distance in nats from a control to the base that a model wins back.

        (mean control - mean model) / (mean control - mean base)

    over the texts that all three have; its interval is the jackknife's (Student's over the
    pseudo-values n r - (n - 1) r without text i). None where the base is no better than the
    control.
    """
    common = [text for text in losses if text in control and text in base]
    won = [control[text] - losses[text] for text in common]
    whole = [control[text] - base[text] for text in common]
    count = len(common)
    if not common or sum(whole) <= 0:
        return None
    share = sum(won) / sum(whole)
    if count < 2:
        return Mean(share, None, count)
    without = [
        (sum(won) - w) / (sum(whole) - d) if sum(whole) != d else share
        for w, d in zip(won, whole, strict=True)
    ]
    spread = mean_of([count * share - (count - 1) * other for other in without])
    return Mean(share, spread.half_width, count)
