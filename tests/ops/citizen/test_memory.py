"""The causal form in long sequences: memory linear in N, states entering chunks at any N, decays that underflow."""

import pytest
import torch

import hla_kernels as hk
from hla_kernels.hla.chunked import CHUNK, GROUP, Chunks
from tests.ops.cases import CAUSAL, Allocated, assert_same, error, tokens


def allocated(op, n, **options):
    """(sum, largest) of the allocations of forward and backward. With a state: plain torch code, every stage seen."""
    x = [t.requires_grad_() for t in tokens(n, b=1, h=2, hk=1, d=2, dv=2, dtype=torch.float32)]
    with Allocated() as mode:
        y, state = getattr(hk, op)(*x, causal=True, return_state=True, **options)
        (y.sum() + sum(t.sum() for t in state.tensors.values())).backward()
    return mode.total, mode.largest


@pytest.mark.parametrize("decay", [None, 0.9, "heads"])
@pytest.mark.parametrize("op", CAUSAL)
def test_memory_is_linear(op, decay):
    """16 times the tokens allocate at most 16 times the bytes, in sum and in the largest tensor. D = 2 makes the states
    small, so that a matrix of chunks x chunks would show."""
    decay = torch.tensor([0.9, 0.99], requires_grad=True) if decay == "heads" else decay
    short, long = 4 * CHUNK * GROUP, 64 * CHUNK * GROUP
    for a, b in zip(allocated(op, short, decay=decay), allocated(op, long, decay=decay), strict=True):
        assert b <= 16 * a, b / a


@pytest.mark.parametrize("gamma", [0.9999, 0.5, 1e-6, 1e-30])
@pytest.mark.parametrize("n", [CHUNK * GROUP, CHUNK * GROUP + 1, 50_000, 1_000_000])
def test_states_entering_chunks(n, gamma):
    """All levels of groups against the loop over chunks, and the gradient of the decay, finite up to N = 1e6."""
    log_gamma = torch.tensor([gamma, 0.99], dtype=torch.float64).view(1, 2, 1, 1, 1).log().requires_grad_()
    chunks = Chunks(n, log_gamma, log_gamma)
    gen = torch.Generator().manual_seed(0)
    own = torch.randn(1, 2, 1, chunks.count, 1, 2, dtype=torch.float64, generator=gen)
    state = carry = torch.ones(1, 2, 1, 1, 2, dtype=torch.float64)
    looped, rho = [], (log_gamma.detach() * chunks.size).exp()
    for own_sum in own.unbind(3):
        looped.append(state)
        state = rho * state + own_sum
    entering = chunks.entering(own, carry)
    assert_same(entering.detach(), torch.stack(looped, 3))
    assert bool(torch.isfinite(torch.autograd.grad(entering.square().sum(), log_gamma)[0]).all())


@pytest.mark.parametrize("op", CAUSAL)
def test_long_and_forgetful(op):
    """gamma = 1e-6 in float32 over several levels of powers: they underflow to 0, never to NaN.

    Ratio normaliser without eps and a padded last chunk. o and dv against float64; dq and dk of a ratio in which one
    token counts are differences of equal numbers, of which only finiteness can be asked.
    """
    n = CHUNK * GROUP * GROUP + 5
    results = []
    for dtype in (torch.float32, torch.float64):
        x = [t.requires_grad_() for t in tokens(n, b=1, h=1, hk=1, d=2, dv=2, dtype=torch.float32)]
        decay = torch.tensor([1e-6], requires_grad=True)
        cast = [t.to(dtype) for t in (*x, decay)]
        y = getattr(hk, op)(*cast[:3], causal=True, decay=cast[3], feature_map="elu1", normalize=True, eps=0.0)
        results.append([y, *torch.autograd.grad(y.square().sum(), (*x, decay))])
    assert all(bool(torch.isfinite(g).all()) for g in results[0])
    for i in (0, 3):
        assert error(results[0][i], results[1][i]) < 1e-5


@pytest.mark.parametrize("op", CAUSAL)
def test_padding_has_no_gradient(op):
    """Without eps the padded positions of the last chunk are 0 / 0: they must not reach the gradients."""
    for n in (CHUNK, CHUNK + 1):
        x = [t.requires_grad_() for t in tokens(n)]
        y = getattr(hk, op)(*x, causal=True, feature_map="elu1", normalize=True, eps=0.0)
        for g in torch.autograd.grad(y.square().sum(), x):
            assert bool(torch.isfinite(g).all())
