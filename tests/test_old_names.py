"""Modules of the workbench under the names that they had before."""

import subprocess
import sys

CODE = """
import sys, warnings
warnings.simplefilter("error", DeprecationWarning)
try:
    import latte.lab.data
except DeprecationWarning as warning:
    print(warning)
warnings.simplefilter("ignore", DeprecationWarning)
from latte.lab.data.tokenizers import byte_tokenizer
from latte.lab.evaluate.checkpoint import load_checkpoint
import latte.lab.data.tokenizers as tokenizers
import latte.lab.evaluate.checkpoint as checkpoint
assert sys.modules["latte.lab.data.tokenizers"] is tokenizers is sys.modules["latte.lab.data.tokenizers"]
assert byte_tokenizer is tokenizers.byte_tokenizer
assert load_checkpoint is checkpoint.load_checkpoint
print(tokenizers.__spec__.name, tokenizers.__name__)
"""


def test_old_names_give_the_same_modules_with_a_warning():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert found.stdout.splitlines() == [
        "latte.lab.data is now latte.lab.data",
        "latte.lab.data.tokenizers latte.lab.data.tokenizers",
    ], found.stderr
