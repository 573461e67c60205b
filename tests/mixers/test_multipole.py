"""Multipole attention: every form against weights written out by hand, and what it is to softmax."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hla_kernels as hk
from hla_kernels.softmax import multipole
from tests.ops.cases import Allocated, assert_same, l2_error, tokens
from zoo.mixers import Context, build_mixer

CASES = {  # grid, blocks, radius, prefix, suffix
    "uneven": ((6, 7), (2, 3), 1, 2, 1),
    "video": ((3, 3, 4), (2, 1, 2), 1, 0, 3),
    "itself": ((5, 4), (2, 2), 0, 1, 0),
    "line": ((11,), (3,), 2, 0, 0),
}


@pytest.fixture(params=[2500, multipole.PAIRS], ids=["parts", "whole"])
def form(request, monkeypatch):
    """A few queries at a time, or all."""
    monkeypatch.setattr(multipole, "PAIRS", request.param)


def setting(grid, prefix, suffix, h=4, hk=2, d=6, dv=3, dtype=torch.float64, seed=0):
    """q, k, v; the keys have a common mean, as in trained models."""
    q, k, v = tokens(math.prod(grid) + prefix + suffix, h=h, hk=hk, d=d, dv=dv, dtype=dtype, seed=seed)
    return q, k + 1, v


def options(case, degree=1):
    grid, blocks, radius, prefix, suffix = CASES[case]
    sizes = {"grid": grid, "blocks": blocks, "radius": radius, "prefix": prefix, "suffix": suffix}
    return {**sizes, "degree": degree, "q_scale": 0.4}


def mask_of(n, kept):
    return torch.arange(n).expand(2, n) < torch.tensor(kept)[:, None]


def by_hand(q, k, v, *, grid, blocks, radius, prefix, suffix, degree, q_scale):
    """One query at a time, with the places and blocks of tokens as lists."""
    places = list(itertools.product(*(range(n) for n in grid)))
    starts = [[i * n // m for i in range(m + 1)] for n, m in zip(grid, blocks, strict=True)]
    block = [tuple(sum(x >= s for s in starts[a][1:]) for a, x in enumerate(place)) for place in places]
    same = {b: [prefix + j for j, c in enumerate(block) if c == b] for b in block}
    group, n, out = q.shape[2] // k.shape[2], q.shape[1], torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    on_grid = range(prefix, n - suffix)
    for i, h in itertools.product(range(n), range(q.shape[2])):
        s = q_scale * (q[:, i, h, None] * k[:, :, h // group]).sum(-1)
        w = s.exp()
        for j in on_grid if i in on_grid else ():
            if max(abs(x - y) for x, y in zip(places[i - prefix], places[j - prefix], strict=True)) > radius:
                a = s[:, same[block[j - prefix]]].mean(1)
                r = s[:, j] - a
                w[:, j] = a.exp() * sum(r**p / math.factorial(p) for p in range(degree + 1))
        out[:, i, h] = (w[..., None] * v[:, :, h // group]).sum(1) / w.sum(1, keepdim=True)
    return out


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_definition_by_hand(case, degree):
    x = setting(*(CASES[case][i] for i in (0, 3, 4)))
    assert_same(hk.multipole(*x, **options(case, degree), impl="reference"), by_hand(*x, **options(case, degree)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_definition_and_gradients(form, case, degree, masked):
    x = [t.requires_grad_() for t in setting(*(CASES[case][i] for i in (0, 3, 4)))]
    n = x[0].shape[1]
    more = {**options(case, degree), "key_padding_mask": mask_of(n, (n, n // 2)) if masked else None}
    y, wanted = hk.multipole(*x, **more), hk.multipole(*x, **more, impl="reference")
    assert y.is_contiguous()
    assert_same(y, wanted)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    for a, b in zip(torch.autograd.grad(y, x, weights), torch.autograd.grad(wanted, x, weights), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("near", [{"radius": 7, "blocks": (2, 2)}, {"radius": 0, "blocks": (7, 6)}])
def test_all_near_or_blocks_of_one_token_are_softmax(form, near):
    q, k, v = setting((7, 6), 1, 2)
    y = hk.multipole(q, k, v, grid=(7, 6), prefix=1, suffix=2, q_scale=0.7, **near)
    assert_same(y, hk.softmax_attention(q, k, v, scale=0.7))


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_error_to_softmax_is_of_the_next_order(degree):
    q, k, v = setting((8, 8), 0, 0)
    error = []
    for size in (0.02, 0.01):
        y = hk.multipole(size * q, k, v, grid=(8, 8), blocks=(2, 2), radius=1, degree=degree)
        error.append(float((y - hk.softmax_attention(size * q, k, v, scale=1.0)).abs().max()))
    assert 0.8 * 2 ** (degree + 1) < error[0] / error[1] < 1.2 * 2 ** (degree + 1)


def test_scores_of_any_size_give_an_average(form):
    """The divisor is positive and nothing overflows where softmax is one token alone."""
    more = {"grid": (8, 8), "blocks": (2, 2), "prefix": 1}
    q, k, v = setting((8, 8), 1, 0)
    assert_same(hk.multipole(100 * q, k, torch.ones_like(v), **more), torch.ones(2, 65, 4, 3).double())
    q, k, v = (t.float().requires_grad_() for t in (q, k, v))
    y = hk.multipole(100 * q, k, v, **more)
    assert all(t.isfinite().all() for t in (y, *torch.autograd.grad(y.square().sum(), (q, k, v))))


def test_memory_and_products(monkeypatch):
    """No tensor holds more than `PAIRS` numbers, forward and backward; as many products as the docstring says."""
    monkeypatch.setattr(multipole, "PAIRS", 2**17)
    x = [t.requires_grad_() for t in setting((32, 32), 0, 0, h=1, hk=1, d=16, dv=16, dtype=torch.float32)]
    with Allocated() as memory, FlopCounterMode(display=False) as counter:
        y = hk.multipole(*x, grid=(32, 32), blocks=(2, 2), radius=1, degree=2)
    forward = counter.get_total_flops() / (2 * x[0].shape[0])
    with Allocated() as backward:
        y.sum().backward()
    assert max(memory.largest, backward.largest) <= 4 * 2**17 < 4 * x[0].shape[0] * 1024**2
    assert 1 <= forward / (3 * 1024**2 * 16) < 1.01


def test_explain_and_compile(form):
    """One graph, forward and backward."""
    more = options("uneven")
    compiled = torch.compile(lambda *x: hk.multipole(*x, **more), backend="aot_eager", fullgraph=True)
    x = [t.requires_grad_() for t in setting((6, 7), 2, 1)]
    assert hk.explain("multipole", *x, **more).impl == "torch"
    y, wanted = compiled(*x), hk.multipole(*x, **more)
    assert_same(y, wanted)
    sums = [torch.autograd.grad(t.square().sum(), x) for t in (y, wanted)]
    for a, b in zip(*sums, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding(form, dtype):
    """At most twice the error of the definition in the same dtype, forward and backward, worst of three seeds."""
    more, ours, plain = options("uneven"), [0.0] * 4, [0.0] * 4
    for seed in range(3):
        x = setting((6, 7), 2, 1, dtype=dtype, seed=seed)
        truth = grads("reference", [t.double() for t in x], more)
        for errors, impl in ((ours, "torch"), (plain, "reference")):
            for i, (a, b) in enumerate(zip(grads(impl, x, more), truth, strict=True)):
                errors[i] = max(errors[i], l2_error(a, b))
    assert all(a <= 2 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_bits_are_the_same(form, degree):
    more = {"grid": (21, 4), "blocks": (2, 2), "prefix": 1, "radius": 3, "degree": degree}
    x = [t.to("cuda", torch.float16) for t in setting((21, 4), 1, 0, hk=4, d=48, dv=64)]
    runs = [grads("torch", x, more) for _ in range(8)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def grads(impl, x, more):
    x = [t.detach().clone().requires_grad_() for t in x]
    y = hk.multipole(*x, **more, impl=impl)
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), x)]


def test_what_is_padded_is_not_read(form):
    q, k, v = setting((6, 7), 2, 1)
    more, mask = options("uneven"), mask_of(45, (45, 20))
    y = hk.multipole(q, k, v, **more, key_padding_mask=mask)
    broken = [torch.where(mask[..., None, None], t, math.nan) for t in (q, k, v)]
    assert_same(hk.multipole(*broken, **more, key_padding_mask=mask), y)
    assert not y[1, 20:].any()
    x = [t.requires_grad_() for t in (q, k, v)]
    for impl in ("auto", "reference"):
        y = hk.multipole(*x, **more, key_padding_mask=mask_of(45, (45, 0)), impl=impl)
        assert not y[1].any() and all(t.isfinite().all() for t in torch.autograd.grad(y.square().sum(), x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_jit_trace(form, degree):
    """A trace of other tokens."""
    def call(q, k, v):
        return hk.multipole(q, k, v, **options("uneven", degree))

    traced = torch.jit.trace(call, setting((6, 7), 2, 1))
    x = setting((6, 7), 2, 1, seed=1)
    assert_same(traced(*x), call(*x))


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_an_empty_batch(form, degree):
    x = [t[:0].requires_grad_() for t in setting((6, 7), 2, 1)]
    y = hk.multipole(*x, **options("uneven", degree))
    assert y.shape == (0, 45, x[0].shape[2], x[2].shape[3])
    assert [t.shape for t in torch.autograd.grad(y.sum(), x)] == [t.shape for t in x]


def test_a_mixer_is_the_operator_on_rotated_tokens():
    q, k, v = setting((4, 6), 1, 0, hk=4, d=6, dv=6)
    mixer = build_mixer("multipole", 24, 4, 6, grid=(4, 6), prefix=1, dtype=torch.float64, radius=1)
    assert mixer.options.blocks == (2, 2) and mixer.layout == "2x2 of 4x6"
    ctx = Context(x=q, grid=(4, 6), prefix=1, rotate=lambda t: t.flip(-1) * torch.arange(6))
    more = {"grid": (4, 6), "blocks": (2, 2), "radius": 1, "prefix": 1, "q_scale": 6**-0.5}
    wanted = hk.multipole(ctx.rotate(q), ctx.rotate(k), v, **more, impl="reference")
    assert_same(mixer(q, k, v, ctx), wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"blocks": [2, 0]}, "blocks must be positive integers"),
        ({"blocks": [2]}, "one number for each of 2 axes"),
        ({"radius": -1}, "radius must be a number of tokens of at least 0, got -1"),
        ({"degree": 3}, "degree must be 0, 1 or 2, got 3"),
        ({"feature_map": "relu"}, "feature_map='identity', normalize=True"),
        ({"causal": True}, "two-sided only"),
        ({"radios": 1}, "radius"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer("multipole", 24, 3, 8, grid=(4, 4), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grid": (6, 6)}, "needs 39 tokens, got 45"),
        ({"blocks": (7, 7)}, "more blocks than tokens"),
        ({"degree": True}, "degree must be 0, 1 or 2"),
        ({"radius": 1.5}, "radius must be a number of tokens"),
        ({"impl": "triton"}, "cannot run here"),
        ({"impl": "fast"}, "impl"),
        ({"q_scale": math.inf}, "q_scale must be a finite number"),
    ],
)
def test_calls_that_are_refused(options, sentence):
    more = {"grid": (6, 7), "blocks": (2, 3), "prefix": 2, "suffix": 1, **options}
    with pytest.raises(ValueError, match=sentence):
        hk.multipole(*setting((6, 7), 2, 1), **more)
