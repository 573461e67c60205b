"""The reader of SASS on short programs, right and wrong; on every kernel of the table it runs in `test_offline`."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.ops.fused.offline.sass import faults, in_loops, parse

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0"
FENCE, WAIT, STORE = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "STG.E.128 desc[UR6][R2.64], R24"
SET = tuple(f"UMOV UR{r}, URZ" for r in (4, 5, 6, 7))
ZEROS = tuple(f"CS2R R{r}, SRZ" for r in (24, 26, 28, 30))
OPERAND = tuple(f"F2FP.BF16.F32.PACK_AB R{r}, R1, R0" for r in (8, 9, 10, 11))
BACK = "@P0 BRA `(.L_x_0)"
SWITCH = 'BRX R14 -0x30 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'


def program(*lines: str):
    """The instructions of lines in the form of `nvdisasm -c`; a line that ends in a colon is a label."""
    return parse("\n".join(x if x.endswith(":") else f"        /*{16 * i:04x}*/  {x} ;" for i, x in enumerate(lines)))


def found(*lines: str) -> set[str]:
    return {fault.split(":")[0] for fault in faults(program(*SET, *lines, "EXIT"))}


@pytest.mark.parametrize(
    "lines",
    (
        (*ZEROS, *OPERAND, FENCE, PRODUCT, WAIT, STORE),
        (*ZEROS, *OPERAND, FENCE, PRODUCT, PRODUCT, WAIT, STORE),
        (*ZEROS, ".L_x_0:", *OPERAND, FENCE, PRODUCT, WAIT, BACK, STORE),
        (*ZEROS, *OPERAND, FENCE, PRODUCT, PRODUCT.replace("R24", "R40").replace("R40, gsb0", "RZ, !UPT, gsb0"), WAIT),
        (*ZEROS, *OPERAND[:3], "LOP3.LUT P2, R11, R3, R4, RZ, 0xc0, !PT", f"@P2 {OPERAND[3]}", FENCE, PRODUCT, WAIT),
        (".L_x_0:", FENCE, "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4].tnspA, RZ, !UPT, gsb0", WAIT, BACK),
        (*ZEROS, *OPERAND, SWITCH, ".L_x_0:", FENCE, PRODUCT, WAIT, "EXIT", ".L_x_1:", FENCE, PRODUCT, WAIT),
        ("FADD R1, R2, R3",),
    ),
)  # fmt: skip
def test_right(lines):
    assert found(*lines) == set()


@pytest.mark.parametrize(
    ("lines", "name"),
    (
        ((*ZEROS, *OPERAND, FENCE, PRODUCT, STORE, WAIT), "touched_in_flight"),
        ((*ZEROS, *OPERAND, FENCE, PRODUCT, OPERAND[2], WAIT, STORE), "touched_in_flight"),
        ((*ZEROS, *OPERAND, FENCE, PRODUCT, WAIT.replace("0x0", "0x1"), STORE), "touched_in_flight"),
        ((*ZEROS, *OPERAND, FENCE, PRODUCT, PRODUCT.replace("R8", "R28"), WAIT), "touched_in_flight"),
        ((*ZEROS, ".L_x_0:", "FADD R1, R1, R31", *OPERAND, FENCE, PRODUCT, BACK, WAIT, STORE), "touched_in_flight"),
        ((*ZEROS, *OPERAND[:3], FENCE, OPERAND[3], PRODUCT, WAIT, STORE), "set_behind_the_fence"),
        ((*ZEROS[:3], *OPERAND, FENCE, ZEROS[3], PRODUCT, WAIT, STORE), "set_behind_the_fence"),
        ((*ZEROS[:3], *OPERAND, FENCE, PRODUCT, WAIT, STORE), "set_elsewhere"),
        ((*ZEROS, *OPERAND[:3], FENCE, PRODUCT, WAIT, STORE), "set_elsewhere"),
        ((*ZEROS, *OPERAND[:3], f"@P1 {OPERAND[3]}", FENCE, PRODUCT, WAIT, STORE), "set_elsewhere"),
        ((*ZEROS, *OPERAND, SWITCH, ".L_x_0:", "EXIT", ".L_x_1:", FENCE, PRODUCT, STORE), "touched_in_flight"),
        ((*ZEROS, *OPERAND, "EXIT", FENCE, PRODUCT, WAIT), "not_reached"),
        # as ptxas 13.4 did where one register stands four times in the PTX, with others' numbers in the last three
        (
            (*ZEROS, *OPERAND, ".L_x_0:", OPERAND[0], FENCE, PRODUCT, WAIT, *OPERAND[1:], FENCE, PRODUCT, WAIT, BACK),
            "set_elsewhere",
        ),
    ),
)  # fmt: skip
def test_wrong(lines, name):
    assert found(*lines) == {name}


@pytest.mark.parametrize(
    ("before", "names"),
    (
        (("UMOV UR14, UR5", "UMOV UR15, UR5"), set()),
        ((), {"never_set"}),
        (("UMOV UR14, UR5",), {"never_set"}),
        (("@P0 BRA `(.L_x_0)", "UMOV UR14, UR5", "UMOV UR15, UR5", ".L_x_0:"), {"never_set"}),
    ),
)
def test_an_address_that_nothing_sets(before, names):
    """As ptxas 12.8 did with the second operand of a product, whose buffer had held the first operand of another."""
    addresses = ("UIADD3.64 UR12, UR14, 0x20, URZ", "UIADD3.64 UR14, UR4, 0x2, URZ")
    assert found(*before, *addresses, *ZEROS, *OPERAND, FENCE, PRODUCT.replace("UR4", "UR12"), WAIT) == names


@pytest.mark.parametrize(("register", "names"), (("UR32", set()), ("UR31", {"never_set"})))
def test_a_copy_with_a_uniform_address(register, names):
    """As ptxas 12.9 writes it: two neighbouring registers are the address and the rest of the descriptor."""
    copy = f"LDGSTS.E.BYPASS.128 [R12+{register}+0x800], desc[UR33][R18.64], P3"
    assert found("UMOV UR32, UR4", "UMOV UR33, UR5", copy, *ZEROS, *OPERAND, FENCE, PRODUCT, WAIT) == names


def test_spills_in_loops():
    outside = ("STL [R1], R4", ".L_x_0:", "FADD R1, R2, R3", BACK, "LDL R4, [R1]")
    assert in_loops(program(*outside, "EXIT")) == 0
    assert in_loops(program(*outside[:3], "LDL.64 R6, [R1+0x8]", *outside[3:], "EXIT")) == 1
