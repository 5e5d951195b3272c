"""Where the Triton kernels are the default: the rule over its whole table, for GPUs that are not
there.
"""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from latte.models import LatteForCausalLM, preset_config
from latte.ops import (
    backend,
    default_backend,
    latte_attention,
    notices,
    pointwise,
    use_backend,
)
from latte.ops.triton_backend import checked, launch
from latte.ops.triton_backend.checked import FORMS, Form, Machine

ROWS = checked.read()
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CARDS = (80, 89, 90, 100, 120)
GOOD = Machine(90, "compiler", "12.9")


@pytest.fixture
def gpu(monkeypatch):
    """A function that puts a GPU there, on which nothing can run."""

    def there(machine=GOOD, trial=lambda device, products: None):
        checked._kept_widest.cache_clear()
        monkeypatch.setattr(checked, "machine", lambda device: machine)
        monkeypatch.setattr(checked, "_kept_trial", trial)
        monkeypatch.setattr(backend, "default", None)
        monkeypatch.setattr(notices, "_given", set())

    yield there
    checked._kept_widest.cache_clear()


def asked(row, dtype=None, **wider):
    widths = {name: getattr(row, name) + wider.get(name, 0) for name in "LKD"}
    return checked.refusal(
        FORMS[row.name], row.step, CUDA, getattr(torch, dtype or row.dtype), **widths
    )


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("ptxas", ["12.8", "12.9", "13.1"])
def test_the_kernels_are_the_default_where_they_were_checked(gpu, card, ptxas):
    """Every row, at its widths and beyond, on every card, with every assembler."""
    gpu(Machine(card, "compiler", ptxas))
    cards = {row.card for row in ROWS}
    assert cards == {launch.HOPPER}
    for row in ROWS:
        products = not row.step and row.name not in ("rg_lru", "conv")
        reason = asked(row)
        assert reason is None or "\n" not in reason
        if card not in cards:
            assert reason == (
                f"compute capability {card / 10}, checked so far: 9.0; `make gpu-check` checks"
            )
        elif products and ptxas == "12.8":
            assert "ptxas is 12.8, 12.9 or newer is needed" in reason
            assert "triton>=3.8" in reason and "TRITON_PTXAS_PATH" in reason
        else:
            assert reason is None
            for name in "LKD":
                if most := getattr(row, name):
                    wide = asked(row, **{name: 1})
                    assert (
                        f"checked up to {name} = {most} here, not for {name} = {most + 1}" in wide
                    )
            assert "not in float64" in asked(row, "float64")


