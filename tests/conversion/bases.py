"""Small random decoders of every family that can be converted, and their exact references."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from latte.conversion.config import CONFIGS
from latte.conversion.modeling import FAMILIES

NAMES = tuple(FAMILIES)
WINDOW = 5
SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
# What makes a family itself, at values where it shows.
OWN = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 5.0, "sliding_window": 9},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                  "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
}  # fmt: skip

ORIGINAL = 16  # tokens, of a scaled base's first training
ORIGINALLY = {"original_max_position_embeddings": ORIGINAL}
# Every scaling of rotary positions that Transformers knows, at values where it shows.
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINALLY},
    "longrope": {"factor": 4.0, **ORIGINALLY, "short_factor": [1.0, 1.5],
                 "long_factor": [2.0, 8.0]},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINALLY},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip


def scaled(family: str, scaling: str) -> dict[str, Any]:
    """The fields of a base with a scaling. Its kinds of layers, if it has any, differ in it."""
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": 100.0, **SCALINGS[scaling]}
    if scaling == "longrope":
        half = (SHAPE | OWN[family])["head_dim"] // 2
        rope |= {name: rope[name] * (half // 2) for name in ("short_factor", "long_factor")}
    kinds = dict.fromkeys(OWN[family].get("layer_types", ()), rope)
    if kinds:
        rope = kinds | {"sliding_attention": rope | {"rope_theta": 50.0}}
    length = ORIGINAL if scaling == "dynamic" else 4 * ORIGINAL
    return {"rope_parameters": rope, "max_position_embeddings": length}


def exact_attention(module, query, key, value, attention_mask, *, scaling, softcap=None, **_):
    """Eager attention without its detour through fp32, so that fp64 stays fp64."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    logits = query @ key.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = (logits + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", eager_mask)


@functools.cache
def base(family: str, scaling: str | None = None):
    """A random model in fp64 and evaluation mode, with norms and biases that are not trivial."""
    kind = type(AutoConfig.for_model(family))
    torch.manual_seed(0)
    fields = SHAPE | OWN[family] | ({} if scaling is None else scaled(family, scaling))
    model = AutoModelForCausalLM.from_config(kind(**fields)).double().eval()
    model.set_attn_implementation("exact")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def full_layers(family: str) -> tuple[int, ...]:
    """The layers of a base that have full attention."""
    config = CONFIGS[family](**{k: v for k, v in base(family).config.to_dict().items()
                                if k != "model_type"}, num_latents=8)  # fmt: skip
    return config.full_layers


def converted(family: str, scaling: str | None = None, **fields):
    """A fresh converted model with the base's weights, fp64."""
    values = {"local_window": WINDOW, "num_latents": 8, "latent_input": "rglru"}
    inherited = base(family, scaling).config.to_dict()
    inherited.pop("model_type")
    config = CONFIGS[family](**(inherited | values | fields))
    torch.manual_seed(1)
    model = FAMILIES[family][1](config).double().eval()
    missing, unexpected = model.load_state_dict(base(family, scaling).state_dict(), strict=False)
    assert not unexpected and all(".latents." in name for name in missing)
    with torch.no_grad():  # latents that matter, each on its own
        for name, parameter in model.named_parameters():
            if ".latents." in name and name.endswith(
                ("q_proj.weight", "k_proj.weight", "kept_scores.down.weight")
            ):
                parameter.normal_(std=0.5)
    return model


def band(tokens: int, window: int | None) -> torch.Tensor:
    """An additive causal mask (1, 1, T, T) of `window` keys, self included."""
    place = torch.arange(tokens)
    gap = place[:, None] - place[None]
    seen = gap >= 0 if window is None else (gap >= 0) & (gap < window)
    return torch.zeros(1, 1, tokens, tokens, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def base_logits(
    family: str, ids: torch.Tensor, window: int | None | str, *, of_full: int | None = None
) -> torch.Tensor:
    """The base's logits with one window on every layer; "own": with the windows it has.

    of_full: a window in the place of full attention alone, with "own".
    """
    model, tokens = base(family), ids.shape[1]
    kinds = getattr(model.config, "layer_types", None)
    own = getattr(model.config, "sliding_window", None)
    full, sliding = band(tokens, of_full), band(tokens, own)
    if window != "own":
        full = sliding = band(tokens, window)  # type: ignore[arg-type]
    with torch.no_grad():
        if FAMILIES[family][0].masks_by_kind:
            masks = {"full_attention": full, "sliding_attention": sliding}
            return model(ids, attention_mask=masks).logits
        return model(ids, attention_mask=sliding if kinds is None and own else full).logits


def tokens(length: int = 23, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Random ids (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPE["vocab_size"], (batch, length), generator=generator)
