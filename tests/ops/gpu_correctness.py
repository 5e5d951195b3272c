"""Are the kernels right on this GPU? One line for each check, all of them run, exit code 1 if any
failed.

What is exact comes from fp64: the equations in O(T^2) at 777 tokens, the PyTorch backend in fp64
beyond. A result may err at most twice what the equations (or the PyTorch backend) in the same
precision err; the floor of a few ulps is for where those are exact by luck. The gradient of decays
has a bound of its own: it is a sum of the keys' gradients over a segment, whose roundings add up.
Laws need no judge.

    python -m tests.ops.gpu_correctness [GROUP...] [--failed CSV] [--quick] [--out DIR]
                                        [--device DEVICE]

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, W window, n sinks, E channels, C taps, N states.

A group is an op and a dtype, ``latte:bfloat16``, or ``huge``: more than 2^31 elements. Without
groups all of them run, one after another; ``experiments/benchmarks/gpu_check.py`` starts each in a
process of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.gpu_common import Place, forget, options, place, reason, stop_if_broken
from experiments.benchmarks.records import read_rows, say
from latte.layers import RotaryEmbedding
from latte.ops import Partition, use_backend
from latte.ops.pointwise import add_rms_norm, rotate_both, silu_product
from latte.ops.tensors import token_positions
from tests.ops.opdb import OPS, VALUES, Bench, Failed, Op, leaves, lift, map_state
from tests.ops.opdb import judge as judge_all

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = {"H": 8, "G": 8, "L": 32, "K": 64, "D": 64, "W": 128, "n": 4, "E": 1024, "C": 3}
SIZES |= {"count": 64, "block": 64}
# Other widths, fewer key/value heads, the smallest padded sizes.
OTHERS = (
    {"H": 8, "G": 2, "L": 16, "K": 128, "D": 128, "E": 768, "C": 4},
    {"H": 4, "G": 4, "L": 64, "K": 64, "D": 256, "E": 2560, "C": 2},
    {"H": 3, "G": 1, "L": 3, "K": 40, "D": 72, "E": 100, "C": 3},
    {"H": 4, "G": 1, "L": 16, "K": 256, "D": 256, "E": 256, "C": 4},  # Gemma's heads
    {"H": 2, "G": 1, "L": 128, "K": 64, "D": 64, "E": 512, "C": 4},
    {"H": 2, "G": 2, "L": 256, "K": 64, "D": 64, "E": 512, "C": 4},
)
STEPS = "steps are the whole"
QUICK = SIZES | {"H": 2, "G": 1, "L": 3, "K": 8, "D": 5, "E": 12}
QUICK |= {"count": 3, "block": 4}
MODERATE, LONG = 777, 65536
HUGE = 2**31 + 2**24  # elements of the largest input
STATE_ERROR = {torch.bfloat16: 2e-3, torch.float16: 1e-3}  # of an fp32 state, relative
DECAY_ERROR = {torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float32: 5e-5}  # of its gradient
# With extreme logits some gradients nearly vanish, as differences of others that are large. In half
# precision the factors of these are rounded. In fp32 decays' gradients, which are sums over tokens,
# err 21 to 29 in the CPU's backends. Ulps of fp32 of the largest tensor.
EXTREME_ULPS = {torch.bfloat16: 2.0**15, torch.float16: 2.0**13, torch.float32: 32.0}
TAIL = 4096  # tokens of the huge check that are computed again from the state before them


# The rows of the table that are checked. Those with sinks have a window that is no multiple of a
# chunk, and short enough for a quick run.
FAR_WINDOW = dict.fromkeys(("converted", "window-sinks", "kept", "delayed-forgetting"), 50)
CASES = {
    name: OPS[name]
    for name in (
        *("latte", "forgetting", "bidirectional", "macchiato", "macchiato-forgetting", "window"),
        *("converted", "kept", "kept-window", "window-sinks", "rg_lru", "conv"),
        *("macchiato-bidirectional", "delayed-forgetting", "window-bidirectional"),
        "rg_lru-reversed",
    )
}


def pointwise_op(fn: Callable[..., tuple[Tensor, ...]], **inputs: str) -> Op:
    """A row of a pointwise op of these inputs, whose outputs are joined along the heads or E.

    ``fn`` gets the positions (B or 1, T) of the tokens too.
    """

    def run(
        *, backend: str, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
        output_final_state: bool = False, window: int = 0, **tensors: Tensor,
    ) -> tuple[Tensor, None]:  # fmt: skip
        first = next(iter(tensors.values()))
        with use_backend(backend):
            found = fn(token_positions(first, key_mask, cu_seqlens), **tensors)
        return torch.cat(found, 2), None

    return Op(run, inputs, past=False, averages=False)


def rotation(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return rotate_both(q, k, *RotaryEmbedding(q.shape[-1])(positions, q.dtype)[:2])


POINTWISE = {
    "rotation": pointwise_op(rotation, q="BTHK", k="BTGK"),
    "silu-product": pointwise_op(
        lambda _, gate, up: (silu_product(gate, up),), gate="BTE", up="BTE"
    ),
    "residual-norm": pointwise_op(
        lambda _, x, added, weight: add_rms_norm(x, added, weight, 1e-6),
        x="BTE",
        added="BTE",
        weight="E",
    ),
}
CASES |= POINTWISE


class Skipped(Exception):
    """A check that cannot run here, with the reason."""


def judge(
    got: list[Tensor],
    plain: list[Tensor],
    exact: list[Tensor],
    dtype: torch.dtype,
    **floors: Any,
) -> str:
    """Every tensor errs at most twice what the judge of that precision errs.

    A state is fp32 also for half-precision inputs, where the judge rounds nothing: it may err as
    much as the factors of its products are rounded (bf16, and tf32 for fp16). ``floors`` are those
    of :func:`tests.ops.opdb.judge`.
    """
    states = (dtype, STATE_ERROR[dtype]) if dtype in STATE_ERROR else None
    return judge_all(got, plain, exact, states=states, **floors)


# --- the checks: each returns what it found, or raises Failed or Skipped ------------------------


def agrees(b: Bench, judge_backend: str, B: int, T: int, scale: float = 1.0, **options: Any) -> str:
    """Values and gradients against fp64."""
    N = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else None
    inputs, state = b.inputs(B, T, N, scale=scale), options.pop("state", None)
    judging = b._replace(backend=judge_backend)
    wide = [lift(x) for x in inputs]
    exact = judging.results(wide, map_state(lift, state), **options)
    plain = judging.results(inputs, state, **options)
    floors: dict[str, Any] = {"largest": EXTREME_ULPS[b.dtype] if scale > 1.0 else 0.0}
    if "log_decay" in b.op.inputs:
        place = b.gradient("log_decay", len(exact), state)
        floors["limits"] = {place: DECAY_ERROR[b.dtype]}
    return judge(b.results(inputs, state, **options), plain, exact, b.dtype, **floors)


def everything(b: Bench, T: int) -> dict[str, Any]:
    """Mask, packing, a state in and a state out, as far as the op takes them together."""
    device = b.device
    cu = torch.tensor([0, 0, T // 4, T // 4 + 1, T // 2, T], dtype=torch.int32, device=device)
    mask = torch.rand(1, T, generator=torch.Generator().manual_seed(11)) > 0.3
    options = {"key_mask": mask.to(device), "cu_seqlens": cu}
    if b.op.past and b.op.packed_states:
        options |= {"state": b.state(len(cu) - 1), "output_final_state": True}
    return options


def going_on(b: Bench, T: int) -> dict[str, Any]:
    """Mask, a state in and a state out."""
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(11)) > 0.3
    options = {"key_mask": mask.to(b.device), "state": b.state(2)}
    return options | {"output_final_state": True}


def rows_sum_to_one(b: Bench, T: int) -> str:
    named = b.shaped(b.inputs(1, T, scale=8.0))
    out, _ = b.call([torch.ones_like(x) if name in VALUES else x for name, _, x in named])
    off = (out.float() - 1.0).abs().max().item()
    allowed = max(1e-4, torch.finfo(b.dtype).eps)
    if not off <= allowed:
        raise Failed(f"a row sums to 1 {off:+.1e}, allowed {allowed:.1e}")
    return f"off by at most {off:.1e}"


def source_gradients_vanish(b: Bench, T: int) -> str:
    inputs = b.inputs(1, T)
    (k,) = (x.requires_grad_() for name, _, x in b.shaped(inputs) if name == b.op.latent_keys)
    out, _ = b.call(inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    (dk,) = torch.autograd.grad((out * weights).sum(), k)
    dk = dk.double()
    share = (dk.sum(1).abs() / dk.abs().sum(1).clamp_min(1e-30)).max().item()
    allowed = 1e-5 + torch.finfo(b.dtype).eps
    if not (share <= allowed and dk.abs().max() > 0):
        raise Failed(f"sum over tokens is {share:.1e} of the sum of sizes, allowed {allowed:.1e}")
    return f"{share:.1e} of the sum of sizes"


def past_is_past(b: Bench, T: int) -> str:
    inputs, cut = b.inputs(1, T), 2 * T // 3
    before, _ = b.call(inputs)
    later = [x.clone() for x in inputs]
    for name, shape, x in b.shaped(later):
        if shape[:2] == "BT":  # decays are at most 0
            x[:, cut:] = 2.0 * x[:, cut:] if name == "log_decay" else 3.0 - 2.0 * x[:, cut:]
    after, _ = b.call(later)
    if not torch.equal(before[:, :cut], after[:, :cut]):
        off = (before[:, :cut].float() - after[:, :cut].float()).abs().max().item()
        raise Failed(f"later tokens changed earlier outputs by {off:.1e}")
    if torch.equal(before[:, cut:], after[:, cut:]):
        raise Failed("the outputs do not depend on the inputs at all")
    return "to the last bit"


def steps_are_the_whole(b: Bench, T: int, steps: int = 8) -> str:
    """A prefill and single tokens through the state, as in decoding, against all at once."""
    inputs, cuts = b.inputs(2, T), range(T - steps, T)
    with torch.no_grad():
        exact = b.judge().call([lift(x) for x in inputs], output_final_state=True)
        plain, got = (leaves(x.pieces(inputs, cuts)) for x in (b.judge(b.dtype), b))
        return judge(got, plain, leaves(exact), b.dtype)


def runs_repeat(b: Bench, T: int) -> str:
    """A difference between runs is a race."""
    inputs = b.inputs(2, T)
    first, second = (b.results(inputs) for _ in range(2))
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if not torch.equal(x, y):
            off = (x.double() - y.double()).abs().max().item()
            raise Failed(f"tensor {i} differs by {off:.1e} between two runs")
    return "bit for bit"


def host_does_not_wait(b: Bench, T: int) -> str:
    """Forward and backward while PyTorch raises on every synchronisation."""
    if b.device.type != "cuda":
        raise Skipped("there is no GPU to wait for")
    options = everything(b, T)
    inputs = [x.requires_grad_() for x in b.inputs(1, T, len(options["cu_seqlens"]) - 1)]

    def step() -> None:
        out, _ = b.call(inputs, **options)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    step()
    torch.cuda.synchronize(b.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronisation"


def compiles_in_one_graph(b: Bench, T: int) -> str:
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in b.inputs(2, T)]

    def fn(*xs: Tensor) -> Tensor:
        return b.call(xs)[0]

    backend = "inductor" if b.device.type == "cuda" else "aot_eager"
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    results = []
    for run in (compiled, fn):
        out = run(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for i, (x, y) in enumerate(zip(*results, strict=True)):
        off = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()
        if not off <= 2 * torch.finfo(b.dtype).eps:
            raise Failed(f"tensor {i}: compiled differs by {off:.1e}")
    return "forward and backward"


def huge(at: Place, name: str) -> str:
    """Beyond 2^31 elements: the last tokens again, from the state before them, are the same."""
    sizes = SIZES | {"H": 8, "G": 8, "L": 16, "K": 64, "D": 512, "E": 4096}
    if not at.cuda:
        sizes = QUICK
    dtype = torch.bfloat16 if at.cuda else torch.float32
    b = Bench(CASES[name], at.backend, dtype, sizes, at.device)
    width = sizes["E"] if name in ("rg_lru", "conv") else sizes["H"] * sizes["D"]
    T = HUGE // width if at.cuda else 300
    tail = TAIL if at.cuda else 50
    if at.cuda:
        free, need = torch.cuda.mem_get_info(at.device)[0], 14 * 2 * T * width
        if free < need:
            raise Skipped(f"needs {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    inputs = [x.requires_grad_() for x in b.inputs(1, T)]
    out, _ = b.call(inputs)
    dy = torch.zeros_like(out)
    dy[:, -tail:] = b.normal(5)(*dy[:, -tail:].shape)
    end = slice(-tail, None)

    def of_tokens(xs: Sequence[Tensor]) -> list[Tensor]:
        return [x for _, shape, x in b.shaped(xs) if shape[:2] == "BT"]

    whole = [out[:, end].detach()]
    whole += [g[:, end].clone() for g in torch.autograd.grad(out, of_tokens(inputs), dy)]
    last_dy = dy[:, end].clone()
    del out, dy
    with torch.no_grad():
        first = b.span(inputs, slice(None, -tail))
        _, state = b.call(first, output_final_state=True)
    last = [x.detach().clone().requires_grad_() for x in b.span(inputs, end)]
    del first, inputs
    out, _ = b.call(last, state)
    again = [out.detach(), *torch.autograd.grad(out, of_tokens(last), last_dy)]
    for i, (x, y) in enumerate(zip(whole, again, strict=True)):
        off = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()
        if not off <= 4 * torch.finfo(b.dtype).eps:
            raise Failed(f"tensor {i}: the last {tail} tokens differ by {off:.1e}")
    return f"{T} tokens, {T * width:,} elements"


def checks_of(at: Place, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and call of every check of one op and dtype."""
    op = CASES[name]
    sizes = QUICK if at.quick else SIZES
    window = {"W": FAR_WINDOW.get(name, sizes["W"])}
    b = Bench(op, at.backend, dtype, sizes | window, at.device)
    T = 70 if at.quick else MODERATE
    yield "fp64 reference", lambda: agrees(b, "reference", 2, T)
    yield "mask, packing, states", lambda: agrees(b, "reference", 1, T, **everything(b, T))
    if not op.packed_states:
        yield "mask, states", lambda: agrees(b, "reference", 2, T, **going_on(b, T))
    if name == "converted":
        for one in ("sinks alone", "sinks and late latents", "sinks and joint softmax"):
            row = replace(op, options={"partition": Partition(None, "late" in one, "joint" in one)})
            yield one, lambda row=row: agrees(b._replace(op=row), "reference", 2, T)
    if op.averages:
        yield "extreme logits", lambda: agrees(b, "reference", 1, T // 2, scale=1e4)
        yield "rows sum to 1", lambda: rows_sum_to_one(b, T)
    if op.latent_keys:
        yield "source gradients sum to 0", lambda: source_gradients_vanish(b, T)
    if op.past:
        yield "the future leaves the past alone", lambda: past_is_past(b, T)
        yield STEPS, lambda: steps_are_the_whole(b, T)
    yield "runs repeat", lambda: runs_repeat(b, T)
    yield "no synchronisation", lambda: host_does_not_wait(b, T)
    if name not in POINTWISE:  # whose kernels are not for graphs
        yield "compiled in one graph", lambda: compiles_in_one_graph(b, T)
    if at.quick:
        return
    for B in (1, 64):
        tokens = LONG // B
        yield f"B = {B}, T = {tokens}", lambda B=B, t=tokens: agrees(b, "torch", B, t)
    if name in ("latte", "forgetting", "macchiato") and dtype == torch.float32:
        # One segment per sequence: sums that tensor cores cut off would drift with its length.
        yield "B = 32, T = 16384, uncut", lambda: agrees(b, "torch", 32, 16384)
    for sizes in OTHERS:
        letters = "".join(op.inputs.values())
        label = ", ".join(f"{k} = {v}" for k, v in sizes.items() if k in letters)
        yield label, lambda s=sizes: agrees(b.sized(**s), "reference", 2, 333)
        if op.past:
            yield f"{STEPS}, {label}", lambda s=sizes: steps_are_the_whole(b.sized(**s), 99)


def groups() -> list[str]:
    """All groups: an op and a dtype each, and the large one."""
    return [f"{name}:{dtype}" for dtype in DTYPES for name in CASES] + ["huge"]


def has_kernels(at: Place, name: str) -> str | None:
    """Why the backend does not serve this op, or None if it does."""
    b = Bench(CASES[name], at.backend, torch.float32, QUICK, at.device)
    try:
        b.call(b.inputs(1, 4))
    except ValueError as error:
        return str(error)
    return None


def checks_in(at: Place, group: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Full name and call of every check of a group."""
    if group == "huge":
        for name in ("latte", "macchiato", "window", "rg_lru", "conv"):
            if has_kernels(at, name) is None:
                yield f"huge: {name}", lambda name=name: huge(at, name)
        return
    name, _, dtype = group.partition(":")
    if name not in CASES or dtype not in DTYPES:
        raise SystemExit(f"unknown group {group!r}, expected one of {', '.join(groups())}")
    missing = has_kernels(at, name)
    if missing is not None:

        def skip() -> str:
            raise Skipped(missing)

        yield f"{group}: all checks", skip
        return
    for label, check in checks_of(at, name, DTYPES[dtype]):
        yield f"{group}: {label}", check


def run_group(at: Place, group: str, table: Any, names: Container[str] | None = None) -> int:
    """Run the checks of a group, all or those with these names, a line and a row for each.

    Returns:
        Number of checks that failed.
    """
    failures = 0
    for name, check in checks_in(at, group):
        if names is not None and name not in names:
            continue
        start = time.monotonic()
        try:
            verdict, detail = "pass", check()
        except Skipped as why:
            verdict, detail = "skip", str(why)
        except Failed as why:
            verdict, detail = "FAIL", str(why)
        except Exception as error:  # noqa: BLE001 - a check that raises has failed; the next runs
            verdict, detail = "FAIL", reason(error)
            table.add(row_of(name, verdict, detail, start))
            say(f"{verdict}  {name}: {detail}")
            failures += 1
            try:
                stop_if_broken(at, error)
            except Exception:
                later = f"{group}: all later checks"
                table.add(row_of(later, "FAIL", "not run: the GPU is in error", start))
                raise
            continue
        failures += verdict == "FAIL"
        table.add(row_of(name, verdict, detail, start))
        say(f"{verdict}  {name}: {detail}")
        forget()
    return failures


def row_of(name: str, verdict: str, detail: str, start: float) -> dict[str, Any]:
    seconds = round(time.monotonic() - start, 2)
    return {"check": name, "verdict": verdict, "detail": detail, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__, 120)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all of them")
    parser.add_argument(
        "--failed", type=Path, metavar="CSV", help="only the checks that failed in this table"
    )
    args = parser.parse_args(argv)
    at = place(args)
    names = None
    if args.failed is not None:
        names = {r["check"] for r in read_rows(args.failed) if r["verdict"] == "FAIL"}
    chosen = args.groups or groups()
    name = f"gpu_checks-{chosen[0].replace(':', '-')}.csv" if args.groups else "gpu_checks.csv"
    table = at.table(name)
    failures = sum(run_group(at, group, table, names) for group in chosen)
    say(f"{len(table.rows)} checks, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
