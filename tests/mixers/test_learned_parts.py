"""Learned parameters of mixers away from their initial values, against explicit formulas."""

import math

import pytest
import torch

from hla_kernels import op
from tests.helpers.mixers import DIM, HEAD_DIM, HEADS, inputs
from zoo.mixers import MIXERS, Context, build_mixer
from zoo.mixers.base import LEARNED_MAPS
from zoo.mixers.layers import Power

B, N, H, D, C = 2, 13, 3, 4, 12
SERIAL = ("la", "hla2", "ahla", "hla3")


def setting(name: str, **options):
    """A float64 mixer with random parameters, and q, k, v, ctx for it."""
    torch.manual_seed(0)
    mixer = build_mixer(name, C, H, D, dtype=torch.float64, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    q, k, v = (torch.randn(B, N, H, D, dtype=torch.float64) for _ in range(3))
    return mixer, q, k, v, Context(x=torch.randn(B, N, C, dtype=torch.float64), grid=(3, 4), prefix=1)


def causal_weights(name: str, q: torch.Tensor, k: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """W [B, H, N, N] of o_t = sum_j W_tj v_j with a decay gamma [H], summed token by token."""
    a = torch.einsum("bthd,bjhd->bhtj", q, k)
    w1, w2 = torch.zeros_like(a), torch.zeros_like(a)
    for t in range(N):
        for j in range(t + 1):
            w1[..., t, j] = gamma ** (t - j) * a[..., t, j]
            for i in range(j + 1):
                w2[..., t, j] += gamma ** (t - i) * a[..., t, i] * a[..., j, i]
    return {"la": w1, "ahla": w1 @ w1, "hla2": w2, "hla3": w2 @ w1}[name]


def ratio(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhtj,bjhd->bthd", w / w.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("name", SERIAL)
def test_learned_decay_is_one_number_a_head(name):
    mixer, q, k, v, ctx = setting(name, feature_map="elu1", causal=True, decay=0.9)
    gamma = 1 / (1 + (-mixer.decay_logit.detach()).exp())
    elu1 = torch.nn.functional.elu
    expected = ratio(causal_weights(name, elu1(q) + 1, elu1(k) + 1, gamma), v)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-6, atol=1e-6)


def test_the_initial_decay_is_the_one_asked_for():
    mixer = build_mixer("la", C, H, D, causal=True, decay=0.999, dtype=torch.bfloat16)
    torch.testing.assert_close(mixer.decay(), torch.full((H,), 0.999), rtol=1e-5, atol=0)


def test_a_runaway_decay_stays_in_range():
    mixer, q, k, v, ctx = setting("la", causal=True, decay=0.9)
    torch.nn.init.constant_(mixer.decay_logit, -1000.0)
    assert torch.isfinite(mixer(q, k, v, ctx)).all()


@pytest.mark.parametrize("name", SERIAL)
def test_both_scans_with_a_rotation_turn_each_token_by_its_own_position(name):
    mixer, q, k, v, ctx = setting(name, feature_map="elu1", causal=True, scan="both")
    angle = torch.linspace(0, 1.5, N, dtype=torch.float64)[None, :, None]

    def rotate(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = angle[..., None].cos(), angle[..., None].sin()
        return torch.stack([c * even - s * odd, s * even + c * odd], -1).flatten(-2)

    phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    ones, expected = torch.ones(H, dtype=torch.float64), 0
    for flip in (lambda x: x, lambda x: x.flip(1)):
        num = causal_weights(name, flip(rotate(phi_q)), flip(rotate(phi_k)), ones)
        den = causal_weights(name, flip(phi_q), flip(phi_k), ones).sum(-1, keepdim=True)
        expected = expected + flip(torch.einsum("bhtj,bjhd->bthd", num / den, flip(v))) / 2
    turned = Context(x=ctx.x, grid=ctx.grid, prefix=1, rotate=rotate)
    torch.testing.assert_close(mixer(q, k, v, turned), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SERIAL)
@pytest.mark.parametrize("normalize", [False, True])
def test_both_scans_count_a_token_once_and_ratios_are_averaged(name, normalize):
    mixer, q, k, v, ctx = setting(name, feature_map="elu1", normalize=normalize, causal=True, scan="both", decay=0.9)
    phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    gamma = mixer.decay().double().detach()
    there = causal_weights(name, phi_q, phi_k, gamma)
    back = causal_weights(name, phi_q.flip(1), phi_k.flip(1), gamma).flip(-1, -2)
    if normalize:
        weights = sum(w / w.sum(-1, keepdim=True) for w in (there, back)) / 2
    else:
        alone = (phi_q * phi_k).sum(-1).mT ** {"la": 1, "hla3": 3}.get(name, 2)
        weights = there + back - torch.diag_embed(alone)
    expected = torch.einsum("bhtj,bjhd->bthd", weights, v)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-6, atol=1e-6)


def test_hedgehog_projects_each_head_by_its_matrix():
    mixer, q, k, v, ctx = setting("la", feature_map="hedgehog")

    def phi(x, weight):
        y = torch.stack([x[:, :, h] @ weight[h] for h in range(H)], 2)
        return torch.cat([(s * y).exp() / (s * y).exp().sum(-1, keepdim=True) for s in (1, -1)], -1)

    a = torch.einsum("bthd,bjhd->bhtj", phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight))
    torch.testing.assert_close(mixer(q, k, v, ctx), ratio(a, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["la", "ahla"])
def test_power_turns_the_positive_parts_of_each_head_and_keeps_their_length(name):
    mixer, q, k, v, ctx = setting(name)
    k[:, 3] = -k[:, 3].abs()  # a token without a positive part

    def phi(x, weight):
        out = torch.zeros_like(x)
        for h in range(H):
            y = x[:, :, h].clamp(min=0)
            raised = y ** (1 + 4 / (1 + (-weight[h]).exp()))
            out[:, :, h] = (y.norm(dim=-1) / raised.norm(dim=-1)).nan_to_num(0)[..., None] * raised
        return out

    a = torch.einsum("bthd,bjhd->bhtj", phi(q, mixer.phi_q.weight), phi(k, mixer.phi_k.weight))
    w = a if name == "la" else a @ a / N
    expected = ratio(w, v).nan_to_num(0)  # a query without a positive part gets nothing
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-6, atol=1e-6)
    mixer(q.requires_grad_(), k.requires_grad_(), v, ctx).square().sum().backward()
    for x in (q, k, mixer.phi_q.weight, mixer.phi_k.weight):
        assert x.grad.isfinite().all() and x.grad.abs().max() > 0


OF_POWER = [name for name in MIXERS if getattr(MIXERS[name].defaults, "feature_map", "") == "power"]


@pytest.mark.parametrize("name", OF_POWER)
def test_operators_take_the_features_of_power_as_they_are(monkeypatch, name):
    """A relu after them changes nothing, neither in outputs nor in gradients."""
    layout = {"grid": (4, 4)} if MIXERS[name].defaults.needs_grid else {}
    mixer = build_mixer(name, DIM, HEADS, HEAD_DIM, dtype=torch.float64, **layout)
    tokens = [x[:, :16].detach().requires_grad_() for x in inputs()[:3]]
    ctx, maps, choose = Context(x=inputs()[3].x[:, :16], grid=(4, 4)), set(), op.choose
    monkeypatch.setattr(op, "choose", lambda call, impl: maps.add(call.options.feature_map) or choose(call, impl))
    found = []
    for inner in ("identity", "relu"):
        monkeypatch.setitem(LEARNED_MAPS, "power", inner)
        y = mixer(*tokens, ctx)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*tokens, *mixer.phi_q.parameters()])])
        assert maps <= {None, inner}
        maps.clear()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_power_starts_at_the_exponent_asked_for():
    torch.testing.assert_close(Power(2).power, torch.full((2,), 3.0))
    torch.testing.assert_close(build_mixer("hla3", C, H, D).phi_q.power, torch.full((H,), 4.0))
    torch.testing.assert_close(build_mixer("la", C, H, D, exponent=1.5).phi_k.power, torch.full((H,), 1.5))


