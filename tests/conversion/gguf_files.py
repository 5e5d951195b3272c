"""Small GGUF files of random decoders, written as llama.cpp's converter writes them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from latte.lab.data.tokenizers import byte_alphabet
from tests.conversion.bases import OWN, SHAPE

ARCHITECTURES = {"gemma3_text": "gemma3"}
# A tuned model's: marks of turns in the places of bos and eos; the end of documents beside them.
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ Ġ", "t h", "th e", "Ġ the")
TOKENS = (*MARKS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES))
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER = {
    "model": "gpt2", "pre": "smollm", "token_list": list(TOKENS), "token_merges": list(MERGES),
    "token_types": [3] * len(MARKS) + [1] * (len(TOKENS) - len(MARKS)),
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "add_bos_token": False,
}  # fmt: skip
# SentencePiece's kind: bytes, characters, and what is merged by scores. Here "to" comes before
# "ot" and "▁t", a user's token is matched first, and nothing makes the control token </s> of text.
PIECES = (
    *("<unk>", "<s>", "</s>", "<pad>"), *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁", *"abehotrx</s>"[:8], "<", "/", ">", "s"), *("to", "ot", "▁t", "▁▁", "oto", "▁x", "</s"),
    "<b>",
)  # fmt: skip
SENTENCEPIECE = {
    "model": "llama", "pre": "default", "token_list": list(PIECES),
    "token_scores": [0.0] * 260 + [-float(i) for i in range(len(PIECES) - 260)],
    "token_types": [2, 3, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 261), 4],
}  # fmt: skip


def small_base(family: str, **fields):
    """A random model in fp32 and evaluation mode, of widths that blocks of 32 weights fill."""
    kind = type(AutoConfig.for_model(family))
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96}
    own = OWN[family] | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    own |= {"head_dim": 32, "layer_types": None, "num_hidden_layers": 6}
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        own["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                  "sliding_attention": local}  # fmt: skip
    if family.startswith("gemma"):
        own["query_pre_attn_scalar"] = 32
    if family == "qwen2":
        own |= {"use_sliding_window": False, "head_dim": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**(SHAPE | sizes | own | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_gguf(
    path,
    model,
    *,
    kind="F32",
    extra=None,
    tokenizer=TOKENIZER,
    template=TEMPLATE,
    keys=None,
    **more,
):
    """Write a model to a file.

    Args:
        kind: of all matrices, by its name in ggml.
        extra: tensors besides, by name; None leaves one out.
        tokenizer: metadata of it, by the writer's names; None leaves it out.
        keys: metadata besides, by whole keys.
        more: calls of the writer: `add_file_type=3`; several arguments as a tuple; None leaves a
            call out.
    """
    import gguf

    config = model.config
    family = ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), family)
    width = model.model.layers[0].self_attn.head_dim
    rope = config.rope_parameters
    calls = {
        "add_block_count": config.num_hidden_layers,
        "add_context_length": config.max_position_embeddings,
        "add_embedding_length": config.hidden_size,
        "add_feed_forward_length": config.intermediate_size,
        "add_head_count": config.num_attention_heads,
        "add_head_count_kv": config.num_key_value_heads,
        "add_layer_norm_rms_eps": config.rms_norm_eps,
        "add_rope_freq_base": rope.get("full_attention", rope)["rope_theta"],
        "add_key_length": width,
        "add_value_length": width,
        "add_rope_dimension_count": width if family == "llama" else None,
    }
    if family in ("gemma2", "gemma3"):
        calls["add_sliding_window"] = config.sliding_window
    if family == "gemma2":
        calls["add_attn_logit_softcapping"] = config.attn_logit_softcapping
        calls["add_final_logit_softcapping"] = config.final_logit_softcapping
    if tokenizer is not None:
        calls |= {
            {"model": "add_tokenizer_model", "pre": "add_tokenizer_pre"}.get(name, f"add_{name}"): x
            for name, x in tokenizer.items()
        }
        calls["add_chat_template"] = template
    for name, value in (calls | more).items():
        if value is not None:
            getattr(writer, name)(*(value if isinstance(value, tuple) else (value,)))
    for key, value in (keys or {}).items():
        kinds = {bool: "bool", int: "int32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        x = weight.float().numpy()
        if family == "llama" and ("q_proj." in name or "k_proj." in name):
            x = _interleaved(x, x.shape[0] // width)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        stem, _, suffix = name.rpartition(".")
        own = f"{names.get_name(stem)}.{suffix}"
        if own not in (extra or {}):
            add(writer, own, x, kind if x.ndim > 1 else "F32")
    for name, x in (extra or {}).items():
        if x is not None:
            add(writer, name, np.asarray(x, np.float32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, name, x, kind):
    from gguf import GGMLQuantizationType, quants

    of = GGMLQuantizationType[kind]
    writer.add_tensor(name, quants.quantize(x, of), raw_dtype=None if kind == "F32" else of)


def _interleaved(x, heads):
    """Rows of each head in llama.cpp's order: halves that rotate together are neighbours there."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
