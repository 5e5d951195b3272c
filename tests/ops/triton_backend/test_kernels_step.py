"""One decoding step in one kernel: decoding is prefill, whatever the state, mask and window.

Then ``generate`` as on a GPU: the prompt on PyTorch, every token after it on the step's kernels,
against the same weights in fp64 on PyTorch.

Shapes: B rows, T tokens, H query heads, G key/value heads, L latents, K, D widths, W window.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from latte.models import LatteCache, LatteForCausalLM, cache, preset_config
from latte.ops import LatteState, api, latte_attention, macchiato_attention, use_backend
from latte.ops.backend import choose
from latte.ops.triton_backend import launch, step
from latte.ops.triton_backend.step import latte_step_op, macchiato_step_op
from tests.ops.helpers import (
    F64,
    assert_same,
    flat,
    latte_inputs,
    latte_state,
    macchiato_inputs,
    relative_error,
    window_state,
)
from tests.ops.triton_backend.kernel_helpers import DEVICE, Fences

OPS = {"latte": latte_attention, "macchiato": macchiato_attention}


@pytest.fixture
def small(monkeypatch):
    """Four slots and four latents at a time, or fewer."""
    monkeypatch.setattr(launch, "STEP_ELEMENTS", 64)


def left_padded(B, prompt, new):
    """The first row's prompt is padding but for one token; one later token is masked."""
    mask = torch.ones(B, prompt + new, dtype=torch.bool)
    mask[0, : max(prompt - 1, 0)] = False
    mask[-1, prompt + 1] = False
    return mask.to(DEVICE)


def decodes(op, inputs, prompt, **options):
    """A prompt by the torch backend, then token by token, against the reference on all in fp64."""
    T = inputs[0].shape[1]
    mask = left_padded(inputs[0].shape[0], prompt, T - prompt)
    carry = {"output_final_state": True, **options}
    inputs = [x.to(DEVICE) for x in inputs]
    want, last = op(*inputs, key_mask=mask, backend="reference", **carry)
    low, outs, state = [x.float() for x in inputs], [], None
    with torch.no_grad():
        if prompt:
            part = [x[:, :prompt] for x in low]
            out, state = op(*part, key_mask=mask[:, :prompt], backend="torch", **carry)
            outs.append(out)
        for t in range(prompt, T):
            part, real = [x[:, t : t + 1] for x in low], mask[:, t : t + 1]
            out, state = op(*part, key_mask=real, initial_state=state, backend="triton", **carry)
            outs.append(out)
    assert_same([torch.cat(outs, 1), *flat(state)], [want, *flat(last)], 3e-6)
    if op is macchiato_attention:
        assert torch.equal(state[1].mask, last[1].mask)


@pytest.mark.parametrize(("prompt", "H", "G", "L", "D"), [(5, 4, 2, 6, 5), (0, 2, 2, 1, 17)])
def test_latte_decodes_what_it_prefills(small, prompt, H, G, L, D):
    q, k, v = latte_inputs(2, prompt + 3, H, L, D, scale=3.0)
    decodes(latte_attention, (q, k, v[:, :, :G]), prompt)


@pytest.mark.parametrize(
    ("prompt", "H", "G", "window", "softcap"),
    [(5, 4, 2, 4, None), (7, 2, 1, 9, 2.0), (4, 2, 2, 1, None), (0, 4, 2, 11, 3.0)],
)
def test_macchiato_decodes_what_it_prefills(small, prompt, H, G, window, softcap):
    """Grouped heads, soft-capping, left padding; windows inside, beyond and without the past."""
    inputs = macchiato_inputs(2, prompt + 3, H, G, 6, 7, 5)
    decodes(macchiato_attention, inputs, prompt, window=window, softcap=softcap)


def test_with_the_tiles_of_a_gpu():
    inputs = macchiato_inputs(1, 73, 2, 1, 33, 64, 64)
    decodes(macchiato_attention, inputs, 70, window=70, scale=0.3)


