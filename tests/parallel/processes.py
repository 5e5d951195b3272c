"""`python processes.py OUT`: groups of 2, 3 and 4 processes on gloo; what each case found, as JSON.

One program for all cases, since a group takes seconds to start. It computes first what one process
finds, and forks. A case is a function of (rank, processes) that returns numbers, the largest of all
processes is kept; or a string, which must be the same on all of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from latte.conversion.modeling import FAMILIES
from latte.models import LatteForCausalLM, preset_config
from latte.parallel import context_parallel, handover, shard_batch
from latte.parallel.batch import process_group

T = 23
PRESETS = (
    *("latte", "latte-conv++", "latte-r++", "swa++", "r-swa++", "linear++"),
    *("latte-conv-swa++", "latte-r-swa++", "latte-conv-swa-f++", "latte-r-swa-f++"),
    *("latte-gated", "latte-hybrid"),
)
SHAPE = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
ALL_KINDS = ("latte", "latte-conv-swa++", "latte-r-swa-f++", "r-swa++", "linear++")
KINDS = ("rows", "padded", "packed")
CASES: dict[int, dict[str, Callable[[int, int], Any]]] = {2: {}, 3: {}, 4: {}}


def case(*worlds: int) -> Callable[..., Any]:
    def add(fn: Callable[[int, int], Any]) -> Any:
        for world in worlds:
            CASES[world][fn.__name__] = fn
        return fn

    return add


def make(preset: str = "latte-r-swa++", dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A model of one's own seed, whose parameters are not those of initialisation."""
    sizes: dict[str, Any] = {**SHAPE, "num_hidden_layers": 2, "num_key_value_heads": 1, **fields}
    if "swa" in preset or preset in ("latte-gated", "latte-hybrid"):
        sizes |= {"sliding_window": fields.get("sliding_window", 9)}
    if preset == "latte-hybrid":
        sizes |= {"block_types": ("recurrent", "attention")}
    sizes |= {"num_latents": 8} if preset.startswith(("latte", "linear")) else {}
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config(preset, "tiny", **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).train()


def make_converted(family: str, **fields: Any) -> Any:
    kind = FAMILIES[family][1]
    torch.manual_seed(0)
    own = {"local_window": 5, "num_latents": 8, "num_hidden_layers": 2, "head_dim": 8}
    return kind(kind.config_class(**SHAPE, num_key_value_heads=1, **own, **fields)).double().train()


