"""The walks of docs/architecture.md are the functions that a run really goes through."""

import re
import sys
from pathlib import Path

import pytest
import torch

import latte
from latte.conversion.attention import MacchiatoAttention
from latte.layers import Mixer
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.ops import cpp_backend

ROOT = Path(__file__).parents[1]
SOURCES = Path(latte.__file__).parent
MOST_FRAMES = 8
MOST_CALLS = {"prefill": 100, "token": 45}  # of a layer
MOST_LINES = 900  # of a layer, own and converted


def written(title):
    """The functions of a walk, as the page lists them."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition(f"### {title}\n")[2].partition("\n#")[0]
    return re.findall(r"^\d+\. `([\w/.]+\.py::[\w.]+)`", section, re.M)


def profiled(look, call):
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)


def walked(kernel, call):
    """Our own functions on the stack when the native kernel is called, outermost first."""
    stacks = []

    def look(frame, event, _):
        code = frame.f_code
        if (
            event != "call"
            or code.co_name != "__call__"
            or not code.co_filename.endswith("_ops.py")
        ):
            return
        if str(frame.f_locals["self"]).removesuffix(".default") != f"latte.{kernel}":
            return
        stack = []
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(SOURCES):
                name = frame.f_code.co_qualname.replace(".<locals>", "")
                stack.insert(0, f"{file.relative_to(SOURCES).as_posix()}::{name}")
            frame = frame.f_back
        stacks.append(stack)

    profiled(look, call)
    assert stacks and all(stack == stacks[0] for stack in stacks)
    return stacks[0]


@pytest.fixture
def model():
    if cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    return LatteForCausalLM(preset_config("latte-r-swa++", "tiny", num_hidden_layers=2)).eval()


def test_a_layer_is_read_in_few_lines():
    """The classes of a converted layer, which is Latte's own too, and what they hand around."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (files,) = re.findall(r"^One layer, own or converted, is (.*)\.$", page, re.M)
    texts = [(SOURCES / name).read_text(encoding="utf-8") for name in re.findall("`(.*?)`", files)]
    assert sum(len(text.splitlines()) for text in texts) <= MOST_LINES
    own = {x.__name__ for x in MacchiatoAttention.__mro__ if issubclass(x, Mixer)}
    assert own < set(re.findall(r"^class (\w+)", "\n".join(texts), re.M))


def test_one_token_of_decoding(model):
    cache, ids = LatteCache(model.config), torch.zeros(1, 9, dtype=torch.long)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        found = walked("cpu_macchiato_step", lambda: model(ids[:, :1], past_key_values=cache))
    assert found == written("One token of decoding") and len(found) <= MOST_FRAMES


def test_a_batch_to_the_kernel(model):
    ids = torch.zeros(2, 9, dtype=torch.long)
    found = walked("cpu_macchiato", lambda: model(ids, labels=ids))
    assert found == written("A batch, to the kernel") and len(found) <= MOST_FRAMES


def own_calls(call):
    """The number of Python calls into the package."""
    count = 0

    def look(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(str(SOURCES))

    profiled(look, call)
    return count


def test_a_layer_makes_few_calls_of_our_own():
    if cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "small")).eval()
    ids, one = torch.ones(1, 200, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
        for _ in range(2):
            model(one, past_key_values=cache)
        prefill = own_calls(lambda: model(ids, use_cache=True))
        token = own_calls(lambda: model(one, past_key_values=cache))
    layers = model.config.num_hidden_layers
    assert prefill <= MOST_CALLS["prefill"] * layers and token <= MOST_CALLS["token"] * layers
