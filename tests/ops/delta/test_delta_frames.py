"""Delta rules over frames: the mean of the tokens' updates of the state before the frame."""

import pytest
import torch

import hla_kernels as hk
from tests.ops.delta.members import DOUBLE, DV, MEMBERS, B, D, H, full, member, tokens

N, FRAME = 30, 6


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("impl", ("torch", "reference"))
@pytest.mark.parametrize("name", MEMBERS)
def test_published_recurrences(name, impl):
    """One published step per token from the state before the frame, averaged; all tokens read the result."""
    (given, step), state, outs = member(name, N), torch.zeros(B, H, D, DV, dtype=DOUBLE), []
    q = tokens(N)[0]
    for f in range(0, N, FRAME):
        state = torch.stack([step(t, state) for t in range(f, f + FRAME)]).mean(0)
        outs += [torch.einsum("bhd,bhde->bhe", q[:, t], state) for t in range(f, f + FRAME)]
    o, last = hk.delta(q, **given, frame=FRAME, return_state=True, impl=impl)
    close(o, torch.stack(outs, 1))
    close(last.matrix, state)


@pytest.mark.parametrize("channels", ("none", "head", "token", "channel"))
@pytest.mark.parametrize(("rank", "writes"), ((0, 1), (1, 1), (2, 1), (3, 3)))
def test_gradients(channels, rank, writes):
    q, given = tokens(N)[0], full(N, rank, writes, channels)
    state = hk.DeltaState(torch.randn(B, H, D, DV, dtype=DOUBLE))
    x = [t.requires_grad_() for t in (q, *(t for t in given.values() if t is not None), state.matrix) if t.numel()]
    g = torch.Generator().manual_seed(0)
    grad, grads = torch.randn(B, N, H, DV, generator=g, dtype=DOUBLE), []
    for impl in ("torch", "reference"):
        o, last = hk.delta(q, **given, frame=FRAME, state=state, return_state=True, impl=impl)
        grads.append(torch.autograd.grad((o * grad).sum() + last.matrix.square().sum(), x))
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs, 1e-9)


@pytest.mark.parametrize("name", ("hdla", "gated_delta_net", "retnet"))
def test_frames_of_one_token_are_causal_and_gla_of_one_frame_is_two_sided(name):
    q, given = tokens(N)[0], member(name, N)[0]
    close(hk.delta(q, **given, frame=1), hk.delta(q, **given))
    q, k, v = tokens(N)
    close(hk.delta(q, k, v, frame=N), hk.linear_attention(q, k, v))
    close(hk.delta(q, k, v, frame=FRAME), hk.linear_attention(q, k, v, causal="frame", frame=FRAME) / FRAME)


@pytest.mark.parametrize("name", ("hdla", "gated_delta_product", "mamba2"))
def test_segments_are_the_whole(name):
    q, given = tokens(N)[0], member(name, N)[0]
    whole, last = hk.delta(q, **given, frame=FRAME, return_state="mergeable")
    parts = [
        {"q": q[:, s], **{key: x if x.shape[:2] != (B, N) else x[:, s] for key, x in given.items()}, "frame": FRAME}
        for s in (slice(0, 12), slice(12, N))
    ]
    first, state = hk.delta(**parts[0], return_state=True)
    second, end = hk.delta(**parts[1], state=state, return_state=True)
    close(torch.cat([first, second], 1), whole)
    close(end.matrix, last.matrix)
    assert end.nbytes == state.nbytes == B * H * D * DV * 8
    close(hk.merge_delta(*(hk.delta(**part, return_state="mergeable")[1] for part in parts)), last)


def test_later_frames_change_nothing_before_them():
    q, given = tokens(N)[0], member("hdla", N)[0]
    o = hk.delta(q, **given, frame=FRAME)
    changed = {key: torch.cat([x[:, :12], 0.5 * x[:, 12:]], 1) for key, x in given.items()}
    found = hk.delta(q, **changed, frame=FRAME)
    assert torch.equal(found[:, :12], o[:, :12]) and not torch.allclose(found[:, 12:], o[:, 12:])


def test_states_stay_bounded():
    """The mean of transitions that shrink shrinks: 2,000 frames of equal keys, which a sum would amplify."""
    n = 8000
    k, v = (x[:1, :1].expand(1, n, H, -1) for x in tokens(1)[1:])
    beta = torch.full((1, n, H), 0.9, dtype=DOUBLE)
    o = hk.delta(k, **hk.delta_rules.delta_net(k, v, beta), frame=4)
    close(o[:, -1], v[:, -1])


def test_compiles_whole_and_passes_opcheck():
    q, given = tokens(N)[0].float(), {key: x.float() for key, x in member("hdla", N)[0].items()}
    compiled = torch.compile(lambda q: hk.delta(q, **given, frame=FRAME), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), hk.delta(q, **given, frame=FRAME))
    x = [q.requires_grad_(), *(given[key].unsqueeze(3) for key in "kv"), given["log_f"], given["a"], given["b"]]
    torch.library.opcheck(torch.ops.hla_kernels.delta, (*x, torch.zeros(B, H, D, DV), FRAME))


@pytest.mark.parametrize(
    ("frame", "sentence"),
    ((7, "no whole number of frames of 7"), (-1, "number of tokens per frame"), (True, "number of tokens per frame")),
)
def test_what_is_refused(frame, sentence):
    with pytest.raises(ValueError, match=sentence):
        hk.delta(*tokens(N), frame=frame)