def test_forms_without_a_row_are_not_the_default(gpu):
    """Those that failed a check, or were never checked, in every dtype of the kernels."""
    gpu()
    rows = {(row.name, row.step, row.dtype) for row in ROWS}
    for name, form in FORMS.items():
        for step in (False, True):
            for dtype in launch.DTYPES:
                precision = str(dtype).removeprefix("torch.")
                reason = checked.refusal(form, step, CUDA, dtype)
                assert (reason is None) == ((name, step, precision) in rows)
                assert reason is None or f"not in {precision}" in reason
    unknown = Form("sliding_window_attention", decays=True)
    assert "passed all checks on 9.0 in no dtype" in checked.refusal(unknown, False, CUDA, BF16)


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (Machine(0, "compiler", None), "NVIDIA GPUs alone"),
        (Machine(90, "missing", None), "pip install triton"),
        (Machine(90, "interpreter", "12.9"), "TRITON_INTERPRET"),
        (Machine(75, "compiler", "12.9"), "compute capability 7.5, the kernels need 8.0"),
        (Machine(90, "compiler", None), "ptxas is unknown"),
    ],
)
def test_every_refusal_is_one_line(gpu, machine, told):
    gpu(machine)
    form = FORMS["latte"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for dtype in (BF16, torch.float32):
                reason = checked.refusal(form, False, CUDA, dtype, L=16, D=64)
                assert told in reason and "\n" not in reason
                checked.warn(reason)
    assert len(caught) == 1 and told in str(caught[0].message)
    assert default_backend("cuda") == "torch"


def test_a_first_call_that_fails_or_errs_gives_way(gpu, monkeypatch):
    def broken(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    tried = []
    trial = checked._kept_trial
    monkeypatch.setattr(checked, "tried_products", broken)
    monkeypatch.setattr(checked, "tried_sums", lambda device: tried.append(device) or 0.5)
    gpu(trial=trial)
    trial.cache_clear()
    reasons = [checked.refusal(FORMS[n], False, CUDA, BF16) for n in ("latte", "conv", "rg_lru")]
    trial.cache_clear()
    assert reasons[0] == "a first call of the kernels failed, RuntimeError: " + (
        "Failed to find C compiler."
    )
    assert reasons[1:] == ["a first call of the kernels errs by 5.0e-01"] * 2 and len(tried) == 1


def test_a_call_looks_its_answer_up(gpu, monkeypatch):
    gpu()
    read = []
    monkeypatch.setattr(checked, "_rows", lambda: read.append(1) or ROWS)
    for width in (64, 65, 64):
        assert checked.refusal(FORMS["latte"], False, CUDA, BF16, L=16, D=width) is None
    assert len(read) <= 2


def test_a_model_on_a_gpu_reaches_the_kernels_without_a_setting(gpu, monkeypatch):
    """Tensors without memory, on a device that counts as a GPU."""
    gpu()
    monkeypatch.setattr(checked, "GPU", "meta")
    with torch.device("meta"):
        config = preset_config("latte-r-swa++", "small", num_hidden_layers=1)
        model = LatteForCausalLM(config).to(BF16)
        ids = torch.zeros(2, 300, dtype=torch.long)

    def chosen():
        with backend.watch_choices() as found:
            model(ids, labels=ids).loss.backward()
        return found

    assert chosen() == {"triton"}
    with use_backend("torch"):
        assert chosen() == {"torch"}
    gpu(GOOD._replace(ptxas="12.8"))
    with pytest.warns(UserWarning, match="'torch' is used on this GPU.*ptxas is 12.8"):
        assert chosen() == {"torch", "triton"}  # the RG-LRU has no products
    gpu(GOOD._replace(card=80))
    with pytest.warns(UserWarning, match="compute capability 8.0"):
        assert chosen() == {"torch"}


def test_pointwise_kernels_follow_the_table_without_a_warning(gpu, monkeypatch):
    row = ROWS[0]._replace(name="rotation", step=False, dtype="bfloat16", K=4)
    monkeypatch.setattr(checked, "_rows", lambda: [row])
    gpu()
    monkeypatch.setattr(checked, "GPU", "meta")
    x = torch.zeros(2, 3, 4, dtype=BF16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not pointwise._on_triton("rotate", x)  # nothing can be launched for it
        monkeypatch.setattr(pointwise, "on_cpu", lambda x, or_gpu: or_gpu)
        assert pointwise._on_triton("rotate", x)
        assert not pointwise._on_triton("rotate", x.float())
        assert not pointwise._on_triton("rotate", torch.cat([x, x], -1))  # wider than was checked
        assert not pointwise._on_triton("silu_product", x)
        with use_backend("torch"):
            assert not pointwise._on_triton("rotate", x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_asks_too(gpu, dynamic):
    gpu()

    def call(q, v):
        inputs = (q, q, v)
        form = (True, None, False)
        kind = backend.choose(
            *("latte_attention", None, ("torch", "triton"), CUDA, lambda: None),
            inputs=inputs,
            form=form,
        )
        return q.sum() + (kind == "triton")

    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, backend=graphs, dynamic=dynamic)
    for T, L, wanted in ((5, 16, 1), (9, 16, 1), (7, 16, 1), (7, 65, 0)):
        x = torch.zeros(1, T, 2, L, dtype=BF16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert compiled(x, x[..., :16]).item() == wanted
    assert not dynamic or graphs.frame_count <= 2


def test_steps_take_the_kernels_where_these_are_the_default(gpu):
    gpu()
    assert default_backend("cuda") == "triton" and not backend.steps_in_place("cuda", False)
    assert backend.steps_in_place("cuda", True) and backend.steps_in_place("cpu", False)
    gpu(GOOD._replace(ptxas="12.8"))  # a step has no products
    assert default_backend("cuda") == "torch" and not backend.steps_in_place("cuda", False)
    gpu(GOOD._replace(card=80))
    assert backend.steps_in_place("cuda", False)


def test_a_cpu_asks_nothing_of_triton(monkeypatch):
    def asked(*args):
        raise AssertionError("asked")

    monkeypatch.setattr(backend, "default", None)
    for module, name in [(launch, "triton_mode"), (launch, "assembler"), (checked, "machine")]:
        monkeypatch.setattr(module, name, asked)
    x = torch.zeros(1, 3, 1, 2)
    latte_attention(x, x, x)
    assert default_backend() in ("cpu", "torch") and backend.steps_in_place("cpu", False)


def test_a_table_reads_as_it_was_written(tmp_path):
    checked.write(ROWS[::-1], tmp_path / "rows.csv")
    assert checked.read(tmp_path / "rows.csv") == ROWS
