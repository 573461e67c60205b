"""causal="frame": tokens attend to their own frame and to earlier ones, with a state of constant size."""

import pytest
import torch

import hla_kernels as hk
from tests.ops.cases import CAUSAL, assert_same, tokens

FRAMES, FRAME = 5, 6
N = FRAMES * FRAME
OPTIONS = {
    "plain": {},
    "ratio": {"feature_map": "elu1", "normalize": True},
    "anchored": {"center": "k", "mean_path": True, "scale": 0.2},
    "decay": {"decay": torch.tensor([0.9, 0.6, 1.0, 0.05], dtype=torch.float64)},
    "decay of key heads": {"decay": torch.tensor([0.9, 0.6], dtype=torch.float64), "scale": 0.3},
}
BOTH = pytest.mark.parametrize("name", OPTIONS)
EACH = pytest.mark.parametrize("op", CAUSAL)


def options(name, frame=FRAME):
    return {**OPTIONS[name], "causal": "frame", "frame": frame}


def masked(op, q, k, v, s=0.3, frame=FRAME):
    """The masked matrices of the definition, written down with loops over frames; one head [N, D]."""
    n = len(q)
    seen = torch.zeros(n, n, dtype=q.dtype)
    for f in range(0, n, frame):
        seen[f : f + frame, : f + frame] = 1
    a = s * seen * (q @ k.T)
    second = s * seen * ((q @ k.T) @ a.T)  # the mask is applied again: no later frame in between
    weights = {"linear_attention": a, "hla2": second, "ahla": a @ a, "hla3": second @ a}[op]
    return weights @ v


@EACH
def test_definition(op):
    q, k, v = tokens(N, b=1, h=1, hk=1)
    y = getattr(hk, op)(q, k, v, causal="frame", frame=FRAME, scale=0.3)
    assert_same(y[0, :, 0], masked(op, *(x[0, :, 0] for x in (q, k, v))))


@EACH
@BOTH
@pytest.mark.parametrize("frame", [1, 6, 15, 30])
def test_reference_and_gradients(op, name, frame):
    """The torch form, forward and backward, equals N x N matrices; one frame is two-sided, frames of one token are
    causal."""
    x = [t.requires_grad_() for t in tokens(N)]
    f, given, found = getattr(hk, op), dict(options(name, frame)), []
    decay = given.get("decay")
    if decay is not None:
        given["decay"] = decay.clone().requires_grad_()
    inputs = x if decay is None else [*x, given["decay"]]
    grad = tokens(N, hk=4, seed=1)[2]
    for impl in ("torch", "reference"):
        y = f(*x, **given, impl=impl)
        found.append([y, *torch.autograd.grad(y, inputs, grad, allow_unused=True)])
    for a, b in zip(*found, strict=True):
        if a is None or b is None:
            assert not (0 if a is None else a.any()) and not (0 if b is None else b.any())
        else:
            assert_same(a, b)
    if frame == 1:
        assert_same(found[0][0], f(*x, causal=True, **{**OPTIONS[name], **given_decay(given)}))


def given_decay(given):
    return {"decay": given["decay"]} if "decay" in given else {}


@EACH
def test_one_frame_is_two_sided(op):
    x = tokens(N)
    y = getattr(hk, op)(*x, causal="frame", frame=N, scale=0.3, ridge=0.0)
    assert_same(y, getattr(hk, op)(*x, scale=0.3))


@EACH
@BOTH
def test_pieces_are_the_whole(op, name):
    """Frames in pieces equal the whole, with gradients through the states; the state has one size."""
    x = [t.requires_grad_() for t in tokens(N)]
    f, grad = getattr(hk, op), tokens(N, hk=4, seed=1)[2]
    whole, last = f(*x, **options(name), return_state=True)
    state, pieces, sizes = None, [], set()
    for a, b in ((0, 6), (6, 18), (18, 30)):
        y, state = f(*(t[:, a:b] for t in x), **options(name), state=state, return_state=True)
        pieces.append(y)
        sizes.add(state.nbytes)
    assert_same(torch.cat(pieces, 1), whole)
    assert len(sizes) == 1 and int(state.n) == N
    for key, t in last.tensors.items():
        assert_same(state.tensors[key], t)
    found = [torch.autograd.grad(y, x, grad) for y in (torch.cat(pieces, 1), whole)]
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@EACH
def test_merge(op):
    x, f = tokens(N), getattr(hk, op)
    _, whole = f(*x, **options("plain"), return_state=True)
    halves = [[t[:, part] for t in x] for part in (slice(12), slice(12, N))]
    a, b = (f(*half, **options("plain"), return_state="mergeable")[1] for half in halves)
    merged = hk.merge(a, b)
    for key, t in whole.tensors.items():
        assert_same(merged.tensors[key], t)
    states = [f(*x, **options("decay"), return_state=True)[1] for _ in range(2)]
    with pytest.raises(ValueError, match="cannot be merged"):
        hk.merge(*states)


@EACH
def test_later_frames_change_nothing_before_them(op):
    x = tokens(N)
    y = getattr(hk, op)(*x, **options("ratio"))
    for t in x:
        t[:, 12:] = torch.randn(t[:, 12:].shape, dtype=t.dtype)
    z = getattr(hk, op)(*x, **options("ratio"))
    assert torch.equal(y[:, :12], z[:, :12]) and not torch.allclose(y[:, 12:], z[:, 12:])
    assert torch.equal(y[:, 11], z[:, 11])


@EACH
def test_decay_of_one_is_no_decay(op):
    x = tokens(N)
    ones = torch.ones(4, dtype=torch.float64)
    assert_same(getattr(hk, op)(*x, **options("plain"), decay=ones), getattr(hk, op)(*x, **options("plain")))


def test_errors():
    x = tokens(N)
    for given, words in (
        ({"causal": "frame"}, "go together"),
        ({"causal": True, "frame": 6}, "go together"),
        ({"causal": "frame", "frame": 7}, "no whole number of frames"),
        ({"causal": "frame", "frame": 2.0}, "number of tokens per frame"),
        ({"causal": "frames", "frame": 6}, "causal must be"),
        ({"causal": "frame", "frame": 6, "decay": 0.9, "decay_rule": "paper"}, "not defined for frames"),
    ):
        with pytest.raises(ValueError, match=words):
            hk.hla2(*x, **given)
    with pytest.raises(ValueError, match="softmax_attention has no"):
        hk.softmax_attention(*x, causal="frame", frame=6)
    _, state = hk.hla2(*x, causal="frame", frame=6, return_state=True)
    with pytest.raises(ValueError, match="belongs to hla2"):
        hk.ahla(*x, causal="frame", frame=6, state=state)
    with pytest.raises(ValueError, match="frame=6"):
        hk.hla2(*x, causal="frame", frame=5, state=state)
    with pytest.raises(ValueError, match="causal='frame'"):
        hk.hla2(*x, causal=True, state=state)


def test_compiled():
    x = tokens(N, dtype=torch.float32)
    f = lambda q, k, v: hk.hla2(q, k, v, causal="frame", frame=FRAME)  # noqa: E731
    y = torch.compile(f, fullgraph=True, backend="aot_eager")(*x)
    assert torch.equal(y, f(*x))
