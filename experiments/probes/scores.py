"""Asking the probes of `experiments.probes.questions`: scores by context length and depth.

Prompts are read in segments, the cache carrying the state from one to the next, as `scoring`
does: with a state of constant size, memory is constant in the length. What follows a prompt goes
through the same cache, token by token where the model itself chooses. Shape suffixes: R cases side
by side, T tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.probes.questions import (
    CONTINUATION,
    Material,
    continuation_case,
    copy_case,
    repeated,
    retrieval_case,
)
from latte.errors import LatteError

PROBES = ("retrieval", "copy", "continuation")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DISTRACTORS = 3

Scores = dict[str, list[float]]  # metric -> a value per case


@dataclass(frozen=True)
class ProbeRow:
    """The mean of a metric over the cases of a cell, and its standard error.

    retrieval, per `depth`: `exact` (greedy decoding says the word), `ranked_first` (it is likelier
    than the distractors' words; 1/4 by chance), `beats_unsaid` (than words that were not said),
    `margin` and `margin_unsaid` (nats per token by which it beats the best of those), `nll` (nats
    per token of the word), `nll_unseen` (where another word was said instead) and `gain`, what
    having been told saves: 0 for a model that looks nothing up, and where a small model's first
    signs show.
    copy: `token_match` (tokens of the greedy continuation that are the paragraph's), `exact` (all
    are), `nll` (nats per token), `..._unseen`, the same without the paragraph, and `gain`, what
    having seen it saves.
    continuation: `repeated_4`, `distinct_1`, `distinct_2` of greedy decoding, sampling (at
    temperature 1) and the text's own continuation.
    """

    probe: str
    length: int
    depth: float | None
    metric: str
    value: float
    stderr: float | None
    cases: int


def run_probes(
    model: nn.Module,
    material: Material,
    probes: Sequence[str],
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    cases: int = 32,
    seed: int = 0,
    segment: int = 1024,
    batch_tokens: int = 16384,
    bf16: bool = False,
    progress: bool = True,
) -> list[ProbeRow]:
    """Ask `cases` questions per probe, length and depth. The model is left in its mode.

    Args:
        lengths: tokens of prompt and answer together.
        depths: where the right statement stands in the retrieval probe, 0 to 1.
        segment: tokens read at a time.
        batch_tokens: tokens side by side (one case at least).
        bf16: autocast to bfloat16; likelihoods are computed in fp32.

    Raises:
        LatteError: an unknown probe, a length without room, too little text.
    """
    from tqdm import tqdm

    cells = plan(material, probes, lengths, depths)
    device = next(model.parameters()).device
    autocast: Any = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    was_training = model.training
    model.eval()
    rows: list[ProbeRow] = []
    bar = tqdm(total=len(cells) * cases, unit="case", disable=None if progress else True)
    try:
        with torch.no_grad(), autocast, bar:
            for name, length, depth in cells:
                bar.set_description(f"{name} at {length}")
                scores: Scores = {}
                size = max(1, batch_tokens // length)
                for first in range(0, cases, size):
                    indices = range(first, min(first + size, cases))
                    batch = [make_case(material, name, seed, i, length, depth) for i in indices]
                    if name == "retrieval":
                        found = score_retrieval(model, batch, segment)
                    elif name == "copy":
                        found = score_copy(model, batch, segment)
                    else:
                        found = score_continuation(model, batch, segment, draws(seed, indices))
                    for metric, values in found.items():
                        scores.setdefault(metric, []).extend(values)
                    bar.update(len(batch))
                rows += [_row(name, length, depth, *item) for item in scores.items()]
    finally:
        model.train(was_training)
    return rows


def plan(
    material: Material, probes: Sequence[str], lengths: Sequence[int], depths: Sequence[float]
) -> list[tuple[str, int, float | None]]:
    """The (probe, length, depth) to ask. Raises LatteError if one of them cannot be."""
    unknown = [name for name in probes if name not in PROBES]
    if unknown or not probes:
        what = repr(unknown[0]) if unknown else "none"
        raise LatteError(f"probes: expected some of {', '.join(PROBES)}, got {what}")
    cells: list[tuple[str, int, float | None]] = [
        (name, length, depth)
        for name in PROBES
        if name in probes
        for length in lengths
        for depth in (depths if name == "retrieval" else (None,))
    ]
    for name, length, depth in cells:
        make_case(material, name, 0, 0, length, depth)
    return cells


def make_case(
    material: Material, probe: str, seed: int, index: int, length: int, depth: float | None
) -> Any:
    """Case `index` of a cell."""
    if probe == "retrieval":
        assert depth is not None
        return retrieval_case(
            material, seed, index, length=length, depth=depth, distractors=DISTRACTORS
        )
    make: Callable[..., Any] = copy_case if probe == "copy" else continuation_case
    return make(material, seed, index, length=length)


def _row(
    probe: str, length: int, depth: float | None, metric: str, values: list[float]
) -> ProbeRow:
    mean, stderr = mean_and_error(values)
    return ProbeRow(probe, length, depth, metric, mean, stderr, len(values))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean over cases, and its standard error from two cases on."""
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (count - 1) / count) if count > 1 else None


