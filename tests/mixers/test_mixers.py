"""Every mixer against its definition, with every option, and properties common to all mixers."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from hla_kernels.features import feature
from tests.helpers.mixers import DIM, GRID, GRIDLESS, HEAD_DIM, HEADS, MATRICES, PREFIX, inputs, make, options_of
from zoo.mixers import MIXERS, Context, LinearMixer, Mixer, build_mixer

ROTARY = [name for name in MIXERS if MIXERS[name].takes_rotations]
SERIAL = [name for name in GRIDLESS if not getattr(MIXERS[name].defaults, "two_sided", True)]
EPS_EFFECT = 1e-6  # relative effect of the eps of the mixers, which the definitions here omit


def phi(x: torch.Tensor, feature_map: str, exponent: float = 3.0) -> torch.Tensor:
    if feature_map == "power":  # the length of relu(x) in the direction of its power
        y = x.clamp(min=0)
        return (y**exponent * (y.norm(dim=-1) / (y**exponent).norm(dim=-1))[..., None]).nan_to_num(0)
    return feature(x, "softmax_pair" if feature_map == "hedgehog" else feature_map)


def weights(name: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The N x N matrix [B, H, N, N] of the two-sided mixer, by its definition; each factor is a mean over N."""
    return MATRICES[name](torch.einsum("bnhd,bmhd->bhnm", q, k) / q.shape[1])


def apply(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhnm,bmhd->bnhd", w, v)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("feature_map", ["power", "relu", "elu1", "softmax", "softmax_pair", "hedgehog"])
def test_ratio_form_is_the_definition(name, feature_map):
    q, k, v, ctx = inputs()
    mixer = make(name) if feature_map == "power" else make(name, feature_map=feature_map)  # power is the default
    exponent = 4.0 if name == "hla3" else 3.0
    w = weights(name, phi(q, feature_map, exponent), phi(k, feature_map, exponent))
    if name == "poly":  # the orders above one start at the smallest positive coefficient
        a = w
        at = a.transpose(-1, -2)
        w = a + 1e-3 * (a @ at + a @ a + a @ at @ a)
    expected = apply(w / w.sum(-1, keepdim=True), v)
    torch.testing.assert_close(mixer(q, k, v, ctx), expected, rtol=EPS_EFFECT, atol=EPS_EFFECT)


@pytest.mark.parametrize("name", MATRICES)
def test_anchored_form_is_the_definition(name):
    q, k, v, ctx = inputs(1)
    mixer = make(name, feature_map="identity", normalize=False, center="k", mean_path=True)
    w = weights(name, q * HEAD_DIM**-0.5, k - k.mean(1, keepdim=True))
    mean = v.mean(1, keepdim=True)
    torch.testing.assert_close(mixer(q, k, v, ctx), mean + apply(w, v - mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["ratio", "anchored", "rotary"])
@pytest.mark.parametrize("name", ["ahla", "hla2", "hla3"])
def test_annealing_goes_from_first_order_to_the_mixer(name, form):
    q, k, v, ctx = inputs(9)
    anchored = {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True}
    options = anchored if form == "anchored" else {"feature_map": "elu1"}
    if form == "rotary":
        ctx = Context(x=ctx.x, grid=GRID, prefix=PREFIX, rotate=lambda t: t.roll(1, -1))
    mixer, plain, first = make(name, **options), make(name, **options), make("la", **options)
    device = torch.device("cpu")
    mixer.set_warmup(0.0, 2.0, device)
    scale = 2.0 if form == "anchored" else 1.0
    mean = v.mean(1, keepdim=True) if form == "anchored" else 0
    torch.testing.assert_close(mixer(q, k, v, ctx) - mean, scale * (first(q, k, v, ctx) - mean), rtol=1e-6, atol=1e-6)
    mixer.set_warmup(0.25, 2.0, device)
    if form == "ratio":
        a = weights("la", phi(q, "elu1"), phi(k, "elu1"))
        w = 1.5 * a + 0.25 * weights(name, phi(q, "elu1"), phi(k, "elu1"))
        torch.testing.assert_close(
            mixer(q, k, v, ctx), apply(w / w.sum(-1, keepdim=True), v), rtol=EPS_EFFECT, atol=EPS_EFFECT
        )
    if name == "ahla" and form != "anchored":  # lambda = 2 * 0.75 / 0.25
        ridged = make(name, ridge=6.0, **options)
        torch.testing.assert_close(mixer(q, k, v, ctx), ridged(q, k, v, ctx), rtol=1e-6, atol=1e-6)
    assert not mixer.state_dict()
    mixer.set_warmup(1.0, 2.0, device)
    torch.testing.assert_close(mixer(q, k, v, ctx), plain(q, k, v, ctx), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"causal": True}, {"ridge": 0.5}])
