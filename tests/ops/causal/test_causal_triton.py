"""Triton form of the causal operators against the definition in float64.

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
from hla_kernels.hla.stages.operator import work_dtype
from hla_kernels.op import why_not_triton
from hla_kernels.options import Options, is_paper
from tests.helpers.error_rule import LIMITS as RULE
from tests.helpers.error_rule import features_as_read
from tests.ops.cases import CAUSAL, l2_error, tokens
from tests.ops.fused.cases import poison
from tests.ops.fused.children import check_compiled, check_interpreted

RATIO = {"feature_map": "elu1", "normalize": True}
PAIR = {"feature_map": "softmax_pair", "normalize": True, "scale": 0.5}
KINDS = {"plain": {}, "scale": {"scale": 0.3}, "relu": {"feature_map": "relu"}, "ratio": RATIO, "pair": PAIR}
KINDS["frames"] = {"causal": "frame", "frame": 70, "scale": 0.3}
KINDS["paper"] = {"decay_rule": "paper", "scale": 0.3}
KINDS["frame ratio"] = {"causal": "frame", "frame": 50, **RATIO}
# n, query heads, key heads, D, Dv, option, decay per query head or key head
CASES = [
    (1, 2, 2, 16, 16, "plain", ()),
    (37, 2, 1, 16, 24, "scale", (0.9, 0.5)),
    (70, 4, 2, 24, 16, "ratio", (0.9, 0.6, 1.0, 0.05)),
    (70, 4, 2, 8, 16, "pair", (0.9, 0.8)),
    (200, 2, 2, 40, 16, "relu", ()),
    (333, 2, 1, 16, 16, "ratio", (0.99, 0.95)),
    (333, 1, 1, 24, 40, "plain", (0.98,)),
    (210, 2, 1, 16, 24, "frames", ()),
    (150, 2, 2, 24, 16, "frame ratio", ()),
    (210, 2, 1, 16, 24, "frames", (0.9, 0.3)),
    (150, 2, 2, 24, 16, "frame ratio", (0.9, 0.5)),
    (200, 2, 1, 16, 24, "paper", (0.9, 0.3)),
]
PIECES = [CASES[1], CASES[2], *CASES[6:]]  # with states, too
# relative L2 errors of o, gradients of tokens and of the decay; of ratios, whose gradients cancel
LIMITS = {torch.bfloat16: (4e-3, 4e-3, 2e-2), torch.float16: (1e-3, 1e-3, 6e-3)}
OF_RATIOS = {torch.bfloat16: (4e-3, 5e-3, 2e-2), torch.float16: (1e-3, 3e-3, 6e-3)}
PAPER = LIMITS | {torch.bfloat16: (RULE[torch.bfloat16], RULE[torch.bfloat16], 2e-2)}  # four sums, which partly cancel
GPU_CASES = [
    (1000, 4, 4, 64, 64, "plain", ()), (600, 4, 2, 128, 128, "plain", (0.9, 0.99)), (333, 2, 2, 72, 40, "ratio", ()),
    (4096, 2, 1, 64, 64, "ratio", (0.99, 0.999)), (5000, 2, 2, 64, 128, "scale", (0.9, 0.999)),
    (2100, 4, 2, 64, 64, "frames", ()), (3000, 2, 2, 128, 128, "frame ratio", ()),
    (2100, 4, 2, 64, 64, "frames", (0.9, 0.6)), (3000, 2, 2, 64, 128, "frame ratio", (0.9, 0.5)),
    (2000, 4, 2, 64, 72, "paper", (0.9, 0.99)),
]  # fmt: skip
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton form needs a CUDA device: none here")


def setting(case, dtype, device, size=1.0, batch=2):
    """(q, k, v), decay [heads] in float64 or None, gradient of the output, options."""
    n, h, n_key_heads, d, dv, kind, decay = case
    x = [(size * t).to(device, dtype) for t in tokens(n, batch, h, n_key_heads, d, dv)]
    grad = tokens(n, batch, h, h, d, dv, seed=1)[2].to(device, dtype)
    # numbers in float32, as the operator reads them: 0.999^t of the rounded 0.999 is 1e-5 from the other at t = 1000
    return x, torch.tensor(decay, device=device).double() if decay else None, grad, KINDS[kind]


def run(op, x, decay, options):
    """The operator without its checks: interpreted kernels have no CUDA device."""
    o = options_of(decay, options)
    gamma = None if decay is None else decay.reshape(1, x[1].shape[2], -1, 1, 1)
    rest = (o.feature_map, o.normalize, o.scale, o.frame, o.eps, True, False)
    return stages.causal_stages(*x, gamma, None, "paper" if is_paper(op, o) else op, *rest)[0]


def options_of(decay, options):
    return Options(**{"causal": True, "decay": None if decay is None else "tensor", **options})


def streamed(evaluate, cuts):
    """A function like `run` that calls `evaluate` in pieces with the state carried, and returns outputs and state."""

    def f(op, x, decay, options):
        o = options_of(decay, options)
        gamma = None if decay is None else decay.reshape(1, x[1].shape[2], -1, 1, 1)
        state, outputs, n = None, [], x[0].shape[1]
        unit = o.frame or 1
        for a, b in pairwise(round(n * c / unit) * unit for c in cuts):
            y, state = evaluate(op, *(t[:, a:b] for t in x), gamma, o, state)
            outputs.append(y)
        kept = [t for name, t in sorted(state.tensors.items()) if name != "gamma"]
        # sums over many tokens are scaled, so that gradients are of one size
        return torch.cat([torch.cat(outputs, 1).flatten(), *(t.flatten().to(y.dtype) / n for t in kept)])

    return f


def in_pieces(op, given, evaluate):
    """Relative L2 errors of outputs, states and gradients, of two calls against one of the torch form in float64."""
    x, decay, _, options = given
    truth = streamed(lambda op, q, k, v, gamma, o, state: causal(op, q, k, v, o, gamma, state, True), (0, 1))
    with torch.no_grad():
        size = truth(op, [t.double() for t in x], decay, options).shape
    grad = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(x[0])
    found = grads(streamed(evaluate, (0, 0.3, 1)), op, x, decay, grad, options)
    expected = grads(truth, op, x, decay, grad, options, torch.float64)
    return [l2_error(a, b) for a, b in zip(found, expected, strict=True)]


def one_by_one(op, given):
    """Relative L2 error of outputs and states where the last two tokens come alone."""
    x, decay, _, options = given
    n, f = x[0].shape[1], lambda *inputs: stages.evaluate(*inputs, True)
    truth = streamed(lambda op, q, k, v, gamma, o, state: causal(op, q, k, v, o, gamma, state, True), (0, 1))
    with torch.no_grad():
        found = streamed(f, (0, 1 - 2 / n, 1 - 1 / n, 1))(op, x, decay, options)
        return l2_error(found, truth(op, [t.double() for t in x], decay, options))


def defined(op, x, decay, options, dtype=torch.float64):
    """The definition, of features rounded to this dtype."""
    if decay is not None:
        decay = decay.repeat_interleave(x[0].shape[2] // decay.shape[0])
    q, k, options = features_as_read(*x[:2], options, dtype)
    return reference(op, q, k, x[2], options_of(decay, options), decay)


def grads(f, op, x, decay, grad, options, dtype=None):
    """Output and gradients of tokens and of the decay."""
    x = [t.detach().to(dtype or t.dtype).requires_grad_() for t in x]
    more = [] if decay is None else [decay.detach().to(torch.float64 if dtype else torch.float32).requires_grad_()]
    y = f(op, x, more[0] if more else None, options)
    return [y.detach(), *torch.autograd.grad(y, [*x, *more], grad.to(y))]


def errors(op, x, decay, grad, options):
    """Relative L2 errors against float64 of features as they are read, and what was found. Features of ratios of first
    order rounded to bfloat16 are 3.4e-3 of dq from those that are not, as many as everything else."""
    found = grads(run, op, x, decay, grad, options)
    read = partial(defined, dtype=work_dtype(x[0], op, options.get("normalize", False), True))
    truth = grads(read, op, x, decay, grad, options, torch.float64)
    return [l2_error(a, b) for a, b in zip(found, truth, strict=True)], found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("op", CAUSAL)
def test_error_and_bits(monkeypatch, op, dtype, case):
    ratio = "normalize" in KINDS[case[5]]
    given = setting(case, dtype, "cuda", 0.2 if dtype == torch.float16 and not ratio else 1.0)
    with monkeypatch.context() as patch:
        poison(patch)
        (o, *of_tokens), first = errors(op, *given)
        second = grads(run, op, *given)
    of_decay = of_tokens.pop() if case[6] else 0.0
    limits = (OF_RATIOS if ratio else PAPER if case[5] == "paper" else LIMITS)[dtype]
    assert (o <= limits[0]) and max(of_tokens) <= limits[1] and of_decay <= limits[2], (o, of_tokens, of_decay)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", [GPU_CASES[0], *GPU_CASES[4:]], ids=str)
@pytest.mark.parametrize("op", CAUSAL)
def test_states(op, case):
    """Two calls with a state equal one, with gradients of both states."""
    given = setting(case, torch.bfloat16, "cuda")
    errors = in_pieces(op, given, lambda *inputs: stages.evaluate(*inputs, True))
    assert max(errors[:4]) <= 5e-3 and max(errors) <= 2e-2, errors
    assert "frame" in given[3] or one_by_one(op, given) <= 5e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", CAUSAL)
def test_float16_of_many_tokens(op):
    """Sums over 32,768 tokens stay finite, and their error small."""
    x = [t.cuda().half().requires_grad_() for t in tokens(32768, 1, 2, 2, 64, 64)]
    y = getattr(hk, op)(*x, causal=True, feature_map="relu", scale=1 / 4096, impl="triton")
    truth = getattr(hk, op)(*(t.double() for t in x), causal=True, feature_map="relu", scale=1 / 4096)
    found = torch.autograd.grad(y.float().square().mean(), x)
    assert all(torch.isfinite(t).all() for t in (y, *found))
    assert l2_error(y, truth) <= 2e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "dtype"), [("plain", torch.bfloat16), ("ratio", torch.float16)], ids=str)
@pytest.mark.parametrize("op", CAUSAL)
def test_auto_and_compile(op, kind, dtype):
    """`auto` uses it, compiled in one graph with the same bits."""
    x, decay, grad, _ = setting((200, 4, 2, 64, 64, kind, (0.9, 0.99)), dtype, "cuda")
    f = lambda op, x, decay, options: getattr(hk, op)(*x, causal=True, decay=decay, **KINDS[kind])  # noqa: E731
    assert hk.explain(op, *x, causal=True, decay=decay.float(), **KINDS[kind]).impl == "triton"
    compiled = torch.compile(lambda x, decay: f(op, x, decay, {}), fullgraph=True, backend="aot_eager")
    found = [grads(g, op, x, decay, grad, {}) for g in (f, lambda op, x, decay, options: compiled(x, decay))]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", CAUSAL)
def test_packed_sequences(op):
    """Packed sequences equal each sequence alone, with gradients."""
    cu, given = torch.tensor([0, 300, 301, 700], dtype=torch.int32, device="cuda"), {**RATIO, "impl": "triton"}
    x = [t.cuda().bfloat16().requires_grad_() for t in tokens(700, 1, 2, 2, 64, 64)]
    y = getattr(hk, op)(*x, causal=True, cu_seqlens=cu, max_seqlen=400, **given)
    each = [getattr(hk, op)(*(t[:, a:b] for t in x), causal=True, **given) for a, b in pairwise(cu.tolist())]
    grads = (torch.autograd.grad(z.square().sum(), x) for z in (y, torch.cat(each, 1)))
    for a, b in [(y, torch.cat(each, 1)), *zip(*grads, strict=True)]:
        assert l2_error(a, b.double()) <= 4e-3


@pytest.mark.kernels
@pytest.mark.parametrize("op", CAUSAL)
def test_interpreted(op):
    """This file as a program, in float32; and torch.library.opcheck."""
    pytest.importorskip("triton")
    check_interpreted(__file__, "interpreted", op)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("d", "learned", "stack"), [(64, 0, 0), (64, 1, 8), (128, 0, 0), (128, 1, 64), ("64x32", 0, 8)]
)
def test_no_spills_and_no_operand_in_registers(tmp_path, d, learned, stack):
    """What calls and their backward launch, compiled for sm_90a. Sums for the gradient of the decay spill registers.
    d: channels per head, or "DxDv" if values have other channels than queries."""
    pytest.importorskip("triton")
    check_compiled(stack, 9, tmp_path, __file__, ("compiled", d, learned))


@pytest.mark.kernels
@pytest.mark.parametrize("d", [64, 128])
def test_no_spills_and_no_operand_in_registers_in_float16(tmp_path, d):
    """Ratios with a map, and plain calls."""
    pytest.importorskip("triton")
    check_compiled(0, 4, tmp_path, __file__, ("compiled_half", d))


def test_what_triton_does_not_have():
    x = [t.bfloat16() for t in tokens(9, d=16, dv=16)]
    why_not = lambda options, x=x: stages.why_not(x[0], x[2], Options(True, **options))  # noqa: E731
    for options, word in (
        ({"center": "k"}, "center"), ({"mean_path": True}, "mean_path"), ({"ridge": 0.1}, "ridge"),
        ({"decay": 0.9, "decay_rule": "paper"}, None), ({"feature_map": "softmax_pair"}, None),
    ):  # fmt: skip
        assert word is None or word in why_not(options)
    assert "multiple of 8" in why_not({}, [t[..., :9] for t in x])
    assert "at most 128" in why_not({"feature_map": "softmax_pair"}, [t.repeat(1, 1, 1, 5) for t in x])
    assert "float32" in why_not({}, [t.float() for t in x])
    assert why_not({"feature_map": "relu", "normalize": True}, [t.half() for t in x]) is None
    assert "CUDA" in why_not_triton(hk.op.prepare("hla2", *x, causal=True))


def test_shapes_are_known_without_a_device():
    for name, options in KINDS.items():
        x, decay, _, _ = setting((30, 4, 2, 16, 24, name, (0.9, 0.8)), torch.bfloat16, "meta")
        x, decay = [t.requires_grad_() for t in x], decay.float().requires_grad_()
        y = run("hla3", x, decay, options)
        found = torch.autograd.grad(y.sum(), [*x, decay])
        assert [t.shape for t in (y, *found)] == [(2, 30, 4, 24), *(t.shape for t in (*x, decay))]


def test_an_empty_batch_has_a_state():
    pytest.importorskip("triton")
    x, state = [t[:0] for t in tokens(6, 1, 4, 2, 16, 24)], None
    for _ in range(2):
        y, state = stages.evaluate("hla3", *x, None, Options(True), state, True)
    assert y.shape == (0, 6, 4, 24) and state.n == 12


def interpreted(op: str) -> None:
    from hla_kernels.hla.stages import launch, operator, plan
    from tests.ops.fused.children.quicker import interpret_quicker

    interpret_quicker()
    torch.cuda.device_of = lambda x: nullcontext()
    plan.SEGMENT = 2
    for case in (CASES[0], CASES[2], CASES[8]):  # operands rounded to TF32, as for float16
        found, _ = errors(op, *setting(case, torch.float32, "cpu"))
        assert max(found[:4]) <= 3e-3, (case, found)
    operator.in_tf32 = launch.in_tf32 = lambda dtype: False
    for case in CASES if op == "hla2" else CASES[:-1]:  # the last one is hla2's decay rule
        batch = 2 if case[0] < 300 else 1  # which has as many programs per head
        given = setting(case, torch.float32, "cpu", batch=batch)
        with pytest.MonkeyPatch.context() as patch:
            poison(patch)
            patch.setattr(plan, "PROGRAMS", 6 * batch)
            found, several = errors(op, *given)
        assert max(found) <= 3e-5, (case, found)
        if case[0] > plan.SEGMENT * plan.CHUNK and "frame" not in given[3]:  # several segments, which can be one
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(plan, "PROGRAMS", 1)
                one = grads(run, op, *given)
            whole = [l2_error(a, b.double()) for a, b in zip(several, one, strict=True)]
            assert max(whole) <= 3e-5, (case, whole)
        if case in PIECES:
            with pytest.MonkeyPatch.context() as patch:
                poison(patch)
                patch.setattr(plan, "PROGRAMS", 6 * batch)
                found = in_pieces(op, given, lambda *inputs: stages.evaluate(*inputs, True))
            assert max(found) <= 3e-5, (case, found)
            assert "frame" in given[3] or one_by_one(op, given) <= 3e-5
    x = [t.float().requires_grad_() for t in tokens(20, 1, 2, 1, 16, 16)]
    gamma = torch.full((1, 1, 2, 1, 1), 0.9, requires_grad=True)
    options = (op, "elu1", True, 0.3, 0, 1e-6, True)
    torch.library.opcheck(torch.ops.hla_kernels.causal_stages, (*x, gamma, None, *options, False))
    first = torch.randn(1, 2, operator.state_size(op, 16, 17), requires_grad=True)
    torch.library.opcheck(torch.ops.hla_kernels.causal_stages, (*x, gamma, first, *options, True))
    if op == "hla2":
        first = torch.randn(1, 2, operator.state_size("paper", 16, 16), requires_grad=True)
        inputs = (*x, gamma, first, "paper", None, False, 0.3, 0, 1e-6, True, True)
        torch.library.opcheck(torch.ops.hla_kernels.causal_stages, inputs)
    one = [t[:, :1].detach() for t in x]
    _, state = stages.evaluate(op, *one, gamma.detach(), Options(True, decay="tensor"), None, True)
    kept = [t for name, t in state.tensors.items() if name != "gamma"]
    inputs = (*one, gamma.detach(), kept, op, None, False, 0.3, 1e-6)
    torch.library.opcheck(torch.ops.hla_kernels.causal_step, inputs, test_utils=("test_schema", "test_faketensor"))


def recorded() -> None:
    """Keep what would be launched, for a GPU that is not here."""
    from hla_kernels.hla.stages import launch, operator, rows, step
    from tests.ops.fused.offline.gate import Recorder

    torch.cuda.device_of = lambda x: nullcontext()
    launch.Sums.add = lambda *_: None
    operator.Sums = launch.Sums
    launch.gradient_of_decay = lambda sums, gamma, group: gamma
    for name in ("causal_states", "causal_carry", "causal_outputs"):
        setattr(launch, name, Recorder(getattr(launch, name)))
    for module, name in ((step, "causal_step"), (rows, "causal_mapped"), (rows, "causal_undivided")):
        setattr(module, name, Recorder(getattr(module, name)))


def compiled(d: str, learned: str) -> None:
    from hla_kernels.hla.stages import decode, operator
    from tests.ops.causal.offline import judge_recorded

    recorded()
    width, dv = (int(x) for x in d.split("x")) if "x" in d else (int(d), int(d))
    q, v = (torch.empty(2, 4096, 3, w, dtype=torch.bfloat16, device="meta") for w in (width, dv))
    gamma = torch.empty(1, 3, 1, 1, 1, device="meta") if int(learned) else None
    for op in CAUSAL:
        for normalize in (False, True):
            options = (op, "relu" if normalize else None, normalize, None, 0)
            operator.causal_stages.function(q, q, v, gamma, None, *options, 1e-6, False, False)
            saved = operator.causal_stages.function(q, q, v, gamma, None, *options, 1e-6, True, False)
            rest = (None, None, list(saved), bool(int(learned)), *options)
            operator.causal_stages_backward.function(v, q, q, v, gamma, *rest)
    of_states = [("hla3", None, normalize, None, 1024) for normalize in (False, True)]
    for options in (*of_states, *[("paper", None, False, None, 0)] * int(learned)):
        first = torch.empty(2, 3, operator.state_size(options[0], width, dv + options[2]), device="meta")
        saved = operator.causal_stages.function(q, q, v, gamma, first, *options, 1e-6, True, True)
        rest = (first, first, list(saved), bool(int(learned)), *options)
        operator.causal_stages_backward.function(v, q, q, v, gamma, *rest)
    if not int(learned):  # `first` is of the ratio
        operator.causal_stages.function(q, q, v, gamma, first, "hla3", None, True, None, 0, 1e-6, False, True)
        parts = operator._by_stage("hla3", first, width, dv + 1).values()
        decode.causal_step.function(
            q[:, :1], q[:, :1], v[:, :1], gamma, [x[:, :, None] for x in parts], "hla3", None, True, None, 1e-6
        )
    judge_recorded()


def compiled_half(d: str) -> None:
    from hla_kernels.hla.stages import operator
    from tests.ops.causal.offline import judge_recorded

    recorded()
    half = torch.empty(2, 4096, 3, int(d), dtype=torch.float16, device="meta")
    for options in (("hla3", "elu1", True, None, 0), ("hla3", None, False, None, 0)):
        saved = operator.causal_stages.function(half, half, half, None, None, *options, 1e-6, True, False)
        rest = (None, None, list(saved), False, *options)
        operator.causal_stages_backward.function(half, half, half, half, None, *rest)
    judge_recorded()


if __name__ == "__main__":
    programs = {"interpreted": interpreted, "compiled": compiled, "compiled_half": compiled_half}
    programs[sys.argv[1]](*sys.argv[2:])