# --- the probes --------------------------------------------------------------------------------


def score_retrieval(model: nn.Module, batch: list[Any], segment: int) -> Scores:
    """Likelihood of every candidate after the question; see :class:`ProbeRow`."""
    logits_RV, cache = read(model, _stack(case.prompt for case in batch), segment)
    log_p, exact = [], []
    count, size = batch[0].candidates.shape
    for which in range(count):
        answers_RA = _stack(case.candidates[which] for case in batch)
        nll_RA, right_RA = follow(model, logits_RV, cache, answers_RA)
        log_p.append(-nll_RA.mean(1))
        exact.append(right_RA.all(1))
    control_RV, control = read(model, _stack(case.control for case in batch), segment)
    answers_RA = _stack(case.candidates[0] for case in batch)
    unseen_R = follow(model, control_RV, control, answers_RA)[0].mean(1)
    log_p_RC = torch.stack(log_p, 1)
    said = (count - 1) // 2
    right_R = log_p_RC[:, 0]
    said_RC, unsaid_RC = log_p_RC[:, 1 : 1 + said], log_p_RC[:, 1 + said :]
    margin_R, unsaid_R = right_R - said_RC.amax(1), right_R - unsaid_RC.amax(1)
    return _lists(
        exact=exact[0],
        ranked_first=margin_R > 0,
        beats_unsaid=unsaid_R > 0,
        nll=-right_R,
        margin=margin_R,
        margin_unsaid=unsaid_R,
        nll_unseen=unseen_R,
        gain=unseen_R + right_R,
    )


def score_copy(model: nn.Module, batch: list[Any], segment: int) -> Scores:
    """Greedy continuation and likelihood, with and without the paragraph in the context."""
    answers_RA = _stack(case.answer for case in batch)
    found: Scores = {}
    for suffix, name in (("", "prompt"), ("_unseen", "control")):
        logits_RV, cache = read(model, _stack(getattr(case, name) for case in batch), segment)
        nll_RA, _ = follow(model, logits_RV, cache, answers_RA)
        made_RA = generate(model, logits_RV, cache, answers_RA.shape[1])
        match_RA = made_RA == answers_RA.to(made_RA.device)
        values = _lists(
            token_match=match_RA.double().mean(1), exact=match_RA.all(1), nll=nll_RA.mean(1)
        )
        found |= {metric + suffix: value for metric, value in values.items()}
    pairs = zip(found["nll_unseen"], found["nll"], strict=True)
    return found | {"gain": [unseen - seen for unseen, seen in pairs]}