def step_inputs(op, B=2, scale=1.0):
    """One token and a state, in fp64."""
    if op == "latte":
        return list(latte_inputs(B, 1, 4, 3, 5, scale)), latte_state(B, 4, 3, 5, scale=scale)
    inputs = list(macchiato_inputs(B, 1, 4, 2, 3, 6, 5, scale))
    return inputs, (latte_state(B, 4, 3, 5, scale=scale), window_state(B, 5, 2, 6, 5))


def converted(tree, dtype):
    """A state in ``dtype``: the latents' part never below fp32."""
    if isinstance(tree, LatteState):
        return LatteState(*(x.to(DEVICE, torch.promote_types(dtype, torch.float32)) for x in tree))
    if isinstance(tree, tuple):
        parts = (converted(x, dtype) for x in tree)
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree.to(DEVICE, dtype) if tree.is_floating_point() else tree.to(DEVICE)


def run(op, inputs, state, backend, **options):
    options |= {"window": 6} if op == "macchiato" else {}
    with torch.no_grad():
        return OPS[op](
            *inputs, initial_state=state, output_final_state=True, backend=backend, **options
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", OPS)
def test_errs_at_most_twice_the_reference(small, op, dtype):
    inputs, state = step_inputs(op)
    low, low_state = [x.to(DEVICE, dtype) for x in inputs], converted(state, dtype)
    exact = [x.to(F64) for x in low], converted(low_state, F64)
    want = flat(run(op, *exact, "reference"))
    plain, got = (flat(run(op, low, low_state, b)) for b in ("reference", "triton"))
    for a, b, e in zip(got, plain, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert relative_error(a, e) <= max(2 * relative_error(b, e), 1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["1e4", "jump", "fall"])
def test_extreme_logits(small, op, kind):
    inputs, state = step_inputs(op, scale=1e4 if kind == "1e4" else 1.0)
    inputs[1] += {"jump": 1e4, "fall": -1e4}.get(kind, 0.0)
    want = run(op, [x.to(DEVICE) for x in inputs], converted(state, F64), "reference")
    low = [x.float().to(DEVICE) for x in inputs]
    assert_same(flat(run(op, low, converted(state, torch.float32), "triton")), flat(want), 2e-3)


@pytest.mark.parametrize("op", OPS)
def test_a_masked_token_changes_nothing_and_may_hold_anything(small, op):
    inputs, state = step_inputs(op)
    inputs = [torch.full_like(x, torch.nan) if i else x for i, x in enumerate(inputs)]
    if op == "macchiato":
        inputs[2] = torch.zeros_like(inputs[2])  # a query is read
    low, state = [x.float().to(DEVICE) for x in inputs], converted(state, torch.float32)
    masked = torch.zeros(2, 1, dtype=torch.bool, device=DEVICE)
    out, after = run(op, low, state, "triton", key_mask=masked)
    assert torch.isfinite(out).all()
    latents = (state, after) if op == "latte" else (state[0], after[0])
    assert_same([*latents[1]], [*latents[0]], 1e-6)
    if op == "macchiato":
        assert not after[1].mask[:, -1].any()
        assert torch.equal(after[1].mask[:, :-1], state[1].mask[:, 1:])
    out, after = run(op, low, None, "triton", key_mask=masked)
    assert not out.any() and torch.isneginf(flat(after)[0]).all()


@pytest.mark.parametrize("op", OPS)
def test_the_old_state_stays_and_nothing_is_shared(small, op):
    inputs, state = step_inputs(op)
    low, state = [x.float().to(DEVICE) for x in inputs], converted(state, torch.float32)
    kept = [x.clone() for x in flat(state)]
    _, after = run(op, low, state, "triton")
    assert_same(flat(state), kept, 0.0)
    old = {x.untyped_storage().data_ptr() for x in flat(state)}
    assert not old & {x.untyped_storage().data_ptr() for x in flat(after)}


@pytest.mark.parametrize("op", OPS)
def test_memory_is_neither_read_nor_written_beyond(small, op, monkeypatch):
    fences = Fences()
    inputs, state = step_inputs(op)
    low = [fences.of(x.float().to(DEVICE)) for x in inputs]
    state = converted(state, torch.float32)
    parts = [fences.of(x) for x in flat(state)]
    latents = LatteState(*parts[:2])
    state = latents if op == "latte" else (latents, type(state[1])(*parts[2:], state[1].mask))
    plain = torch.empty_like
    fences.guard(monkeypatch)
    fenced = torch.empty_like

    def empty_like(x):
        return plain(x) if x.dtype == torch.uint8 else fenced(x)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert not any(torch.isnan(x).any() for x in flat(run(op, low, state, "triton")))
    fences.check()


def test_strided_inputs(small):
    inputs, state = step_inputs("macchiato")
    low, state = [x.float().to(DEVICE) for x in inputs], converted(state, torch.float32)
    out, (latents, tail, *_) = run("macchiato", low, state, "triton")
    want = [out, *latents, *tail]
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in low]
    tail = type(state[1])(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in state[1]))
    assert not tail.mask.is_contiguous()
    out, (latents, tail, *_) = run("macchiato", strided, (state[0], tail), "triton")
    assert_same([out, *latents, *tail], want, 0.0)


