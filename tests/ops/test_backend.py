"""The backend that ops take where their caller names none."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import latte_inputs, macchiato_inputs

from latte.ops import (
    api,
    default_backend,
    latte_attention,
    linear_attention,
    set_default_backend,
    sliding_window_attention,
    use_backend,
)


@pytest.fixture
def calls(monkeypatch):
    """How often the equations themselves were run."""
    seen = []

    def counted(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    original = api.LATTE["reference"]
    monkeypatch.setitem(api.LATTE, "reference", counted)
    return seen


def test_the_default_serves_ops_whose_caller_names_none(calls):
    q, k, v = latte_inputs(T=9)
    assert default_backend() == "torch"
    with use_backend("reference"):
        assert default_backend() == "reference"
        latte_attention(q, k, v)
        latte_attention(q, k, v, backend="torch")
    assert len(calls) == 1 and default_backend() == "torch"
    set_default_backend("reference")
    try:
        latte_attention(q, k, v)
    finally:
        set_default_backend("torch")
    latte_attention(q, k, v)
    assert len(calls) == 2


def test_a_default_that_an_op_has_not_is_torch():
    q, k, v = latte_inputs(T=9)
    with use_backend("triton"):
        linear_attention(q, k, v, feature_map="elu")
        sliding_window_attention(*macchiato_inputs(T=9)[2:], window=None)
        # Triton serves Latte, but not fp64: no other backend takes its place.
        with pytest.raises(ValueError, match="backend 'triton' is not available"):
            latte_attention(q, k, v)
    with pytest.raises(ValueError, match="'triton' is not available for this op"):
        linear_attention(q, k, v, feature_map="elu", backend="triton")


def test_an_unknown_default_is_told():
    with pytest.raises(ValueError, match="must be one of .*, got 'cuda'"):
        set_default_backend("cuda")
    with pytest.raises(ValueError, match="got 'cuda'"), use_backend("cuda"):
        pass
    assert default_backend() == "torch"


@pytest.mark.parametrize(("value", "printed"), [("reference", "reference"), ("cuda", "LATTE_BACK")])
def test_from_the_environment(value, printed):
    code = (
        "import importlib.util as u, sys\n"
        f"s = u.spec_from_file_location('d', {sys.modules['latte.ops.backend'].__file__!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "try:\n    print(m.default_backend())\nexcept ValueError as e:\n    print(e)"
    )
    environment = {**os.environ, "LATTE_BACKEND": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().startswith(printed), done.stderr


def test_a_compiled_function_follows_the_default():
    q, k, v = (x.float() for x in latte_inputs(T=9))
    compiled = torch.compile(lambda *x: latte_attention(*x)[0], fullgraph=True, backend="eager")
    torch._dynamo.reset()
    want = latte_attention(q, k, v)[0]
    torch.testing.assert_close(compiled(q, k, v), want)
    with use_backend("reference"):
        torch.testing.assert_close(compiled(q, k, v), latte_attention(q, k, v)[0], rtol=0, atol=0)
