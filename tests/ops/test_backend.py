"""The backend that ops take where their caller names none."""

import importlib.util
import inspect
import sys
import threading

import pytest
import torch

from latte.ops import (
    api,
    causal_conv1d,
    cpp_backend,
    default_backend,
    latte_attention,
    linear_attention,
    macchiato_attention,
    reference,
    rg_lru,
    set_default_backend,
    sliding_window_attention,
    use_backend,
)
from latte.ops.backend import choose, named_backend
from tests.ops.helpers import latte_inputs, macchiato_inputs, randn

NATIVE = "cpu" if cpp_backend.ABSENT is None else "torch"
X = randn(1, 9, 4)
LATTE, MACCHIATO = latte_inputs(1, 9), macchiato_inputs(1, 9)
CALLS = {
    "LATTE": lambda **o: latte_attention(*LATTE, **o),
    "MACCHIATO": lambda **o: macchiato_attention(*MACCHIATO, window=4, **o),
    "WINDOW": lambda **o: sliding_window_attention(*MACCHIATO[2:], window=4, **o),
    "LINEAR": lambda **o: linear_attention(*LATTE, feature_map="elu", **o),
    "RG_LRU": lambda **o: rg_lru(X, X, X, randn(4), **o),
    "CONVOLUTION": lambda **o: causal_conv1d(X, randn(4, 3), **o),
}


@pytest.fixture
def calls(monkeypatch):
    """Which backends have been run, one entry a call."""
    seen = []

    def counted(name, original):
        def run(*args, **kwargs):
            seen.append(name)
            return original(*args, **kwargs)

        return run

    for op in CALLS:
        for name, original in getattr(api, op).items():
            monkeypatch.setitem(getattr(api, op), name, counted(name, original))
    return seen


@pytest.mark.parametrize("op", CALLS)
def test_the_backend_that_is_asked_for_serves_alone(op, calls):
    CALLS[op](backend="reference")
    CALLS[op](backend="torch")
    CALLS[op]()
    with use_backend("reference"):
        CALLS[op]()
    default = NATIVE if "cpu" in getattr(api, op) else "torch"
    assert calls == ["reference", "torch", default, "reference"]
    with pytest.raises(ValueError, match="'triton' is not available"):  # for fp64, or at all
        CALLS[op](backend="triton")
    with pytest.raises(ValueError, match="must be None or one of .*'torch'.*, got 'cuda'"):
        CALLS[op](backend="cuda")
    assert len(calls) == 4


def test_the_equations_stand_alone():
    """The judge imports neither a backend nor what only backends share."""
    names = {x.__module__ for x in vars(reference).values() if inspect.isfunction(x)}
    assert names <= {f"latte.ops.{m}" for m in ("reference", "state", "tensors")}


def test_the_default_serves_ops_whose_caller_names_none(calls, monkeypatch):
    monkeypatch.setattr("latte.ops.backend.default", None)  # and back to it, whatever was named
    q, k, v = latte_inputs(T=9)
    assert default_backend() == NATIVE
    with use_backend("reference"):
        assert default_backend() == "reference"
        latte_attention(q, k, v)
        latte_attention(q, k, v, backend="torch")
    assert calls == ["reference", "torch"] and default_backend() == NATIVE
    set_default_backend("reference")
    latte_attention(q, k, v)
    set_default_backend("torch")
    latte_attention(q, k, v)
    assert calls == ["reference", "torch", "reference", "torch"]


def test_the_default_is_what_serves(calls, monkeypatch):
    """With the library, without it, and on tensors that it does not serve."""
    monkeypatch.setattr("latte.ops.backend.default", None)
    x = torch.zeros(1, 4, 2)
    for absent in (cpp_backend.ABSENT, "it is not there"):
        monkeypatch.setattr(cpp_backend, "ABSENT", absent)
        monkeypatch.setattr(cpp_backend, "WARNS", False)
        for device in ("cpu", "meta"):
            del calls[:]
            rg_lru(*[x.to(device)] * 3, torch.zeros(2, device=device))
            assert calls == [default_backend(device)]
        assert default_backend("cuda") == default_backend(torch.device("cuda", 1)) == "torch"


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


def test_a_default_that_does_not_fit_a_gpu_gives_way(recwarn):
    """With one warning, whoever calls how often; what a call asks for itself is an error."""
    gpu, served = torch.device("cuda"), ("reference", "torch", "triton")
    reason = "on compute capability 7.5: expected 8.0 or newer"

    def chosen(backend):
        return choose("op", backend, served, gpu, lambda: reason)

    def call(x):
        return x + (chosen(None) == "torch")

    with use_backend("triton"):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        torch._dynamo.reset()
        assert compiled(torch.zeros(1)).item() == 1
        assert [chosen(None), chosen(None)] == ["torch", "torch"]
        with pytest.raises(ValueError, match="'triton' is not available on compute capability"):
            chosen("triton")
    told = [str(w.message) for w in recwarn if reason in str(w.message)]
    assert told == [
        f"op: backend 'triton' is not available {reason}; the default gives way to 'torch'"
    ]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_block_is_of_its_thread(everywhere):
    """So that requests, evaluations and trainings side by side do not change each other's."""

    def other(found):
        found.append(named_backend())
        with use_backend("reference"):
            inside.wait()
            found.append(named_backend())
            looked.wait()
        found.append(named_backend())

    before, inside, looked = named_backend(), threading.Barrier(2), threading.Barrier(2)
    with use_backend("torch", everywhere=everywhere):
        found = []
        thread = threading.Thread(target=other, args=(found,))
        thread.start()
        inside.wait()
        assert named_backend() == "torch"
        looked.wait()
        thread.join()
        outside = "torch" if everywhere else before
        assert found == [outside, "reference", outside]
    assert named_backend() == before


def test_an_unknown_default_is_told():
    with pytest.raises(ValueError, match="must be one of .*, got 'cuda'"):
        set_default_backend("cuda")
    before = default_backend()
    with pytest.raises(ValueError, match="got 'cuda'"), use_backend("cuda"):
        pass
    assert default_backend() == before


@pytest.mark.parametrize(("value", "told"), [("reference", "reference"), ("cuda", "LATTE_BACK")])
def test_from_the_environment(value, told, monkeypatch):
    """The module as a process that starts with this variable has it."""
    monkeypatch.setenv("LATTE_BACKEND", value)
    path = sys.modules["latte.ops.backend"].__file__
    spec = importlib.util.spec_from_file_location("latte_backend_anew", path)
    anew = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(anew)
        found = anew.default_backend()
    except ValueError as error:
        found = str(error)
    assert found.startswith(told)


def test_a_compiled_function_follows_the_default():
    q, k, v = (x.float() for x in latte_inputs(T=9))
    compiled = torch.compile(lambda *x: latte_attention(*x)[0], fullgraph=True, backend="eager")
    torch._dynamo.reset()
    want = latte_attention(q, k, v)[0]
    torch.testing.assert_close(compiled(q, k, v), want)
    with use_backend("reference"):
        torch.testing.assert_close(compiled(q, k, v), latte_attention(q, k, v)[0], rtol=0, atol=0)
