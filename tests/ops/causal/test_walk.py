"""One walk through all stages, for calls without a backward, against the definition in float64 and other forms.

On a CUDA device, interpreted in a separate process, and compiled.
"""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch

import hla_kernels as hk
from hla_kernels.hla import stages
from hla_kernels.hla.causal import causal
from hla_kernels.hla.reference import reference
from hla_kernels.options import Options
from tests.ops.cases import l2_error, tokens
from tests.ops.fused.cases import poison
from tests.ops.fused.children import check_compiled, check_interpreted

OPS = ("ahla", "hla2", "hla3")
# n, query heads, key heads, D, Dv, options, decay per query head or key head
CASES = [
    (1, 2, 2, 16, 16, {}, ()),
    (37, 2, 1, 16, 24, {"scale": 0.3}, (0.9, 0.5)),
    (70, 4, 2, 8, 72, {"feature_map": "relu"}, (0.9, 0.6, 1.0, 0.05)),
    (65, 2, 2, 72, 40, {}, ()),
]
GPU_CASES = [
    (1000, 4, 4, 64, 64, {}, ()), (600, 4, 2, 32, 128, {}, (0.9, 0.99, 1.0, 0.5)),
    (333, 2, 2, 56, 40, {"feature_map": "relu"}, ()), (4999, 2, 2, 64, 64, {"scale": 0.3}, (0.9, 0.999)),
    (7, 3, 3, 64, 64, {}, ()), (2048, 2, 2, 64, 80, {}, (0.99, 1.0)),
]  # fmt: skip
WIDE = [(1000, 2, 2, 128, 128, {}, ()), (600, 2, 1, 80, 96, {"scale": 0.3}, (0.99,))]
CALLS = [(op, case) for op in OPS for case in GPU_CASES] + [("ahla", case) for case in WIDE]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


def setting(case, dtype, device):
    """q, k, v, the decay [heads] or None, and options."""
    n, h, key_heads, d, dv, options, decay = case
    x = [t.to(device, dtype) for t in tokens(n, 2, h, key_heads, d, dv)]
    options = Options(**{"causal": True, "decay": "tensor" if decay else None, **options})
    return x, torch.tensor(decay, device=device) if decay else None, options


def outputs(op, x, decay, options, cuts=(0, 1), evaluate=stages.evaluate):
    """Outputs and states of calls without a backward, of pieces of the tokens."""
    gamma = None if decay is None else decay.reshape(1, x[1].shape[2], -1, 1, 1)
    state, found, n = None, [], x[0].shape[1]
    with torch.no_grad():
        for a, b in pairwise(round(n * c) for c in cuts):
            y, state = evaluate(op, *(t[:, a:b] for t in x), gamma, options, state, True)
            found.append(y)
    kept = [t.flatten().to(y.dtype) / n for name, t in sorted(state.tensors.items()) if name != "gamma"]
    return torch.cat([torch.cat(found, 1).flatten(), *kept])


def truth(op, x, decay, options):
    """The same in float64."""
    evaluate = lambda op, q, k, v, gamma, *rest: causal(op, q, k, v, rest[0], gamma, *rest[1:])  # noqa: E731
    return outputs(op, [t.double() for t in x], None if decay is None else decay.double(), options, (0, 1), evaluate)


def by_turns(patch, *forms):
    """Calls are one walk, or not, in turn."""
    from hla_kernels.hla.stages import operator

    turns = iter(forms * 10)
    patch.setattr(operator, "walks", lambda *_: next(turns))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("op", "case"), CALLS, ids=str)
def test_error_and_bits(monkeypatch, op, case):
    x, decay, options = setting(case, torch.bfloat16, "cuda")
    monkeypatch.setenv("HLA_KERNELS_VERIFY", "0")  # the check has a backward, which the walk has not
    by_turns(monkeypatch, True)
    poison(monkeypatch)
    call = partial(getattr(hk, op), *x, causal=True, impl="triton", decay=decay, **case[5])
    with torch.no_grad():
        first, second = call(), call()
    each = None if decay is None else decay.double().repeat_interleave(case[1] // len(decay))
    assert l2_error(first, reference(op, *(t.double() for t in x), options, each)) <= 4e-3
    assert torch.equal(first, second)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("op", "case"), CALLS, ids=str)
def test_states(monkeypatch, op, case):
    """Calls with a state equal one, of either form before the other."""
    given = setting(case, torch.bfloat16, "cuda")
    expected = truth(op, *given)
    for forms in ((True,), (True, False), (False, True)):
        by_turns(monkeypatch, *forms)
        for cuts in ((0, 1), (0, 0.3, 1)):
            assert l2_error(outputs(op, *given, cuts), expected) <= 5e-3


@pytest.mark.kernels
@pytest.mark.parametrize("op", OPS)
def test_interpreted(op):
    """This file as a program, in float32; and torch.library.opcheck."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted", op)


@pytest.mark.kernels
def test_no_spills_and_no_operand_in_registers(tmp_path):
    """All widths, with and without a decay, compiled for sm_90a."""
    pytest.importorskip("triton")
    check_compiled(0, 18, tmp_path, __file__, ("compiled",))


def interpreted(op: str) -> None:
    from hla_kernels.hla.stages import launch, operator
    from tests.ops.fused.children.quicker import interpret_quicker

    interpret_quicker()
    torch.cuda.device_of = lambda x: nullcontext()
    operator.in_tf32 = launch.in_tf32 = lambda dtype: False
    for case in CASES:
        given = setting(case, torch.float32, "cpu")
        expected = truth(op, *given)
        for cuts, *forms in (((0, 1), True), ((0, 0.4, 1), True, False), ((0, 0.4, 1), False, True)):
            with pytest.MonkeyPatch.context() as patch:
                poison(patch)
                by_turns(patch, *forms)
                if case[0] > 1 or len(forms) == 1:
                    assert l2_error(outputs(op, *given, cuts), expected) <= 1e-5, (case, cuts, forms)
    x, gamma = setting(CASES[1], torch.float32, "cpu")[0], torch.full((1, 1, 2, 1, 1), 0.9)
    first = torch.randn(2, 2, operator.state_size(op, 16, 24))
    inputs = (*x, gamma, first, op, "elu1", False, 0.3, 0, 1e-6, False, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "walks", lambda *_: True)
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.hla_kernels.causal_stages, inputs, test_utils=tests)


def compiled() -> None:
    from hla_kernels.hla.stages import operator, walk
    from tests.ops.causal.offline import judge_recorded
    from tests.ops.fused.offline.gate import Recorder

    torch.cuda.device_of = lambda x: nullcontext()
    walk.causal_walk, operator.walks = Recorder(walk.causal_walk), lambda *_: True
    for op, d in [*((op, d) for op in OPS for d in (32, 64)), *(("ahla", d) for d in (80, 96, 128))]:
        for gamma in (None, torch.empty(1, 3, 1, 1, 1, device="meta")):
            q = torch.empty(2, 500, 3, d, dtype=torch.bfloat16, device="meta")
            first = torch.empty(2, 3, operator.state_size(op, d, d), device="meta")
            operator.causal_stages.function(q, q, q, gamma, first, op, None, False, None, 0, 1e-6, False, True)
    judge_recorded()


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]](*sys.argv[2:])
