"""Block mixing as a mixer: definition, mixing matrix and priors, choice of blocks, errors."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from hla_kernels.features import feature
from zoo.mixers import MIXERS, Context, build_mixer
from zoo.mixers.base import EPS
from zoo.mixers.block_mixing import BlockMixing, block_distances, choose_blocks, prior_matrix
from zoo.mixers.context import Rotation
from zoo.mixers.mhla import BlockOptions

DIM, HEADS, HEAD_DIM, GRID, PREFIX = 24, 3, 8, (4, 5), 1
PRIORS = ("linear", "cos", "exp", "gaussian", "local", "uniform")
KINDS = ("softmax", "project", "distance", "fixed")
BLOCK_OF = [
    0,
    *(1 + 2 * (y >= 2) + (x >= 2) for y in range(4) for x in range(5)),
]  # 2 x 2 blocks: rows 2 + 2, columns 2 + 3


def inputs(seed: int = 0, n: int = 21):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, HEADS, HEAD_DIM, generator=g, dtype=torch.float64) for _ in range(3))
    x = torch.randn(2, n, DIM, generator=g, dtype=torch.float64)
    return q, k, v, Context(x=x, grid=GRID, prefix=PREFIX)


def make(name: str = "mhla", **options):
    options = {"blocks": [2, 2], "prefix": PREFIX, **options}
    return build_mixer(name, DIM, HEADS, HEAD_DIM, dtype=torch.float64, **options)


def stirred(mixer):
    torch.manual_seed(1)
    for p in mixer.mixing.parameters():
        torch.nn.init.uniform_(p)
    return mixer


def weights(order: str, q: torch.Tensor, k: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """[B, H, N, N] of features q, k [B, N, H, D]: M o A / N and so on, by the block of each token."""
    a = torch.einsum("bnhd,bmhd->bhnm", q, k)
    m = m[..., BLOCK_OF, :][..., BLOCK_OF] * m.shape[-1] / q.shape[1]
    return {"la": m * a, "ahla": m * ((m * a) @ a), "hla2": m * ((m * a) @ a.mT)}[order]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature_map", ["power", "elu1"])
@pytest.mark.parametrize(("name", "order"), [("mhla", "la"), ("mhla", "ahla"), ("mhla2", "hla2")])
def test_ratio_form_is_the_definition(name, order, feature_map, kind, per_head):
    if per_head and kind == "fixed":
        return
    q, k, v, ctx = inputs()
    mixer = stirred(make(name, order=order, mixing=kind, per_head=per_head, feature_map=feature_map))
    m = mixer.mixing()
    assert m.shape == ((HEADS, 5, 5) if per_head else (5, 5))
    fq, fk = (feature(q, "elu1"), feature(k, "elu1")) if feature_map == "elu1" else (mixer.phi_q(q), mixer.phi_k(k))
    w = weights(order, fq, fk, m)
    expected = torch.einsum("bhnm,bmhd->bnhd", w / (w.sum(-1, keepdim=True) + EPS), v)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_at_the_prior(kind, prior):
    wanted = prior_matrix(prior, (3, 4), True)
    torch.testing.assert_close(wanted.sum(-1), torch.ones(13, dtype=torch.float64))
    found = BlockMixing(kind, prior, (3, 4), True, dtype=torch.float64)()
    torch.testing.assert_close(found.sum(-1), torch.ones(13, dtype=torch.float64))
    if kind != "distance":  # its maximum is the diagonal of the grid, not the row maximum
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3 if kind == "softmax" else 1e-12)
    elif prior in ("exp", "uniform"):  # functions of the distance alone; the first between knots
        torch.testing.assert_close(
            found[1:, 1:] / found[1:, 1:].sum(-1, keepdim=True), prior_matrix(prior, (3, 4), False)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixing_made_on_meta_is_filled_later(kind):
    with torch.device("meta"):
        mixing = BlockMixing(kind, "exp", (2, 3), True, 3 if kind != "fixed" else None)
    mixing = mixing.to_empty(device="cpu")
    mixing.reset_parameters()
    torch.testing.assert_close(mixing(), BlockMixing(kind, "exp", (2, 3), True, 3 if kind != "fixed" else None)())


def test_priors_by_hand():
    """On three blocks in a row, from the formulas of the paper: row-wise maximum, row-wise sum."""
    half = math.cos(math.pi / 8)
    quarter = math.cos(math.pi / 4)
    rows = {
        "linear": ([1, 0.5, 0], [0, 1, 0]),
        "cos": ([1, half, quarter], [quarter, 1, quarter]),
        "exp": ([1, math.exp(-1 / 3), math.exp(-2 / 3)], [math.exp(-1 / 3), 1, math.exp(-1 / 3)]),
        "gaussian": ([1, math.exp(-9 / 8), math.exp(-9 / 2)], [math.exp(-9 / 2), 1, math.exp(-9 / 2)]),
        "local": ([1, 1, 0], [1, 1, 1]),
        "uniform": ([1, 1, 1], [1, 1, 1]),
    }
    for prior, (first, middle) in rows.items():
        found = prior_matrix(prior, (3,), False)
        for row, wanted in ((0, first), (1, middle), (2, first[::-1])):
            wanted = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(found[row], wanted / wanted.sum())


def test_distances_are_those_of_block_centres():
    d = block_distances((2, 3, 2))
    assert d[0, 11] == math.sqrt(1 + 4 + 1) and d[0, 1] == 1 and torch.equal(d, d.T)
    diagonal = prior_matrix("linear", (4, 4), False).diagonal()
    assert float(diagonal.min()) > 0.10 and float(diagonal.max()) < 0.15  # as diffuse as published


def test_the_prefix_weighs_all_alike():
    m = prior_matrix("gaussian", (3, 3), True)
    torch.testing.assert_close(m[0], torch.full((10,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(m[1:, 0], torch.full((9,), 0.1, dtype=torch.float64))


BLOCKS = {
    (16, 16): (4, 4),
    (32, 32): (6, 6),
    (14, 14): (4, 4),
    (64, 64): (8, 8),
    (37, 37): (6, 6),
    (24, 24): (4, 4),
    (21, 30, 52): (4, 5, 9),
    (1, 8, 8): (1, 3, 3),
    (2, 3): (1, 2),
    (7,): (3,),
}


@pytest.mark.parametrize("grid", BLOCKS)
def test_choice_of_blocks(grid):
    """About sqrt(N) blocks, at most a seventh above, nearly cubic; the published layouts of 16 blocks at 256 px."""
    blocks = choose_blocks(grid)
    assert blocks == BLOCKS[grid]
    assert 0.4 < math.prod(blocks) ** 2 / math.prod(grid) <= (8 / 7) ** 2
    sides = [n / m for n, m in zip(grid, blocks, strict=True) if n > 1]
    assert max(sides) / min(sides) <= 1.5
    assert choose_blocks(grid, True)[1:] == (1,) * (len(grid) - 1)


@pytest.mark.parametrize(
    ("grid", "causal", "blocks"),
    [
        ((8, 8), False, (2, 2)),
        ((12, 16), False, (3, 4)),
        ((37, 37), False, (6, 6)),
        ((4, 30, 52), False, (1, 6, 13)),
        ((8, 8), True, (8, 1)),
    ],
)
def test_choice_of_blocks_of_earlier_versions(grid, causal, blocks):
    """As commit c31fcd5 chose them."""
    assert BlockOptions(blocks="dividing", causal=causal).for_grid(grid).blocks == blocks


@pytest.mark.parametrize("order", ["la", "ahla", "hla2"])
def test_uniform_mixing_is_the_mixer_without_blocks(order):
    q, k, v, ctx = inputs(1)
    plain = build_mixer(order, DIM, HEADS, HEAD_DIM, dtype=torch.float64)
    for kind in KINDS:
        mixer = make(order=order, mixing=kind, prior="uniform")
        torch.testing.assert_close(mixer(q, k, v, ctx), plain(q, k, v, ctx), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", ["la", "ahla", "hla2"])
def test_rotation_is_that_of_the_mixer_without_blocks(order, half):
    q, k, v, ctx = inputs(2)
    angle = torch.randn(q.shape[1], HEAD_DIM // 2, dtype=torch.float64)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turn(t):
        a, b = t.chunk(2, -1) if half else (t[..., ::2], t[..., 1::2])
        parts = (a * cos - b * sin, a * sin + b * cos)
        return torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)

    turned = Context(x=ctx.x, grid=GRID, prefix=PREFIX, rotate=Rotation(turn, lambda: (angle.cos(), angle.sin()), half))
    wanted = build_mixer(order, DIM, HEADS, HEAD_DIM, dtype=torch.float64)(q, k, v, turned)
    for learned in (False, True):  # the tables of a learned embedding have gradients
        angle.requires_grad_(learned)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        found = make(order=order, prior="uniform")(q, k, v, turned)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    found.sum().backward()
    assert bool(angle.grad.any())


def test_a_distance_form_serves_every_grid():
    """The same weights of distance at another resolution: a grid twice as fine, cut into the same blocks or more."""
    mixer = stirred(make(mixing="distance", blocks=None, grid=(8, 8)))
    assert mixer.blocks == (3, 3) and mixer.options.blocks is None
    for grid in ((8, 8), (4, 12), (16, 16)):
        n = PREFIX + math.prod(grid)
        q, k, v, ctx = inputs(3, n)
        y = mixer(q, k, v, Context(x=ctx.x, grid=grid, prefix=PREFIX))
        m = len(mixer.mixing(choose_blocks(grid)))
        assert y.shape == q.shape and m == math.prod(choose_blocks(grid)) + 1
    # four blocks instead of one: the weight of the far half is nearly the same
    smooth = BlockMixing("distance", "exp", (2, 1), False, dtype=torch.float64)
    coarse, fine = smooth(), smooth((8, 1))
    torch.testing.assert_close(fine[:4, 4:].sum(-1).mean(), coarse[0, 1], rtol=0.2, atol=0)


def test_a_distance_form_does_not_know_its_host():
    """The same knots in models of two sizes are the same matrix: logits of the distance over the grid's diagonal."""
    hosts = (2, 3), (8, 6)
    small, large = (BlockMixing("distance", "linear", blocks, False, dtype=torch.float64) for blocks in hosts)
    large.load_state_dict(small.state_dict())
    for blocks in ((2, 3), (5, 4), (8, 6)):
        x = block_distances(blocks).numpy() / math.hypot(*blocks)
        logits = np.interp(x, np.linspace(0, 1, len(small.knots)), small.knots.detach().numpy())
        for mixing in (small, large):
            torch.testing.assert_close(mixing(blocks), torch.from_numpy(small.gain * logits).softmax(-1))


