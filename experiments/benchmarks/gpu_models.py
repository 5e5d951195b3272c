"""Whole models on a GPU, bf16: decoding, forward passes, training. Parts:

``decode``: time per token at contexts of 1k to 1M tokens, batches of 1 and 64, of ``latte-r-swa++``
at "paper" size beside a transformer of the same size, random weights.

* Latte's state has one size: it comes from 256 processed tokens, and its position is set to the
  context.
* The transformer is Transformers' Llama with ``StaticCache``, which writes in place, its keys and
  values random numbers: their values do not change the work. Contexts that do not fit say so.
* ``eager``: the model's forward as ``generate`` calls it. ``graph``: the same captured as a CUDA
  graph and replayed; what cannot be captured says so.

``runtime``: the paper's runtime figure: forward passes at sizes 400m and 2.6b, 65,536 tokens as
B = 64 to 1 sequences, the hidden states of all tokens and the logits of each sequence's last one,
no cache.

* ``latte-conv-swa++`` and ``latte-r-swa++``.
* ``transformer++, flash`` and ``transformer++, standard``: the same model with softmax attention
  by PyTorch's flash backend, and with the T x T weights in memory.

``training``: ``latte-r-swa++`` beside ``transformer++`` (flash attention) at "paper" size, 32,768
tokens a step as blocks of 1k, 4k and 16k, bf16 autocast, fp32 weights, clipping, fused AdamW,
dropout as in the preset; plain, and with the blocks compiled as a recipe's
``training.torch_compile`` does. The share of the peak (MFU) takes model FLOPs and data-sheet peaks
from ``latte.lab.machine``. Peak memory is of one step, weights and optimiser included.

    python -m experiments.benchmarks.gpu_models PART [--quick] [--out DIR] [--budget SECONDS]
        [--device DEVICE]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from experiments.benchmarks import gpu_common as gpu
from experiments.benchmarks.cpu_training import TrainingStep
from experiments.benchmarks.records import Goal, Row, Table, ratio, say, select
from latte.lab import machine
from latte.lab.machine import Times
from latte.lab.train.speed import compile_blocks
from latte.layers.state import map_tensors
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.ops import use_backend

OURS, RIVAL, LLAMA = "latte-r-swa++", "transformer++", "llama"


def make_model(at: gpu.Place, name: str, size: str, dtype: torch.dtype) -> LatteForCausalLM:
    """A model on the device, in inference mode; every run draws the same random weights."""
    torch.manual_seed(0)
    with torch.device(at.device):
        model: Any = LatteForCausalLM(preset_config(name, size))
    return model.to(dtype).eval()


def random_tokens(at: gpu.Place, model: Any, B: int, T: int) -> Tensor:
    """(B, T)."""
    generator = torch.Generator(at.device).manual_seed(1)
    return torch.randint(model.config.vocab_size, (B, T), generator=generator, device=at.device)


def add(
    at: gpu.Place, table: Table, side: str, sizes: Row, t: Times, tokens: int, **more: Any
) -> None:
    """A row, with the tokens per second."""
    row = {"side": side, **sizes, "dtype": at.precision, **t.row()}
    table.add_and_say(row | {"tokens_per_s": round(1e3 * tokens / t.median, 1), **more})


def faster(times: dict[str, Times], baseline: str, t: Times) -> float | str:
    """How many times faster than the rival; "" where that did not run."""
    return round(times[baseline].median / t.median, 3) if baseline in times else ""


# --- decoding ----------------------------------------------------------------------------------

CONTEXTS = (1024, 8192, 32768, 131072, 1048576)
LONGEST_OF_RIVAL = 131072
FED = 256


class Latte:
    """One more token for a state of constant size, which every call starts from and replaces."""

    def __init__(self, at: gpu.Place, model: Any, B: int, context: int) -> None:
        self.at, self.model, self.context = at, model, context
        ids = random_tokens(at, model, B, FED)
        self.token = ids[:, :1].contiguous()
        self.cache = LatteCache(model.config)
        with torch.inference_mode(), use_backend(at.backend):
            model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.layers = cast(Any, self.cache.layers)
        with torch.no_grad():
            for layer in self.layers:
                position = torch.full_like(layer.state.position, context)
                layer.state = map_tensors(torch.clone, layer.state._replace(position=position))
                layer.seen_tokens = context
        self.start = [layer.state for layer in self.layers]

    @property
    def cache_bytes(self) -> int:
        return self.cache.nbytes

    def __call__(self) -> Tensor:
        """The state is copied back into its own memory: a replayed graph goes on from it."""
        with torch.no_grad(), use_backend(self.at.backend):
            out = self.model(self.token, past_key_values=self.cache, use_cache=True)
            for layer, start in zip(self.layers, self.start, strict=True):
                for old, new in zip(tree_leaves(start), tree_leaves(layer.state), strict=True):
                    if old is not None:
                        old.copy_(new)
                layer.state, layer.seen_tokens = start, self.context
        return out.logits


class Llama:
    """One more token for keys and values of a fixed number of tokens."""

    def __init__(self, at: gpu.Place, model: Any, B: int, context: int) -> None:
        from transformers import StaticCache

        self.model, self.context = model, context
        self.token = random_tokens(at, model, B, 1)
        self.position = torch.full_like(self.token, context - 1)
        self.cache = StaticCache(config=model.config, max_cache_len=context)
        self.layers = cast(Any, self.cache.layers)
        self()
        for layer in self.layers:
            layer.keys.normal_()
            layer.values.normal_()

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def __call__(self) -> Tensor:
        """The token before the cache is full: it sees all of it."""
        with torch.no_grad():
            for layer in self.layers:
                layer.cumulative_length.fill_(self.context - 1)
            return self.model(
                self.token,
                past_key_values=self.cache,
                position_ids=self.position,
                use_cache=True,
            ).logits


def make_llama(at: gpu.Place, size: str) -> Any:
    """Transformers' Llama of the sizes of ``transformer++``: the same parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    like = preset_config(RIVAL, size)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    fields = {name: getattr(like, name) for name in (*names, "num_attention_heads")}
    fields |= {"max_position_embeddings": 2 * max(CONTEXTS), "tie_word_embeddings": True}
    config = LlamaConfig(**fields | {"attn_implementation": "sdpa"})
    with torch.device(at.device):
        model: Any = LlamaForCausalLM(config)
    return model.to(at.dtype).eval()


