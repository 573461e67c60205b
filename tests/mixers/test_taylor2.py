"""`taylor2` against its definition and against softmax, and the gains of all mixers."""

import pytest
import torch

from tests.helpers.mixers import DIM, GRID, HEAD_DIM, HEADS, PREFIX, inputs, make, options_of
from zoo.mixers import MIXERS, Context, build_mixer


def weights(q, k, width=None):
    """Raw Taylor weights 1 + s + r^2 / 2 [B, H, N, N] of centred scores s; r uses the first channels only."""
    k = k - k.mean(1, keepdim=True)
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * HEAD_DIM**-0.5
    r = s if width is None else torch.einsum("bnhd,bmhd->bhnm", q[..., :width], k[..., :width]) * HEAD_DIM**-0.5
    return 1 + s + r**2 / 2


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_it_is_the_average_with_taylor_weights(width, turned):
    q, k, v, ctx = inputs()
    rotate = (lambda t: t.roll(1, -1) * 1.3) if turned else None
    found = make("taylor2", width=width)(q, k, v, Context(x=ctx.x, rotate=rotate))
    w = weights(rotate(q), rotate(k), width) if turned else weights(q, k, width)
    wanted = torch.einsum("bhnm,bmhd->bnhd", w / w.sum(-1, keepdim=True), v)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", [True, False])
def test_it_is_softmax_to_second_order(normalize):
    q, k, v, ctx = inputs(2)
    soft, ours = make("softmax"), make("taylor2", normalize=normalize)
    errors = [(soft(s * q, k, v, ctx) - ours(s * q, k, v, ctx)).abs().max() for s in (0.05, 0.025)]
    assert 6 < errors[0] / errors[1] < 10  # halving q divides a third-order remainder by eight


@pytest.mark.parametrize("width", [None, 3])
def test_options_parameters_and_padding(width):
    q, k, v, ctx = inputs(3)
    mixer = make("taylor2", width=width, depthwise="v", gate=True, post_norm=True, gains=True)
    for p in mixer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    mixer(q, k, v, ctx).square().sum().backward()
    idle = {n for n, p in mixer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert not idle and mixer.gains.temperature is None  # there is no feature map to warm
    plain = make("taylor2", width=width, gains=True)
    mask = torch.arange(q.shape[1]).expand(2, -1) < 13
    found = plain(q, k, v, Context(x=ctx.x, key_padding_mask=mask))
    alone = plain(*(t[:, :13] for t in (q, k, v)), Context(x=ctx.x[:, :13]))
    torch.testing.assert_close(found[:, :13], alone, rtol=1e-9, atol=1e-9)
    assert not bool(found[:, 13:].any())


def test_set_coefficients_are_those_of_the_operator():
    q, k, v, ctx = inputs(4)
    mixer = make("taylor2")
    mixer.set_coefficients(torch.tensor([[0.0, 1.0]] * HEADS, dtype=torch.float64))
    s = weights(q, k) - 1
    first = torch.einsum("bnhd,bmhd->bhnm", q, k - k.mean(1, keepdim=True)) * HEAD_DIM**-0.5
    w = 1 + s - first
    wanted = torch.einsum("bhnm,bmhd->bnhd", w / w.sum(-1, keepdim=True), v)
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"causal": True}, "two-sided only"),
        ({"feature_map": "relu"}, "are fixed, got 'relu'"),
        ({"center": None}, "are fixed"),
        ({"width": 0}, "width must be a positive number"),
        ({"width": HEAD_DIM + 1}, "width must be at most 8, the channels per head"),
        ({"coefficients": (1.0,)}, "two numbers c1, c2"),
        ({"ridge": 0.1}, "ridge is defined for"),
        ({"wdith": 4}, "Did you mean 'width'"),
    ],
)
def test_bad_options_say_what_is_allowed(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer("taylor2", DIM, HEADS, HEAD_DIM, **options)


@pytest.mark.parametrize("name", [name for name in MIXERS if options_of(name, gains=True)])
def test_gains_are_neutral_at_first_and_then_an_affine_map_of_each_head(name):
    q, k, v, _ = inputs(5)
    ctx = Context(x=torch.zeros(2, q.shape[1], DIM, dtype=q.dtype), grid=GRID, prefix=PREFIX)
    plain, gained = make(name), make(name, gains=True)
    torch.testing.assert_close(gained(q, k, v, ctx), plain(q, k, v, ctx), rtol=0, atol=0)
    gained.gains.set(torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.3, 0.0, -1.0]), torch.tensor([2.0, 1.0, 0.5]))
    warm = torch.tensor([2.0, 1.0, 0.5])[:, None] if plain.options.feature_map != "identity" else 1.0
    wanted = (
        plain(warm * q, warm * k, v, ctx) * gained.gains.gain[:, None]
        + v.mean(1, keepdim=True) * (gained.gains.shift[:, None])
    )
    torch.testing.assert_close(gained(q, k, v, ctx), wanted, rtol=1e-9, atol=1e-9)


def test_causal_mixers_have_no_gains():
    with pytest.raises(ValueError, match="mean value of all tokens"):
        make("la", causal=True, gains=True)