def test_power_takes_one_exponent_per_head():
    part, wanted = Power(3), torch.tensor([1.25, 2.0, 4.5])
    part.set(wanted)
    torch.testing.assert_close(part.power, wanted)


def test_power_does_not_overflow():
    part = Power(2)
    x = torch.tensor([6e4, 3e4, -1.0]).half().expand(1, 1, 2, 3)
    y = x.double().clamp(min=0)
    expected = y**3 * (y.norm(dim=-1) / (y**3).norm(dim=-1))[..., None]
    torch.testing.assert_close(part(x), expected.half(), rtol=1e-3, atol=0)


def test_norm_and_gate_act_on_heads_and_channels():
    mixer, q, k, v, ctx = setting("la", post_norm=True, gate=True)
    bare = build_mixer("la", C, H, D, dtype=torch.float64)
    bare.load_state_dict({name: p for name, p in mixer.state_dict().items() if name.startswith("phi")})
    plain = bare(q, k, v, ctx)
    rms = (plain.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gate = 2 / (1 + (-(ctx.x @ mixer.gate.weight.T + mixer.gate.bias)).exp())
    expected = plain / rms * mixer.norm.weight * gate.reshape(B, N, H, D)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected)


@pytest.mark.parametrize("feature_map", ["softmax", "softmax_pair", "elu1"])
@pytest.mark.parametrize("name", ["la", "hla2", "ahla", "hla3"])
def test_a_ratio_mixer_averages_also_with_wide_heads(name, feature_map):
    torch.manual_seed(1)
    mixer = build_mixer(name, 128, 1, 128, feature_map=feature_map)
    q, k = torch.randn(1, 197, 1, 128), torch.randn(1, 197, 1, 128)
    ones = torch.ones_like(q)
    o = mixer(q, k, ones, Context(x=torch.zeros(1, 197, 128)))
    torch.testing.assert_close(o, ones, rtol=5e-3, atol=0)


def test_positive_coefficients_weigh_the_four_orders():
    mixer, q, k, v, ctx = setting("poly", feature_map="softmax")
    a = torch.einsum("bthd,bjhd->bhtj", q.softmax(-1), k.softmax(-1)) / N
    c = (mixer.coefficients.exp() + 1).log()[:, :, None, None]
    w = c[:, 0] * a + c[:, 1] * a @ a.mT + c[:, 2] * a @ a + c[:, 3] * a @ a.mT @ a
    torch.testing.assert_close(mixer(q, k, v, ctx), ratio(w, v), rtol=1e-6, atol=1e-6)
    assert math.isclose(float(c.min()), float(torch.nn.functional.softplus(mixer.coefficients).min()))
