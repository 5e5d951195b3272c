"""A kernel's machine code (SASS), as ``nvdisasm -c`` prints it: its instructions and its blocks."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import networkx


class Instruction(NamedTuple):
    """One line of a disassembly."""

    address: str
    guard: str  # its predicate, "" if it always runs
    opcode: str
    operands: list[str]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def width(self) -> int:
        """Number of registers that it writes, at most."""
        if self.name == "HGMMA":
            return int(self.opcode.split("x")[1]) // 2
        if self.name == "LDSM":
            return int(self.opcode[-1])
        return 4 if ".128" in self.opcode else 2 if re.search(r"\.(64|WIDE)", self.opcode) else 1


class Code:
    """The blocks of instructions that run from end to end, and where these lead.

    Attributes:
        blocks: By the index of its first instruction, every block that can be reached.
        graph: An edge from each block to those that may follow it, by the same indices.
    """

    def __init__(self, text: str) -> None:
        code: list[Instruction] = []
        labels: dict[str, int] = {}  # the instruction that each stands before
        for line in text.splitlines():
            if label := re.match(r"(\.L_\w+):", line):
                labels[label[1]] = len(code)
            if m := re.match(r"\s+/\*(\w{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;", line):
                operands = [x.strip() for x in re.split(r",\s*(?![^\[(]*[\])])", m[4]) if x]
                operands = [x.replace(".reuse", "") for x in operands]
                code.append(Instruction(m[1], m[2] or "", m[3], operands))
        jumps = {i + 1 for i, x in enumerate(code) if x.name in ("BRA", "UBRA", "EXIT")}
        bounds = sorted(({0, *labels.values()} | jumps) - {len(code)})
        spans = [*itertools.pairwise([*bounds, len(code)])]
        whole = networkx.DiGraph()
        whole.add_nodes_from(bounds)
        for first, stop in spans:
            to = _followers(code[stop - 1], labels, stop)
            whole.add_edges_from((first, at) for at in to if at < len(code))
        self.graph = whole.subgraph(networkx.descendants(whole, 0) | {0})
        self.blocks = {first: code[first:stop] for first, stop in spans if first in self.graph}


def _followers(last: Instruction, labels: dict[str, int], stop: int) -> list[int]:
    """Where a block leads that has this last instruction and ends before ``stop``."""
    if last.name == "EXIT" and not last.guard:
        return []
    if last.name not in ("BRA", "UBRA"):
        return [stop]
    (target,) = re.findall(r"\.L_\w+", last.operands[-1])
    goes_on = last.guard or len(last.operands) > 1  # the first of two is a condition
    return [labels[target], *([stop] if goes_on else [])]
