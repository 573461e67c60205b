"""Delta-rule mixers against their recurrences, and the orders in which they read a grid."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.mixers import DELTA, DIM, HEAD_DIM, HEADS
from zoo.mixers import Context, build_mixer
from zoo.mixers.scans import Order

GRID = (2, 3)


def mixer_of(name, seed=0, **options):
    """A float64 mixer whose parameters are all random."""
    torch.manual_seed(seed)
    mixer = build_mixer(name, DIM, HEADS, HEAD_DIM, grid=GRID, **options).double()
    for p in mixer.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return mixer


def tokens(n=6, heads=HEADS, prefix=0, suffix=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, h, HEAD_DIM, generator=g, dtype=torch.float64) for h in (HEADS, heads, heads))
    x = torch.randn(2, n, DIM, generator=g, dtype=torch.float64)
    return q, k, v, Context(x, GRID, prefix, suffix)


def rule(name, mixer, x, k):
    """(f [B, N, H, D or 1], beta, factor of the written value, [B, N, H, 1] each) from the hidden states."""
    ones = torch.ones(*k.shape[:3], 1, dtype=k.dtype)
    beta = 0 * ones
    if hasattr(mixer, "beta"):
        beta = torch.sigmoid(x @ mixer.beta.weight.T + mixer.beta.bias).unsqueeze(-1)
    if name == "retnet":
        return (1 - 2.0 ** (-5 - 8 * torch.arange(HEADS, dtype=torch.float64) / HEADS))[:, None] * ones, beta, ones
    if name in ("gla", "hdla"):
        f = torch.sigmoid(mixer.forget.up(mixer.forget.down(x))).unflatten(-1, (HEADS, HEAD_DIM))
        return (f ** (1 / 16), beta, ones) if name == "gla" else (f, 2 * beta, ones)
    if name == "deltanet":
        return ones, beta, beta
    dt = F.softplus(x @ mixer.step.weight.T + mixer.step.bias).unsqueeze(-1)
    f = torch.exp(-mixer.step.log_rate.exp()[:, None] * dt)
    return (f, beta, dt) if name == "mamba2" else (f, beta, beta)


def step(name, state, key, v, f, beta, factor):
    """The state after a token, from its key, value and `rule` [B, H, .]."""
    decay, b = f[..., None], beta[..., None]
    householder = torch.eye(HEAD_DIM, dtype=key.dtype) - b * key.unsqueeze(-1) * key.unsqueeze(-2)
    state = householder @ (decay * (householder @ state)) if name == "hdla" else decay * (householder @ state)
    return state + (factor * key).unsqueeze(-1) * v.unsqueeze(-2)


def by_token(name, mixer, q, k, v, x, order, activation=F.silu):
    """The recurrence along an order, then norm and gate, as the publications have them."""
    q, k, v = (activation(t) for t in (q, k, v))
    k = k if name in ("gla", "mamba2", "retnet") else k / k.norm(dim=-1, keepdim=True)
    f, beta, factor = rule(name, mixer, x, k)
    state, out = torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM, dtype=q.dtype), torch.empty_like(q)
    for t in order:
        state = step(name, state, k[:, t], v[:, t], f[:, t], beta[:, t], factor[:, t])
        out[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2) * HEAD_DIM**-0.5
    return out


def finish(mixer, out, x):
    normed = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    return normed * 2 * torch.sigmoid(x @ mixer.gate.weight.T + mixer.gate.bias).view_as(out)


RASTER, COLUMNS = [0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize(("layer", "order"), list(enumerate((RASTER, RASTER[::-1], COLUMNS, COLUMNS[::-1], RASTER))))
def test_recurrence_in_the_direction_of_the_layer(name, layer, order):
    mixer = mixer_of(name, layer_index=layer, depthwise="")
    q, k, v, ctx = tokens()
    expected = finish(mixer, by_token(name, mixer, q, k, v, ctx.x, order), ctx.x)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-7, atol=1e-8)


def test_recurrence_without_activation():
    mixer = mixer_of("gla", scan="raster", depthwise="", activation="identity")
    q, k, v, ctx = tokens()
    expected = finish(mixer, by_token("gla", mixer, q, k, v, ctx.x, RASTER, activation=lambda t: t), ctx.x)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", DELTA)
def test_both_directions_count_a_token_once(name):
    mixer = mixer_of(name, scan="both", depthwise="")
    q, k, v, ctx = tokens()
    there, back = (by_token(name, mixer, q, k, v, ctx.x, order) for order in (RASTER, RASTER[::-1]))
    alone = torch.stack([by_token(name, mixer, q, k, v, ctx.x, [t])[:, t] for t in range(6)], 1)
    torch.testing.assert_close(
        mixer(q, k, v, ctx), finish(mixer, there + back - alone, ctx.x), rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("name", DELTA)
def test_each_quarter_of_the_heads_has_a_direction(name):
    mixer = mixer_of(name, scan="heads", depthwise="")
    q, k, v, ctx = tokens()
    parts = [by_token(name, mixer, q, k, v, ctx.x, o) for o in (RASTER, RASTER[::-1], COLUMNS, COLUMNS[::-1])]
    heads = torch.arange(HEADS).tensor_split(4)
    expected = torch.cat([part[:, :, h] for part, h in zip(parts, heads, strict=True)], 2)
    torch.testing.assert_close(mixer(q, k, v, ctx), finish(mixer, expected, ctx.x), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", DELTA)
def test_tokens_of_a_frame_act_on_the_state_before_it(name):
    """Two frames of three tokens: the mean of what the recurrence does with each token alone; streamed too."""
    mixer = mixer_of(name, scan="frame")
    q, k, v, ctx = tokens()
    q_, k_, v_ = (F.silu(t) for t in (q, k, v))
    k_ = k_ if name in ("gla", "mamba2", "retnet") else F.normalize(k_, dim=-1)
    f, beta, factor = rule(name, mixer, ctx.x, k_)
    state, out = torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM, dtype=q.dtype), torch.empty_like(q)
    for frame in ((0, 1, 2), (3, 4, 5)):
        left = [step(name, state, k_[:, t], v_[:, t], f[:, t], beta[:, t], factor[:, t]) for t in frame]
        state = torch.stack(left).mean(0)
        for t in frame:
            out[:, t] = (q_[:, t].unsqueeze(-2) @ state).squeeze(-2) * HEAD_DIM**-0.5
    expected = finish(mixer, out, ctx.x)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-7, atol=1e-8)
    mixer.states = {}
    parts = [
        mixer(*(t[:, s] for t in (q, k, v)), Context(ctx.x[:, s], (1, 3))) for s in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-7, atol=1e-8)


def test_frames_are_of_a_grid_without_other_tokens():
    with pytest.raises(ValueError, match="read later frames"):
        build_mixer("gdn", DIM, HEADS, HEAD_DIM, grid=GRID, scan="frame", lepe=3)
    q, k, v, ctx = tokens(7, prefix=1)
    with pytest.raises(ValueError, match="no class or text tokens"):
        mixer_of("gdn", scan="frame")(q, k, v, Context(ctx.x, GRID, 1))


def test_orders_begin_with_text_and_end_with_class_tokens():
    ctx = Context(torch.empty(0), GRID, prefix=1, suffix=2)
    orders, line = [Order(i, ctx) for i in range(4)], torch.arange(9)[None]
    found = [order.permute(line)[0].tolist() for order in orders]
    patches = [[1 + t for t in order] for order in (RASTER, RASTER[::-1], COLUMNS, COLUMNS[::-1])]
    assert found == [[7, 8, *order, 0] for order in patches]
    for order in orders:
        assert torch.equal(order.unpermute(order.permute(line)), line)


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("scan", ("raster", "alternate", "both", "heads"))
def test_padded_tokens_change_nothing(name, scan):
    """Those of a padded line are as if they were not there."""
    mixer = mixer_of(name, scan=scan, depthwise="")
    q, k, v, ctx = tokens(6)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    line = {"grid": (1, 6)}
    padded = mixer(q, k, v, Context(ctx.x, key_padding_mask=mask, **line))
    alone = mixer(*(t[:, :4] for t in (q, k, v)), Context(ctx.x[:, :4], grid=(1, 4)))
    torch.testing.assert_close(padded[:, :4], alone, rtol=1e-9, atol=1e-10)
    assert not padded[:, 4:].any()


@pytest.mark.parametrize("name", DELTA)
def test_grouped_keys(name):
    mixer = mixer_of(name, num_kv_heads=1, depthwise="")
    q, k, v, ctx = tokens(heads=1)
    repeated = (t.repeat_interleave(HEADS, 2) for t in (k, v))
    torch.testing.assert_close(mixer(q, k, v, ctx), mixer_of(name, depthwise="")(q, *repeated, ctx))


@pytest.mark.parametrize("name", DELTA)
def test_raster_is_causal_with_class_tokens_too(name):
    mixer = mixer_of(name, scan="raster", depthwise="")
    q, k, v, ctx = tokens(prefix=1)
    o = mixer(q, k, v, ctx)
    changed = [torch.cat([t[:, :3], t[:, 3:].flip(1)], 1) for t in (q, k, v, ctx.x)]
    assert torch.equal(mixer(*changed[:3], Context(changed[3], GRID, 1))[:, :3], o[:, :3])


def test_refusals():
    with pytest.raises(ValueError, match="'raster'"):
        build_mixer("hdla", DIM, HEADS, HEAD_DIM, scan="rastre")
    with pytest.raises(ValueError, match="silu"):
        build_mixer("gdn", DIM, HEADS, HEAD_DIM, activation="relu")
    q, k, v, ctx = tokens()
    with pytest.raises(ValueError, match="needs a token grid"):
        mixer_of("hdla")(q, k, v, Context(ctx.x))
    with pytest.raises(ValueError, match="causal"):
        mixer_of("hdla")(q, k, v, Context(ctx.x, GRID, is_causal=True))
    assert mixer_of("hdla", scan="raster")(q, k, v, Context(ctx.x, GRID, is_causal=True)).shape == q.shape
