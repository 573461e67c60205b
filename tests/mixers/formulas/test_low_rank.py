"""Mixers of low rank against the N x N weights of their publications, in float64."""

import pytest
import torch
from torch.func import functional_call

from tests.helpers.first_order import HK, B, C, D, H, N
from zoo.mixers import Context, build_mixer
from zoo.mixers.low_rank import pseudoinverse, segments

GRID, PREFIX, RANK = (3, 6), 1, 5
NAMES = ("flare", "efficient", "performer", "rfa", "linformer", "nystrom")
RANKED = tuple(n for n in NAMES if n != "efficient")


def setting(name: str, **options):
    torch.manual_seed(0)
    if name in RANKED:
        options = {"rank": RANK, **options}
    layer = {"num_kv_heads": HK, "grid": GRID, "prefix": PREFIX, "dtype": torch.float64}
    mixer = build_mixer(name, C, H, D, **layer, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    q, k, v = (torch.randn(B, N, heads, D, dtype=torch.float64) for heads in (H, HK, HK))
    return mixer, q, k, v, torch.randn(B, N, C, dtype=torch.float64)


def context(x: torch.Tensor, mask: torch.Tensor | None = None) -> Context:
    return Context(x=x, grid=GRID, prefix=PREFIX, key_padding_mask=mask)


def means(m: int) -> torch.Tensor:
    """[M, N] weights of the means over segments, by a loop."""
    w = torch.zeros(m, N, dtype=torch.float64)
    for i in range(m):
        first, last = i * N // m, -(-(i + 1) * N // m)
        w[i, first:last] = 1 / (last - first)
    return w


def weights_of(mixer, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Weights [B, H, N, N] of the mixer for q, k [B, H, N, D]."""
    scale = D**-0.5
    if mixer.name == "flare":
        reader = q if mixer.options.read == "q" else k
        return (reader @ mixer.latents.mT).softmax(-1) @ (mixer.latents @ k.mT).softmax(-1)
    if mixer.name == "efficient":
        return q.softmax(-1) @ k.softmax(-2).mT
    if mixer.name == "performer":
        features = [
            torch.exp(t * scale**0.5 @ mixer.directions.mT - scale * t.square().sum(-1, keepdim=True) / 2)
            for t in (q, k)
        ]
        a = features[0] @ features[1].mT
        return a / a.sum(-1, keepdim=True)
    if mixer.name == "rfa":
        angles = (
            torch.einsum("bhnd,hrd->bhnr", t / t.norm(dim=-1, keepdim=True), mixer.directions / mixer.sigma[:, None])
            for t in (q, k)
        )
        a, b = angles
        weights = torch.cos(a[:, :, :, None] - b[:, :, None]).mean(-1)
        return weights / N / weights.mean(-1, keepdim=True).clamp(min=0.01)
    if mixer.name == "nystrom":
        w = means(RANK)
        few_q, few_k = w @ q, w @ k
        inverse = torch.linalg.pinv((scale * few_q @ few_k.mT).softmax(-1))
        return (scale * q @ few_k.mT).softmax(-1) @ inverse @ (scale * few_q @ k.mT).softmax(-1)
    e, f = (torch.block_diag(torch.ones(1, 1), w.flatten(1)) for w in mixer.weights)  # the class token is a key
    return (scale * q @ (e @ k).mT).softmax(-1) @ f


@pytest.mark.parametrize(
    ("name", "options"),
    [*((n, {}) for n in NAMES if n != "nystrom"), ("flare", {"read": "k"}), ("nystrom", {"iterations": 25})],
)
def test_definition(name, options):
    mixer, q, k, v, x = setting(name, **options)
    found = mixer(q, k, v, context(x))
    q, k, v = (t.repeat_interleave(H // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))
    wanted = (weights_of(mixer, q, k) @ v).transpose(1, 2)
    tolerance = 1e-6 if name == "nystrom" else 1e-9  # of the iteration for the inverse
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "linformer"])
def test_padded_tokens_are_absent(name):
    mixer, q, k, v, x = setting(name)
    mask = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.6
    found = mixer(q, k, v, context(x, mask))
    assert not found[~mask].any()
    for b in range(B):
        alone = [t[b : b + 1, mask[b]] for t in (q, k, v)]
        row = Context(x=x, grid=(1, int(mask[b].sum())))
        torch.testing.assert_close(found[b : b + 1, mask[b]], mixer(*alone, row), rtol=1e-9, atol=1e-9)


def test_linformer_reads_padding_as_zeros():
    mixer, q, k, v, x = setting("linformer")
    mask = torch.arange(N).expand(B, N) < 12
    found = mixer(q, k, v, context(x, mask))
    zeros = (t * mask[:, :, None, None] for t in (k, v))
    torch.testing.assert_close(found[:, :12], mixer(q, *zeros, context(x))[:, :12], rtol=1e-9, atol=1e-9)
    assert not found[:, 12:].any()


def test_linformer_keeps_its_means_on_another_grid():
    """A constant image has the same means, and a linear one nearly so."""
    mixer = build_mixer("linformer", C, H, D, grid=(8, 8), rank=16, dtype=torch.float64)
    for grid in ((8, 8), (16, 16), (5, 9)):
        sums = mixer._interpolated(grid).sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0.3, atol=0)
    at_16 = mixer._interpolated((16, 16)) @ torch.linspace(0, 1, 16, dtype=torch.float64).repeat_interleave(16)
    at_8 = mixer._interpolated((8, 8)) @ torch.linspace(0, 1, 8, dtype=torch.float64).repeat_interleave(8)
    torch.testing.assert_close(at_16, at_8, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", ["flare", "efficient", "performer", "rfa"])
def test_points_have_no_order(name):
    mixer, q, k, v, x = setting(name)
    order = torch.randperm(N)
    found = mixer(q[:, order], k[:, order], v[:, order], Context(x=x))
    torch.testing.assert_close(found, mixer(q, k, v, Context(x=x))[:, order], rtol=1e-9, atol=1e-9)


def test_performer_estimates_softmax():
    """The mean over many draws of the unnormalised weights is exp(scale q.k), within five standard errors."""
    torch.manual_seed(0)
    q, k = 0.7 * torch.randn(2, 1, 6, 1, 4, dtype=torch.float64)
    draws = []
    for _ in range(400):
        mixer = build_mixer("performer", 4, 1, 4, rank=8, dtype=torch.float64)
        f, g = (mixer.exponents(t).exp()[0, :, 0] for t in (q, k))
        draws.append(f @ g.T / 8)
    draws = torch.stack(draws)
    wanted = (q[0, :, 0] @ k[0, :, 0].T / 2).exp()
    error = (draws.mean(0) - wanted).abs()
    assert (error < 5 * draws.std(0) / 400**0.5).all()


def test_rfa_estimates_softmax_of_unit_vectors():
    """The mean over many draws of phi(q).phi(k) is exp(q.k - 1) for sigma = 1, within five standard errors."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 6, 1, 4, dtype=torch.float64)
    draws = []
    for _ in range(400):
        mixer = build_mixer("rfa", 4, 1, 4, rank=8, dtype=torch.float64)
        f, g = (mixer.phi(t)[0, :, 0] for t in (q, k))
        draws.append((f @ g.T).detach())
    draws = torch.stack(draws)
    q, k = (t[0, :, 0] / t[0, :, 0].norm(dim=-1, keepdim=True) for t in (q, k))
    error = (draws.mean(0) - (q @ k.T - 1).exp()).abs()
    assert (error < 5 * draws.std(0) / 400**0.5).all()


def test_directions_are_orthogonal():
    mixer = build_mixer("performer", C, H, D, rank=20, dtype=torch.float64)
    for w in mixer.directions:
        for block in w.split(D):
            gram = block @ block.T
            torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)  # drawn in float32


def test_segments_of_few_tokens_overlap():
    assert torch.equal(segments(2, 4, None, torch.device("cpu"))[0], torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]))


