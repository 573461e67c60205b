"""Multipole attention in Triton against float64: on a CUDA device, interpreted in a process of its own, compiled.

Rule of the error: relative L2 against the definition in float64, at most `TIMES` that of the definition of the
same tokens, evaluated in float32, for the output and every gradient.
"""

import json
import math
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hla_kernels as hk
from hla_kernels.op import why_not_triton
from hla_kernels.softmax.multipole.call import prepare
from hla_kernels.softmax.multipole.fused.launch import multipole_op
from tests.ops.cases import l2_error
from tests.ops.fused.children import check_compiled, check_interpreted

TIMES = 2
SPREAD = pytest.mark.xfail(
    reason="an open fault: keys minus anchors are rounded to bfloat16, which scores of a large spread amplify; on an "
    "H200 some gradients there had more than twice the torch form's error",
    strict=False,
)
STACK_LIMIT = 8  # bytes of a thread
CASES = {  # grid, blocks, radius, prefix, suffix
    "square": ((16, 16), (4, 4), 2, 1, 0),
    "small blocks": ((16, 16), (8, 8), 1, 0, 0),
    "uneven": ((9, 11), (3, 4), 1, 2, 3),
    "video": ((4, 5, 6), (2, 2, 2), 1, 0, 3),
    "line": ((50,), (5,), 3, 0, 0),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


def setting(case, d, dtype, device, size=1.0):
    grid, blocks, radius, prefix, suffix = CASES[case]
    g = torch.Generator().manual_seed(0)
    n = math.prod(grid) + prefix + suffix
    q, k, v, grad = (torch.randn(2, n, heads, d, generator=g) for heads in (4, 2, 2, 4))
    tokens = [t.to(device, dtype) for t in (size * q, k + 0.5, v)]
    places = {"grid": grid, "blocks": blocks, "radius": radius, "prefix": prefix, "suffix": suffix}
    return tokens, grad.to(device), {**places, "q_scale": d**-0.5}


def grads(tokens, grad, run):
    x = [t.detach().clone().requires_grad_() for t in tokens]
    y = run(*x)
    return [y.detach(), *torch.autograd.grad((y * grad.to(y)).sum(), x)]


def impl(name, more):
    return lambda *x: hk.multipole(*x, **more, impl=name)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [1.0, pytest.param(3.0, marks=SPREAD)])
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_error_and_bits(case, degree, d, size):
    tokens, grad, more = setting(case, d, torch.bfloat16, "cuda", size)
    more["degree"] = degree
    first, second = (grads(tokens, grad, impl("triton", more)) for _ in range(2))
    plain = grads(tokens, grad, impl("reference", more))
    truth = grads([t.double() for t in tokens], grad, impl("reference", more))
    for a, b, c, t in zip(first, second, plain, truth, strict=True):
        assert torch.equal(a, b)
        assert l2_error(a, t) <= TIMES * l2_error(c, t)


def test_interpreted():
    """The same in float32: this file as a program."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted")


def test_no_spills(tmp_path):
    """What a call with heads of 64 launches, compiled for sm_90a."""
    pytest.importorskip("triton")
    check_compiled(STACK_LIMIT, 3, tmp_path, __file__, "compiled")


def compiled() -> None:
    from hla_kernels.softmax.multipole.fused import kernels, launch
    from tests.ops.fused.offline_gate import Recorder, compile_call

    torch.cuda.device_of = lambda x: nullcontext()  # what is compiled for is not here
    for name in ("output", "for_queries", "for_keys"):
        setattr(kernels, name, Recorder(getattr(kernels, name)))
    q = torch.empty(2, 256, 3, 64, dtype=torch.bfloat16, device="meta")
    rest = (torch.empty(3, 256, dtype=torch.int32, device="meta"), 2, 1, 0.125)
    o, top = launch.multipole_op._init_fn(q, q, q, q, *rest)
    launch.multipole_backward._init_fn(o, q, q, q, q, rest[0], o, top, *rest[1:])
    for call in Recorder.calls:
        print(json.dumps(compile_call(*call)))


def interpreted() -> None:
    from hla_kernels.softmax.multipole import fused

    for case, degree in (("uneven", 0), ("uneven", 1), ("uneven", 2), ("video", 1), ("line", 2)):
        tokens, grad, more = setting(case, 16, torch.float32, "cpu")
        more["degree"] = degree
        found = grads([t[:1] for t in tokens], grad[:1], lambda *x, m=more: fused.evaluate(prepare(*x, **m)))
        truth = grads([t[:1].double() for t in tokens], grad[:1], impl("reference", more))
        for a, t in zip(found, truth, strict=True):
            assert l2_error(a, t) < 1e-6, (case, degree, l2_error(a, t))


def test_operations_and_shapes_are_known_without_a_device():
    """Three products of all pairs forward, eleven backward: the operator on tensors without memory."""
    x = [torch.empty(2, 50, 3, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(4)]
    with FlopCounterMode(display=False) as counter:
        o, top = multipole_op(*x, torch.empty(3, 50, dtype=torch.int32, device="meta"), 1, 1, 0.25)
        forward = counter.get_total_flops()
        found = torch.autograd.grad(o.sum(), x)
    assert [t.shape for t in (o, *found)] == [x[0].shape] * 5 and top.shape == (2, 3, 50)
    assert (forward, counter.get_total_flops()) == (2 * 3 * 2 * 3 * 50 * 50 * 16, 2 * 14 * 2 * 3 * 50 * 50 * 16)


def test_what_triton_does_not_have():
    """Each reason is said, on a device that would have the form."""
    from hla_kernels.softmax.multipole.fused import why_not

    (q, k, v), _, more = setting("square", 16, torch.bfloat16, "cpu")
    assert why_not(prepare(q, k, v, **more)) is None and "CUDA" in why_not_triton(prepare(q, k, v, **more))
    assert "bfloat16" in why_not(prepare(q.float(), k.float(), v.float(), **more))
    assert "16, 32" in why_not(prepare(q[..., :9], k[..., :9], v[..., :9], **more))
    mask = torch.ones(q.shape[:2], dtype=torch.bool)
    assert "key_padding_mask" in why_not(prepare(q, k, v, **more, key_padding_mask=mask))


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
