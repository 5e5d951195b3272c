"""Attention distillation layer by layer, from hidden states of the base that are recorded once.

The base runs once over a few rows of text. The inputs of each converted layer are written to one
file per row (:func:`record`), in half precision. Each layer is then fitted alone
(:class:`LayerFit`): its targets are computed from its own input, without the base and without
other layers. The loss is that of :mod:`latte.conversion.attention_distillation`. Queries, keys,
values and the window's output do not change while the latents are fitted, so they are computed once
per row.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K head width, S
sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from latte.conversion.attention import MacchiatoAttention
from latte.conversion.attention_distillation import (
    SAMPLE_EVERY,
    base_output,
    mass_divergence,
    relative_error,
    sampled_masses,
    watch,
)
from latte.conversion.controls import late_latents
from latte.conversion.step import rotary_tables
from latte.layers.mixer import EMPTY, Context, Projected
from latte.layers.parts import Rotary
from latte.layers.weights import window_mass, window_odds, with_mass

Row = TypeVar("Row")


class Recorder:
    """Collects the input of every converted layer while the base runs."""

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}

    def __call__(
        self, layer: MacchiatoAttention, x_BTE: Tensor, near: Projected, context: Context
    ) -> Tensor:
        """The base's output of a layer, (B, T, E)."""
        self.inputs[layer.layer_idx] = x_BTE
        return base_output(layer, near, context)


def record(
    model: Any, rows: Iterable[Tensor], folder: Path, on_row: Callable[[int], None] = lambda _: None
) -> list[Path]:
    """Run the base over rows of tokens. Write one file per row, of bf16 tensors named by layer.

    The base runs on its own device. A row whose file exists is skipped, so an interrupted run
    continues where it stopped.

    Args:
        rows: Token ids, (T,) each.
        on_row: Function that is called with the number of finished rows.
    """

    def recorded(ids_T: Tensor) -> dict[str, Tensor]:
        recorder = Recorder()
        watch(model, recorder, input_ids=ids_T[None])
        return {str(index): x[0] for index, x in recorder.inputs.items()}

    return write_rows(folder, "row", rows, recorded, on_row)


def write_rows(
    folder: Path,
    name: str,
    rows: Iterable[Row],
    recorded: Callable[[Row], Mapping[str, Tensor]],
    on_row: Callable[[int], None],
) -> list[Path]:
    """Write what is recorded of each row to a file ``NAME-00000.safetensors``, if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, row in enumerate(rows):
        file = folder / f"{name}-{number:05d}.safetensors"
        if not file.is_file():
            write_row(file, recorded(row))
        files.append(file)
        on_row(number + 1)
    return files


def write_row(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a row's tensors as bf16, completely or not at all."""
    part = file.with_suffix(".part")
    half = {name: x.to("cpu", torch.bfloat16).contiguous() for name, x in tensors.items()}
    save_file(half, part)
    part.rename(file)


class FitRow(NamedTuple):
    """The data of one row that its loss needs, besides the latents' logits.

    All tensors except the masses are in half precision.

    Attributes:
        x: Input of the layer, (T, E).
        v: Values, (T, G, K).
        near: Output of the window, (T, H, K).
        target: Output of the base's attention, after the output projection, (T, E).
        log_mass: Logsumexp of the window's logits, (T, H).
        mass: Share of the base's attention within the window, at the sampled places, (S, H).
        places: Positions of the sampled tokens, (S,).
        local: With kept tokens: rotated queries (T, H, K) and keys (T, G, K), and the queries for
            the sinks. ``log_mass`` is then (S, H), that of the base's logits.
    """

    x: Tensor
    v: Tensor
    near: Tensor
    target: Tensor
    log_mass: Tensor
    mass: Tensor
    places: Tensor
    local: tuple[Tensor, Tensor, Tensor | None] | None = None


@dataclass(frozen=True)
class FitOptions:
    """Options of the fit of a layer.

    Attributes:
        steps: Largest number of optimiser steps.
        batch_size: Number of rows per step.
        learning_rate: Peak learning rate of AdamW. It falls to a twentieth by a cosine.
        mass_weight: Weight of KL(m || p(l=0)), added to the output's relative error.
        eval_steps: Number of steps between two scores on the held-out rows.
        patience: Number of scores without a gain of 0.5% after which the fit ends.
    """

    steps: int = 120
    batch_size: int = 2
    learning_rate: float = 2e-2
    mass_weight: float = 0.1
    eval_steps: int = 30
    patience: int = 2


class FitErrors(NamedTuple):
    """Errors on the held-out rows: of the layer's output, its mass, and the window alone."""

    step: int
    output: float
    mass: float
    window: float


