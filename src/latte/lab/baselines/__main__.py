"""`python -m latte.lab.baselines SIZE`: the baselines, their parameters, what is missing."""

from __future__ import annotations

import sys

from transformers.utils import logging

from latte.lab.baselines.catalogue import BASELINES
from latte.models import SIZES, count_parameters, preset_config


def main(arguments: list[str] | None = None) -> int:
    """Print the baselines at a size: parameters, and what is missing here."""
    words = sys.argv[1:] if arguments is None else arguments
    size = words[0] if words else "tiny"
    if len(words) > 1 or size not in SIZES:
        expected = f"expected one of the sizes {', '.join(SIZES)}"
        print(f"baselines: error: {expected}, got {' '.join(words)}", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    target = count_parameters(preset_config("transformer++", size))
    print("| name | library | paper | causal | parameters | to `transformer++` |")
    print("|---|---|---|---|---:|---:|")
    print(f"| `transformer++` | latte | | yes | {target / 1e6:.2f}M | 1 |")
    for name, comparator in BASELINES.items():
        line = f"| `{name}` | {comparator.library} | arXiv {comparator.paper} |"
        line += f" {'yes' if comparator.causal else 'no'} |"
        if lacks := comparator.missing():
            print(f"{line} needs {lacks} | |")
        else:
            number = comparator.count(comparator.config(size))
            print(f"{line} {number / 1e6:.2f}M | {number / target:.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