@pytest.mark.parametrize("op", OPS)
def test_compiles_in_one_graph(small, op):
    torch._dynamo.reset()
    inputs, state = step_inputs(op)
    low, state = [x.float().to(DEVICE) for x in inputs], converted(state, torch.float32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with use_backend("triton"):
        got = flat(compiled(op, low, state, None))
    assert_same(got, flat(run(op, low, state, "triton")), 0.0)


def test_custom_ops_keep_their_contracts(small):
    inputs, state = step_inputs("macchiato")
    low, state = [x.float().to(DEVICE) for x in inputs], converted(state, torch.float32)
    mask = torch.tensor([[True], [False]], device=DEVICE)
    none, window = [None] * 8, state[1].mask.shape[1] + 1  # neither sinks nor late latents
    args = (*low, mask, None, *state[0], None, *state[1], *none, window, 0.5, 2.0, False, False)
    checks = torch.library.opcheck(macchiato_step_op, args)
    args = (low[1], low[1], low[4], None, None, *state[0])
    checks |= torch.library.opcheck(latte_step_op, args)
    assert set(checks.values()) == {"SUCCESS"}


@pytest.fixture
def steps(monkeypatch):
    """How many steps the kernel has served."""
    count = SimpleNamespace(served=0)

    def counted(*args):
        count.served += 1
        return latte_step_op(*args)

    monkeypatch.setattr(step, "latte_step_op", counted)
    return count


def test_which_calls_are_steps(steps):
    low = [x.float().to(DEVICE) for x in latte_inputs(1, 2, 2, 3, 5)]
    one = [x[:, :1] for x in low]
    latte_attention(*one, backend="triton")
    assert steps.served == 1
    with use_backend("triton"):
        latte_attention(*one)
    assert steps.served == 2
    with torch.no_grad():
        wanted = [x.clone().requires_grad_() for x in one]
        latte_attention(*wanted, backend="triton")
    assert steps.served == 3
    # None of these is one: it is asked for a gradient, has two tokens, looks ahead, is packed.
    out, _ = latte_attention(*wanted, backend="triton")
    assert out.requires_grad
    cu = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    latte_attention(*low, backend="triton")
    latte_attention(*one, backend="triton", causal=False)
    latte_attention(*one, backend="triton", cu_seqlens=cu)
    latte_attention(*one, backend="torch")
    with use_backend("torch"):
        latte_attention(*one)
    assert steps.served == 3


def test_what_none_means():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def chosen(backend, device, refusal):
        served = ("reference", "torch", "triton")
        return choose("op", backend, served, device, lambda: refusal, step=True)

    assert chosen(None, gpu, None) == "torch"  # its form was never checked on a GPU
    assert chosen(None, gpu, "for L=300") == "torch"
    assert chosen(None, cpu, None) == "torch"
    assert chosen("torch", gpu, None) == "torch"
    with use_backend("torch"):
        assert chosen(None, gpu, None) == "torch"
    with use_backend("triton"):
        assert chosen(None, cpu, None) == "triton"
        with pytest.raises(ValueError, match="'triton' is not available for L=300"):
            chosen(None, cpu, "for L=300")


def test_what_the_kernel_cannot_serve_is_told():
    q, k, v = latte_inputs(1, 1, 2, 3, 5)
    with use_backend("triton"):
        with pytest.raises(ValueError, match="'triton' is not available for torch.float64"):
            latte_attention(q, k, v)
        wide = torch.zeros(1, 1, 2, 600)
        with pytest.raises(ValueError, match="for K=600: expected K from 1 to 512"):
            macchiato_attention(torch.zeros(1, 1, 2, 4), k.float(), wide, wide, v.float(), window=4)


PRESETS = ["latte-conv++", "latte-r-swa++"]
NEW = 4


def models(preset):
    """A small model in fp32, and the same in fp64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_latents": 12}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    sizes |= {"initializer_range": 0.4, "tie_word_embeddings": False}
    if "swa" in preset:
        sizes["sliding_window"] = 4
    single = LatteForCausalLM(preset_config(preset, "tiny", **sizes)).eval().to(DEVICE)
    return single, copy.deepcopy(single).double()


def prompt(B=3, T=6):
    ids = torch.randint(3, 40, (B, T), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids * mask, mask


def generate(model, ids, mask, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    config = GenerationConfig(
        **settings, return_dict_in_generate=True, output_logits=True, suppress_tokens=[0]
    )
    return model.generate(ids, attention_mask=mask, generation_config=config)


@contextmanager
def steps_on(backend):
    """What steps run on if nobody names a backend; prompts stay on PyTorch."""

    def chosen(op, asked, *rest, step=False, **options):
        return choose(op, backend if step else asked, *rest, step=step, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "choose", chosen)
        patch.setattr(cache, "steps_in_place", lambda *_: False)  # as on a GPU
        yield


@pytest.fixture
def served(monkeypatch):
    """The steps' kernels that were launched, by name."""
    names = []

    def counted(name):
        op = getattr(step, name)

        def call(*args):
            names.append(name)
            return op(*args)

        return call

    for name in ("latte_step_op", "macchiato_step_op"):
        monkeypatch.setattr(step, name, counted(name))
    return names


@pytest.mark.parametrize("preset", PRESETS)
def test_a_left_padded_batch(preset, served):
    single, double = models(preset)
    ids, mask = prompt()
    want = generate(double, ids, mask)
    assert not served
    with steps_on("triton"):
        got = generate(single, ids, mask)
    assert torch.equal(got.sequences, want.sequences)
    for a, e in zip(got.logits, want.logits, strict=True):
        assert (a.double() - e).abs().max() <= 1e-4 * e.abs().max()
    # One launch per layer and token after the first, which the prompt gives.
    op = "macchiato_step_op" if "swa" in preset else "latte_step_op"
    assert served == [op] * 2 * (NEW - 1)


def test_beams(served):
    single, double = models("latte-r-swa++")
    ids, mask = prompt(2)
    beams = {"num_beams": 2, "max_new_tokens": 3}
    want = generate(double, ids, mask, **beams)
    with steps_on("triton"):
        got = generate(single, ids, mask, **beams)
    assert torch.equal(got.sequences, want.sequences) and served


def test_taking_tokens_back(served):
    """Steps leave the states that an undo log starts from as they were."""
    single, double = models("latte-r-swa++")
    ids = prompt(2, 9)[0][1:]
    logits = []
    for model, backend in ((double, "torch"), (single, "triton")):
        earlier = LatteCache(model.config)
        for layer in earlier.layers:
            layer.activate_past_recording()
        with torch.no_grad(), steps_on(backend):
            for t in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 8)):
                model(ids[:, t], past_key_values=earlier)
            earlier.crop(-2)
            logits.append(model(ids[:, 8:9], past_key_values=earlier).logits.double())
    assert served
    assert (logits[1] - logits[0]).abs().max() <= 1e-4 * logits[0].abs().max()
