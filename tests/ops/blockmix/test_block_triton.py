"""The Triton form of block mixing without a GPU: interpreted, in a process of its own, and compiled for sm_90a."""

from pathlib import Path

import pytest

from tests.ops.fused.children import PYTEST, check_compiled, check_interpreted

pytest.importorskip("triton")

HERE = Path(__file__).parent
STACK_LIMIT = 16  # bytes, spilt by `blockmix_reduce_moments` of Wan with rotary tables and Triton 3.6; 3.8 spills 8
WAN, DIT = ("2", "12", "21,30,50", "7,3,5", "128"), ("32", "6", "32,32", "4,4", "64")
# options, B, H, grid, blocks, D, tables: Wan2.1 at 480p, DiT-S/2 at 512, an odd width
COMPILED = (
    ("{}", *WAN),
    ("{}", *WAN, "rotary"),
    ('{"normalize": false, "feature_map": null}', "2", "12", "21,30,52", "3,5,10", "128"),
    ('{"normalize": false, "feature_map": null}', "1", "12", "21,30,52", "3,5,10", "128", "shared"),
    ('{"normalize": false, "feature_map": null}', "1", "12", "21,30,52", "3,5,10", "128", "ones"),
    ("{}", *DIT, "shared"),
    ("{}", *DIT),
    ('{"order": "hla2", "feature_map": "elu1"}', *DIT),
    ('{"order": "ahla", "normalize": false}', *WAN, "rotary"),
    ("{}", "8", "16", "32,32", "4,4", "72"),
    ("{}", "8", "16", "32,32", "4,4", "96", "rotary"),
    ('{"feature_map": "softmax"}', *WAN),
    ("{}", "256", "6", "8,8", "4,4", "64"),  # by pairs
)


@pytest.mark.kernels
def test_interpreted():
    check_interpreted(*PYTEST, HERE / "block_interpreted.py")


@pytest.mark.kernels
def test_no_spills(tmp_path):
    check_compiled(STACK_LIMIT, 5, tmp_path, HERE / "block_gate.py", *COMPILED)


WAN_GRIDS, FEW = ((21, 30, 50), (9, 31, 17), (21, 30, 52)), ((9, 11), (8, 13), (10, 12))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("grids", "blocks"), [(WAN_GRIDS, (7, 3, 5)), (FEW, (3, 4))], ids=["blocks", "pairs"])
def test_another_number_of_tokens_compiles_nothing(grids, blocks, normalize):
    """The same kernels for grids in as many blocks: numbers that are specialised on would show as constants."""
    from hla_kernels.blockmix.fused import pairs, tokens
    from hla_kernels.blockmix.fused.mixing import kernels as mixing
    from hla_kernels.features import map_kernels
    from tests.ops.blockmix.block_gate import key, record
    from tests.ops.blockmix.fused_cases import options_of

    modules, found = (mixing, tokens, pairs, map_kernels), []
    for grid in grids:
        calls = record(options_of(grid, blocks, normalize=normalize), 2, 12, 128)
        found.append({key(*call) for call in calls})
        for fn, args, _ in calls:
            numbers = [name for name, x in zip(fn.arg_names, args, strict=False) if isinstance(x, int | tuple)]
            assert set(numbers) <= {x for module in modules for x in module.NO_SPECIALIZE}, fn.__name__
    assert found[0] == found[1] == found[2]
