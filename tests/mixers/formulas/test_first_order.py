"""mala, rala and inline against their published formulas, written as N x N matrices in float64."""

import pytest
import torch

from tests.helpers.first_order import HK, D, H, N, phi, scores, setting, turn
from zoo.mixers import Context


def average(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhtj,bjhd->bthd", w, v.repeat_interleave(H // HK, 2))


def test_mala_is_equation_13():
    """beta A - gamma with beta = 1 + 1 / S, gamma = S / N, S the sum of a row (MALA, arXiv 2507.00698, Eq. 13)."""
    mixer, q, k, v, ctx = setting("mala")
    a = D**-0.5 / N * scores(phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight))
    total = a.sum(-1, keepdim=True)
    expected = average((1 + 1 / total) * a - total / N, v)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-6, atol=1e-6)


def test_mala_depends_on_the_length_of_the_query_and_la_does_not():
    (mala, q, k, v, ctx), (la, *_) = setting("mala"), setting("la")
    torch.testing.assert_close(la(3 * q, k, v, ctx), la(q, k, v, ctx), rtol=1e-6, atol=1e-6)
    change = (mala(3 * q, k, v, ctx) - mala(q, k, v, ctx)).norm() / mala(q, k, v, ctx).norm()
    assert change > 0.1


def test_mala_with_a_rotation():
    """The ratio of `la`, whose denominator is not rotated, and first order with the centred rotated keys."""
    mixer, q, k, v, ctx = setting("mala")
    fq, fk = phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight)
    turned, plain = scores(turn(fq), turn(fk)), scores(fq, fk)
    w = turned / plain.sum(-1, keepdim=True) + D**-0.5 / N * (turned - turned.mean(-1, keepdim=True))
    found = mixer(q, k, v, Context(x=ctx.x, rotate=turn))
    torch.testing.assert_close(found, average(w, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_rala_is_equations_6_to_9(rotated):
    """Keys times N softmax(mean query . key), the output times a function of x (RALA, arXiv 2411.07635, Eq. 6 to 9)."""
    mixer, q, k, v, ctx = setting("rala")
    fq, fk = phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight)
    mean = fq.mean(1, keepdim=True).unflatten(2, (HK, -1)).mean(3)  # over the tokens and the heads that share keys
    alpha = N * (D**-0.5 * (mean * fk).sum(-1, keepdim=True)).softmax(1)
    weighed = alpha * fk
    numerator = scores(turn(fq), turn(weighed)) if rotated else scores(fq, weighed)
    gate = 2 / (1 + (-(ctx.x @ mixer.gate.weight.T + mixer.gate.bias)).exp()).unflatten(-1, (H, D))
    expected = gate * average(numerator / scores(fq, weighed).sum(-1, keepdim=True), v)
    found = mixer(q, k, v, Context(x=ctx.x, rotate=turn if rotated else None))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_inline_is_equation_5(rotated):
    """Weights (s - mean s + 1) / N that sum to one (InLine, arXiv 2412.06590, Eq. 5)."""
    mixer, q, k, v, ctx = setting("inline")
    s = D**-0.5 * (scores(turn(q), turn(k)) if rotated else scores(q, k))
    w = (s - s.mean(-1, keepdim=True) + 1) / N
    torch.testing.assert_close(w.sum(-1), torch.ones_like(w[..., 0]))
    found = mixer(q, k, v, Context(x=ctx.x, rotate=turn if rotated else None))
    torch.testing.assert_close(found, average(w, v), rtol=1e-9, atol=1e-9)


def test_causal_inline_does_not_see_the_future():
    mixer, q, k, v, ctx = setting("inline", causal=True, post_norm=True)
    ctx = Context(x=ctx.x, grid=(1, N))
    before = mixer(q, k, v, ctx)
    for changed in (q, k, v):
        changed[:, 11:] += 1.0
    torch.testing.assert_close(mixer(q, k, v, ctx)[:, :11], before[:, :11], rtol=1e-12, atol=1e-12)