@pytest.mark.parametrize("feature_map", ["identity", "relu"])
@pytest.mark.parametrize("order", ["la", "ahla", "hla2"])
def test_prepared_features_are_those_of_the_mixer(order, feature_map):
    """What a host may do in one pass with its norms: the map, then the rotation."""
    q, k, v, ctx = inputs()
    mixer = stirred(make(order=order, feature_map=feature_map, normalize=False, post_norm=True, depthwise="v"))
    assert mixer.fusable_map == feature_map
    angle = torch.rand(q.shape[1], HEAD_DIM // 2, dtype=torch.float64)

    def turn(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)

    rotated = replace(ctx, rotate=Rotation(turn, lambda: (angle.cos(), angle.sin())))
    features = (turn(feature(t, feature_map)) for t in (q, k))
    found = mixer(*features, v, replace(ctx, prepared=True))
    torch.testing.assert_close(found, mixer(q, k, v, rotated))


@pytest.mark.parametrize(
    "options", [{}, {"feature_map": "elu1"}, {"depthwise": "k"}, {"gains": True, "feature_map": "identity"}], ids=str
)
def test_no_early_map(options):
    """With a ratio, another map, or something between the projections and the map."""
    plain = {"feature_map": "relu", "normalize": options == {}, "post_norm": True}
    assert make(**{**plain, **options}).fusable_map is None


@pytest.mark.parametrize("mixer", ["mhla", "mhla2", "poly", "taylor2", "la"])
def test_a_mixer_prints_the_options_that_were_changed(mixer):
    layout = {"grid": (4, 4)} if MIXERS[mixer].defaults.needs_grid else {}
    assert "gains=True" in repr(build_mixer(mixer, 8, 2, 4, gains=True, **layout))


def test_matrices_serve_other_grids_with_their_blocks():
    mixer = make(grid=(8, 8), blocks=None)
    assert mixer.options.blocks == (3, 3) and mixer.layout == "3x3 of 8x8"
    q, k, v, ctx = inputs(4, 36)
    assert mixer(q, k, v, Context(x=ctx.x, grid=(5, 7), prefix=PREFIX)).shape == q.shape


def test_projection_clips():
    mixing = BlockMixing("project", "linear", (2, 2), False)
    with torch.no_grad():
        mixing.weight[0] = torch.tensor([-0.5, 0.3, 1.5, 1.0])
    mixing.project_()
    assert mixing.weight[0].tolist() == pytest.approx([0, 0.3, 1, 1])
    with torch.no_grad():
        mixing.weight[0, 0] = -1  # by a loop without the projection
    assert float(mixing()[0, 0]) == 0
    learned = BlockMixing("softmax", "linear", (2, 2), False)
    before = learned.weight.clone()
    learned.project_()
    assert torch.equal(before, learned.weight)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", ["mhla", "mhla2"])
def test_every_parameter_gets_a_gradient(name, kind):
    q, k, v, ctx = inputs(5)
    mixer = make(name, mixing=kind, per_head=True, feature_map="hedgehog", post_norm=True, lepe=5, gate=True)
    mixer(q, k, v, ctx).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())