def test_what_cannot_be_annealed_says_so(options):
    with pytest.raises(ValueError, match=r"order warm-up of .* needs causal=False and ridge=0"):
        make("ahla", **options).set_warmup(0.5, 1.0, torch.device("cpu"))


def test_the_anchored_form_is_the_first_order_of_softmax():
    q, k, v, ctx = inputs(2)
    soft = make("softmax")
    anchor = make("poly", feature_map="identity", normalize=False, center="k", mean_path=True)
    errors = []
    for size in (0.1, 0.05):
        errors.append((soft(size * q, k, v, ctx) - anchor(size * q, k, v, ctx)).abs().max())
    assert errors[1] < 0.3 * errors[0]  # halving q divides a second-order remainder by four


@pytest.mark.parametrize("name", GRIDLESS)
def test_two_sided_mixers_do_not_see_the_order_of_tokens(name):
    q, k, v, ctx = inputs(3)
    mixer = make(name)
    order = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(0))
    permuted = mixer(q[:, order], k[:, order], v[:, order], ctx)
    torch.testing.assert_close(permuted, mixer(q, k, v, ctx)[:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SERIAL)
@pytest.mark.parametrize("decay", [None, 0.9])
def test_causal_mixers_do_not_see_the_future(name, decay):
    q, k, v, ctx = inputs(4)
    mixer = make(name, causal=True, decay=decay, post_norm=True)
    whole = mixer(q, k, v, ctx)
    for changed in (q, k, v):
        changed[:, 12:] += 1.0
    torch.testing.assert_close(mixer(q, k, v, ctx)[:, :12], whole[:, :12], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SERIAL)
def test_scan_both_is_symmetric_under_reversal(name):
    q, k, v, ctx = inputs(5)
    mixer = make(name, causal=True, scan="both", post_norm=True)
    reversed_ = mixer(q.flip(1), k.flip(1), v.flip(1), ctx).flip(1)
    torch.testing.assert_close(reversed_, mixer(q, k, v, ctx), rtol=1e-9, atol=1e-9)
    if not MIXERS[name].defaults.normalize:
        return
    average = make(name, feature_map="elu1", causal=True, scan="both")  # no weight is zero
    constant = average(q, k, torch.ones_like(v), ctx)  # both directions are averages, and so is their half sum
    torch.testing.assert_close(constant, torch.ones_like(v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MATRICES)
def test_rotation_acts_on_the_numerator_only(name):
    q, k, v, ctx = inputs(6)
    mixer = make(name, feature_map="elu1")
    turned = Context(
        x=ctx.x, grid=GRID, prefix=PREFIX, rotate=lambda t: t.roll(1, -1) * torch.tensor([-1.0] + [1.0] * 7)
    )
    fq, fk = phi(q, "elu1"), phi(k, "elu1")
    num, den = weights(name, turned.rotate(fq), turned.rotate(fk)), weights(name, fq, fk)
    if name == "poly":
        num, den = (a + 1e-3 * (a @ a.mT + a @ a + a @ a.mT @ a) for a in (num, den))
    expected = apply(num / den.sum(-1, keepdim=True), v)
    torch.testing.assert_close(mixer(q, k, v, turned), expected, rtol=EPS_EFFECT, atol=EPS_EFFECT)


@pytest.mark.parametrize("name", ROTARY)
def test_rotation_reaches_the_output(name):
    q, k, v, ctx = inputs(6)
    turned = replace(ctx, rotate=lambda t: t * torch.linspace(-1, 1, t.shape[1])[:, None, None])
    mixer = make(name)
    assert (mixer(q, k, v, turned) - mixer(q, k, v, ctx)).norm() > 0.01 * mixer(q, k, v, ctx).norm()


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ROTARY])
def test_a_mixer_without_rotations_refuses_them(name):
    q, k, v, ctx = inputs(6)
    with pytest.raises(ValueError, match=f"'{name}' cannot honour a rotary embedding"):
        make(name)(q, k, v, replace(ctx, rotate=lambda t: t))


def test_a_new_mixer_takes_no_rotations():
    """Unless its class states it: a mixer that ignores rotations loses the positions."""
    assert not Mixer.takes_rotations