def make_batch(kind: str = "rows", tokens: int = T, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B = 1 if kind.startswith("packed") else 2
    ids = torch.randint(3, 40, (B, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":  # on the left, over more than one part, and in between
        mask = torch.ones_like(ids)
        mask[0, :13], mask[1, :2], mask[1, 12] = 0, 0, 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":  # over parts, within one, and where one begins (8 of 3, 6 of 4)
        bounds = [0, 2, 6, 8, tokens]
        batch["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32)
    if kind == "packed by positions":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (17, tokens - 17)])[None]
    return batch


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Loss, logits and gradients of one process."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    logits = None if out.logits is None else out.logits.detach()  # none with a chunked loss
    return out.loss.detach(), logits, gradients(model)


def differences(model: Any, batch: dict[str, Any], expected: Any, group: Any = None) -> list[float]:
    """How far loss, logits and gradients are from those of one process, relative to the largest."""
    loss, logits, wanted = expected
    ranked = process_group(group)
    rank, processes = dist.get_rank(ranked), dist.get_world_size(ranked)
    model.zero_grad()
    with context_parallel(model, group):
        out = model(**shard_batch(batch, group))
        out.loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    pairs = [(out.loss, loss), *((found[name], wanted[name]) for name in wanted)]
    if logits is not None:
        length = logits.shape[1]
        part = slice(length * rank // processes, length * (rank + 1) // processes)
        real = batch.get("attention_mask", torch.ones(logits.shape[:2]))[:, part].bool()
        pairs.append((out.logits[real], logits[:, part][real]))
    return [far(x, y) for x, y in pairs]


def far(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape
    return float((x - y).abs().max() / (y.abs().max() + 1e-12)) if x.numel() else 0.0


# Models and batches, and what one process alone finds for them. A gradient starts threads, and a
# process with threads must not be forked: it is a process of its own that finds these.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {}
EXPECTED: dict[str, Any] = {}


def expect(name: str, model: Any, batch: dict[str, Any], *worlds: int) -> None:
    MODELS[name] = (model, batch)

    def exact(rank: int, processes: int) -> float:
        return max(differences(*MODELS[name], EXPECTED[name]))

    for world in worlds:
        CASES[world][name] = exact


def prepare() -> None:
    for preset in PRESETS:
        model = make(preset)
        for kind in KINDS if preset in ALL_KINDS else KINDS[:1]:
            expect(f"{preset}, {kind}", model, make_batch(kind), 3)
    for preset in ("latte", "latte-conv++", "latte-r-swa-f++"):
        model = make(preset)
        # One or two tokens each: the window reaches over several parts.
        expect(f"{preset}, short parts", model, make_batch(tokens=6), 4)
        expect(f"{preset}, packed", model, make_batch("packed"), 2, 4)
    for preset in ("swa++", "latte-conv-swa++"):
        model = make(preset, sliding_window=1, conv_kernel_size=1)
        expect(f"{preset}, tails of nothing", model, make_batch(), 2)
    model = make("latte-conv-swa-f++", joint_softmax=True)
    for kind in KINDS:
        expect(f"joint softmax, {kind}", model, make_batch(kind), 2, 4)
    model = make("latte-r-swa++")
    expect("packed by positions", model, make_batch("packed by positions"), 2)
    lean = make("latte-r-swa++")
    lean.gradient_checkpointing_enable()
    expect("gradient checkpointing", lean, make_batch(), 3)
    for family, fields in (
        ("llama", {}),
        ("gemma2", {"latent_input": "conv", "forgetting": "gated"}),
        ("gemma2, one layer with its own window", {"converted_layers": (1,), "sliding_window": 9}),
        ("qwen2", {"mixing": "latents"}),
        ("gemma3_text", {"mixing": "window", "layer_types": ["sliding_attention"] * 2}),
    ):
        model = make_converted(family.partition(",")[0], **fields)
        expect(f"converted {family}", model, make_batch(), 2)
    for preset in ("latte-conv-swa-f++", "latte-r-swa++", "linear++"):
        single = make(preset, torch.float32)
        expect(f"{preset}, fp32", single, make_batch(tokens=70), 2)
    chunked = make("latte-r-swa++", torch.float32)
    chunked.chunked_loss = hasattr(torch.nn, "LinearCrossEntropyOptions")
    expect("chunked loss, fp32", chunked, make_batch(), 2)


def write_expected(_: int, file: str) -> None:
    """Write what one process finds."""
    found: dict[str, Any] = {name: whole(*given) for name, given in MODELS.items()}
    torch.save(found | {"ten steps": train(None)}, file)


def train(context: Any) -> Any:
    """The last loss and the weights after ten steps."""
    model = make("latte-r-swa-f++", num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        batch = make_batch("packed" if step % 2 else "rows", seed=step)
        optimizer.zero_grad()
        with nullcontext() if context is None else context(model):
            loss = model(**(batch if context is None else shard_batch(batch))).loss
            loss.backward()
        optimizer.step()
    return [loss.detach(), *(p.detach() for p in model.parameters())]


@case(2, 3, 4)
def ten_steps(rank: int, processes: int) -> list[float]:
    """Of training: equal to one process within rounding, and run to run bit by bit."""

    first, second, alone = train(context_parallel), train(context_parallel), EXPECTED["ten steps"]
    first_of_group = [x.clone() for x in first]
    for x in first_of_group:
        dist.broadcast(x, 0)
    again = max(float((x - y).abs().max()) for x, y in zip(first, second, strict=True))
    same = max(float((x - y).abs().max()) for x, y in zip(first, first_of_group, strict=True))
    return [again, same, max(far(x, y) for x, y in zip(first, alone, strict=True))]


@case(4)
def data_parallel(rank: int, processes: int) -> list[float]:
    """DDP and FSDP2, over the other dimension of a mesh and over all: the mean over groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    batches = [make_batch("padded", seed=seed) for seed in (1, 2)]
    # Losses are means over each group's own labels here, and DDP means their mean.
    found = [whole(make(), batch)[2] for batch in batches]
    wanted = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    mine = shard_batch(batches[mesh.get_local_rank("data")], mesh["context"])
    worst = []
    for over in (mesh["data"].get_group(), None):
        model = DistributedDataParallel(make(), process_group=over)
        for _ in range(2):
            model.zero_grad()
            with context_parallel(model, mesh["context"]):
                model(**mine).loss.backward()
        worst += [max(far(p.grad, wanted[n]) for n, p in model.module.named_parameters())]
    for over in (mesh["data"], init_device_mesh("cpu", (4,))):
        model = make()
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        with context_parallel(model, mesh["context"]):
            model(**mine).loss.backward()
        names = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        worst += [max(far(x, wanted[n]) for n, x in names.items())]
    return worst


@case(3)
def exchanged(rank: int, processes: int) -> str:
    """Bytes of each exchange of two layers, forward, at two lengths."""
    sizes: list[int] = []
    gather = handover.all_gather

    def counted(x: torch.Tensor, group: Any) -> torch.Tensor:
        sizes.append(x.numel() * x.element_size())
        return gather(x, group)

    handover.all_gather = counted
    found = []
    for tokens in (30, 300):
        for preset in ("latte", "latte-r-swa++"):
            sizes.clear()
            model = make(preset, torch.float32)
            with context_parallel(model):
                model(**shard_batch(make_batch(tokens=tokens)))
            found.append(sizes.copy())
    handover.all_gather = gather
    return json.dumps(found)


@case(2)
def mistakes(rank: int, processes: int) -> str:
    """The message of each, which all processes raise."""
    model, batch = make("latte"), shard_batch(make_batch())
    found = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[name] = "nothing was raised"
        except ValueError as error:
            found[name] = str(error)

    def run(**given: Any) -> Any:
        with context_parallel(model):
            return model(**given)

    ids = batch["input_ids"]
    note("labels", lambda: run(input_ids=ids, labels=ids))
    note("use_cache", lambda: run(input_ids=ids, use_cache=True))
    note("tuple", lambda: run(input_ids=ids, return_dict=False))
    note("attentions", lambda: run(input_ids=ids, output_attentions=True))
    note("rows", lambda: run(input_ids=ids[: 1 + rank]))
    note("none", lambda: run(input_ids=ids[:, : 5 * rank]))
    note("tokens", lambda: shard_batch(make_batch(tokens=1)))
    note("unknown", lambda: shard_batch({**make_batch(), "token_type_ids": make_batch()["labels"]}))
    note("nothing", lambda: shard_batch({"labels": ids}))
    note("mesh", lambda: shard_batch(make_batch(), init_device_mesh("cpu", (1, 2))))

    def nested() -> None:
        with context_parallel(model), context_parallel(model):
            pass

    note("nested", nested)
    left = [model._forward_pre_hooks, model.model._forward_pre_hooks, model._forward_hooks]
    assert not any(left) and model.model.shards is None
    assert all(not p._backward_hooks for p in model.parameters())
    return json.dumps(found)


def work(rank: int, processes: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    results: dict[str, Any] = {}
    try:
        for name, fn in CASES[processes].items():
            found = fn(rank, processes)
            every: list[Any] = [None] * processes
            dist.all_gather_object(every, found)
            if isinstance(found, str):
                assert len(set(every)) == 1, (name, every)
                results[name] = json.loads(found)
            else:
                rows = [x if isinstance(x, list) else [x] for x in every]
                results[name] = [max(column) for column in zip(*rows, strict=True)]
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others would wait
    if rank == 0:
        Path(out, f"{processes}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "alone.pt"))
        mp.start_processes(write_expected, (file,), 1, start_method="fork")
        EXPECTED |= torch.load(file)
        for world in CASES:
            store = str(Path(folder, str(world)))
            mp.start_processes(work, (world, store, sys.argv[1]), world, start_method="fork")
