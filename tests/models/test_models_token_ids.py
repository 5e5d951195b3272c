"""Token ids and labels that the vocabulary does not have."""

import pytest
import torch

from latte.conversion.config import CONFIGS
from latte.conversion.modeling import FAMILIES


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = CONFIGS["llama"](
        **sizes, vocab_size=259, num_attention_heads=2, local_window=8, num_latents=4
    )
    config.converted_layers = (0,)
    torch.manual_seed(0)
    return FAMILIES["llama"][1](config).eval()


@pytest.mark.parametrize("wrong", [259, -1, 10**6])
@pytest.mark.parametrize("kind", ["latte-r-swa++", "transformer++", "converted"])
def test_a_wrong_id_is_named(make_model, kind, wrong):
    model = llama() if kind == "converted" else make_model(kind, vocab_size=259)
    ids = torch.tensor([[1, 2, wrong, 4]])
    with pytest.raises(ValueError, match=rf"from 0 to 258 \(a vocabulary of 259\), got {wrong}$"):
        model(ids)
    with torch.no_grad():
        cache = model(ids[:, :2]).past_key_values
        with pytest.raises(ValueError, match=f"got {wrong}$"):  # at one token too
            model(ids[:, 2:3], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("wrong", [259, -1])
@pytest.mark.parametrize("given", ["labels", "shift_labels"])
@pytest.mark.parametrize("kind", ["latte-r-swa++", "chunked", "converted"])
def test_a_wrong_label_is_named(make_model, kind, given, wrong):
    chunked = kind == "chunked"
    model = llama() if kind == "converted" else make_model("latte-r-swa++", vocab_size=259)
    model.train(chunked).chunked_loss = chunked
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match=rf"labels: .* from 0 to 258 .*, or -100, got {wrong}$"):
        model(ids, **{"labels": ids, given: torch.tensor([[1, -100, wrong, 4]])})
    for labels, found in ((ids.float(), "torch.float32"), (ids.int(), "torch.int32")):
        with pytest.raises(ValueError, match=f"labels must be a tensor of int64, got {found}$"):
            model(ids, **{"labels": ids, given: labels})
    if kind != "converted":  # whose forward is the base's own
        with pytest.raises(ValueError, match=f"^{given} must be a tensor, got list$"):
            model(ids, **{given: ids.tolist()})