def test_pseudoinverse():
    torch.manual_seed(0)
    a = torch.randn(3, 6, 6, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(pseudoinverse(a, 25), torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    torch.manual_seed(3)
    options = {"rank": 3} if name in RANKED else {}
    mixer = build_mixer(name, 3, 2, 4, num_kv_heads=1, grid=(2, 2), prefix=1, dtype=torch.float64, **options)
    mask = torch.arange(5).expand(2, 5) < torch.tensor([[3], [5]])
    tensors = [torch.randn(2, 5, h, 4, dtype=torch.float64) for h in (2, 1, 1)] + [
        p.detach() for p in mixer.parameters()
    ]
    names, x = [n for n, _ in mixer.named_parameters()], torch.zeros(2, 5, 3)

    def run(q, k, v, *parameters):
        ctx = Context(x=x, grid=(2, 2), prefix=1, key_padding_mask=mask)
        return functional_call(mixer, dict(zip(names, parameters, strict=True)), (q, k, v, ctx))

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("flare", {"rank": 0}, "positive number"),
        ("flare", {"read": "v"}, "unknown read"),
        ("nystrom", {"iterations": -1}, "at least 0"),
        ("performer", {"rank": 300}, "at most 256"),
    ],
)
def test_bad_options(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer(name, C, H, D, **options)
