"""Token files cut into training blocks, and held-out text for exact scores.

Training blocks are equal pieces of the token stream, in an order that (seed, index) decides.
Held-out text is scored window by window. At any context length every token is scored once.
Perplexity is exp(sum of NLL / tokens scored). Bits per byte is sum of NLL / ln 2 / bytes scored.
Only sums are used, because a mean of means depends on how the text was cut.

T: block length, B: rows of a batch, N: segments, C: context length. A segment is the part of one
document that lies in one block. States, windows and losses do not cross its ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from latte.errors import LatteError
from latte.lab.data.tokenfile import TokenFile

IGNORE = -100


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """The image of ``index`` under a permutation of range(size) that (seed, epoch) chooses.

    It is a four-round Feistel network over the smallest even number of bits that holds ``size``. It
    is applied until the result is below ``size`` (at most four times on average). So it needs no
    table, and no generator whose state could differ after a resume.
    """
    if not 0 <= index < size:
        raise IndexError(f"index must be in [0, {size}), got {index}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = f"latte blocks {seed} {epoch} {size}".encode()
    digest = hashlib.blake2b(key, digest_size=64).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") | 1 for i in range(8)]
    value = index
    while True:
        left, right = value >> half, value & mask
        for i in range(0, 8, 2):
            mixed = (right + keys[i]) * keys[i + 1] & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 29
            mixed = mixed * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32 & mask)
        value = left << half | right
        if value < size:
            return value


class PackedBlocks(Dataset):
    """Blocks of T tokens; item i is a pure function of (seed, i).

    Block b is ``tokens[b * T : (b + 1) * T]``. The last, shorter piece is left out. Item i is block
    ``permuted(i % num_blocks, ...)`` of epoch ``i // num_blocks``. Indices continue over the
    epochs: pass ``length`` (for example, steps times batch size) and read the items in order. A run
    resumed at item i reads the same data as one that was not interrupted. No global random state is
    read or changed.

    An item is a dictionary of tensors, named as a causal model's arguments:

    - ``input_ids`` (T,) int64;
    - ``labels`` (T,) int64: the input ids, which the model shifts by one (as in Hugging Face). The
      first token of each segment has the label -100, because the token before it belongs to
      another document or block;
    - ``position_ids`` (T,) int64: the position within the segment;
    - ``cu_seq_lens_q`` (N + 1,) int32: the bounds of the segments, from 0 to T.

    With ``respect_documents=False`` the block is one segment, in which documents see each other.
    The labels are the same. With ``start_blocks`` a block's first token is replaced by the start
    token, so that the block begins as a document does.

    Args:
        tokens: Token file.
        block_length: Number T of tokens in a block.
        seed: Seed of the order.
        shuffle: Whether to shuffle the blocks in each epoch. If not, they keep the corpus' order.
        respect_documents: Whether a document's end is the end of a segment.
        start_blocks: Whether every block begins with the start token.
        length: Number of items; one epoch by default.
    """

    def __init__(
        self,
        tokens: TokenFile,
        block_length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        respect_documents: bool = True,
        start_blocks: bool = False,
        length: int | None = None,
    ) -> None:
        if block_length < 2:
            raise LatteError(f"block_length must be at least 2, got {block_length}")
        self.num_blocks = len(tokens) // block_length
        if self.num_blocks == 0:
            raise LatteError(
                f"{tokens.path}: {len(tokens)} tokens are too few for a single block of "
                f"{block_length}"
            )
        if length is not None and length < 1:
            raise LatteError(f"length must be at least 1, got {length}")
        self.tokens = tokens
        self.block_length = block_length
        self.seed = seed
        self.shuffle = shuffle
        self.respect_documents, self.start_blocks = respect_documents, start_blocks
        self.length = self.num_blocks if length is None else length

    def __len__(self) -> int:
        return self.length

    def block_number(self, index: int) -> int:
        """The number of the block that item ``index`` is."""
        epoch, place = divmod(index, self.num_blocks)
        return permuted(place, self.num_blocks, self.seed, epoch) if self.shuffle else place

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < 0:
            index += self.length
        if not 0 <= index < self.length:
            raise IndexError(f"item {index} of {self.length}")
        T = self.block_length
        start = self.block_number(index) * T
        input_ids = self.tokens.tokens[start : start + T].astype(np.int64)
        offsets = self.tokens.offsets
        if self.start_blocks:
            input_ids[0] = self.tokens.tokens[offsets[0]]
        first, last = np.searchsorted(offsets, (start + 1, start + T))
        bounds = np.concatenate(([0], offsets[first:last] - start, [T]))
        labels = input_ids.copy()
        labels[bounds[:-1]] = IGNORE
        if not self.respect_documents:
            bounds = np.array([0, T])
        starts = np.repeat(bounds[:-1], np.diff(bounds))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(np.arange(T) - starts),
            "cu_seq_lens_q": torch.from_numpy(bounds.astype(np.int32)),
        }


class SharedBlocks(Dataset):
    """Blocks in an order that gives all processes of a group the same batch.

    Without this, processes take batches in turns.

    Args:
        blocks: Blocks that the processes share.
        batch_size: Number of items in a batch.
        processes: Number of processes in a group. Their ranks are consecutive.
    """

    def __init__(self, blocks: PackedBlocks, batch_size: int, processes: int) -> None:
        self.blocks, self.batch_size, self.processes = blocks, batch_size, processes

    def __len__(self) -> int:
        return len(self.blocks) * self.processes

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch, place = divmod(index, self.batch_size)
        return self.blocks[batch // self.processes * self.batch_size + place]


class BlockCollator:
    """Blocks -> a batch for a causal model.

    - ``"packed"``: one row of B * T tokens: ``input_ids``, ``labels``, ``position_ids`` (1, B*T)
      and ``cu_seq_lens_q`` (N + 1,) int32 over the row, where states and windows start again.
    - ``"rows"``: ``input_ids``, ``labels`` (B, T). Only for blocks of one segment each.
    - ``"padded"``: ``input_ids``, ``labels``, one row for each segment, padded on the right to the
      longest, with token 0 and label -100. This is for causal models that cannot separate packed
      segments. They see and predict the same tokens.
    - ``"auto"``: rows when each block is one segment, packed otherwise. The two give the same loss.
    """

    def __init__(self, layout: Literal["auto", "packed", "rows", "padded"] = "auto") -> None:
        if layout not in ("auto", "packed", "rows", "padded"):
            raise LatteError(f"layout must be 'auto', 'packed', 'rows' or 'padded', got {layout!r}")
        self.layout = layout

    def __call__(self, blocks: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        single = all(len(block["cu_seq_lens_q"]) == 2 for block in blocks)
        if self.layout == "rows" and not single:
            raise LatteError(
                "layout='rows' needs blocks of one document each; use 'packed' or 'auto', or "
                "respect_documents=False"
            )
        if self.layout == "padded":
            return {
                name: pad_sequence(_segments(blocks, name), True, padding)
                for name, padding in (("input_ids", 0), ("labels", IGNORE))
            }
        if single and self.layout != "packed":
            return {
                name: torch.stack([torch.as_tensor(block[name]) for block in blocks])
                for name in ("input_ids", "labels")
            }
        batch = {
            name: torch.cat([torch.as_tensor(block[name]) for block in blocks])[None]
            for name in ("input_ids", "labels", "position_ids")
        }
        lengths = torch.cat([torch.as_tensor(block["cu_seq_lens_q"]).diff() for block in blocks])
        return {**batch, "cu_seq_lens_q": pad(lengths.cumsum(0), (1, 0)).to(torch.int32)}


def _segments(blocks: Sequence[dict[str, Any]], name: str) -> list[torch.Tensor]:
    """One of the blocks' tensors, cut into their segments."""
    pieces: list[torch.Tensor] = []
    for block in blocks:
        lengths = torch.as_tensor(block["cu_seq_lens_q"]).diff().tolist()
        pieces += torch.as_tensor(block[name]).split(lengths)
    return pieces