@pytest.mark.parametrize("name", MIXERS)
def test_parts_with_parameters_start_as_the_identity(name):
    q, k, v, ctx = inputs(7)
    torch.manual_seed(0)
    extra = make(name, **options_of(name, depthwise="qkv", depthwise_kernel=5, lepe=3, gate=True))
    plain = make(name, depthwise="")
    plain.load_state_dict(extra.state_dict(), strict=False)
    torch.testing.assert_close(extra(q, k, v, ctx), plain(q, k, v, ctx), rtol=0, atol=0)


PARTS = {"post_norm": True, "depthwise": "qkv", "gate": True, "lepe": 5}
EVERY_PART = [(name, options_of(name, gains=True)) for name in MIXERS]
EVERY_PART += [(name, {"feature_map": "hedgehog", "causal": True, "decay": 0.9}) for name in SERIAL if name in MATRICES]


@pytest.mark.parametrize(("name", "more"), EVERY_PART)
def test_every_parameter_gets_a_gradient(name, more):
    q, k, v, ctx = inputs(8)
    mixer = make(name, **options_of(name, **PARTS), **more)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    mixer(q, k, v, ctx).cos().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mixer.parameters())


def test_depthwise_is_a_convolution_over_the_grid_and_leaves_prefix_tokens():
    v = inputs(9)[2]
    mixer = make("la", depthwise="v")
    conv = mixer.depthwise["v"]
    torch.nn.init.normal_(conv.weight)
    part = mixer.depthwise["v"](v, GRID, PREFIX)
    torch.testing.assert_close(part[:, :PREFIX], v[:, :PREFIX], rtol=0, atol=0)
    row, col, head, ch = 2, 3, 1, 4  # one interior output, summed by hand
    image = v[:, PREFIX:].unflatten(1, GRID)[:, :, :, head, ch]
    kernel = conv.weight[head * HEAD_DIM + ch, 0]
    by_hand = image[:, row, col] + (image[:, row - 1 : row + 2, col - 1 : col + 2] * kernel).sum((1, 2))
    torch.testing.assert_close(part[:, PREFIX:].unflatten(1, GRID)[:, row, col, head, ch], by_hand)


def test_depthwise_over_video_grids():
    q, k, v, ctx = inputs(10)
    mixer = make("la", depthwise="qk", grid_dims=3)
    video = Context(x=ctx.x, grid=(2, 2, 5), prefix=PREFIX)
    torch.testing.assert_close(mixer(q, k, v, video), make("la")(q, k, v, ctx))
    with pytest.raises(ValueError, match="3-D grids"):
        mixer(q, k, v, ctx)


def test_ridge_adds_lambda_to_the_key_moment():
    q, k, v, ctx = inputs(11)
    mixer = make("hla2", feature_map="identity", normalize=False, ridge=0.5)
    n, s = q.shape[1], HEAD_DIM**-0.5
    S = torch.einsum("bnhd,bnhe->bhde", k, k) / n + 0.5 * torch.eye(HEAD_DIM, dtype=q.dtype)
    C = torch.einsum("bnhd,bnhe->bhde", s * q, v) / n
    torch.testing.assert_close(mixer(q, k, v, ctx), torch.einsum("bnhd,bhde->bnhe", s * q, S @ C))


@pytest.mark.parametrize("name", list(MIXERS))
def test_reset_parameters_restores_a_model_built_on_meta(name):
    options = options_of(name, depthwise="v", lepe=3, gate=True, post_norm=True, blocks=[2, 2])
    mixer = make(name, device="meta", **options).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in mixer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    q, k, v, ctx = inputs(12)
    torch.manual_seed(0)
    torch.testing.assert_close(mixer(q, k, v, ctx), make(name, **options)(q, k, v, ctx), rtol=0, atol=0)


def test_softmax_has_the_depthwise_options_of_the_others():
    q, k, v, ctx = inputs(14)
    mixer, other = make("softmax", depthwise="qv", lepe=3), make("la", depthwise="qv", lepe=3, feature_map="elu1")
    torch.testing.assert_close(mixer(q, k, v, ctx), make("softmax")(q, k, v, ctx), rtol=0, atol=0)  # zero-initialised
    with torch.no_grad():
        for mine, its in zip(mixer.parameters(), other.parameters(), strict=True):
            mine.copy_(its.normal_(std=0.3))
    local = [part.weight[:, 0] for part in (mixer.depthwise["q"], mixer.depthwise["v"], mixer.lepe)]
    around = [F.pad(t[:, PREFIX:].unflatten(1, ctx.grid).flatten(3), (0, 0, 1, 1, 1, 1)) for t in (q, v, v)]
    h, w = ctx.grid
    moved = [
        sum(x[:, i : i + h, j : j + w] * c[:, i, j] for i in range(3) for j in range(3)).flatten(1, 2)
        for x, c in zip(around, local, strict=True)
    ]
    biases = (mixer.depthwise["q"].bias, mixer.depthwise["v"].bias, mixer.lepe.bias)
    moved = [(m + b).unflatten(2, (HEADS, HEAD_DIM)) for m, b in zip(moved, biases, strict=True)]
    moved = [F.pad(m, (0, 0, 0, 0, PREFIX, 0)) for m in moved]
    wanted = make("softmax")(q + moved[0], k, v + moved[1], ctx) + moved[2]
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted)
    with pytest.raises(ValueError, match="needs a token grid"):
        mixer(q, k, v, Context(x=ctx.x))


