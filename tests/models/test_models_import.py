"""What ``import latte`` pulls in, and that Auto classes know Latte in either import order."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from latte.models import LatteForCausalLM

# One interpreter forked for each piece of code: none sees what another has imported. What none is
# about is imported before, for it takes most of the time.
FORKS = """
import contextlib, os, sys
import huggingface_hub, tokenizers, torch._dynamo, torch.distributed.tensor
with contextlib.suppress(ImportError):  # which Transformers takes where they are there
    import accelerate.utils, jinja2, scipy.optimize
for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {code}")
"""


def printed(*codes):
    """What each piece of code prints in a process of its own, one line a piece."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", FORKS, *map(textwrap.dedent, codes)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("checkpoint")
    LatteForCausalLM(config("latte-r-swa++")).save_pretrained(path)
    return path


LIGHT = """
    import sys
    import latte
    from latte import latte_attention, LatteMacchiato
    heavy = [m for m in sys.modules if m.split(".")[0] in ("datasets", "transformers")]
    heavy += [m for m in sys.modules if m.startswith(("latte.lab", "latte.serve", "latte.cli"))]
    # Where Triton is installed PyTorch itself loads it; the kernels wait for their first use.
    heavy += [m for m in sys.modules if m == "latte.ops.triton_backend.tiles"]
    print(heavy, latte.__version__)
"""
OLD_NAMES = """
    import sys, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from OLD.data.tokenizers import byte_tokenizer
        from OLD.evaluate.checkpoint import load_checkpoint
    import OLD.evaluate, latte.lab.data.tokenizers as new, latte.lab.evaluate.checkpoint
    kinds = {w.category.__name__ for w in caught if "is now latte.lab." in str(w.message)}
    print(
        byte_tokenizer is new.byte_tokenizer and sys.modules["OLD.data.tokenizers"] is new,
        OLD.evaluate is latte.lab.evaluate and new.__spec__.name == "latte.lab.data.tokenizers",
        kinds,
    )
""".replace("OLD.", "latte.")
# PyTorch's compiler takes 170 MB. It is not imported here, only by Transformers.
LAYERS = """
    import sys
    sys.modules["torch._dynamo"] = None  # importing it is an error
    import latte.layers, latte.ops.api, latte.ops.widened, latte.ops.triton_backend.launch
    print("transformers" in sys.modules)
"""
ORDERS = {
    "latte first": "import latte\nfrom transformers import AutoConfig, AutoModelForCausalLM",
    "transformers first": "from transformers import AutoConfig, AutoModelForCausalLM\nimport latte",
    "another model first": "import latte\nfrom transformers import LlamaModel\n"
    "from transformers import AutoConfig, AutoModelForCausalLM",
    "configuration first": "from latte.models import LatteConfig\n"
    "LatteConfig()\nfrom transformers import AutoConfig, AutoModelForCausalLM",
}


def test_imports_in_fresh_processes(checkpoint):
    """What is imported late stays unimported, and Auto classes know Latte in any order."""
    use = textwrap.dedent(f"""
        config = AutoConfig.from_pretrained({str(checkpoint)!r})
        model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})
        from_config = AutoModelForCausalLM.from_config(config)
        print(type(config).__name__, type(model).__name__, type(from_config).__name__)
    """)
    light, layers, old, *orders = printed(
        LIGHT, LAYERS, OLD_NAMES, *(f"{x}\n{use}" for x in ORDERS.values())
    )
    assert light.startswith("[] 0.1.0")
    assert layers == "False"
    assert old == "True True {'DeprecationWarning'}"
    known = "LatteConfig LatteForCausalLM LatteForCausalLM"
    assert dict(zip(ORDERS, orders, strict=True)) == dict.fromkeys(ORDERS, known)


def test_lazy_names():
    import latte

    for name in latte.__all__:
        if name not in latte._MODULES:  # theirs to test
            assert getattr(latte, name) is not None
    assert set(latte.__all__) <= set(dir(latte))
    with pytest.raises(AttributeError, match="no attribute 'espresso'"):
        latte.espresso  # noqa: B018


PACKAGES = [
    "latte",
    "latte.conversion",
    "latte.lab.data",
    "latte.layers",
    "latte.models",
    "latte.ops",
]


@pytest.mark.parametrize("package", PACKAGES)
def test_lazy_names_are_those_that_type_checkers_see(package):
    """A name is looked for in one module after the other: the first that has it is its own."""
    home = importlib.import_module(package)
    tree = ast.parse(Path(home.__file__).read_text(encoding="utf-8"))
    told = next(n for n in tree.body if isinstance(n, ast.If)).body
    for node in told:
        module = importlib.import_module(node.module)
        for name in [alias.name for alias in node.names]:
            assert getattr(home, name) is getattr(module, name), name