def test_lepe_adds_a_convolution_of_the_values():
    q, k, v, ctx = inputs(6)
    mixer, plain = make(lepe=3), make()
    torch.nn.init.normal_(mixer.lepe.weight)
    local = mixer(q, k, v, ctx) - plain(q, k, v, ctx)
    assert not bool(local[:, :PREFIX].any())
    row, col, head, ch = 2, 3, 1, 4
    image = v[:, PREFIX:].unflatten(1, GRID)[:, :, :, head, ch]
    by_hand = (image[:, row - 1 : row + 2, col - 1 : col + 2] * mixer.lepe.weight[head * HEAD_DIM + ch, 0]).sum((1, 2))
    torch.testing.assert_close(local[:, PREFIX:].unflatten(1, GRID)[:, row, col, head, ch], by_hand)


def test_grouped_values_go_to_every_query_head_of_theirs():
    q, k, v, ctx = inputs(7)
    mixer = build_mixer(
        "mhla", DIM, HEADS, HEAD_DIM, num_kv_heads=1, dtype=torch.float64, blocks=[2, 2], prefix=PREFIX, lepe=3
    )
    torch.nn.init.normal_(mixer.lepe.weight)
    k, v = k[:, :, :1], v[:, :, :1]
    whole = make(lepe=3)
    with torch.no_grad():
        whole.lepe.weight.copy_(mixer.lepe.weight.repeat(HEADS, 1, 1, 1))
    wanted = whole(q, k.expand_as(q), v.expand_as(q), ctx)
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted, rtol=1e-9, atol=1e-9)


