"""Which tokens to keep: each layer's scores, fitted to what its base looks at again.

The base runs over rows of tokens. For every source s that has left the window, each layer records
how much later queries wanted it: the largest ``a_ts |v_s|`` of a group's heads and of the queries t
that no longer have s in their window. The layer's scores
(:class:`latte.layers.kept_scores.KeptScores`) are maps of its input x, so a layer is fitted alone,
without the base. Its loss is listwise: the cross-entropy of softmax(scores) and the sources' shares
of what is wanted. A list has the sources of several rows, because texts in use are longer than rows
and have more sources that nobody wants.

Shape suffixes: B batch, T tokens, E hidden size, G key/value heads, R query heads of one, K head
width, C queries of a block, S sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from latte.conversion.attention import MacchiatoAttention
from latte.conversion.attention_distillation import base_output, watch
from latte.conversion.kept_rows import AskedRow
from latte.conversion.recording import set_learning_rate, write_rows
from latte.errors import LatteError
from latte.layers.kept_scores import EPS, KeptScores
from latte.layers.mixer import Context, Projected
from latte.models.tensor_file import read_tensors, write_tensors

KIND = "kept scores"


@dataclass(frozen=True)
class KeptFitOptions:
    """Options of the fit of a layer's scores.

    Attributes:
        steps: Number of optimiser steps.
        rows: Number of rows of a list.
        learning_rate: Peak learning rate of AdamW. It falls to a twentieth by a cosine.
        weight_decay: Weight decay.
        dropout: Share of the inputs' coordinates that are left out at a step.
        asked: Weight of what the questions want, beside what all later queries want: 0 to 1.
    """

    steps: int = 100
    rows: int = 6
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    asked: float = 0.5


class KeptRecorder:
    """Records a running base: each converted layer's input, and how much its tokens are wanted.

    Args:
        block: Number of tokens between two updates of what is kept.
        asked: Position of the first token of the questions.
    """

    def __init__(self, block: int, asked: int) -> None:
        self.block, self.asked = block, asked
        self.tensors: dict[str, Tensor] = {}

    def __call__(
        self, layer: MacchiatoAttention, x_BTE: Tensor, near: Projected, context: Context
    ) -> Tensor:
        """The base's output of a layer, (B, T, E)."""
        index = layer.layer_idx
        self.tensors[f"{index}"] = x_BTE[0]
        self.tensors[f"{index}.wanted"] = wanted(layer, near, self.block, self.asked)
        return base_output(layer, near, context)


def wanted(layer: MacchiatoAttention, near: Projected, block: int, asked: int) -> Tensor:
    """How much queries want each source that has left their window, (2, G, S).

    Args:
        layer: A converted layer.
        near: The base's queries, keys and values of one row.
        block: Number of queries between two updates, from position 0 on. Only then do sources
            leave the window.
        asked: Position of a query.

    Returns:
        The largest ``a_ts |v_s|`` of all queries, and of the queries from ``asked`` on, of the S
        sources that some query no longer has in its window. The window of a sink never ends: its
        values are 0.
    """
    q, k, v = (x[0].float().transpose(0, 1) for x in (near.q, near.k, near.v))
    G, T, _ = k.shape
    q = q.unflatten(0, (G, -1)) * layer.scale
    found = q.new_zeros(2, G, max(0, T - 1 - (T - 1) % block - layer.window + 1))
    for first in range(0, T, block):
        left = first - layer.window + 1
        if left <= layer.num_sinks:
            continue
        stop = min(first + block, T)
        logits = q[:, :, first:stop] @ k[:, None, :stop].mT
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        token = torch.arange(stop, device=q.device)
        hidden = token > token[first:, None]
        if layer.base_window is not None:
            hidden = hidden | (token <= token[first:, None] - layer.base_window)
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)[..., :left]
        found[0, :, :left] = torch.maximum(found[0, :, :left], weights.amax((1, 2)))
        if stop > asked:
            weights = weights[:, :, max(0, asked - first) :]
            found[1, :, :left] = torch.maximum(found[1, :, :left], weights.amax((1, 2)))
    found *= v.norm(dim=-1)[:, : found.shape[-1]]
    found[..., : layer.num_sinks] = 0
    return found


