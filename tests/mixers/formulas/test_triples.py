"""Triple and 2-simplicial attention against sums over pairs; quad and Strassen attention as references."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from hla_kernels.trilinear.reference import product_attention, simplex2, strassen_attention
from hla_kernels.trilinear.window import simplex2_window
from tests.helpers.first_order import HK, B, C, D, H, N, setting, turn
from zoo.mixers import Context, build_mixer

GRID, PREFIX, SUFFIX = (3, 5), 2, 2  # 19 tokens


def heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.repeat_interleave(H // t.shape[2], 2) for t in tensors]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def second(mixer, x: torch.Tensor, signed: bool) -> list[torch.Tensor]:
    """Second queries and keys per query head."""
    width = mixer.options.width
    found = [width**-0.5 + F.linear(x, w).unflatten(-1, (-1, width)) for w in (mixer.extra_q, mixer.extra_k)]
    return heads(*(t if signed else t.clamp(min=0) for t in found))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("real", [N, 11])
@pytest.mark.parametrize("width", [1, 8])
def test_triple_is_a_product_of_scores(width, real, rotated):
    """N x N weights; the tokens from `real` on are padding."""
    mixer, q, k, v, ctx = setting("triple", width=width, feature_map="relu")
    wanted_of = q[:, :real].relu(), *heads(k[:, :real].relu())
    pair = [t[:, :real] for t in second(mixer, ctx.x, False)]
    rotate = turn if rotated else lambda t: t
    padded = [F.pad(t, (0, 0, 0, 0, 0, N - real)) for t in wanted_of]
    top = product_attention([[rotate(t)[:, :real] for t in padded], pair], heads(v[:, :real])[0])
    below = product_attention([wanted_of, pair], torch.ones(B, real, H, 1, dtype=torch.float64))
    mask = None if real == N else torch.arange(N).expand(B, N) < real
    found = mixer(q, k, v, Context(x=ctx.x, rotate=rotate if rotated else None, key_padding_mask=mask))
    torch.testing.assert_close(found[:, :real], (top / below).nan_to_num(0), rtol=1e-9, atol=1e-9)
    assert not found[:, real:].any()


def test_triple_without_a_ratio():
    mixer, q, k, v, ctx = setting("triple", feature_map="identity", normalize=False)
    pair = second(mixer, ctx.x, True)
    wanted = D**-0.5 * product_attention([(q, heads(k)[0]), pair], heads(v)[0])
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rotate", [None, turn])
@pytest.mark.parametrize(
    "options", [{}, {"feature_map": "elu1"}, {"feature_map": "identity", "normalize": False}, {"gains": True}]
)
def test_a_new_triple_is_linear_attention(options, rotate):
    _, q, k, v, ctx = setting("triple")
    mixers = [build_mixer(n, C, H, D, num_kv_heads=HK, dtype=torch.float64, **options) for n in ("triple", "la")]
    found, wanted = (mixer(q, k, v, Context(x=ctx.x, rotate=rotate)) for mixer in mixers)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_triple_and_quad_have_a_state_of_their_order():
    """sum_j (q1.k1) (q2.k2) (q3.k3) v_j read from the state sum_j k1 (x) k2 (x) k3 (x) v."""
    pairs = [(noise(B, N, H, 3, seed=i), noise(B, N, H, 3, seed=9 + i)) for i in range(3)]
    v = noise(B, N, H, 4, seed=5)
    for order, letters in ((2, "xy"), (3, "xyz")):
        keys = ",".join(f"bnh{c}" for c in letters)
        state = torch.einsum(f"{keys},bnhe->bh{letters}e", *(k for _, k in pairs[:order]), v) / N
        wanted = torch.einsum(f"bh{letters}e,{keys}->bnhe", state, *(q for q, _ in pairs[:order]))
        torch.testing.assert_close(product_attention(pairs[:order], v), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 100])
def test_strassen_attention_is_a_softmax_over_pairs(size):
    """Scores of tens of thousands included, whose exponentials are infinite."""
    q, k1, k2, v1, v2 = (size * noise(B, 7, H, 4, seed=i).requires_grad_() for i in range(5))
    scores = [torch.einsum("bihd,bjhd->bhij", *t) for t in ((q, k1), (k1, k2), (q, k2))]
    s = scores[0][..., :, :, None] + scores[1][..., None, :, :] + scores[2][..., :, None, :]
    p = (0.5 * s).flatten(-2).softmax(-1).view_as(s)
    wanted = torch.einsum("bhijk,bjhe,bkhe->bihe", p, v1, v2)
    found = strassen_attention(q, k1, k2, v1, v2, 0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad((o / size**2).cos().sum(), (q, k1, k2, v1, v2)) for o in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-9)


def allowed_pairs(grid: tuple[int, ...], prefix: int, suffix: int, radius: int) -> torch.Tensor:
    """[N, N, N], by loops over coordinates."""
    place = [None] * prefix + list(itertools.product(*map(range, grid))) + [None] * suffix

    def near(a, b) -> bool:
        return b is None or (a is not None and max(abs(x - y) for x, y in zip(a, b, strict=True)) <= radius)

    one = torch.tensor([[near(a, b) for b in place] for a in place])
    first = one | torch.tensor([a is None for a in place])[:, None]  # tokens outside the grid read all j
    return first[:, :, None] & one[:, None, :]


@pytest.mark.parametrize("block", [1, 2**22])
@pytest.mark.parametrize(
    ("grid", "prefix", "suffix", "radius"),
    [(GRID, 0, 0, 1), (GRID, 2, 2, 1), ((2, 3, 2), 1, 0, 1), ((4, 4), 0, 1, 7), ((6, 1), 1, 0, 2), ((1, 1), 2, 0, 1)],
)
def test_windows_are_pairs_of_neighbours(grid, prefix, suffix, radius, block, monkeypatch):
    monkeypatch.setattr("hla_kernels.trilinear.window.BLOCK", block)
    allowed = allowed_pairs(grid, prefix, suffix, radius)
    n = len(allowed)
    q, k1, k2, v1, v2 = (noise(B, n, H if i == 0 else HK, D, seed=i).requires_grad_() for i in range(5))
    mask = torch.rand(B, n, generator=torch.Generator().manual_seed(3)) < 0.8
    for real in (None, mask):
        seen = allowed if real is None else allowed & (real[:, None, None, :, None] & real[:, None, None, None, :])
        wanted = simplex2(*heads(q, k1, k2, v1, v2), 0.4, seen)
        live = torch.ones_like(mask) if real is None else real
        live = live & seen.expand(B, 1, n, n, n).flatten(3).any(-1)[:, 0]  # others have no pair
        found = simplex2_window(
            q, k1, k2, v1, v2, grid=grid, radius=radius, scale=0.4, prefix=prefix, suffix=suffix, mask=real
        )
        torch.testing.assert_close(found[live], wanted[live], rtol=1e-9, atol=1e-9)
        grads = [
            torch.autograd.grad(o[live].cos().sum(), (q, k1, k2, v1, v2), retain_graph=True) for o in (found, wanted)
        ]
        if real is None:  # the definition divides by zero for tokens without a pair
            torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_a_new_simplex2_is_softmax_in_its_window():
    """With all tokens in the window, softmax attention; its k and v may have fewer heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, N, h, D, dtype=torch.float64) for h in (H, HK, HK))
    ctx = Context(x=torch.randn(B, N, C, dtype=torch.float64), grid=GRID, prefix=PREFIX, suffix=SUFFIX)
    layer = {"num_kv_heads": HK, "dtype": torch.float64}
    mixers = build_mixer("simplex2", C, H, D, radius=4, **layer), build_mixer("softmax", C, H, D, **layer)
    torch.testing.assert_close(*(mixer(q, k, v, ctx) for mixer in mixers), rtol=1e-9, atol=1e-9)