def score_continuation(
    model: nn.Module, batch: list[Any], segment: int, uniform_RA: Tensor
) -> Scores:
    """Repetition in greedy and sampled continuations, and in the text's own."""
    logits_RV, cache = read(model, _stack(case.prompt for case in batch), segment)
    count = len(batch[0].answer)
    made = {
        "greedy": generate(model, logits_RV, copy.deepcopy(cache), count).tolist(),
        "sampled": generate(model, logits_RV, cache, count, uniform_RA).tolist(),
        "text": [case.answer for case in batch],
    }
    found: Scores = {}
    for how, rows in made.items():
        found[f"repeated_4_{how}"] = [repeated(row, 4) for row in rows]
        for n in (1, 2):
            found[f"distinct_{n}_{how}"] = [1 - repeated(row, n) for row in rows]
    return found


# --- the model, through its cache ---------------------------------------------------------------


def read(model: nn.Module, prompts_RT: Tensor, segment: int) -> tuple[Tensor, Any]:
    """(logits after the prompts (R, V) in fp32, the cache); `segment` tokens at a time."""
    device = next(model.parameters()).device
    forward: Any = model.forward
    keep = (
        {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    )
    cache, output = None, None
    for part_RT in prompts_RT.to(device).split(segment, dim=1):
        output = model(input_ids=part_RT, past_key_values=cache, use_cache=True, **keep)
        cache = output.past_key_values
    assert output is not None
    return output.logits[:, -1].float(), cache


def follow(
    model: nn.Module, logits_RV: Tensor, cache: Any, answers_RA: Tensor
) -> tuple[Tensor, Tensor]:
    """Per answer token: its NLL in nats, and whether greedy decoding says it. Both (R, A).

    `logits_RV` are those before the first answer token. The cache is left as it is.
    """
    answers_RA = answers_RA.to(logits_RV.device)
    logits_RAV = logits_RV[:, None]
    if answers_RA.shape[1] > 1:
        output = model(
            input_ids=answers_RA[:, :-1], past_key_values=copy.deepcopy(cache), use_cache=True
        )
        logits_RAV = torch.cat([logits_RAV, output.logits.float()], 1)
    log_p_RA = logits_RAV.log_softmax(-1).gather(-1, answers_RA[..., None])[..., 0]
    return -log_p_RA, logits_RAV.argmax(-1) == answers_RA


def generate(
    model: nn.Module,
    logits_RV: Tensor,
    cache: Any,
    count: int,
    uniform_RA: Tensor | None = None,
) -> Tensor:
    """`count` more tokens (R, count), greedy, or sampled at temperature 1.

    Args:
        logits_RV: those before the first of them. The cache is used up.
        uniform_RA: numbers in [0, 1), one per token, that decide a sample; A >= count.

    The end-of-text token does not end it.
    """
    tokens: list[Tensor] = []
    while True:
        if uniform_RA is None:
            next_R = logits_RV.argmax(-1)
        else:
            mass_RV = logits_RV.double().softmax(-1).cumsum(-1)
            at_R1 = uniform_RA[:, len(tokens), None].to(mass_RV.device) * mass_RV[:, -1:]
            next_R = torch.searchsorted(mass_RV, at_R1, right=True)[:, 0]
            next_R = next_R.clamp_max(logits_RV.shape[1] - 1)
        tokens.append(next_R)
        if len(tokens) == count:
            return torch.stack(tokens, 1)
        output = model(input_ids=next_R[:, None], past_key_values=cache, use_cache=True)
        cache, logits_RV = output.past_key_values, output.logits[:, -1].float()


def draws(seed: int, indices: Sequence[int]) -> Tensor:
    """(R, CONTINUATION) fp64 in [0, 1): what decides the samples of these cases, on any device."""
    rows = [np.random.default_rng([seed, index, 4]).uniform(size=CONTINUATION) for index in indices]
    return torch.from_numpy(np.stack(rows))


def _stack(rows: Any) -> Tensor:
    return torch.from_numpy(np.stack(list(rows)))


def _lists(**values: Tensor) -> Scores:
    return {name: value.double().tolist() for name, value in values.items()}
