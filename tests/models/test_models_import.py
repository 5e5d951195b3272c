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


def run(code, *arguments):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("checkpoint")
    LatteForCausalLM(config("latte-r-swa++")).save_pretrained(path)
    return path


def test_import_is_light():
    out = run("""
        import sys, time
        start = time.perf_counter()
        import latte
        from latte import latte_attention, LatteMacchiato
        seconds = time.perf_counter() - start
        heavy = [m for m in sys.modules if m.split(".")[0] == "datasets"]
        # Where Triton is installed PyTorch itself loads it; the kernels wait for their first use.
        heavy += [m for m in sys.modules if m == "latte.ops.triton_backend.tiles"]
        heavy += [m for m in sys.modules if m.startswith("transformers.") and "modeling" in m]
        print(heavy, "transformers" in sys.modules, latte.__version__, seconds)
    """)
    assert out.startswith("[] False 0.1.0"), out


ORDERS = {
    "latte first": "import latte\nfrom transformers import AutoConfig, AutoModelForCausalLM",
    "transformers first": "from transformers import AutoConfig, AutoModelForCausalLM\nimport latte",
    "another model first": "import latte\nfrom transformers import LlamaModel\n"
    "from transformers import AutoConfig, AutoModelForCausalLM",
    "configuration first": "from latte.models import LatteConfig\n"
    "LatteConfig()\nfrom transformers import AutoConfig, AutoModelForCausalLM",
}


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_work_in_any_order(checkpoint, order):
    code = f"import sys\n{ORDERS[order]}\n" + textwrap.dedent("""
        config = AutoConfig.from_pretrained(sys.argv[1])
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        from_config = AutoModelForCausalLM.from_config(config)
        print(type(config).__name__, type(model).__name__, type(from_config).__name__)
    """)
    assert run(code, checkpoint).split() == ["LatteConfig"] + ["LatteForCausalLM"] * 2


def test_lazy_names():
    import latte

    for name in latte.__all__:
        if name not in latte._MODULES:  # theirs to test
            assert getattr(latte, name) is not None
    assert set(latte.__all__) <= set(dir(latte))
    with pytest.raises(AttributeError, match="no attribute 'espresso'"):
        latte.espresso  # noqa: B018


@pytest.mark.parametrize("package", ["latte", "latte.models", "latte.data", "latte.conversion"])
def test_lazy_names_are_those_that_type_checkers_see(package):
    """A name is looked for in one module after the other: the first that has it is its own."""
    home = importlib.import_module(package)
    tree = ast.parse(Path(home.__file__).read_text(encoding="utf-8"))
    told = next(n for n in tree.body if isinstance(n, ast.If)).body
    for node in told:
        module = importlib.import_module(node.module)
        for name in [alias.name for alias in node.names]:
            assert getattr(home, name) is getattr(module, name), name
