import sys
from pathlib import Path

# The benchmarks are scripts that import each other by name; the checks on a GPU are one more.
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "benchmarks"), str(TESTS / "ops")]
