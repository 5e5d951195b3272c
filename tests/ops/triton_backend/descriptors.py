"""Do the products of an H100 read their factors where these are? From machine code: no GPU needed.

A product of a warpgroup (HGMMA) reads its factors from shared memory. Their descriptors, 64 bits
each, are in uniform registers. The upper half of a descriptor says how the factor is laid out. It
is a constant of the kernel, so propagating constants along all paths must find it. Where it does
not, some path may bring a register that was never set. The assembler ptxas has made such code: an
address came from an old value of the register, and an H100 ended with an illegal memory access
(docs/gpu.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.ops.triton_backend.sass import Code, Instruction


class Xor(NamedTuple):
    """A constant ^ unknown values, each by a name: ptxas exchanges registers by three of them."""

    constant: int
    unknown: frozenset[str]


State = dict[str, int | Xor]  # registers and words of the stack of which something is known
ALL = 0xFFFFFFFF
REGISTER = re.compile(r"U?R\d+")
PREDICATE = re.compile(r"!?U?P[T\d]+")
# They have no destination, or none but predicates.
SILENT = (
    *("ST", "RED", "BRA", "BAR", "EXIT", "BSSY", "BSYNC", "NOP", "MEMBAR", "FENCE", "WARP"),
    *("LDGSTS", "LDGDEPBAR", "DEPBAR", "SYNCS", "ISETP", "UISETP", "FSETP", "PLOP3", "UPLOP3"),
)


def unproven(text: str) -> list[str]:
    """Products with a descriptor whose upper half is not known on every path.

    Args:
        text: A kernel's code, as ``nvdisasm -c`` prints it for sm_90.
    """
    code = Code(text)
    before: dict[int, State] = {0: {}}  # what is known before a block
    waiting = [0]
    while waiting:
        first = waiting.pop()
        state = dict(before[first])
        for instruction in code.blocks[first]:
            execute(state, instruction)
        for to in code.graph[first]:
            old = before.get(to)
            new = state if old is None else {k: v for k, v in old.items() if state.get(k) == v}
            if old is None or len(new) < len(old):
                before[to] = dict(new)
                waiting.append(to)
    found = []
    for first, known in sorted(before.items()):
        state = dict(known)
        for x in code.blocks[first]:
            if not all(isinstance(state.get(half), int) for half in upper_halves(x)):
                found.append(f"{x.address}: {x.opcode} {', '.join(x.operands)}")
            execute(state, x)
    return found


def upper_halves(x: Instruction) -> list[str]:
    """The registers of the upper halves of a product's descriptors: two, or the second's alone."""
    at = next((i for i, o in enumerate(x.operands) if o.startswith("gdesc")), None)
    if x.name != "HGMMA" or at is None:
        return []
    (register,) = re.findall(r"UR\d+", x.operands[at])
    return [after(register, 3)] if at > 1 else [after(register, 1), after(register, 3)]


def after(register: str, n: int) -> str:
    kind, number = re.fullmatch(r"(U?R|S)(\d+)", register).groups()  # type: ignore[union-attr]
    return f"{kind}{int(number) + n}"


def value(state: State, operand: str) -> int | None:
    """Of a register or a constant, if it is known."""
    if operand in ("RZ", "URZ", "SRZ"):
        return 0
    if constant := re.fullmatch(r"(-?)0x([0-9a-f]+)", operand):
        return (-1 if constant[1] else 1) * int(constant[2], 16) & ALL
    found = state.get(operand.removeprefix("-"))
    return None if not isinstance(found, int) else -found & ALL if operand[0] == "-" else found


def both(state: State, operand: str) -> list[int | None]:
    """The lower and upper half of a pair of registers or of a constant."""
    if REGISTER.fullmatch(operand):
        return [value(state, operand), value(state, after(operand, 1))]
    found = value(state, operand)
    return [found, ALL if operand.startswith("-0x") else None if found is None else 0]


def summed(values: Sequence[int | None]) -> int | None:
    known = [x for x in values if x is not None]
    return sum(known) if len(known) == len(values) else None


def execute(state: State, x: Instruction) -> None:
    """What is known after an instruction. A carry out of a lower half is taken to be 0."""
    if x.name == "STL":
        assign(state, x, stack_word(x.operands[0]), stored(state, x))
        return
    operands = x.operands
    while operands and PREDICATE.fullmatch(operands[0]):
        operands = operands[1:]
    if x.name.startswith(SILENT) or not operands or not REGISTER.fullmatch(operands[0]):
        return
    given = [o for o in operands[1:] if not PREDICATE.fullmatch(o)]
    assign(state, x, operands[0], results(state, x, given))


def xored(state: State, x: Instruction, operands: list[str]) -> int | Xor:
    constant, unknown = 0, frozenset[str]()
    for operand in operands:
        found = value(state, operand)
        if found is None:
            found = state.setdefault(operand, Xor(0, frozenset([f"{operand} at {x.address}"])))
        part = found if isinstance(found, Xor) else Xor(found, frozenset())
        constant, unknown = constant ^ part.constant, unknown ^ part.unknown
    return Xor(constant, unknown) if unknown else constant


def results(state: State, x: Instruction, given: list[str]) -> list[int | Xor | None]:
    """The values that it writes, None where unknown."""
    unknown: list[int | Xor | None] = [None] * x.width
    if x.opcode == "ULOP3.LUT" and given[3:4] == ["0x3c"] and given[2] == "URZ":
        return [xored(state, x, given[:2])]
    if x.name in ("UMOV", "MOV", "R2UR"):
        return [value(state, given[0])] if x.width == 1 else both(state, given[0])
    if x.name == "CS2R":
        return [value(state, given[0])] * 2
    if x.name == "LDL":
        word = stack_word(given[0])
        return [state.get(after(word, 4 * i)) for i in range(x.width)] if word else unknown
    if x.opcode == "UIADD3.64":
        halves = [both(state, o) for o in given]
        lower, upper = (summed(part) for part in zip(*halves, strict=True))
        upper = None if upper is None else upper + ((lower or 0) >> 32)
        return [None if half is None else half & ALL for half in (lower, upper)]
    moves = x.name == "IMAD" and x.width == 1 and given[:2] == ["RZ", "RZ"]
    if moves or x.name in ("UIADD3", "IADD3"):
        total = summed([value(state, o) for o in given])
        return [None if total is None else total & ALL]
    return unknown


def stored(state: State, x: Instruction) -> list[int | None]:
    first = x.operands[1]
    return [value(state, after(first, i) if first != "RZ" else first) for i in range(x.width)]


def stack_word(address: str) -> str:
    """Name of a word of the stack; "" if its place is computed."""
    found = re.fullmatch(r"\[R1(?:\+0x([0-9a-f]+))?\]", address)
    return f"S{int(found[1] or '0', 16)}" if found else ""


def assign(state: State, x: Instruction, first: str, values: Sequence[int | Xor | None]) -> None:
    """Write consecutive registers, or words of the stack. With a guard, the old value may stay."""
    step = 4 if first.startswith("S") else 1
    for i, new in enumerate(values if first else []):
        name = after(first, i * step)
        if new is None or (x.guard and state.get(name) != new):
            state.pop(name, None)
        else:
            state[name] = new
