"""With a rotary embedding, the weights of `power` mixers sum to at most one."""

import pytest
import torch

from hla_kernels import op
from hla_kernels.features import feature
from zoo.mixers import Context, build_mixer
from zoo.mixers.context import Rotation

B, N, H, D, GRID = 2, 24, 2, 8, (4, 6)


def rotation(half: bool) -> Rotation:
    """Token t rotates pair p by t (p + 1) / 3; pairs are channels (i, i + D / 2) or (2i, 2i + 1)."""
    angle = torch.arange(N, dtype=torch.float64)[:, None] * torch.arange(1, D // 2 + 1, dtype=torch.float64) / 3
    cos, sin = angle.cos(), angle.sin()

    def turn(t: torch.Tensor) -> torch.Tensor:
        x, y = t.chunk(2, -1) if half else (t[..., 0::2], t[..., 1::2])
        c, s = cos[:, None].to(t), sin[:, None].to(t)
        turned = x * c - y * s, x * s + y * c
        return torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)

    return Rotation(turn, lambda: (cos.float(), sin.float()), half)


def apart(half: bool) -> tuple[torch.Tensor, ...]:
    """q and k whose features lie in different channels of each pair but for a thousandth, v, hidden states."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, N, H, D, generator=g, dtype=torch.float64) for _ in range(3))
    first = torch.arange(D) < D // 2 if half else torch.arange(D) % 2 == 0
    q = torch.where(first, q.abs(), -q.abs())
    k = torch.where(first, -k.abs(), k.abs())
    q[..., ~first] += 1e-3 * 8  # a few of them are positive
    return q, k, v, torch.zeros(B, N, H * D, dtype=torch.float64)


NAMES = ("la", "ahla", "hla2", "hla3", "poly", "rala", "mhla", "mhla2")


def mixed(name: str, half: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a mixer, and v."""
    q, k, v, x = apart(half)
    layout = {"blocks": [2, 2]} if name.startswith("mhla") else {}
    mixer = build_mixer(name, H * D, H, D, dtype=torch.float64, **layout)
    return mixer(q, k, v, Context(x=x, grid=GRID, rotate=rotation(half))), v


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_within_the_values(name, half):
    o, v = mixed(name, half)
    assert 0 < float(o.detach().abs().max()) <= float(v.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_kernels_read_the_tokens(monkeypatch, name):
    """Those of the denominator too: with another last dimension, calls on GPUs run in torch."""
    strides, choose = [], op.choose

    def recorded(call: op.AnyCall, impl: str) -> str:
        strides.extend(x.stride(3) for x in (call.q, call.k, call.v))
        return choose(call, impl)

    monkeypatch.setattr(op, "choose", recorded)
    monkeypatch.setattr(op, "recall", lambda form: None)  # choices of earlier tests
    mixed(name, False)
    assert len(strides) >= 6 and set(strides) == {1}


def test_a_denominator_of_unrotated_features_would_explode():
    """So that the test above can fail."""
    q, k, _, _ = apart(False)
    mixer, turn = build_mixer("la", H * D, H, D, dtype=torch.float64), rotation(False)
    q, k = feature(mixer.phi_q(q), "relu"), feature(mixer.phi_k(k), "relu")
    plain, turned = (torch.einsum("bnhd,bmhd->bhnm", a, b).sum(-1) for a, b in ((q, k), (turn(q), turn(k))))
    assert float((turned / plain.clamp(min=1e-12)).abs().max()) > 1e6


@pytest.mark.parametrize("half", [False, True])
def test_lengths_of_pairs_bound_products_and_have_gradients_at_zero(half):
    q, k, _, _ = apart(half)
    turn = rotation(half)
    bound = torch.einsum("bnhd,bmhd->bhnm", turn.lengths(q), turn.lengths(k))
    assert bool((torch.einsum("bnhd,bmhd->bhnm", turn(q), turn(k)).abs() <= bound + 1e-12).all())
    zero = torch.zeros(1, N, H, D, requires_grad=True)
    turn.lengths(zero).sum().backward()
    assert bool((zero.grad == 0).all())
