"""Models whose linear maps a quantiser has replaced: PyTorch's own, and torchao."""

import copy

import pytest
import torch

from latte.models import LatteCache
from tests.models.modeldb import named, tokens

ROWS = named(
    ["latte-r-swa++", "latte-gated", "latte-hybrid", "linear++", "swa++"]
    + ["llama: kept tokens", "llama: plain", "llama: both", "gemma3_text: both", "llama: base"]
)


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def torchao_int8(model):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("quantised", [dynamic, torchao_int8])
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.filterwarnings("ignore")
def test_quantised_models_read_decode_and_generate(row, quantised):
    model, ids = copy.deepcopy(row.model(torch.float32)), tokens(2, 8)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        model = quantised(model)
        whole, cache = model(ids, use_cache=False).logits, LatteCache(model.config)
        pieces = [model(x, past_key_values=cache).logits for x in ids.split([5, 1, 1, 1], 1)]
    assert 0 < (whole - exact).norm() < 0.5 * exact.norm()
    # A quantiser of activations has one scale for all tokens of a call.
    difference = (torch.cat(pieces, 1) - whole).norm()
    assert difference < (0.2 if quantised is dynamic else 1e-4) * whole.norm()
    out = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert out.shape == (2, 11)
