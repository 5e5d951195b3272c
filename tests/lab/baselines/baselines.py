"""The table of our own comparators' mixers: the laws and the tests of their models run over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from latte.lab.baselines.low_rank import Linformer, Luna
from latte.lab.baselines.mega import Mega
from latte.lab.baselines.state_spaces import H3, S5


@dataclass(frozen=True)
class Row:
    """A mixer, or a variant of one, and what holds of it."""

    layer: Callable[..., Any]  # of width 16
    causal: bool = True  # has a causal form
    both_ways: bool = True  # has a form that reads both ways
    exact: bool = False  # causal to the last bit; the others transform the whole sequence at once
    from_the_first: bool = False  # places count from the row's first token, padding or not

    def build(self, **options: Any) -> Any:
        """The layer in fp64, causal if it can be and nothing else is asked."""
        torch.manual_seed(0)
        return self.layer(**{"causal": self.causal, **options}).double()


MIXERS = {
    "mega": Row(lambda **o: Mega(16, num_averages=3, **o)),
    "h3": Row(lambda **o: H3(16, num_states=6, **o), both_ways=False),
    "s5": Row(lambda **o: S5(16, num_states=12, **o), exact=True),
    "luna": Row(lambda **o: Luna(16, 4, num_memories=5, **o), exact=True),
    "linformer": Row(
        lambda **o: Linformer(16, 4, max_length=14, projected_length=6, **o),
        causal=False,
        from_the_first=True,
    ),
}
LAYERS = MIXERS | {
    "mega-chunks": Row(
        lambda **o: Mega(16, num_averages=3, chunk_size=4, **o), from_the_first=True
    ),
    "h3-heads": Row(lambda **o: H3(16, num_states=6, head_dim=4, **o), both_ways=False),
    "s5-blocks": Row(lambda **o: S5(16, num_states=12, num_blocks=3, **o), exact=True),
}


def names(rows: dict[str, Row], field: str) -> list[str]:
    """The names of the rows for which it holds."""
    return [name for name, row in rows.items() if getattr(row, field)]
