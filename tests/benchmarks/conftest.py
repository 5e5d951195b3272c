import sys
from pathlib import Path

# The benchmarks are scripts that import each other by name.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