STEPS: dict[str, Any] = {OURS: Latte, LLAMA: Llama}


def decode(at: gpu.Place) -> None:
    """All contexts in turns, so that a slow moment meets them all; a batch of 64 holds many keys
    and values, and takes the long contexts one by one."""
    size = "tiny" if at.quick else "paper"
    contexts = (300, 600) if at.quick else CONTEXTS
    models = {OURS: make_model(at, OURS, size, at.dtype), LLAMA: make_llama(at, size)}
    table = at.table("gpu_decode.csv")
    few, many = (1, 2) if at.quick else (1, 64)
    points = [(few, contexts), (many, contexts[:2]), *((many, (c,)) for c in contexts[2:])]
    for B, together in at.while_time(points):
        calls: dict[tuple[str, int, str], gpu.DeviceCall] = {}
        sizes: dict[tuple[str, int, str], Row] = {}
        for context, (name, kind) in itertools.product(together, STEPS.items()):
            if name == LLAMA and context > LONGEST_OF_RIVAL:
                continue
            label = f"{name}, B = {B}, context {context}"
            with gpu.tried(at, label):
                step: Any = kind(at, models[name], B, context)
                step()
                calls[name, context, "eager"] = step
                graph = gpu.replayed(at, label, step)
                if graph is not step:
                    calls[name, context, "graph"] = graph
                for how in ("eager", "graph"):
                    row: Row = {"how": how, "size": size, "B": B, "context": context}
                    row |= {"cache_bytes": step.cache_bytes}
                    row |= {"parameters": models[name].num_parameters()}
                    sizes[name, context, how] = row
        times = gpu.measure(at, calls, budget=0.05 if at.quick else 0.3, cold_cache=False)
        for key, t in times.items():
            add(at, table, key[0], sizes[key], t, B)
        calls.clear()
    at.goals("gpu_decode", decode_goals(table.rows))


def decode_goals(rows: Sequence[Row]) -> list[Goal]:
    """Latte's slowest context over its fastest."""
    goals = []
    for B, how in itertools.product(sorted({row["B"] for row in rows}), ("graph", "eager")):
        ours = select(rows, side=OURS, B=B, how=how)
        if len(ours) > 1:
            ours.sort(key=lambda row: row["median_ms"])
            name = f"decoding, B = {B}, {how}: slowest context over fastest"
            goals += ratio(name, 1.05, ours[-1:], ours, "median_ms")
    return goals


# --- forward passes ----------------------------------------------------------------------------

LATTES = ("latte-conv-swa++", OURS)
KINDS = {f"{RIVAL}, {kind}": kind for kind in ("flash", "standard")}


