"""Make the table of models importable (``tests/models/modeldb.py``), and what it imports."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("models", "conversion")]
