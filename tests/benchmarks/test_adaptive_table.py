"""Table of adaptive multipole attention: FlexAttention peer, cases and printed tables."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hla_kernels
from benchmarks import adaptive, flex, rows


@pytest.mark.parametrize(("grid", "q_tile", "k_tile"), [((16, 16), 64, 16), ((9, 11), 16, 8)])
def test_flex_attention_computes_the_operator(grid, q_tile, k_tile):
    torch.manual_seed(0)
    n = grid[0] * grid[1]
    q, k, v = (torch.randn(2, n, 2, 16) for _ in range(3))
    options = {"grid": grid, "density": 0.2, "q_tile": q_tile, "k_tile": k_tile}
    found = flex.adaptive(q, k + 1, v, **options)
    wanted = hla_kernels.adaptive_multipole(q, k + 1, v, **options, select="mean", far="mean", q_scale=0.25)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_cases_and_table(tmp_path):
    """Rows of a file as a run writes them; a speed-up is of the same shape and pass."""
    settings = adaptive.AdaptiveSettings(shapes=["tokens1k", "wan720p"], selects=["mean"])
    todo = adaptive.cases(settings)
    assert [(case.shape, case.impl) for case in todo][:3] == [("tokens1k", impl) for impl in adaptive.IMPLS]
    assert todo[0].options["density"] == 0.1 and todo[3].options["density"] == 0.0625
    content = rows.start(tmp_path / "a.json", "command", {})
    for case, us in zip(todo, (50.0, 100.0, 70.0), strict=False):
        ours = {"rel_err": 1e-3, "kernels_us": {"pool": 12.0, "output": 38.0}} if case.impl == "ours" else {}
        values = {"us": us, "copy_tb_s": 4.0} | ours
        rows.add(content, case.row("forward") | values, rows.KERNEL_KEY, tmp_path / "a.json")
    lines = adaptive.text(content).splitlines()
    assert "2.00" in lines[2] and "0.001" in lines[2] and "1.43" in lines[4]
    assert lines[-3].split("|")[4:6] == [" pool ", " output "] and lines[-1].split("|")[4:6] == [" 12 ", " 38 "]


def test_a_case_that_fails_stops_no_other():
    """Neither one that fails in its check nor one that fails on the clock; both are written down."""
    settings = adaptive.AdaptiveSettings(shapes=["tokens1k"], impls=["ours"], selects=["mean"], k_tiles=[4, 16, 64])
    todo = adaptive.cases(settings)

    def errors(case):
        if case.options["k_tile"] == 4:
            raise SyntaxError("a compiler's own error")
        return {"forward": 1e-3, "forward_backward": 2e-3}

    def measured(case, which):
        if (case.options["k_tile"], which) == (16, "forward"):
            raise torch.OutOfMemoryError("too large")
        return {"us": 1.0}

    with ThreadPoolExecutor(1) as pool:
        checked = adaptive.check_all(todo, pool, "ours", errors)
    assert ["SyntaxError" in x.get("reason", "") for x in checked] == [True, False, False]
    pairs = zip(todo, checked, strict=True)
    found = [[adaptive.timed(case, which, x, measured) for which in case.passes] for case, x in pairs]
    assert [["reason" in values for values in x] for x in found] == [[True, True], [True, False], [False, False]]
    assert found[2][1] == {"us": 1.0, "rel_err": 2e-3}


def test_bad_settings():
    with pytest.raises(ValueError, match="Did you mean 'wan480p'"):
        adaptive.AdaptiveSettings(shapes=["wan480"])
    with pytest.raises(ValueError, match="density"):
        adaptive.AdaptiveSettings(density=2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a CUDA device: none here")
def test_a_row_on_a_gpu(tmp_path):
    settings = adaptive.AdaptiveSettings(shapes=["tokens1k"], selects=["mean"], json=str(tmp_path / "a.json"))
    content = adaptive.run(settings, "command")
    assert not content["failed"] and len(content["rows"]) == 5
    assert max(row.get("rel_err", 0.0) for row in content["rows"]) < 5e-3
    assert all({"pool", "choose", "output"} <= row["kernels_us"].keys() for row in content["rows"] if "rel_err" in row)
