"""What the default configurations may take and issue on an H100, from their machine code.

Bounds are a little above what the tool prints: ``machine_code.py`` says what its columns mean.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from experiments.benchmarks.gpu_floors import HEADS  # noqa: E402
from experiments.benchmarks.records import FLOORS, read_rows  # noqa: E402
from latte.ops.triton_backend import launch  # noqa: E402
from tests.ops.triton_backend.descriptors import unproven  # noqa: E402
from tests.ops.triton_backend.launches import BF16, Case  # noqa: E402
from tests.ops.triton_backend.machine_code import CARDS, Paths, analyse  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
H100 = 90
CODE = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   MUFU.EX2 R2, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   FADD R3, R3, R3 ;
        /*0040*/                   FADD R3, R3, R3 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/                   FMUL R3, R3, R3 ;
.L_x_3:
        /*0090*/               @P2 BRA `(.L_x_0) ;
        /*00a0*/                   EXIT ;
"""


def test_the_path_that_is_counted():
    """Through the main loop once, by way of the products; the other branch is for rare tokens."""
    found = Paths(CODE).path([1], whole=False)
    assert found == {"MUFU.EX2": 1, "BRA": 2, "HGMMA.64x32x16.F32.BF16": 1, "FMUL": 1}
    assert Paths(CODE).path([1], whole=True).total() == 5 + 2


PRODUCTS = """
        /*0000*/                   ULDC UR20, c[0x0][0x28] ;
        /*0020*/                   UMOV UR5, 0x40000040 ;
        /*0030*/                   IMAD.U32 R8, RZ, RZ, UR5 ;
{set_before}
.L_x_0:
        /*0050*/                   UIADD3 UR30, UP0, UR20, 0x20, URZ ;
        /*0060*/                   UIADD3.X UR31, UR21, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0070*/                   R2UR UR29, R8 ;
        /*0080*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR28].tnspA.tnspB, RZ, !UPT ;
        /*0090*/                   UIADD3.64 UR30, UR30, 0x40, URZ ;
        /*00a0*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR28].tnspB, R24, gsb0 ;
        /*00b0*/                   UMOV UR21, URZ ;
        /*00c0*/               @P2 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
"""


def test_a_product_reads_where_its_factor_is():
    """UR21 is 0 from the second round on; where nothing sets it before the first, both tell."""
    set_before = "        /*0040*/                   UMOV UR21, URZ ;"
    assert unproven(PRODUCTS.replace("{set_before}", set_before)) == []
    found = unproven(PRODUCTS.replace("{set_before}", ""))
    assert [line.split(":")[0] for line in found] == ["0080", "00a0"]
    sometimes = set_before.replace("UMOV", "@UP1 UMOV")
    assert len(unproven(PRODUCTS.replace("{set_before}", sometimes))) == 2


def test_cards_have_the_room_that_configurations_count_on():
    for card, made in CARDS.items():
        assert launch.shared_memory(card) == made.shared_block


def test_latte_on_an_h100():
    """L = 32, D = 64: two blocks at a time, and the backward pass issues less than its bytes."""
    rows = {row.takes.kernel: row for row in analyse(Case("latte", BF16, "plain", **HEADS), H100)}
    assert list(rows) == ["walk", "query_walk", "source_walk"]
    for row in rows.values():
        assert row.takes.blocks(CARDS[H100]) == 2
        assert row.takes.stack <= 128 and row.work.copies > 0 and row.work.carried == 0
        assert row.issue_floor < row.bytes_floor
    assert sum(rows[name].issue_floor for name in ("query_walk", "source_walk")) < 130
    written = [row for row in read_rows(FLOORS) if row["case"] == "latte, L = 32, D = 64"]
    for row, old in zip(rows.values(), written, strict=True):
        assert row.issue_floor == pytest.approx(float(old["issue_us"]), rel=0.05), "--write it anew"


@pytest.mark.slow
def test_latents_that_forget_on_an_h100():
    """A fifth more to issue at most, two blocks, loads under way; the bytes remain the limit."""
    plain, forgetting = (
        analyse(Case("latte", BF16, "plain", **HEADS, forgets=forgets), H100)
        for forgets in (False, True)
    )
    for row in forgetting:
        assert row.takes.blocks(CARDS[H100]) == 2
        assert row.takes.stack <= 224 and row.work.copies > 0 and row.work.carried == 0
        assert row.issue_floor < row.bytes_floor
    issued = [sum(row.work.instructions for row in rows) for rows in (plain, forgetting)]
    assert issued[1] <= 1.22 * issued[0]


@pytest.mark.slow
def test_macchiato_on_an_h100():
    """The forward walk at two blocks, its loads under way; it issues about as long as it reads."""
    case = Case("macchiato", BF16, "plain", window=128, **HEADS)
    rows = {row.takes.kernel: row for row in analyse(case, H100)}
    walk = rows["macchiato_walk"]
    assert walk.takes.blocks(CARDS[H100]) == 2 and walk.takes.stack <= 128
    assert walk.work.copies > 0 and walk.work.carried == 0
    assert walk.issue_floor < 1.02 * walk.bytes_floor