def test_simplex2_reads_further_keys_and_values():
    torch.manual_seed(0)
    mixer = build_mixer("simplex2", C, H, D, radius=1, num_kv_heads=HK, dtype=torch.float64)
    torch.nn.init.normal_(mixer.extra)
    q, k, v = (torch.randn(B, N, h, D, dtype=torch.float64) for h in (H, HK, HK))
    x = torch.randn(B, N, C, dtype=torch.float64)
    l, w = (1 + F.linear(x, e).unflatten(-1, (HK, D)) for e in mixer.extra)
    wanted = simplex2(*heads(q, k, l, v, w), D**-0.5, allowed_pairs(GRID, PREFIX, SUFFIX, 1))
    found = mixer(q, k, v, Context(x=x, grid=GRID, prefix=PREFIX, suffix=SUFFIX))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["triple", "simplex2"])
def test_gradients(name):
    torch.manual_seed(3)
    options = {"width": 2} if name == "triple" else {"radius": 1}
    mixer = build_mixer(name, 3, 2, 4, num_kv_heads=1, dtype=torch.float64, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    mask = torch.arange(5).expand(2, 5) < torch.tensor([[3], [5]])
    shapes = ((2, 5, 2, 4), (2, 5, 1, 4), (2, 5, 1, 4), (2, 5, 3))
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes] + [p.detach() for p in mixer.parameters()]
    names = [n for n, _ in mixer.named_parameters()]

    def run(q, k, v, x, *parameters):
        ctx = Context(x=x, grid=(2, 2), prefix=1, key_padding_mask=mask)
        return functional_call(mixer, dict(zip(names, parameters, strict=True)), (q, k, v, ctx))

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("name", ["triple", "simplex2"])
def test_bfloat16_is_near_float64(name):
    torch.manual_seed(0)
    q, k, v, x = (torch.randn(B, N, *s).bfloat16() for s in ((H, D), (HK, D), (HK, D), (C,)))
    low = build_mixer(name, C, H, D, num_kv_heads=HK, dtype=torch.bfloat16)
    for p in low.parameters():
        torch.nn.init.normal_(p, std=0.3)
    high = build_mixer(name, C, H, D, num_kv_heads=HK, dtype=torch.float64)
    high.load_state_dict(low.state_dict())
    layout = {"grid": GRID, "prefix": PREFIX, "suffix": SUFFIX}
    wanted = high(*(t.double() for t in (q, k, v)), Context(x=x.double(), **layout))
    found = low(q, k, v, Context(x=x, **layout))
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("triple", {"width": 0}, "positive number of channels"),
        ("triple", {"causal": True}, "two-sided only"),
        ("simplex2", {"radius": -1}, "at least 0"),
    ],
)
def test_bad_options(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer(name, C, H, D, **options)
