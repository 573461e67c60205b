"""Mega against its recurrences along each axis of the grid, token by token, in float64."""

import pytest
import torch
from torch.func import functional_call

from tests.helpers.first_order import HK, B, C, D, H, N
from zoo.mixers import Context, build_mixer

GRID, PREFIX, SUFFIX = (3, 5), 2, 2  # 19 tokens
LAYOUT = {"grid": GRID, "prefix": PREFIX, "suffix": SUFFIX}


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, N, h, D, dtype=torch.float64) for h in (H, HK, HK))
    return q, k, v, torch.randn(B, N, C, dtype=torch.float64)


def mega(**options):
    mixer = build_mixer("mega", C, H, D, num_kv_heads=HK, averages=3, dtype=torch.float64, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    return mixer


def averaged(t: torch.Tensor, module) -> torch.Tensor:
    """x plus the recurrences of both directions along both axes, a token of the grid at a time."""
    image = t[:, PREFIX:-SUFFIX].unflatten(1, GRID).flatten(3)  # [B, 3, 5, channels]
    out = image.clone()
    for axis in (0, 1):
        for direction in (0, 1):
            alpha, delta, eta = (p[direction, axis] for p in (module.alpha, module.delta, module.eta))
            alpha, delta = alpha.sigmoid(), delta.sigmoid()
            lines = image.movedim(axis + 1, 1)
            state, found = 0, {}
            for i in range(GRID[axis])[:: 1 - 2 * direction]:
                state = alpha * lines[:, i, ..., None] + (1 - alpha * delta) * state
                found[i] = (state * eta).sum(-1)
            out = out + torch.stack([found[i] for i in range(GRID[axis])], axis + 1)
    grid = out.flatten(1, 2).unflatten(2, t.shape[2:])
    return torch.cat([t[:, :PREFIX], grid, t[:, -SUFFIX:]], 1)


@pytest.mark.parametrize("real", [N, 12])
def test_definition(real):
    mixer, (q, k, v, x) = mega(), inputs()
    mask = torch.arange(N).expand(B, N) < real
    q0, k0 = (t * mask[..., None, None] for t in (q, k))
    a, b = averaged(q0, mixer.average_q), averaged(k0, mixer.average_k)
    b, values = (t.repeat_interleave(H // HK, 2) for t in (b, v))
    scores = D**-0.5 * torch.einsum("bihd,bjhd->bhij", a, b).masked_fill(~mask[:, None, None], -torch.inf)
    gate = 2 * (x @ mixer.gate.weight.T + mixer.gate.bias).sigmoid().unflatten(-1, (H, D))
    wanted = gate * torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    found = mixer(q, k, v, Context(x=x, key_padding_mask=None if real == N else mask, **LAYOUT))
    torch.testing.assert_close(found[:, :real], wanted[:, :real], rtol=1e-9, atol=1e-9)
    assert not found[:, real:].any()


def test_averages_keep_float32_under_autocast():
    """torch has no FFT in bfloat16 on a GPU."""
    average, x = mega().average_q.float(), torch.randn(B, N, H, D)
    with torch.autocast("cpu", torch.bfloat16):
        found = average(x, GRID, PREFIX, SUFFIX)
    assert torch.equal(found, average(x, GRID, PREFIX, SUFFIX))


def test_a_new_mixer_is_softmax():
    q, k, v, x = inputs()
    mixers = [build_mixer(n, C, H, D, num_kv_heads=HK, dtype=torch.float64) for n in ("mega", "softmax")]
    torch.testing.assert_close(*(m(q, k, v, Context(x=x, **LAYOUT)) for m in mixers), rtol=1e-9, atol=1e-9)


def test_video_and_large_logits():
    """Three axes; alpha delta rounds to one, and the gradients stay finite."""
    mixer = mega(grid_dims=3).float()
    with torch.no_grad():
        for module in (mixer.average_q, mixer.average_k):
            module.alpha.fill_(40)
            module.delta.fill_(40)
    q, k, v, x = (t.float() for t in inputs())
    mixer(q, k, v, Context(x=x, grid=(2, 2, 4), prefix=3)).sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    with pytest.raises(ValueError, match="3-D grids"):
        mixer(q, k, v, Context(x=x, **LAYOUT))


def test_gradients():
    torch.manual_seed(3)
    mixer = build_mixer("mega", 3, 2, 2, num_kv_heads=1, averages=2, dtype=torch.float64)
    tensors = [torch.randn(1, 5, *s, dtype=torch.float64) for s in ((2, 2), (1, 2), (1, 2), (3,))]
    tensors += [torch.randn_like(p) for p in mixer.parameters()]
    names = [n for n, _ in mixer.named_parameters()]

    def run(q, k, v, x, *parameters):
        ctx = Context(x=x, grid=(2, 2), prefix=1)
        return functional_call(mixer, dict(zip(names, parameters, strict=True)), (q, k, v, ctx))

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in tensors])


def test_bad_options():
    with pytest.raises(ValueError, match="averages must be a positive number"):
        build_mixer("mega", C, H, D, averages=0)