def test_video_without_denominator():
    """The form of the video models: no ratio, an RMSNorm of each head, a 3-D LePE, a gate."""
    q, k, v, ctx = inputs(8)
    mixer = make(
        normalize=False,
        feature_map="elu1",
        post_norm=True,
        lepe=3,
        gate=True,
        grid_dims=3,
        blocks=[1, 2, 2],
        prefix=PREFIX,
    )
    found = mixer(q, k, v, Context(x=ctx.x, grid=(2, 2, 5), prefix=PREFIX))
    torch.testing.assert_close(
        found.square().mean(-1), torch.ones(2, 21, HEADS, dtype=torch.float64), rtol=1e-3, atol=1e-3
    )


def test_causal_blocks_do_not_see_the_future():
    q, k, v, ctx = inputs(9)
    for order, kind in [*(("la", kind) for kind in KINDS), ("ahla", "softmax"), ("hla2", "softmax")]:
        mixer = make(causal=True, blocks=[2, 1], mixing=kind, order=order)
        whole = mixer(q, k, v, ctx)
        changed = [t.clone() for t in (q, k, v)]
        for t in changed:
            t[:, 12:] += 1.0
        torch.testing.assert_close(mixer(*changed, ctx)[:, :12], whole[:, :12], rtol=1e-12, atol=1e-12)


def test_padding_is_not_read():
    q, k, v, ctx = inputs(10)
    mixer = make(lepe=3)
    torch.nn.init.normal_(mixer.lepe.weight)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 13:] = False
    ctx = Context(x=ctx.x, grid=GRID, prefix=PREFIX, key_padding_mask=mask)
    wanted = mixer(*(t.masked_fill(~mask[..., None, None], 0.0) for t in (q, k, v)), ctx)
    found = mixer(*(t.masked_fill(~mask[..., None, None], float("nan")) for t in (q, k, v)), ctx)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not bool(found[~mask].any())


def test_options_survive_json():
    mixer = make(per_head=True, prior="exp")
    again = make(**json.loads(json.dumps(asdict(mixer.options))))
    assert again.options == mixer.options


BAD = [
    ({"blocks": [2, 0]}, "blocks must be positive integers"),
    ({"blocks": "4x4"}, "blocks must be positive integers"),
    ({"blocks": None}, "needs blocks, such as"),
    ({"blocks": [2, 2, 2]}, "one number for each of 2 axes"),
    ({"order": "hla3"}, "unknown order 'hla3'.*Did you mean 'hla2'"),
    ({"mixing": "soft"}, "Did you mean 'softmax'"),
    ({"prior": "linar"}, "Did you mean 'linear'"),
    ({"mixing": "fixed", "per_head": True}, "per_head must be"),
    ({"center": "k", "normalize": False}, "this mixer has no option center"),
    ({"ridge": 0.1}, "this mixer has no option ridge"),
    ({"causal": True}, "blocks along the first axis alone"),
    ({"causal": True, "blocks": [2, 1], "scan": "both"}, "one direction"),
    ({"feature_map": "identity"}, "non-negative feature map"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**options)


def test_calls_it_cannot_serve():
    q, k, v, ctx = inputs(11)
    with pytest.raises(ValueError, match=r"with its blocks needs a token grid"):
        make()(q, k, v, Context(x=ctx.x, prefix=PREFIX))
    with pytest.raises(ValueError, match="built for 0 prefix tokens before the grid"):
        make(prefix=0)(q, k, v, ctx)
    with pytest.raises(ValueError, match=r"cannot be divided into the blocks \(5, 2\).*convert with blocks=\[2, 2\]"):
        make(blocks=[5, 2])(q, k, v, ctx)