def runtime(at: gpu.Place) -> None:
    """Every model at every length."""
    table = at.table("gpu_runtime.csv")
    models: dict[str, Any] = {}
    built = ""
    lengths = (1024, 65536, 8192, 32768, 2048, 16384, 4096)
    points = [(size, 65536, T) for size in ("400m", "2.6b") for T in lengths]
    if at.quick:
        points = [("tiny", 128, 64), ("tiny", 128, 128)]

    def forward(name: str, ids: Tensor) -> Any:
        with torch.inference_mode(), use_backend(at.backend):
            with gpu.attention_by(at, KINDS.get(name, "flash")):
                return models[name.partition(",")[0]](ids, use_cache=False, logits_to_keep=1)

    for size, total, T in at.while_time(points):
        if size != built:
            models.clear()
            gpu.forget()
            models |= {name: make_model(at, name, size, at.dtype) for name in (*LATTES, RIVAL)}
            built = size
        ids = random_tokens(at, models[RIVAL], total // T, T)
        sides = {name: lambda n=name, x=ids: forward(n, x) for name in (*LATTES, *KINDS)}
        times = gpu.measure(at, sides, budget=0.2, rounds=3, cold_cache=False)
        for side, t in times.items():
            parameters = models[side.partition(",")[0]].num_parameters()
            sizes = {"size": size, "B": total // T, "T": T, "parameters": parameters}
            flash = faster(times, f"{RIVAL}, flash", t)
            add(at, table, side, sizes, t, total, times_faster_than_flash=flash)


# --- training ----------------------------------------------------------------------------------

TARGETS = {1024: 0.9, 4096: 1.3, 16384: 3.0}


def make_step(at: gpu.Place, name: str, size: str, compiled: bool, B: int, T: int) -> TrainingStep:
    """A step of a model with fp32 weights under autocast."""
    model = make_model(at, name, size, torch.float32)
    if compiled:
        compile_blocks(model)
    return TrainingStep(model, random_tokens(at, model, B, T), autocast=True)


def compare_training(
    at: gpu.Place, table: Table, size: str, B: int, T: int, compiled: bool
) -> None:
    """The rows of one length."""
    steps: dict[str, TrainingStep] = {}
    peaks: dict[str, float | str] = {}
    for name in (OURS, RIVAL):
        with gpu.tried(at, f"{name}, T = {T}, compiled {compiled}"):
            before = machine.memory_bytes(at.device)
            step = make_step(at, name, size, compiled, B, T)
            step()
            gpu.wait(at.device)
            machine.reset_peak_memory(at.device)
            step()
            gpu.wait(at.device)
            peak_mb = round((machine.peak_memory_bytes(at.device) - before) / 2**20, 1)
            peaks[name] = peak_mb if at.cuda else ""
            steps[name] = step
    times = gpu.measure(at, steps, budget=0.6 if at.cuda else 0.05, rounds=3, cold_cache=False)
    peak = machine.gpu_peak_flops(torch.cuda.get_device_name(at.device)) if at.cuda else None
    for name, t in times.items():
        model = steps[name].model
        flops = machine.flops_per_token(model, T)
        sizes: Row = {"compiled": compiled, "size": size, "B": B, "T": T}
        sizes |= {"parameters": model.num_parameters()}
        more: Row = {"peak_mb": peaks[name], "gflops_per_token": round(flops / 1e9, 4)}
        more["mfu"] = "" if peak is None else round(1e3 * B * T / t.median * flops / peak, 4)
        more["times_faster"] = faster(times, RIVAL, t)
        add(at, table, name, sizes, t, B * T, **more)


def training_goals(rows: Sequence[Row]) -> list[Goal]:
    """The better of plain and compiled, for either model."""
    rows = sorted(rows, key=lambda row: -row["tokens_per_s"])
    goals = []
    for T, target in TARGETS.items():
        ours, baseline = (select(rows, T=T, side=side) for side in (OURS, RIVAL))
        name = f"training, T = {T}: tokens/s over {RIVAL}'s"
        goals += ratio(name, target, ours, baseline, "tokens_per_s", at_least=True)
    for row in select(rows, T=4096, side=OURS)[:1]:
        if row["mfu"] != "":
            note = "compiled" if row["compiled"] else "not compiled"
            goals.append(Goal("training, T = 4096: MFU", 0.4, row["mfu"], True, note))
    return goals


def training(at: gpu.Place) -> None:
    """Compiling takes long: everything plain first, for a run that is cut off."""
    size, total = ("tiny", 128) if at.quick else ("paper", 32768)
    lengths = (64,) if at.quick else (4096, 16384, 1024)
    table = at.table("gpu_training.csv")
    points = [(c, T) for c in ((False,) if at.quick else (False, True)) for T in lengths]
    for compiled, T in at.while_time(points):
        with gpu.attention_by(at, "flash"), use_backend(at.backend):
            compare_training(at, table, size, total // T, T, compiled)
        torch._dynamo.reset()
    at.goals("gpu_training", training_goals(table.rows))


PARTS: dict[str, Callable[[gpu.Place], None]] = {
    "decode": decode,
    "runtime": runtime,
    "training": training,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = gpu.options(__doc__, 120)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args(argv)
    at = gpu.place(args)
    say(f"{args.part}: {at.dtype}, {at.device}, backend {at.backend}")
    PARTS[args.part](at)


if __name__ == "__main__":
    main()