class LayerFit:
    """One converted layer, the rows it is fitted on, and the held-out rows.

    Args:
        layer: Attention of one layer, with the base's weights and initial latents.
        rotary: Function that returns the layer's rotary table for positions (1, T).
        files: Files that :func:`record` wrote.
        held_out: Number of the last files, which are not trained on.
    """

    def __init__(
        self,
        layer: MacchiatoAttention,
        rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        files: list[Path],
        held_out: int,
    ) -> None:
        self.layer, self.rotary = layer.float(), rotary
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("latents." in name)
        rows = [self._prepare(file) for file in files]
        self.train, self.held_out = rows[: len(rows) - held_out], rows[len(rows) - held_out :]

    @torch.no_grad()
    def _prepare(self, file: Path) -> FitRow:
        layer = self.layer
        device = next(layer.parameters()).device
        with safe_open(str(file), framework="pt") as opened:
            x = opened.get_tensor(str(layer.layer_idx))[None].to(device, torch.float32)
        T = x.shape[1]
        positions = torch.arange(T, device=device)[None]
        edges = [] if layer.sink_edge is None else [layer.sink_edge]
        table, *sinks = rotary_tables(self.rotary, x, positions, edges)
        context = Context(rotary=Rotary(*table, *sinks))
        local = layer.near(x, EMPTY, context)
        first = layer.window if T > layer.window else 0
        places = torch.arange(first, T, SAMPLE_EVERY, device=device)
        local = local._replace(scores=layer.scores(x, context))
        mass, log_mass = sampled_masses(layer, local, places, context)

        def half(each: Tensor) -> Tensor:
            return each[0].to(torch.bfloat16)

        near, _ = layer.window_branch(local, context)
        sink_q = None if local.sink_q is None else half(local.sink_q)
        kept = layer.kept_tokens > 0
        return FitRow(
            x=half(x),
            v=half(local.v),
            near=half(near),
            target=half(base_output(layer, local, context)),
            log_mass=log_mass[0] if kept else window_mass(layer, local, context)[0],
            mass=mass[0],
            places=places,
            local=(half(local.q), half(local.k), sink_q) if kept else None,
        )

    def errors(self, row: FitRow) -> tuple[Tensor, Tensor]:
        """The output's relative error and the mass's divergence of one row."""
        layer = self.layer
        x, v, near, target = (each[None].float() for each in row[:4])
        context = Context()
        local = row.local or (None, None, None)
        q, k, sink_q = (y if y is None else y[None].float() for y in local)
        projected = layer.with_logits(x, Projected(v, q=q, k=k, sink_q=sink_q), context)
        if row.local is not None:
            out = layer.o_proj(layer._attend(x, projected, context)[0].flatten(-2))
            latent_q = with_mass(projected.latent_q[:, row.places], row.log_mass[None])
            real = context.real(x)
            mass = mass_divergence(latent_q, row.mass[None], real[:, row.places])
            return relative_error(out, target, real), mass
        late = layer.window if layer.delay_latents else None
        latent_q, real = projected.latent_q, context.real(x)
        far, _ = late_latents(projected._replace(latent_q=latent_q[..., 1:]), context, late)
        if layer.joint_softmax:
            latent_q = with_mass(latent_q, row.log_mass[None])
        share = torch.sigmoid(window_odds(latent_q))[..., None]
        if late is not None:  # the latents have read nothing before token ``late``
            begun = torch.arange(x.shape[1], device=x.device)[:, None, None] >= late
            share = torch.where(begun, share, 1.0)
        out = layer.o_proj((share * near + (1 - share) * far).flatten(-2))
        mass = mass_divergence(latent_q[:, row.places], row.mass[None], real[:, row.places])
        return relative_error(out, target, real), mass

    @torch.no_grad()
    def score(self, step: int) -> FitErrors:
        """The mean errors of the held-out rows."""
        window = []
        for row in self.held_out:
            alone = self.layer.o_proj(row.near[None].float().flatten(-2))
            real = Context().real(row.x[None])
            window.append(relative_error(alone, row.target[None].float(), real).item())
        errors = [[float(error) for error in self.errors(row)] for row in self.held_out]
        output, mass = (sum(each) / len(errors) for each in zip(*errors, strict=True))
        return FitErrors(step, output, mass, sum(window) / len(window))

    def fit(self, options: FitOptions) -> tuple[dict[str, Tensor], list[FitErrors]]:
        """The latents with the best held-out score, by name, and all scores."""
        latents = self.layer.latents
        optimizer = torch.optim.AdamW(
            latents.parameters(), options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        scores = [self.score(0)]
        best, kept, waited = _loss(scores[0], options), _copy(latents), 0
        for step in range(options.steps):
            set_learning_rate(optimizer, options.learning_rate, step, options.steps)
            optimizer.zero_grad(set_to_none=True)
            for i in range(options.batch_size):
                row = self.train[(step * options.batch_size + i) % len(self.train)]
                output, mass = self.errors(row)
                ((output + options.mass_weight * mass) / options.batch_size).backward()
            optimizer.step()
            if (step + 1) % options.eval_steps and step + 1 != options.steps:
                continue
            scores.append(self.score(step + 1))
            loss = _loss(scores[-1], options)
            waited = 0 if loss < 0.995 * best else waited + 1
            if loss < best:
                best, kept = loss, _copy(latents)
            if waited >= options.patience:
                break
        return kept, scores


def set_learning_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, warm: int = 10
) -> None:
    """A rate that rises over `warm` steps, and falls to a twentieth of its peak by a cosine."""
    fall = 0.05 + 0.475 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / warm) * fall


def _loss(score: FitErrors, options: FitOptions) -> float:
    return score.output + options.mass_weight * score.mass


def _copy(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