# --- held-out text ------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationWindow:
    """``targets[i]`` is the token after ``input_ids[i]``; both (n,) int64, n <= C.

    ``target_bytes`` (n,) float64: number of text bytes of each target; 0 for an end-of-text token.
    ``document``, ``start``: the place of ``input_ids[0]`` (start 0 is the document's bos).
    """

    input_ids: np.ndarray
    targets: np.ndarray
    target_bytes: np.ndarray
    document: int
    start: int


class EvaluationText:
    """Contiguous held-out tokens, by document or joined.

    Each document is ``bos, text..., eos``. Everything after bos is scored: all bytes of the text,
    and its end. Windows of C inputs follow one another without overlap. Each window also predicts
    the token after its last. So **every token is scored exactly once for any C**, and scores at
    several C are over the same tokens and bytes.

    Args:
        tokens: Held-out token file.
        join: Whether to treat all documents as one long document. This allows contexts longer than
            the documents. bos and eos stay in it as tokens; a bos is not predicted.
        max_tokens: Approximate number of tokens to score; all by default. Whole documents are
            chosen, spread evenly over the file; the last one may be cut.
    """

    def __init__(
        self, tokens: TokenFile, *, join: bool = False, max_tokens: int | None = None
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise LatteError(f"max_tokens must be at least 1, got {max_tokens}")
        self.tokens = tokens
        self.join = join
        self._chosen = _choose(tokens, max_tokens)
        self.num_documents = 1 if join else len(self._chosen)
        self.num_targets = sum(stop - start - 1 for start, stop, _ in self._chosen)
        self.num_bytes = sum(count for _, _, count in self._chosen)

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each document's ids (n,) int64 and the number of bytes of each id (n,) float64."""
        parts = []
        for start, stop, count in self._chosen:
            ids = self.tokens.tokens[start:stop].astype(np.int64)
            parts.append((ids, self._bytes_of(ids, count)))
            if not self.join:
                yield parts.pop()
        if self.join:
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[misc]

    def _bytes_of(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Number of bytes per id: exact for byte-level tokenisers, else the same for each id."""
        lengths = self.tokens.byte_lengths
        if lengths is not None:
            return lengths[ids].astype(np.float64)
        text = np.ones(len(ids))
        text[0] = 0
        if ids[-1] == self.tokens.eos and len(ids) > 1:
            text[-1] = 0
        return text * (count / max(1.0, text.sum()))

    def windows(self, context_length: int) -> Iterator[EvaluationWindow]:
        """The windows of every document, in order; a document's last one may be shorter."""
        if context_length < 1:
            raise LatteError(f"context_length must be at least 1, got {context_length}")
        for number, (ids, sizes) in enumerate(self.documents()):
            targets = ids[1:].copy()
            if self.join:  # a bos is not predicted, so the targets are the same at any C
                starts = np.cumsum([stop - start for start, stop, _ in self._chosen])[:-1]
                targets[starts - 1] = IGNORE
            for start in range(0, len(targets), context_length):
                end = start + context_length
                yield EvaluationWindow(
                    ids[:-1][start:end],
                    targets[start:end],
                    sizes[1:][start:end],
                    number,
                    start,
                )

    def batches(self, context_length: int, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Windows in batches, longest first, padded on the right.

        ``input_ids``, ``attention_mask`` (B, n) int64; ``targets`` (B, n) int64, already shifted,
        -100 at positions that are not scored; ``target_bytes`` (B,) float64, the sum of each row.
        """
        if batch_size < 1:
            raise LatteError(f"batch_size must be at least 1, got {batch_size}")
        windows = sorted(self.windows(context_length), key=lambda window: -len(window.targets))
        for first in range(0, len(windows), batch_size):
            rows = windows[first : first + batch_size]
            parts: dict[str, tuple[list[np.ndarray], int]] = {  # and their padding values
                "input_ids": ([window.input_ids for window in rows], self.tokens.eos),
                "attention_mask": ([np.ones_like(window.targets) for window in rows], 0),
                "targets": ([window.targets for window in rows], IGNORE),
            }
            batch = {
                name: pad_sequence([torch.from_numpy(row) for row in values], True, padding)
                for name, (values, padding) in parts.items()
            }
            sizes = [window.target_bytes.sum() for window in rows]
            yield {**batch, "target_bytes": torch.tensor(sizes, dtype=torch.float64)}


def _choose(tokens: TokenFile, max_tokens: int | None) -> list[tuple[int, int, int]]:
    """(first token, end, text bytes) of the documents to score, in the file's order."""
    sizes = np.diff(tokens.offsets)
    takes = sizes.copy()
    if max_tokens is not None:
        # Golden-ratio steps visit the documents evenly, for any number of documents.
        steps = np.mod(np.arange(len(sizes)) * 0.6180339887498949, 1.0)
        places = np.argsort(steps, kind="stable")
        targets = sizes[places] - 1
        left = max_tokens - (targets.cumsum() - targets)  # tokens still to score, at each place
        takes[places] = np.where(left > 0, np.minimum(targets, left) + 1, 0)
    result = []
    for number in np.flatnonzero(takes):
        start, take = int(tokens.offsets[number]), int(takes[number])
        count = int(tokens.document_bytes[number])
        if take < sizes[number]:
            if tokens.byte_lengths is not None:
                count = int(tokens.byte_lengths[tokens.tokens[start : start + take]].sum())
            else:
                count = round(count * (take - 1) / max(1, int(sizes[number]) - 2))
        result.append((start, start + take, count))
    return result


def perplexity(nll: float, targets: int) -> float:
    """exp(nll / targets), where nll is the sum of negative log-likelihoods in nats."""
    if targets < 1:
        raise LatteError("perplexity needs at least one scored token, got none")
    mean = nll / targets
    return math.inf if mean >= 700 else math.exp(mean)


def bits_per_byte(nll: float, num_bytes: float) -> float:
    """nll / ln 2 / bytes, where nll is the sum of negative log-likelihoods in nats."""
    if num_bytes <= 0:
        raise LatteError("bits per byte needs at least one scored byte, got none")
    return nll / math.log(2) / num_bytes
