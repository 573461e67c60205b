"""The static table compiles for sm_90a within registers and shared memory; no GPU needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec
from hla_kernels.hla.fused.spec import MOMENTS
from hla_kernels.op import prepare
from hla_kernels.sequences import WHOLE
from tests.ops.fused.children import SHARED_LIMIT, run

triton = pytest.importorskip("triton")

GATE = Path(__file__).with_name("gate.py")
FIXED = '{"fixed": true}'
PLAIN, RATIO = "{}", '{"feature_map": "elu1", "normalize": true}'
FIXED_RATIO = '{"fixed": true, "feature_map": "elu1", "normalize": true}'
ANCHORED = '{"center": "k", "mean_path": true}'
# those of the tables of speed
SHAPES = (
    (256, 6, 197, 64), (64, 6, 1025, 64), (64, 16, 256, 72), (32, 16, 1024, 72), (4, 16, 16384, 64),
    (2, 12, 32760, 128),
)  # fmt: skip
CASES = (
    # the assembler waits for every product of a kernel if one is carried into the next turn of a loop
    *(("linear_attention", RATIO, *SHAPES[i], "products") for i in (0, 2, 5)),
    *(
        (op, options, *shape) for op in MOMENTS for options in (PLAIN, ANCHORED, RATIO) for shape in SHAPES
        if (op, options, shape[-1]) != ("polynomial", RATIO, 128)
    ),
    ("ahla", PLAIN, 60, 6, 1025, 64),
    ("ahla", RATIO, 64, 6, 4097, 64),
    ("polynomial", RATIO, 8, 16, 1025, 64, "mask"),
    ("polynomial", '{"center": "k"}', 2, 4, 197, 72),  # sums that nothing reads do not end an iteration
    ("hla3", RATIO, 256, 6, 197, 64, "inference"),
    ("linear_attention", RATIO, 64, 8, 1024, 128),
    ("polynomial", PLAIN, 256, 6, 197, 64, "inference"),
    ("polynomial", FIXED, 256, 6, 197, 64),
    ("polynomial", FIXED, 64, 6, 1025, 64),
    ("polynomial", FIXED, 64, 16, 256, 72),
    ("polynomial", FIXED_RATIO, 64, 16, 256, 72),
    ("hla2", PLAIN, 256, 6, 197, 64, "mask"),
    ("ahla", RATIO, 8, 16, 1024, 72, "mask"),
    ("ahla", PLAIN, 32, 16, 1024, 72, "packed"),
    ("hla3", RATIO, 32, 16, 1024, 72, "packed"),
    ("linear_attention", PLAIN, 2, 12, 4096, 128, "float32"),
    ("hla2", PLAIN, 32, 16, 1024, 72, "float16"),
    ("hla2", PLAIN, 2, 12, 32760, 128, "float16"),
    ("polynomial", PLAIN, 64, 16, 256, 64, "float16"),
    *((op, PLAIN, 1, 12, 4095, 128, "shared") for op in MOMENTS),
    # values that are narrower or wider than keys, and widths that are no sum of few powers of two
    *(
        (op, options, 2, 2, 197, d)
        for op in MOMENTS for options in (PLAIN, ANCHORED, RATIO) for d in ("64x32", "40x72")
    ),
    *((op, PLAIN, 2, 2, 1025, d) for op in MOMENTS for d in (24, 40, 96)),
    *(("linear_attention", PLAIN, 2, 2, 1025, d) for d in ("64x16", "72x16", "128x16")),
    ("ahla", ANCHORED, 2, 2, 1025, "128x96"),
    ("hla3", '{"feature_map": "relu", "mean_path": true, "ridge": 0.1}', 8, 4, 1, "40x96", "float16"),  # failed once
    ("linear_attention", RATIO, 1, 12, 4095, 64, "shared"),
    ("ahla", ANCHORED, 1, 12, 4095, 72, "shared"),
    ("hla2", RATIO, 1, 12, 4095, 128, "shared"),
)


# bytes that a kernel may spill outside of loops: hla3 with a ratio and 64 channels did, compiled with Triton 3.9
OUTSIDE_LOOPS = 16


@pytest.mark.kernels
@pytest.mark.timeout(0)  # with a new compiler it compiles for many minutes, and keeps what it has done
@pytest.mark.parametrize("op", MOMENTS)
def test_no_spills(op, tmp_path):
    """Those of an operator in one process: to begin takes as long as to compile."""
    cases = [case for case in CASES if case[0] == op]
    words = [word for case in cases for word in ("+", *case)][1:]
    done = run(GATE, *words, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["call"] for kernel in found} == set(range(len(cases)))
    big = []
    for kernel in found:
        case = cases[kernel["call"]]
        spills = kernel["stack"] > OUTSIDE_LOOPS or kernel["in_loops"] > 0
        big += [(case, kernel)] * (spills or kernel["shared"] > SHARED_LIMIT or kernel.get("one_by_one", False))
    assert big == []


@pytest.mark.parametrize(("heads", "kind"), ((128, ""), (3, ""), (3, "mask"), (3, "packed"), (3, "turned")))
@pytest.mark.parametrize(
    ("op", "options", "d"),
    (
        ("ahla", PLAIN, 64), ("linear_attention", RATIO, 64), ("polynomial", RATIO, 64), ("hla2", ANCHORED, 64),
        ("polynomial", RATIO, 72),
    ),
)  # fmt: skip
def test_another_number_of_tokens_compiles_nothing(op, options, d, heads, kind):
    """On one path, for any N (with 3 heads of 64 channels a batch stride is a multiple of 16 for even N only)."""
    from tests.ops.fused.offline.gate import record
    from tests.ops.fused.offline.judge import key

    found = [{key(*call) for call in record(op, options, 1, heads, n, d, kind)} for n in (197, 240, 222, 193)]
    assert found[0] and all(keys == found[0] for keys in found)


@pytest.mark.parametrize("op", MOMENTS)
def test_the_first_use_check_runs_what_a_call_launches(op):
    """Of every variant: few and many heads, heads cut into parts, precise products of long ratios, no backward."""
    from hla_kernels.dispatch import trial
    from tests.ops.fused.offline.gate import record
    from tests.ops.fused.offline.judge import key

    shapes = (*SHAPES, (1, 6, 197, 64), (2, 6, 700, 64), (16, 16, 4096, 64), (64, 6, 4097, 64), (1, 40, 75600, 128))
    shapes += ((16, 12, 16384, 64),)  # no trial is as large
    for options in (PLAIN, RATIO, ANCHORED):
        for b, h, n, d in shapes:
            if (op, options, d) == ("polynomial", RATIO, 128):
                continue
            q = torch.empty(b, n, h, d, dtype=torch.bfloat16, device="meta").requires_grad_()
            more = [torch.empty(h, 4, device="meta")] if op == "polynomial" else []
            call = prepare(op, q, q, q, *more, **json.loads(options))
            for kind in ("", "inference"):
                with torch.set_grad_enabled(not kind):
                    form = trial.trial_of(call)
                sizes = trial.sizes(form)
                tried = {key(*x) for batch, tokens in sizes for x in record(op, options, batch, h, tokens, d, kind)}
                missing = {x[0].__name__ for x in record(op, options, b, h, n, d, kind) if key(*x) not in tried}
                assert len(sizes) == 1 + len(missing) and missing <= {"hla_middle"} and (not missing or n == 16384)
                assert {*sizes} <= {*trial.sizes((*form[:3], form[3][:-2]))}  # while compiling, all variants


@pytest.mark.parametrize(("n", "d"), ((197, 64), (1025, 64), (256, 72), (32760, 128), (333, 40)))
def test_learned_coefficients_cost_one_small_launch(n, d):
    """Which adds their parts; otherwise a call has the same kernels, which write the parts."""
    from tests.ops.fused.offline.gate import record

    learned, fixed = (record("polynomial", options, 8, 16, n, d) for options in (PLAIN, FIXED))
    assert [fn.__name__ for fn, *_ in learned] == [*(fn.__name__ for fn, *_ in fixed), "hla_sum_coefficients"]
    for fn, args, kwargs in fixed:
        assert (dict(zip(fn.arg_names, args, strict=False)) | kwargs).get("dcoefficients") is None


@pytest.mark.parametrize(("op", "options"), (("hla2", PLAIN), ("ahla", ANCHORED), ("hla3", RATIO)))
def test_many_heads_have_one_launch_forward_and_three_backward(op, options):
    from tests.ops.fused.offline.gate import record

    found = [fn.__name__ for fn, *_ in record(op, options, 64, 6, 512, 64)]
    kernels = [name for name in found if not name.startswith("map")]
    assert kernels == ["hla_summed_forward", "hla_reduce_readout", "hla_summed_middle", "hla_apply_grads"]


@pytest.mark.parametrize("options", (("hla2", None, False), ("ahla", "elu1", True)), ids=str)
def test_what_is_saved_has_a_size_for_every_number_of_tokens(options):
    """One exported program for all sides of the choice of a path: sizes are formulas of B and N, not branches."""

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.ops.hla_kernels.two_sided(
                q, k, v, None, *options, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True
            )

    b, n = torch.export.Dim("b", min=1, max=4096), torch.export.Dim("n", min=2, max=8192)
    for dtype in (torch.float32, torch.bfloat16):
        x = [torch.randn(32, 50, 4, 64, dtype=dtype) for _ in range(3)]
        program = torch.export.export(Module(), tuple(x), dynamic_shapes=({0: b, 1: n},) * 3)
        found = {node.name: node.meta.get("val") for node in program.graph.nodes}
        size, shape = found["two_sided"][1].shape[0].node.expr, found["q"].shape
        for batch, tokens in ((32, 50), (32, 2048), (32, 2049), (31, 50), (96, 4097), (96, 4609)):
            q = torch.empty(batch, tokens, 4, 64, dtype=dtype, device="meta")
            expected = fused.saved_floats(q, q, q, Spec(*options))
            assert size.subs({shape[0].node.expr: batch, shape[1].node.expr: tokens}) == expected
            many = dtype == torch.bfloat16 and batch >= 32
            split = not many or tokens > (4608 if batch == 96 else 2048)
            operators = fused.operator_floats(q, q, Spec(*options), WHOLE)
            assert (operators > (2.5 if options[2] else 1.6) * batch * 4 * 64 * 64) == split


@pytest.mark.parametrize("options", ({}, {"feature_map": "elu1"}, {"feature_map": "elu1", "normalize": True}), ids=str)
def test_what_polynomial_saves_has_a_size_for_an_unknown_number_of_tokens(options):
    """No branch on a symbol without a value."""
    spec, symbols = Spec("polynomial", **options), ShapeEnv()
    with FakeTensorMode(shape_env=symbols):
        n = symbols.create_unbacked_symint()
        q = torch.empty(2, n, 4, 64, dtype=torch.bfloat16)
        size = fused.saved_floats(q, q, q, spec)
    for tokens in (1, 2, 197):
        x = torch.empty(2, tokens, 4, 64, dtype=torch.bfloat16, device="meta")
        expected = fused.saved_floats(x, x, x, spec)
        assert (size if isinstance(size, int) else size.node.expr.subs({n.node.expr: tokens})) == expected > 0


def test_verdicts_of_code_that_is_gone_are_removed(monkeypatch, tmp_path):
    from hla_kernels.hla.fused.split import hla_apply_grads
    from tests.ops.fused.offline import verdicts

    file, source = tmp_path / "verdicts.jsonl", verdicts.source(hla_apply_grads)[:16]
    lines = [json.dumps({"key": str(i), "source": x, "result": {}}) for i, x in enumerate((source, "gone", source))]
    file.write_text("\n".join([*lines, json.dumps({"key": "3", "result": {}})]) + "\n")
    monkeypatch.setattr(verdicts, "FILE", file)
    assert verdicts.prune() == (2, 2) and file.read_text().splitlines() == [lines[0], lines[2]]