BAD_OPTIONS = [
    ("la", {"feature_mpa": "relu"}, "Did you mean 'feature_map'"),
    ("la", {"feature_map": "elu_1"}, "Did you mean 'elu1'"),
    ("la", {"center": "v"}, "unknown center"),
    ("la", {"scan": "boht"}, "Did you mean 'both'"),
    ("la", {"feature_map": "identity"}, "non-negative feature map"),
    ("la", {"center": "k"}, "excludes center"),
    ("la", {"depthwise": "vo"}, "depthwise names tensors"),
    ("la", {"depthwise": "v", "depthwise_kernel": 4}, "positive odd number"),
    ("la", {"lepe": 4}, "lepe must be an odd kernel size"),
    ("la", {"blocks": [2, 2]}, "unknown la option 'blocks'"),
    ("la", {"decay": 0.9}, "decay needs causal=True"),
    ("la", {"causal": True, "decay": 1.5}, "value in \\(0, 1\\)"),
    ("la", {"scan": "both"}, "needs causal=True"),
    ("la", {"grid_dims": 4}, "grid_dims must be 2"),
    ("poly", {"causal": True}, "two-sided only"),
    ("poly", {"coefficients": (1.0, 0.0)}, "four numbers"),
    ("poly", {"coefficients": 3}, "four numbers"),
    ("poly", {"ridge": 0.1}, "ridge is defined for"),
    ("la", {"ridge": 0.1}, "ridge is defined for"),
    ("hla2", {"ridge": -0.1}, "ridge must be"),
    ("la", {"coefficients": (1.0, 0.0, 0.0, 0.0)}, "unknown la option 'coefficients'"),
    ("la", {"normalize": "false"}, "normalize must be True or False"),
    ("la", {"depthwise": None}, "depthwise names tensors"),
    ("la", {"depthwise_kernel": -1}, "positive odd number"),
    ("la", {"depthwise_kernel": True}, "positive odd number"),
    ("la", {"lepe": True}, "lepe must be an odd kernel size"),
    ("la", {"causal": True, "decay": "x"}, "value in \\(0, 1\\)"),
    ("la", {"causal": True, "normalize": False, "feature_map": "identity"}, "grows with the position"),
    ("softmax", {"feature_map": "relu"}, "unknown softmax option"),
    ("ahal", {}, "Did you mean 'ahla'"),
    *(("la", {"exponent": p}, "exponent must be a number between 1 and 5") for p in (1, 5, -3, math.nan, "3")),
    ("mesa", {"exponent": 5}, "exponent must be a number between 1 and 5"),
    *(("mesa", {"ridge": x}, "ridge must be a positive number") for x in (0, -0.1, math.inf, math.nan, True)),
    ("mesa", {"normalize": True}, "this mixer has no option normalize"),
    ("mesa", {"center": "k"}, "this mixer has no option center"),
    *((name, {"feature_map": "identity"}, "non-negative feature map") for name in ("mala", "rala", "resolvent")),
    *((name, {"normalize": False}, "normalize must be True") for name in ("mala", "rala", "resolvent")),
    *(("resolvent", {"share": c}, "share must be a number between 0 and 1") for c in (0, 1, -0.5, math.nan, "half")),
    *((name, {"causal": True}, "two-sided only") for name in ("mala", "rala", "mesa", "resolvent")),
]


