"""What limits each kernel, from its machine code: no GPU is needed, and nothing is executed.

``experiments/benchmarks/gpu_floors.py`` makes tables of it, and says what the two floors are.

The path that is counted through a kernel is the shortest that enters no loop which it can avoid:
those are for tokens beyond the reference's reach, and for the first token of a sequence.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import networkx
import torch
from triton import knobs

from tests.ops.triton_backend.launches import COMPILE, Case, run
from tests.ops.triton_backend.sass import Code


class Card(NamedTuple):
    """A GPU as its maker describes it."""

    name: str
    multiprocessors: int
    gigahertz: float
    terabytes: float  # per second, from memory
    shared: int  # bytes of a multiprocessor
    shared_block: int  # bytes of a block at most
    threads: int  # of a multiprocessor


CARDS = {
    80: Card("A100", 108, 1.41, 2.04, 164 << 10, 163 << 10, 2048),
    89: Card("L40S", 142, 2.52, 0.864, 100 << 10, 99 << 10, 1536),
    90: Card("H100", 132, 1.755, 3.35, 228 << 10, 227 << 10, 2048),
    100: Card("B200", 148, 1.85, 8.0, 228 << 10, 227 << 10, 2048),
    120: Card("RTX 5090", 170, 2.41, 1.79, 100 << 10, 99 << 10, 1536),
}


class Resources(NamedTuple):
    """What one program of a launch takes."""

    kernel: str
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes
    warps: int

    def blocks(self, card: Card) -> int:
        """How many fit on a multiprocessor at a time."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        fits = (65536 // registers, card.shared // (self.shared + 1024))
        return min(*fits, card.threads // (32 * self.warps))


def disassembled(kernel: Any, *options: str, tool: str = "nvdisasm") -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def _usage(kernel: Any) -> tuple[int, int]:
    usage = disassembled(kernel, "-res-usage", tool="cuobjdump")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def resources(name: str, kernel: Any) -> Resources:
    """As the assembler reports them."""
    return Resources(name, *_usage(kernel), kernel.metadata.shared, kernel.metadata.num_warps)


def carried_sums(kernel: Any) -> int:
    """Products that accumulate in what a loop carries from one iteration to the next.

    Tensor cores cut sums off where an addition rounds, so that such a sum drifts with its length.
    """
    code = kernel.asm["ttir"]
    carried, made = set(), {}
    for arguments in re.findall(r"iter_args\(([^)]*)\)", code):
        carried |= set(re.findall(r"(%\w+) =", arguments))
    for result, op, rest in re.findall(r"(%\w+) = \"?([\w.]+)\"? ([^:\n]*)", code):
        made[result] = op, re.findall(r"%\w+", rest)

    def flows(value: str) -> bool:
        op, operands = made.get(value, ("", []))
        through = op.startswith(("arith.", "math.")) or op in ("tt.broadcast", "tt.expand_dims")
        return value in carried or through and any(flows(x) for x in operands)

    return sum(flows(operands[2]) for op, operands in made.values() if op == "tt.dot")


class Paths:
    """The ways through a kernel's instructions, and its loops."""

    def __init__(self, text: str) -> None:
        code = Code(text)
        self.graph = code.graph
        self.blocks = {
            first: Counter(x.opcode for x in block) for first, block in code.blocks.items()
        }
        above = networkx.immediate_dominators(self.graph, 0)

        def dominates(a: int, b: int) -> bool:
            while b not in (a, 0):
                b = above[b]
            return a == b

        self.loops: dict[int, set[int]] = {}  # by their first block: all blocks
        for last, first in self.graph.edges:
            if dominates(first, last):
                within = self.graph.subgraph(set(self.graph) - {first})
                body = (networkx.ancestors(within, last) | {last}) if last != first else set()
                self.loops[first] = self.loops.get(first, set()) | body | {first}

    def size(self, blocks: set[int]) -> int:
        return sum(self.blocks[b].total() for b in blocks)

    def path(self, trips: list[int], whole: bool) -> Counter[str]:
        """What is issued on the cheapest way through the main loop, or through the whole kernel.

        ``trips``: how often the loops inside are taken, the outermost first.
        """
        loops = {} if whole else self.loops
        main = max(loops, key=lambda first: self.size(loops[first]), default=0)
        return self._way(main, loops.get(main, set(self.graph)), trips)

    def _way(self, first: int, blocks: set[int], trips: list[int]) -> Counter[str]:
        """From ``first`` on through the blocks, until they begin again or the kernel ends."""
        inner = {f: b for f, b in self.loops.items() if f != first and b < blocks}
        loops = {f: b for f, b in inner.items() if not any(b < other for other in inner.values())}
        owner = {block: block for block in blocks}
        issued = {block: self.blocks[block] for block in blocks}
        cost = {block: issued[block].total() for block in blocks}
        for f, body in loops.items():
            owner |= dict.fromkeys(body, f)
            # A short one waits, or copies; another is avoided where there is a way around it.
            short = self.size(body) < 24
            times = 1 if short or not trips else trips[0]
            once = self._way(f, body, trips[1:])
            issued[f] = Counter({name: n * times for name, n in once.items()})
            cost[f] = issued[f].total() + (0 if short else 10**6)
        ways = networkx.DiGraph()
        for block in blocks:
            at, again = owner[block], first in self.loops and len(blocks) < len(self.graph)
            for to in self.graph[block]:
                if to in blocks and owner[to] != at and to != first:
                    ways.add_edge(at, owner[to], weight=cost[at])
            if first in self.graph[block] if again else not self.graph[block]:
                ways.add_edge(at, "end", weight=cost[at])
        # What holds products is the kernel's work, also where a chunk may have none of it; without
        # any the longest stretch is.
        work = {at for at in issued if any("MMA" in opcode for opcode in issued[at])}
        work = work or {max(set(owner.values()) - set(loops), key=lambda at: cost[at])}
        route = [owner[first]]
        for at in [*networkx.topological_sort(ways)]:
            if (at == "end" or at in work) and networkx.has_path(ways, route[-1], at):
                route += networkx.shortest_path(ways, route[-1], at, weight="weight")[1:]
        return sum((issued[at] for at in route[:-1]), Counter())


class Work(NamedTuple):
    """One pass through the main loop of a walk, or through a kernel without one."""

    instructions: int  # of each warp
    exponentials: int
    barriers: int
    waits: int  # for products that run beside the program
    copies: int  # that run beside the program
    spilled: int  # loads and stores of the stack
    carried: int  # products whose sums live across the loop

    @classmethod
    def of(cls, kernel_name: str, kernel: Any) -> Work:
        paths = Paths(disassembled(kernel, "-c"))
        counts = paths.path([TRIPS.get(kernel_name, 1)], kernel_name not in WALKS)

        def count(*starts: str) -> int:
            return sum(n for opcode, n in counts.items() if opcode.startswith(starts))

        copies = count("LDGSTS", "UBLKCP", "UTMALDG")
        waits = count("WARPGROUP.DEPBAR", "SYNCS.PHASECHK")
        spilled, sums = count("LDL", "STL"), carried_sums(kernel)
        return cls(
            counts.total(), count("MUFU.EX2"), count("BAR.SYNC"), waits, copies, spilled, sums
        )


WALKS = ("walk", "query_walk", "source_walk", "segment_sums", "macchiato_walk")
WALKS += ("lru_walk", "lru_walk_back")
# How often a kernel's loops over the window's chunks are taken, for a window of two of them.
TRIPS = {
    "macchiato_walk": 2,
    "window_outputs": 2,
    "window_query_gradients": 3,
    "window_source_gradients": 3,
    # Kept tokens are one more chunk; three heads read the same ones.
    "kept_outputs": 4,
    "kept_query_gradients": 4,
    "kept_source_gradients": 9,
    "kept_source_gradients_kept": 3,
}
TOKENS = 65536
RARELY = dict.fromkeys(WALKS, ("token_ref_ptr", "token_mass_ptr"))  # of tokens beyond reach
TAILS = ("final_tail", "tail_gradients")  # which read the ends of their inputs
BACKWARD = ("back", "gradients", "query_walk", "source_walk", "queries_ask", "add_up", "add_sinks")
BACKWARD += ("add_kept",)


class Row(NamedTuple):
    """A kernel of a case: what it takes, does, and cannot be faster than, in microseconds."""

    takes: Resources
    work: Work
    bytes_floor: float
    issue_floor: float

    @property
    def expected(self) -> float:
        return max(self.bytes_floor, self.issue_floor)

    def cells(self, card: Card) -> dict[str, Any]:
        """The columns of the table."""
        r, w = self.takes, self.work
        back = any(part in r.kernel for part in BACKWARD)
        cells: dict[str, Any] = {
            "pass": "backward" if back else "forward",
            "kernel": r.kernel,
            "warps": r.warps,
            "registers": r.registers,
            "stack": r.stack,
        }
        cells |= {"KB": round(r.shared / 1024), "blocks": r.blocks(card), **w._asdict()}
        cells |= {"bytes_us": round(self.bytes_floor), "issue_us": round(self.issue_floor)}
        return cells | {"expected_us": round(self.expected)}


def analyse(case: Case, capability: int) -> list[Row]:
    """The case's kernels: all of a launch's bytes count as moved once."""
    found: dict[str, Row] = {}
    card = CARDS[capability]
    B, T, _, _ = case.sizes
    many = TOKENS / (B * T)

    def look(called: str, kernel: Any, args: Any, options: dict[str, Any]) -> None:
        compiled = COMPILE(kernel, *args, warmup=True, **options)
        takes, work = resources(called, compiled), Work.of(called, compiled)
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        rounds = -(-T // given["C"]) if called in WALKS else 1
        issued = math.prod(options["grid"]) * rounds * work.instructions * takes.warps
        read = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
        moved = sum(x.nbytes for n, x in read.items() if n not in RARELY.get(called, ()))
        moved *= called not in TAILS
        floors = (
            moved / card.terabytes / 1e6,
            issued / (card.multiprocessors * 4e3) / card.gigahertz,
        )
        earlier = found.get(called, Row(takes, work, 0.0, 0.0))[2:]
        found[called] = Row(
            takes, work, *(a + many * b for a, b in zip(earlier, floors, strict=True))
        )

    run(case, look, capability)
    return list(found.values())