def record_wanted(
    model: Any,
    rows: Sequence[AskedRow],
    folder: Path,
    block: int,
    on_row: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Run the base over rows, and write one file per row, in bf16.

    A row whose file exists is skipped.
    """

    def recorded(row: AskedRow) -> dict[str, Tensor]:
        recorder = KeptRecorder(block, row.asked)
        watch(model, recorder, input_ids=row.ids[None])
        return recorder.tensors

    return write_rows(folder, "asked", rows, recorded, on_row)


class KeptFit:
    """The scores of one layer and their targets.

    Args:
        index: Number of the layer.
        files: Files that :func:`record_wanted` wrote.
        sinks: Number of a text's first tokens that are always visible.
        device: Where to compute.
    """

    def __init__(
        self, index: int, files: Sequence[Path], sinks: int, device: torch.device | str = "cpu"
    ) -> None:
        self.index = index
        self.x: list[Tensor] = []  # (S, E) of each row
        self.wanted: list[Tensor] = []  # (2, S, G) of each row
        for file in files:
            with safe_open(str(file), framework="pt") as opened:
                want = opened.get_tensor(f"{index}.wanted").float()[..., sinks:]
                if not want.shape[-1]:
                    continue
                x = opened.get_tensor(f"{index}")[sinks : sinks + want.shape[-1]]
            x = F.rms_norm(x.float(), x.shape[-1:], eps=EPS)
            self.x.append(x.to(device))
            self.wanted.append(want.mT.contiguous().to(device))
        if not self.x:
            raise LatteError("kept scores: expected rows longer than the window, got none")

    def fit(self, options: KeptFitOptions, seed: int = 0) -> dict[str, Tensor]:
        """The fitted weights, by name."""
        x = self.x[0]
        generator = torch.Generator().manual_seed(seed * 1000 + self.index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1000 + self.index)
            scores = KeptScores(x.shape[1], self.wanted[0].shape[-1]).to(x.device)
        scores.requires_grad_(True)  # in a model they have no gradients
        optimizer = torch.optim.AdamW(
            scores.parameters(), options.learning_rate, weight_decay=options.weight_decay
        )
        order: list[int] = []
        for step in range(options.steps):
            set_learning_rate(optimizer, options.learning_rate, step, options.steps)
            while len(order) < options.rows:
                order += torch.randperm(len(self.x), generator=generator).tolist()
            chosen, order = order[: options.rows], order[options.rows :]
            x = torch.cat([self.x[i] for i in chosen])
            seen = torch.rand(x.shape[1], generator=generator) >= options.dropout
            x = x * (seen / (1 - options.dropout)).to(x)
            r = scores.down(F.gelu(scores.up(x)))
            loss = -(self.share(chosen, options.asked) * r.log_softmax(0)).sum(0).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return {name: x.detach().cpu().clone() for name, x in scores.state_dict().items()}

    def share(self, chosen: Sequence[int], asked: float) -> Tensor:
        """The sources' shares (S, G) of what is wanted in some rows."""
        found = torch.cat([self.wanted[i] for i in chosen], 1)
        every, questions = found / found.sum(1, keepdim=True).clamp_min(1e-20)
        return (1 - asked) * every + asked * questions


def fit_kept_scores(
    model: Any,
    rows: Sequence[AskedRow],
    folder: Path,
    *,
    layers: Sequence[int] | None = None,
    block: int = 64,
    options: KeptFitOptions | None = None,
    seed: int = 0,
    on_row: Callable[[int], None] = lambda _: None,
    on_layer: Callable[[int], None] = lambda _: None,
) -> dict[int, dict[str, Tensor]]:
    """Fit the scores of converted layers to what the base wants.

    Memory is one row's attention of one layer, and later the inputs of one layer.

    Args:
        model: Converted language model, with the base's weights.
        rows: What the base reads (:func:`latte.conversion.kept_rows.kept_rows`). Longer than the
            window.
        folder: For files of recorded rows and of fitted layers, which are used if they exist.
        layers: Numbers of the layers to fit; None: all converted ones.
        block: Number of tokens between two updates of what is kept.
        options: Options of a layer's fit.
        seed: Seed of the initial weights and of the order of rows.
        on_row: Function that is called with the number of rows that are recorded.
        on_layer: Function that is called with the number of layers that are fitted.

    Returns:
        The weights of each layer's scores, by the layer's number and the weight's name.
    """
    files = record_wanted(model, rows, folder, block, on_row)
    found: dict[int, dict[str, Tensor]] = {}
    for layer in (x.self_attn for x in model.model.layers):
        index = layer.layer_idx
        if not layer.converted or (layers is not None and index not in layers):
            continue
        file = folder / f"kept-{index:02d}.safetensors"
        if not file.is_file():
            fit = KeptFit(index, files, layer.num_sinks, model.device)
            save_kept_scores(file, {index: fit.fit(options or KeptFitOptions(), seed)})
        found |= read_kept_scores(file)
        on_layer(len(found))
    return found


@torch.no_grad()
def set_kept_scores(model: Any, found: dict[int, dict[str, Tensor]]) -> None:
    """Copy weights that :func:`fit_kept_scores` gave into the layers that have kept tokens."""
    for index, weights in found.items():
        scores = getattr(model.model.layers[index].self_attn.latents, "kept_scores", None)
        if scores is not None:
            scores.load_state_dict(weights)


def save_kept_scores(
    path: Path, found: Mapping[int, Mapping[str, Tensor]], dtype: torch.dtype = torch.float32
) -> None:
    """Write weights that :func:`fit_kept_scores` gave to a file. Raises LatteError."""
    named = {
        f"{index}.{name}": x.to(dtype)
        for index, weights in found.items()
        for name, x in weights.items()
    }
    write_tensors(path, named, {}, KIND)


def read_kept_scores(path: Path) -> dict[int, dict[str, Tensor]]:
    """What :func:`save_kept_scores` wrote, as fp32. Raises LatteError."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, x in read_tensors(path, KIND, "save_kept_scores")[1].items():
        index, _, own = name.partition(".")
        found.setdefault(int(index), {})[own] = x.float()
    return found
