"""Second-order Taylor attention: both product orders against the definition, and against softmax."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hla_kernels as hk
from hla_kernels.softmax.taylor import torch_form as forms
from hla_kernels.softmax.taylor.reference import reference
from tests.ops.cases import assert_same, l2_error, tokens

FORMS = {"by state": True, "by tokens": False}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request, monkeypatch):
    """One order of the products, in blocks of a few tokens."""
    monkeypatch.setattr(forms, "by_state", lambda *sizes: request.param)
    monkeypatch.setattr(forms, "BLOCK", 1)
    return request.param


def setting(n=37, h=4, n_key=2, d=5, dv=3, r=None, dtype=torch.float64, seed=0):
    """q, k, v, coefficients, and the narrow pair or None; the keys have a common mean, as in trained models."""
    q, k, v = tokens(n, h=h, hk=n_key, d=d, dv=dv, dtype=dtype, seed=seed)
    c = torch.tensor([[1.0, 1.0], [0.7, 0.4], [1.3, 0.0], [0.9, 2.0]], dtype=dtype)[:h]
    narrow = None if r is None else tokens(n, h=h, hk=n_key, d=r, dv=1, dtype=dtype, seed=seed + 9)[:2]
    return q, k + 1, v, c, narrow


def mask_of(n, kept):
    return torch.arange(n).expand(2, n) < torch.tensor(kept)[:, None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("r", [None, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_definition_and_gradients(form, normalize, r, masked):
    n = 37
    q, k, v, c, narrow = setting(n, r=r)
    mask = mask_of(n, (n, 20)) if masked else None
    inputs = [t.requires_grad_() for t in (q, k, v, c, *(narrow or ()))]
    y = hk.taylor2(q, k, v, c, narrow=narrow, normalize=normalize, q_scale=0.4, key_padding_mask=mask)
    wanted = reference(q, k, v, c, narrow, normalize, 0.4, mask)
    assert y.is_contiguous()
    assert_same(y, wanted)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    for a, b in zip(torch.autograd.grad(y, inputs, weights), torch.autograd.grad(wanted, inputs, weights), strict=True):
        assert_same(a, b)


def test_the_ratio_is_the_average_with_taylor_weights():
    """Written out with raw weights 1 + s + s^2 / 2 of the centred scores."""
    q, k, v, _, _ = setting(n_key=4)
    s = torch.einsum("bnhd,bmhd->bhnm", q, k - k.mean(1, keepdim=True))
    w = 1 + s + s**2 / 2
    wanted = torch.einsum("bhnm,bmhd->bnhd", w / w.sum(-1, keepdim=True), v)
    assert_same(hk.taylor2(q, k, v, torch.ones(4, 2, dtype=torch.float64)), wanted)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_error_to_softmax_is_of_third_order(normalize):
    q, k, v, _, _ = setting()
    c, error = torch.ones(4, 2, dtype=torch.float64), []
    for size in (0.02, 0.01):
        soft = hk.softmax_attention(size * q, k, v, scale=1.0)
        error.append(float((hk.taylor2(size * q, k, v, c, normalize=normalize) - soft).abs().max()))
    assert 6.5 < error[0] / error[1] < 9.5  # a third-order remainder: halving q divides it by eight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding(form, dtype):
    """At most twice the error of the definition in the same dtype, forward and backward, worst of three seeds."""
    ours, plain = [0.0] * 4, [0.0] * 4
    for seed in range(3):
        *inputs, _ = setting(70, d=8, dv=8, dtype=dtype, seed=seed)
        truth = _grads(lambda *x: reference(*x, None, True, 0.35), [t.double() for t in inputs])
        for errors, f in (
            (ours, lambda *x: hk.taylor2(*x, q_scale=0.35)),
            (plain, lambda *x: reference(*x, None, True, 0.35)),
        ):
            for i, (a, b) in enumerate(zip(_grads(f, inputs), truth, strict=True)):
                errors[i] = max(errors[i], l2_error(a, b))
    for name, a, b in zip(("o", "dq", "dk", "dv"), ours, plain, strict=True):
        assert a <= 2 * b, (name, a, b)


def _grads(f, inputs):
    q, k, v, c = inputs
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    y = f(*x, c)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, x, weights)]


def test_both_orders_are_chosen_by_their_cost():
    assert not forms.by_state(197, 64, 0, 64) and forms.by_state(4096, 64, 0, 64)
    assert forms.by_state(197, 64, 16, 64)

    def flops(n: int, d: int) -> int:
        q, k, v, c, _ = setting(n, d=d, dv=d, n_key=4, dtype=torch.float32)
        with FlopCounterMode(display=False) as outside:
            hk.taylor2(q, k, v, c)
        with FlopCounterMode(display=False) as inside:
            forms.evaluate((q, k, v), c, None, True, 1.0)
        assert outside.get_total_flops() == inside.get_total_flops()
        return outside.get_total_flops()

    assert flops(600, 8) == 2 * flops(300, 8)  # by state: linear
    assert flops(64, 32) == 4 * flops(32, 32)  # by tokens: quadratic


def test_packed():
    """qkv in one tensor: the values, gradients and operations of the three."""
    qkv = torch.stack(setting(n_key=4, d=5, dv=5)[:3], 2).requires_grad_()
    c = setting()[3].requires_grad_()
    x = [t.requires_grad_() for t in (*qkv.detach().unbind(2), c)]
    found = []
    for f, inputs in ((lambda: hk.taylor2(*x), x), (lambda: hk.taylor2_qkvpacked(qkv, c), (qkv, c))):
        with FlopCounterMode(display=False) as counter:
            y = f()
            found.append([y, *torch.autograd.grad(y.sum(), inputs), counter.get_total_flops()])
    (y, dq, dk, dv, dc, flops), (z, dqkv, dcp, same) = found
    torch.testing.assert_close((y, torch.stack((dq, dk, dv), 2), dc), (z, dqkv, dcp), rtol=0, atol=0)
    assert flops == same > 0
    assert hk.explain("taylor2", qkv, c).impl == "torch"
    with pytest.raises(ValueError, match="qkv must have shape"):
        hk.taylor2_qkvpacked(x[0], c)


@pytest.mark.parametrize("r", [None, 3])
def test_citizen(r):
    """opcheck, compile with changing N, autocast, meta tensors."""
    q, k, v, c, narrow = setting(r=r, dtype=torch.float32)
    for t in (q, k, v, c, *(narrow or ())):
        t.requires_grad_()
    torch.library.opcheck(torch.ops.hla_kernels.taylor2, (q, k, v, c, *(narrow or (None, None)), None, True, 0.5))
    compiled = torch.compile(
        lambda q, k, v, *n: hk.taylor2(q, k, v, c, narrow=n or None), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n in (37, 20):
        part = [t[:, :n] for t in (q, k, v, *(narrow or ()))]
        torch.testing.assert_close(compiled(*part), hk.taylor2(*part[:3], c, narrow=tuple(part[3:]) or None))
    with torch.autocast("cpu", torch.bfloat16):
        y = hk.taylor2(q, k, v, c, narrow=narrow)
    assert y.dtype == torch.bfloat16
    meta = hk.taylor2(*(t.to("meta") for t in (q, k, v, c)))
    assert meta.shape == y.shape and meta.is_meta


def test_explain_and_refusals():
    q, k, v, c, narrow = setting(r=3)
    assert hk.explain("taylor2", q, k, v, c).impl == "torch"
    assert_same(hk.taylor2(q, k, v, c, narrow=narrow, impl="reference"), hk.taylor2(q, k, v, c, narrow=narrow))
    for change, sentence in (
        ({"impl": "triton"}, "run on CUDA devices"),
        ({"q_scale": float("nan")}, "q_scale must be a finite number"),
        ({"normalize": 1}, "normalize must be True or False"),
        ({"narrow": (q[:, :5, :, :2], k[..., :2])}, "same number of tokens|narrow must have"),
        ({"narrow": q}, "narrow must be two tensors"),
    ):
        with pytest.raises(ValueError, match=sentence):
            hk.taylor2(q, k, v, c, **change)
    with pytest.raises(ValueError, match=r"shape \[heads, 2\] = \[4, 2\]"):
        hk.taylor2(q, k, v, c[:, :1])
