"""The delta family: chunks against the recurrence, members against their own published recurrences, states."""

import pytest
import torch

import hla_kernels as hk
from hla_kernels import delta_rules as rules
from tests.ops.delta.members import DOUBLE, DV, MEMBERS, B, D, H, full, member, numbers, tokens


@pytest.mark.parametrize("n", (1, 17, 64, 130))
@pytest.mark.parametrize("channels", ("none", "head", "token", "channel"))
@pytest.mark.parametrize(("rank", "writes"), ((0, 1), (1, 1), (2, 1), (3, 3)))
def test_chunks_are_the_recurrence(n, channels, rank, writes):
    q, given = tokens(n)[0], full(n, rank, writes, channels)
    state = hk.DeltaState(torch.randn(B, H, D, DV, dtype=DOUBLE))
    x = [t.requires_grad_() for t in (q, *(t for t in given.values() if t is not None), state.matrix) if t.numel()]
    found, expected = (
        hk.delta(q, **given, state=state, return_state=True, impl=impl) for impl in ("torch", "reference")
    )
    weights = torch.randn_like(found[0]), torch.randn_like(found[1].matrix)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[1].matrix, expected[1].matrix, rtol=1e-11, atol=1e-11)
    grads = [
        torch.autograd.grad((y * weights[0]).sum() + (s.matrix * weights[1]).sum(), x, allow_unused=True)
        for y, s in (found, expected)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def serial(n, step):
    """o of o_t = S'q, S = step(t, S) from zero; tokens in the layout of the operator."""
    state, outs = torch.zeros(B, H, D, DV, dtype=DOUBLE), []
    for t in range(n):
        state = step(t, state)
        outs.append(torch.einsum("bhd,bhde->bhe", tokens(n)[0][:, t], state))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("name", MEMBERS)
def test_published_recurrences(name):
    n = 90
    given, step = member(name, n)
    torch.testing.assert_close(hk.delta(tokens(n)[0], **given), serial(n, step), rtol=1e-11, atol=1e-11)


def test_first_order_is_that_of_linear_attention():
    q, k, v = tokens(70)
    torch.testing.assert_close(hk.delta(q, k, v), hk.linear_attention(q, k, v, causal=True), rtol=1e-11, atol=1e-11)
    gamma = numbers(H, low=0.7)
    decayed = hk.linear_attention(q, k, v, causal=True, decay=gamma)
    torch.testing.assert_close(hk.delta(q, k, v, log_f=gamma.log()), decayed, rtol=1e-10, atol=1e-10)


def test_hdla_with_beta_and_two_less_beta_is_the_same_without_decay():
    """(I - b k k')^2 = I - b (2 - b) k k' for keys of length 1."""
    q, k, v = tokens(80)
    beta = numbers(B, 80, H, high=2.0)
    outs = [hk.delta(q, **rules.hdla(k, v, torch.zeros_like(q), x)) for x in (beta, 2 - beta)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ("hdla", "gated_delta_product", "mamba2"))
@pytest.mark.parametrize("cut", (1, 37, 64))
def test_segments_are_the_whole(name, cut):
    n = 100
    q, given = tokens(n)[0], member(name, n)[0]
    whole, last = hk.delta(q, **given, return_state="mergeable")
    parts = [
        (q[:, s], {key: x if x.shape[:2] != (B, n) else x[:, s] for key, x in given.items()})
        for s in (slice(0, cut), slice(cut, n))
    ]
    first, state = hk.delta(parts[0][0], **parts[0][1], return_state=True)
    second, end = hk.delta(parts[1][0], **parts[1][1], state=state, return_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(end.matrix, last.matrix, rtol=1e-10, atol=1e-10)
    merged = hk.merge_delta(*(hk.delta(x, **y, return_state="mergeable")[1] for x, y in parts))
    torch.testing.assert_close(merged, last, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="mergeable"):
        hk.merge_delta(state, end)


@pytest.mark.parametrize("name", ("hdla", "gla", "delta_net"))
def test_later_tokens_and_other_samples_change_nothing(name):
    n = 70
    q, given = tokens(n)[0], member(name, n)[0]
    o = hk.delta(q, **given)
    changed = {key: torch.cat([x[:, :40], 0.5 * x[:, 40:]], 1) for key, x in given.items()}
    assert torch.equal(hk.delta(q, **changed)[:, :40], o[:, :40])
    alone = hk.delta(q[:1], **{key: x[:1] for key, x in given.items()})
    torch.testing.assert_close(alone, o[:1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("strength", (1e-4, 3.0, 300.0))
@pytest.mark.parametrize("channels", ("token", "channel"))
def test_float32_at_every_strength_of_decay(strength, channels):
    """Finite, with the error of float32: 1e-5 of the output, measured 4e-7 at most."""
    q, given = tokens(200)[0], full(200, 1, 1, channels, strength)
    expected = hk.delta(q, **given, impl="reference")
    low = {key: x.float() for key, x in given.items()}
    found = hk.delta(q.float(), **low)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    x = [t.requires_grad_() for t in low.values()]
    grads = torch.autograd.grad(hk.delta(q.float(), **low).square().sum(), x)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_low_precision_is_rounded_once(dtype):
    q, given = tokens(150)[0], member("hdla", 150)[0]
    low = {key: x.to(dtype) for key, x in given.items()}
    found = hk.delta(q.to(dtype), **low)
    wide = hk.delta(q.to(dtype).double(), **{key: x.double() for key, x in low.items()})
    assert found.dtype == dtype
    assert (found.double() - wide).norm() <= torch.finfo(dtype).eps * wide.norm()


def test_compiles_whole_and_passes_opcheck():
    q, given = tokens(20)[0].float(), {key: x.float() for key, x in member("hdla", 20)[0].items()}
    compiled = torch.compile(lambda q: hk.delta(q, **given), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), hk.delta(q, **given))
    x = [q.requires_grad_(), *(given[key].unsqueeze(3) for key in "kv"), given["log_f"], given["a"], given["b"]]
    torch.library.opcheck(torch.ops.hla_kernels.delta, (*x, torch.zeros(B, H, D, DV), 0))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    (
        ({"log_f": 0.5}, "log_f must be a tensor"),
        ({"log_f": torch.ones(H, dtype=DOUBLE)}, "at most 0 everywhere"),
        ({"log_f": torch.zeros(H + 1, dtype=DOUBLE)}, r"\[B, N, H\] = \[2, 6, 3\]"),
        ({"a": torch.zeros(B, 6, H, 4, D, dtype=DOUBLE)}, "0 to 3"),
        ({"a": torch.zeros(B, 6, H, 1, D, dtype=DOUBLE)}, "b must be a tensor"),
        ({"a": torch.zeros(B, 6, H, 1, D), "b": torch.zeros(B, 6, H, 2, D)}, "one rank, got 1 and 2"),
        ({"k": torch.zeros(B, 6, H, 4, D, dtype=DOUBLE)}, "rank of 1 to 3"),
        ({"k": torch.zeros(B, 6, H, 2, D, dtype=DOUBLE)}, "k and v the same rank"),
        ({"v": torch.zeros(B, 5, H, DV, dtype=DOUBLE)}, "same number of tokens"),
        ({"state": hk.DeltaState(torch.zeros(B, H, DV, D))}, r"matrix \[2, 3, 8, 5\]"),
        ({"state": torch.zeros(B, H, D, DV)}, "state must be a DeltaState"),
        ({"return_state": "all"}, "'mergeable'"),
        ({"impl": "triton"}, "cannot run here"),
        ({"log_g": None}, "did you mean 'log_f'"),
    ),
)
def test_what_is_refused(changes, sentence):
    q, k, v = tokens(6)
    given = {"k": k, "v": v, **changes}
    with pytest.raises(ValueError, match=sentence):
        hk.delta(q, **given)
