"""The format and the arithmetic of llama2.c, spelled out to judge the import by.

Shapes: B batch, T sequence, E hidden size, H query heads, G key/value heads, K width of a head,
V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CONTROL = ["<unk>", "\n<s>\n", "\n</s>\n"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class Sizes:
    dim: int = 60
    hidden: int = 37
    layers: int = 3
    heads: int = 6
    kv_heads: int = 3
    vocabulary: int = 283
    positions: int = 23
    shared: bool = True

    @property
    def head(self) -> int:
        return self.dim // self.heads


def random_weights(sizes: Sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 weights in the file's order, large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    dim, hidden, depth = sizes.dim, sizes.hidden, sizes.layers
    kv = sizes.kv_heads * sizes.head

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * gain / math.sqrt(shape[-1])

    def norm(*shape: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(shape, generator=generator)

    position = torch.arange(sizes.positions)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, sizes.head, 2) / sizes.head)
    weights = {
        "embedding": normal(sizes.vocabulary, dim, gain=4.0),
        "attention_norm": norm(depth, dim),
        "wq": normal(depth, dim, dim, gain=2.0),
        "wk": normal(depth, kv, dim, gain=2.0),
        "wv": normal(depth, kv, dim),
        "wo": normal(depth, dim, dim),
        "mlp_norm": norm(depth, dim),
        "w1": normal(depth, hidden, dim),
        "w2": normal(depth, dim, hidden),
        "w3": normal(depth, hidden, dim),
        "final_norm": norm(dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }
    if not sizes.shared:
        weights["classifier"] = normal(sizes.vocabulary, dim)
    return weights


def checkpoint_bytes(sizes: Sizes, weights: dict[str, torch.Tensor]) -> bytes:
    sign = 1 if sizes.shared else -1
    header = (sizes.dim, sizes.hidden, sizes.layers, sizes.heads, sizes.kv_heads)
    start = struct.pack("<7i", *header, sign * sizes.vocabulary, sizes.positions)
    return start + b"".join(value.numpy().astype("<f4").tobytes() for value in weights.values())


def llama2c_logits(
    sizes: Sizes, weights: dict[str, torch.Tensor], ids_BT: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """run.c's forward pass (B,T,V): rotary pairs (2i, 2i+1), key/value head h // (H / G)."""
    w = {name: value.to(dtype) for name, value in weights.items()}
    length, width = ids_BT.shape[1], sizes.head
    position_T = torch.arange(length, dtype=dtype)
    rate_K = 10000.0 ** (-torch.arange(0, width, 2, dtype=dtype) / width)
    turn_TK = torch.polar(torch.ones(length, width // 2, dtype=dtype), position_T[:, None] * rate_K)
    future_TT = torch.ones(length, length, dtype=torch.bool).triu(1)

    def rmsnorm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return gain * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())

    def rotate(x_BTK: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x_BTK.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn_TK).flatten(-2)

    x_BTE = w["embedding"][ids_BT]
    for n in range(sizes.layers):
        y_BTE = rmsnorm(x_BTE, w["attention_norm"][n])
        q, k, v = (y_BTE @ w[name][n].T for name in ("wq", "wk", "wv"))
        heads = []
        for head in range(sizes.heads):
            group = head // (sizes.heads // sizes.kv_heads)
            own, shared = (slice(i * width, (i + 1) * width) for i in (head, group))
            score_BTT = rotate(q[..., own]) @ rotate(k[..., shared]).mT / math.sqrt(width)
            score_BTT = score_BTT.masked_fill(future_TT, -math.inf)
            heads.append(score_BTT.softmax(-1) @ v[..., shared])
        x_BTE = x_BTE + torch.cat(heads, -1) @ w["wo"][n].T
        y_BTE = rmsnorm(x_BTE, w["mlp_norm"][n])
        gate = y_BTE @ w["w1"][n].T
        x_BTE = x_BTE + (gate * gate.sigmoid() * (y_BTE @ w["w3"][n].T)) @ w["w2"][n].T
    return rmsnorm(x_BTE, w["final_norm"]) @ w.get("classifier", w["embedding"]).T


def tokenizer_bytes(texts: Sequence[str | bytes], scores: Sequence[float]) -> bytes:
    spelled = [text.encode() if isinstance(text, str) else text for text in texts]
    tokens = [
        struct.pack("<fi", score, len(text)) + text
        for text, score in zip(spelled, scores, strict=True)
    ]
    return struct.pack("<i", max(map(len, spelled))) + b"".join(tokens)


def vocabulary(pieces: Sequence[str]) -> tuple[list[str], list[float]]:
    """The three control tokens, the bytes, and pieces whose scores fall, as SentencePiece's do."""
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return [*CONTROL, *BYTES, *pieces], scores


class Llama2cTokenizer:
    """llama2.c's encode and decode, step by step."""

    def __init__(self, texts: Sequence[str], scores: Sequence[float]) -> None:
        self.texts, self.scores = texts, scores
        self.ids = {text: index for index, text in enumerate(texts)}

    def encode(self, text: str) -> list[int]:
        found = [self.ids[" "]] if text else []
        for character in text:
            if character in self.ids:
                found.append(self.ids[character])
            else:
                found += [byte + 3 for byte in character.encode()]
        while True:
            best, where, joint = -1e10, -1, -1
            for i in range(len(found) - 1):
                index = self.ids.get(self.texts[found[i]] + self.texts[found[i + 1]])
                if index is not None and self.scores[index] > best:
                    best, where, joint = self.scores[index], i, index
            if where < 0:
                return found
            found[where : where + 2] = [joint]

    def decode(self, ids: Sequence[int]) -> str:
        """What is printed for `ids` after the token that begins a text."""
        data = b""
        for place, index in enumerate(ids):
            text = self.texts[index]
            if 3 <= index < 259:
                data += bytes([index - 3])
            else:
                data += text[1:].encode() if place == 0 and text[0] == " " else text.encode()
        return data.decode("utf-8")