@pytest.mark.parametrize("name, options, sentence", BAD_OPTIONS)
def test_bad_options_say_what_is_allowed(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer(name, DIM, HEADS, HEAD_DIM, **options)


def test_too_many_features_raise():
    with pytest.raises(ValueError, match="have 320 features"):
        build_mixer("la", 160, 1, 160, feature_map="softmax_pair")


def test_calls_a_mixer_cannot_serve_raise():
    q, k, v, ctx = inputs(13)
    n = q.shape[1]
    with pytest.raises(ValueError, match="cannot honour an attention mask"):
        make("la")(q, k, v, Context(x=ctx.x, grid=GRID, prefix=PREFIX, mask=torch.ones(n, n, dtype=torch.bool)))
    padded = Context(x=ctx.x, grid=GRID, prefix=PREFIX, key_padding_mask=torch.ones(2, n, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot honour a padding mask"):
        make("la", causal=True)(q, k, v, padded)
    with pytest.raises(ValueError, match="causal=True"):
        make("la")(q, k, v, Context(x=ctx.x, grid=GRID, prefix=PREFIX, is_causal=True))
    with pytest.raises(ValueError, match="needs a token grid"):
        make("la", depthwise="v")(q, k, v, Context(x=ctx.x))
    with pytest.raises(ValueError, match="needs 26 tokens, got 21"):
        make("la", depthwise="v")(q, k, v, Context(x=ctx.x, grid=(5, 5), prefix=PREFIX))
    with pytest.raises(ValueError, match="needs 26 tokens, got 21"):
        make("la", causal=True)(q, k, v, Context(x=ctx.x, grid=(5, 5), prefix=PREFIX))


MASKED = {
    "default": {},
    "ratio": {"feature_map": "elu1"},
    "anchored": {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True},
    "learned": {"feature_map": "hedgehog", "post_norm": True},
}


PADDED = [(name, form) for name in GRIDLESS for form in (MASKED if name in MATRICES else ["default"])]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("name", "form"), PADDED)
def test_a_padded_sample_is_the_sample_alone(name, form, rotated):
    if rotated and name not in ROTARY:
        pytest.skip("refuses rotary models")
    q, k, v, ctx = inputs(14)
    mixer = make(name, **MASKED[form])
    mask = torch.ones(q.shape[:2], dtype=torch.bool)
    mask[0, 13:] = False
    turn = (lambda t: t * torch.tensor([-1.0, 2.0]).repeat(t.shape[-1] // 2)) if rotated else None
    for packed in (False, True):
        qkv = torch.stack([q, k, v], 2) if packed else None
        found = mixer(q, k, v, Context(x=ctx.x, rotate=turn, qkv=qkv, key_padding_mask=mask))
        for i, n in ((0, 13), (1, 21)):
            part = [t[i : i + 1, :n] for t in (q, k, v)]
            wanted = mixer(*part, Context(x=ctx.x[i : i + 1, :n], rotate=turn))
            torch.testing.assert_close(found[i : i + 1, :n], wanted, rtol=1e-9, atol=1e-9)
        assert not issubclass(MIXERS[name], LinearMixer) or not bool(found[0, 13:].any())


@pytest.mark.parametrize("depthwise", ["v", "qk"])
def test_padding_is_beyond_the_border_of_the_grid(depthwise):
    """A grid whose last row is padding is the grid without it, whatever stands there."""
    q, k, v, ctx = inputs(16)
    mixer = make("ahla", depthwise=depthwise)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    n = PREFIX + (GRID[0] - 1) * GRID[1]
    mask = torch.arange(q.shape[1]).expand(2, -1) < n
    wanted = mixer(*(t[:, :n] for t in (q, k, v)), Context(x=ctx.x, grid=(GRID[0] - 1, GRID[1]), prefix=PREFIX))
    for t in (q, k, v):
        t[:, n:] = float("nan")
    found = mixer(q, k, v, Context(x=ctx.x, grid=GRID, prefix=PREFIX, key_padding_mask=mask))
    torch.testing.assert_close(found[:, :n], wanted, rtol=1e-9, atol=1e-9)
    assert not bool(found[:, n:].any())


def test_softmax_hides_padded_keys():
    q, k, v, ctx = inputs(15)
    mask = torch.ones(q.shape[:2], dtype=torch.bool)
    mask[0, 13:] = False
    for fused in (True, False):
        mixer = make("softmax", fused=fused)
        found = mixer(q, k, v, Context(x=ctx.x, key_padding_mask=mask))
        wanted = mixer(*(t[:1, :13] for t in (q, k, v)), Context(x=ctx.x[:1, :13]))
        torch.testing.assert_close(found[:1, :13], wanted)


def test_options_survive_json():
    mixer = make("poly", coefficients=[1.0, 0.1, 0.1, 0.1])
    again = make("poly", **json.loads(json.dumps(asdict(mixer.options))))
    assert again.options == mixer.options
