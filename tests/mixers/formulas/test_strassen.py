"""Products of moments, strassen and multilinear: sums over pairs and triples of tokens, written out."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from tests.helpers.first_order import HK, B, C, D, H, N, phi, setting
from zoo.mixers import Context, build_mixer
from zoo.mixers.context import Rotation

NAMES = ("strassen", "multilinear")


def projected(mixer, x: torch.Tensor) -> list[torch.Tensor]:
    """Projections of x by each weight of `extra`, per query head."""
    return [F.linear(x, w).unflatten(-1, (-1, D)).repeat_interleave(H // HK, 2) for w in mixer.extra]


def inputs(mixer, q, k, v, x, count=N):
    """Per query head: q divided by its mean weight over `count` tokens, keys and values of each moment."""
    weight_q, weight_k = mixer.phi_q.weight, mixer.phi_k.weight.repeat_interleave(H // HK)
    k, v = (t.repeat_interleave(H // HK, 2) for t in (k, v))
    added = projected(mixer, x)
    if mixer.name == "strassen":
        keys = [phi(k, weight_k), phi(k + added[0], weight_k)]
    else:
        keys = [phi(k, weight_k), *(1 + t for t in added[::2])]
    q = phi(q, weight_q)
    q = q / torch.einsum("bthd,bjhd->bth", q, keys[0] / count)[..., None]
    q = q.nan_to_num(0)  # queries without a positive channel
    return q, keys, [v, *(1 + t for t in added[1::2])]


@pytest.mark.parametrize("real", [N, 11])
def test_strassen_is_a_sum_over_pairs(real):
    """arXiv 2501.19215 without softmax, four terms, [B, H, N, N, N] weights; the tokens from `real` on are padding."""
    mixer, q, k, v, ctx = setting("strassen")
    q, k, v, x = (t[:, :real] for t in (q, k, v, ctx.x))
    u, (key, other), (values, w) = inputs(mixer, q, k, v, x, real)
    g1, g2, g3, g4 = (mixer.gates[:, i, None, None, None] for i in range(4))
    first = torch.einsum("bthd,bihd->bhti", u, key)[..., None]
    second = torch.einsum("bihd,bjhd->bhij", key, other)[:, :, None]
    third = torch.einsum("bthd,bjhd->bhtj", u, other)[:, :, :, None]
    fourth = torch.einsum("bthd,bihd,bjhd->bhtij", u, key, other)
    a = (g1 * first + g2 * second + g3 * third + g4 * fourth) / real**2
    wanted = torch.einsum("bhtij,bihe,bjhe->bthe", a, values, w)
    mask = torch.arange(N).expand(B, N) < real
    _, q, k, v, ctx = setting("strassen")
    found = mixer(q, k, v, Context(x=ctx.x, key_padding_mask=None if real == N else mask))
    torch.testing.assert_close(found[:, :real], wanted, rtol=1e-9, atol=1e-9)
    assert not found[:, real:].any()


@pytest.mark.parametrize("ways", [2, 3])
def test_multilinear_is_a_sum_over_tuples(ways):
    mixer, q, k, v, ctx = setting("multilinear", ways=ways)
    u, keys, values = inputs(mixer, q, k, v, ctx.x)
    letters = "ijl"[:ways]
    pairs = [t / N for pair in zip(keys, values, strict=True) for t in (pair[0], pair[1] * N)]
    terms = ",".join(f"b{i}hd,b{i}he" for i in letters)
    wanted = torch.einsum(f"bthd,{terms}->bthe", u, *pairs)
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_source_form_is_plain(name):
    """Identity features, no divisor, random projections: the four terms of the notes as D x D products."""
    mixer, q, k, v, ctx = setting(name, feature_map="identity", normalize=False)
    found = mixer(q, k, v, ctx)
    k, v = (t.repeat_interleave(H // HK, 2) for t in (k, v))
    l, w = projected(mixer, ctx.x)
    w = 1 + w
    l = k + l if name == "strassen" else 1 + l
    s, t = (torch.einsum("bnhd,bnhe->bhde", *p) / N for p in ((k, v), (l, w)))
    if name == "multilinear":
        wanted = torch.einsum("bthd,bhde->bthe", q, s * t)
    else:
        g = mixer.gates.T[:, None, None, :, None]
        first = torch.einsum("bthd,bhde->bthe", q, s) * w.mean(1, keepdim=True)
        third = torch.einsum("bthd,bhde->bthe", q, t) * v.mean(1, keepdim=True)
        fourth = torch.einsum("bthd,bhde->bthe", q, s * t)
        wanted = g[0] * first + g[1] * (s * t).sum(2)[:, None] + g[2] * third + g[3] * fourth
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"feature_map": "elu1"}, {"gains": True, "gate": True}])
@pytest.mark.parametrize("name", NAMES)
def test_a_new_mixer_is_linear_attention(name, options):
    _, q, k, v, ctx = setting(name)
    mixers = [build_mixer(n, C, H, D, num_kv_heads=HK, dtype=torch.float64, **options) for n in (name, "la")]
    found, wanted = (mixer(q, k, v, ctx) for mixer in mixers)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def rotary(start: int, half: bool) -> Rotation:
    angle = (start + torch.arange(N, dtype=torch.float64))[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).double()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, -1) if half else (t[..., ::2], t[..., 1::2])
        turned = a * cos - b * sin, a * sin + b * cos
        return torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)

    return Rotation(rotate, lambda: (angle.cos(), angle.sin()), half)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("name", "options"), [("strassen", {}), ("multilinear", {}), ("multilinear", {"ways": 3})])
def test_with_rotation_depends_on_differences_of_positions(name, options, half):
    mixer, q, k, v, ctx = setting(name, **options)
    outs = [mixer(q, k, v, Context(x=ctx.x, rotate=r)) for r in (rotary(0, half), rotary(7, half), None)]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(outs[0], outs[2], rtol=1e-2)


def test_the_rotated_term_is_a_complex_product():
    mixer, q, k, v, ctx = setting("strassen")
    with torch.no_grad():
        mixer.gates.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0]).expand_as(mixer.gates))
    rotation = rotary(0, False)
    u, keys, values = inputs(mixer, q, k, v, ctx.x)
    u, (key, other) = rotation(rotation(u)), (rotation(t) for t in keys)
    u, key, other = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (u, key, other))
    a = torch.einsum("bthd,bihd,bjhd->bhtij", u, key.conj(), other.conj()).real / N**2
    wanted = torch.einsum("bhtij,bihe,bjhe->bthe", a, *values)
    found = mixer(q, k, v, Context(x=ctx.x, rotate=rotation))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_new_rotated_mixer_is_rotated_linear_attention(name, half):
    """With `elu1`; `power` has another denominator in `la`."""
    _, q, k, v, ctx = setting(name)
    own = {"num_kv_heads": HK, "dtype": torch.float64, "feature_map": "elu1"}
    mixers = [build_mixer(n, C, H, D, **own) for n in (name, "la")]
    found, wanted = (mixer(q, k, v, Context(x=ctx.x, rotate=rotary(0, half))) for mixer in mixers)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_rotated_multilinear_is_a_complex_sum_over_tuples():
    """Products of three keys, where (1 + projection) is expanded; q is rotated once per rotated key."""
    mixer, q, k, v, ctx = setting("multilinear", ways=3)
    rotation = rotary(0, False)
    u, keys, values = inputs(mixer, q, k, v, ctx.x)
    complex_of = lambda t: torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())  # noqa: E731
    key, *projections = (complex_of(rotation(t)) for t in (keys[0], keys[1] - 1, keys[2] - 1))
    wanted = torch.zeros_like(u)
    for taken in itertools.product((False, True), repeat=2):
        u_turned = rotation(u)
        for _ in range(sum(taken)):
            u_turned = rotation(u_turned)
        second, third = (p if t else torch.ones_like(p) for p, t in zip(projections, taken, strict=True))
        a = (complex_of(u_turned), key.conj(), second.conj(), third.conj())
        weights = torch.einsum("bthd,bihd,bjhd,blhd->bhtijl", *a).real / N**3
        wanted += torch.einsum("bhtijl,bihe,bjhe,blhe->bthe", weights, *values)
    found = mixer(q, k, v, Context(x=ctx.x, rotate=rotation))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, masked):
    torch.manual_seed(3)
    mixer = build_mixer(name, 3, 2, 4, num_kv_heads=1, dtype=torch.float64)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    mask = torch.arange(5).expand(2, 5) < torch.tensor([[3], [5]])
    shapes = ((2, 5, 2, 4), (2, 5, 1, 4), (2, 5, 1, 4), (2, 5, 3))
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes] + [p.detach() for p in mixer.parameters()]
    names = [n for n, _ in mixer.named_parameters()]

    def run(q, k, v, x, *parameters):
        ctx = Context(x=x, key_padding_mask=mask if masked else None)
        return functional_call(mixer, dict(zip(names, parameters, strict=True)), (q, k, v, ctx))

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_float64(name):
    mixer, q, k, v, ctx = setting(name)
    q, k, v, x = (t.bfloat16() for t in (q, k, v, ctx.x))
    low = build_mixer(name, C, H, D, num_kv_heads=HK, dtype=torch.bfloat16)
    low.load_state_dict(mixer.state_dict())
    mixer.load_state_dict(low.state_dict())
    wanted = mixer(*(t.double() for t in (q, k, v)), Context(x=x.double()))
    found = low(q, k, v, Context(x=x))
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("options", [{"center": "k"}, {"mean_path": True}, {"causal": True}])
@pytest.mark.parametrize("name", NAMES)
def test_options_without_a_meaning_are_refused(name, options):
    with pytest.raises(ValueError, match=r"no option|two-sided only"):
        build_mixer(name, C, H, D, **{"normalize": False, "feature_map": "identity", **options})


def test_ways_is_checked():
    with pytest.raises(ValueError, match="from 2 to 8"):
        build_mixer("multilinear", C, H, D, ways=1)
