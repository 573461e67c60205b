"""Mixers with a linear solve, mesa and resolvent: independent formulas and numerical limits."""

import numpy as np
import pytest
import torch

from tests.helpers.first_order import HK, B, C, D, H, N, phi, scores, setting, turn
from zoo.mixers import Context, build_mixer
from zoo.mixers.base import EPS


@pytest.mark.parametrize("rotated", [False, True])
def test_mesa_is_ridge_regression_of_the_values_on_the_keys(rotated):
    """MesaNet, arXiv 2506.05233, Eq. 6: argmin over W of |K W - V|^2 + lambda |W|^2, read at q; by numpy's lstsq."""
    mixer, q, k, v, ctx = setting("mesa")
    found = mixer(q, k, v, Context(x=ctx.x, rotate=turn if rotated else None)).detach()
    q, k = phi(q, mixer.phi_q.weight).detach(), phi(k, mixer.phi_k.weight).detach()
    q, k = (turn(q), turn(k)) if rotated else (q, k)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, :, h // 2].numpy(), v[b, :, h // 2].numpy()
            ridge = mixer.log_ridge[h // 2].exp().item() * np.square(keys).sum() / D + N * EPS  # mean of diag K'K
            rows = np.concatenate([keys, np.sqrt(ridge) * np.eye(D)])
            solution = np.linalg.lstsq(rows, np.concatenate([values, np.zeros((D, D))]), rcond=None)[0]
            np.testing.assert_allclose(found[b, :, h].numpy(), q[b, :, h].numpy() @ solution, rtol=1e-9, atol=1e-9)


def test_mesa_without_a_ridge_returns_the_values_of_its_keys():
    """D independent keys: a query that equals a key reads that key's value."""
    torch.manual_seed(1)
    mixer = build_mixer("mesa", C, H, D, dtype=torch.float64, feature_map="elu1", ridge=1e-8)
    k, v = (torch.randn(B, D, H, D, dtype=torch.float64) for _ in range(2))
    k = k + 5 * torch.eye(D, dtype=torch.float64)[:, None]
    torch.testing.assert_close(mixer(k, k, v, Context(x=k)), v, rtol=1e-4, atol=1e-4)


def test_ridge_and_share_start_as_asked_for():
    mesa, resolvent = build_mixer("mesa", C, H, D, ridge=0.25), build_mixer("resolvent", C, H, D, share=0.8)
    torch.testing.assert_close(mesa.log_ridge.exp(), torch.full((H,), 0.25))
    torch.testing.assert_close(resolvent.share_logit.sigmoid(), torch.full((H,), 0.8))


def resolvent_weights(mixer, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A [B, H, N, N], whose rows sum to one, and c [H, 1, 1]."""
    a = scores(phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight))
    return a / a.sum(-1, keepdim=True), (1 / (1 + (-mixer.share_logit).exp()))[:, None, None]


def test_resolvent_is_the_series_of_all_orders():
    mixer, q, k, v, ctx = setting("resolvent")
    a, c = resolvent_weights(mixer, q, k)
    v_heads = v.repeat_interleave(H // HK, 2).transpose(1, 2)
    power, by_series = v_heads, 0
    for p in range(400):  # c is at most 0.9 here: what is left is below 1e-18
        power = a @ power
        by_series = by_series + (1 - c) * c**p * power
    by_solve = (1 - c) * torch.linalg.solve(torch.eye(N, dtype=a.dtype) - c * a, a @ v_heads)
    found = mixer(q, k, v, ctx).transpose(1, 2)
    assert c.max() < 0.9
    torch.testing.assert_close(found, by_series, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, by_solve, rtol=1e-6, atol=1e-6)


def test_resolvent_averages():
    mixer, q, k, v, ctx = setting("resolvent", feature_map="elu1")
    torch.testing.assert_close(mixer(q, k, torch.ones_like(v), ctx), torch.ones_like(q), rtol=1e-6, atol=1e-6)


def test_resolvent_refuses_a_rotary_host():
    mixer, q, k, v, ctx = setting("resolvent")
    with pytest.raises(ValueError, match="rotary embedding"):
        mixer(q, k, v, Context(x=ctx.x, rotate=turn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "parameter"), [("mesa", "log_ridge"), ("resolvent", "share_logit")])
@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_a_runaway_parameter_leaves_the_output_finite(name, parameter, value, dtype):
    """Also with fewer tokens than channels, where K'K has no inverse, and for a head without a positive key."""
    torch.manual_seed(2)
    mixer = build_mixer(name, C, H, 32, dtype=dtype)
    torch.nn.init.constant_(getattr(mixer, parameter), value)
    for n in (7, 200):
        q, k, v = (torch.randn(B, n, H, 32) for _ in range(3))
        k[:, :, 0] = -k[:, :, 0].abs()
        q, k, v = (t.to(dtype).requires_grad_() for t in (q, k, v))
        o = mixer(q, k, v, Context(x=q))
        o.float().square().sum().backward()
        assert o.isfinite().all() and all(t.grad.isfinite().all() for t in (q, k, v))
