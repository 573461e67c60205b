"""Block mixing with causal="frame": blocks of a frame, moments over its own and earlier frames."""

import pytest
import torch

import hla_kernels as hk
from hla_kernels import op
from hla_kernels.blockmix.layout import Layout
from tests.ops.blockmix.block_cases import OPTIONS, angles, blocks_by_hand, inputs
from tests.ops.cases import assert_same

LAYOUT = {"grid": (4, 3, 5), "blocks": (1, 2, 2)}
FRAME = 15
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def part(first, last):
    """The layout and the tokens of some frames."""
    return {**LAYOUT, "grid": (last - first, 3, 5)}, slice(FRAME * first, FRAME * last)


def frames(x, m, layout=LAYOUT, **options):
    return hk.mhla(*x, m, **layout, **options, causal="frame")


def test_definition():
    """Loops over frames, blocks and tokens."""
    *x, m = inputs(LAYOUT, b=1, h=1, hk=1)
    q, k, v = (t[0, :, 0] for t in x)
    blocks = blocks_by_hand({"grid": (3, 5), "blocks": (2, 2)})
    o = torch.zeros_like(v)
    for f in range(4):
        for i, block in enumerate(blocks):
            for t in block:
                for g in range(f + 1):
                    for b, other in enumerate(blocks):
                        for j in other:
                            o[f * FRAME + t] += 0.3 * m[i, b] * (q[f * FRAME + t] @ k[g * FRAME + j]) * v[g * FRAME + j]
    found = frames(x, m, feature_map=None, normalize=False, scale=0.3)
    assert_same(found[0, :, 0], o)


@EACH
@pytest.mark.parametrize("heads", [0, 4])
def test_reference_and_gradients(options, heads):
    x = [t.requires_grad_() for t in inputs(LAYOUT, heads=bool(heads))]
    rotary, found = angles(LAYOUT, heads) if heads else None, []
    for impl in ("torch", "reference"):
        y = frames(x[:3], x[3], rotary=rotary, impl=impl, **options)
        found.append([y, *torch.autograd.grad(y, x, inputs(LAYOUT, hk=4)[2])])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@EACH
def test_pieces_are_the_whole(options):
    """With gradients through the states, which have one size."""
    *x, m = inputs(LAYOUT, heads=True)
    x, rotary = [t.requires_grad_() for t in x], angles(LAYOUT, 4)
    whole, last = frames(x, m, rotary=rotary, return_state=True, **options)
    state, pieces, sizes = None, [], set()
    for first, end in ((0, 1), (1, 3), (3, 4)):
        layout, at = part(first, end)
        tables = tuple(t[at] for t in rotary)
        y, state = frames([t[:, at] for t in x], m, layout, rotary=tables, state=state, return_state=True, **options)
        pieces.append(y)
        sizes.add(state.nbytes)
    assert len(sizes) == 1 and int(state.n) == int(last.n) == 4 * FRAME
    for a, b in zip([torch.cat(pieces, 1), *state.tensors.values()], [whole, *last.tensors.values()], strict=True):
        assert_same(a, b)
    grads = [torch.autograd.grad(y.square().sum(), x) for y in (torch.cat(pieces, 1), whole)]
    for a, b in zip(*grads, strict=True):
        assert_same(a, b, 1e-9)


def test_later_frames_change_nothing_before_them():
    *x, m = inputs(LAYOUT)
    before = frames(x, m)
    for t in x:
        t[:, 2 * FRAME :] += 1
    after = frames(x, m)
    assert torch.equal(before[:, : 2 * FRAME], after[:, : 2 * FRAME])
    assert not torch.allclose(before[:, 2 * FRAME :], after[:, 2 * FRAME :])


def test_one_block_is_linear_attention_and_one_frame_is_two_sided():
    *x, m = inputs({**LAYOUT, "blocks": (1, 1, 1)})
    one = {**LAYOUT, "blocks": (1, 1, 1)}
    plain = {"feature_map": None, "normalize": False}
    wanted = m[0, 0] * hk.linear_attention(*x, causal="frame", frame=FRAME)
    assert_same(frames(x, m, one, **plain), wanted)
    *x, m = inputs({"grid": (1, 3, 5), "blocks": (1, 2, 2)})
    layout = {"grid": (1, 3, 5), "blocks": (1, 2, 2)}
    assert_same(frames(x, m, layout), hk.mhla(*x, m, **layout, scale=1.0))


@EACH
def test_blocks_of_all_frames(monkeypatch, options):
    """The form that runs in Triton, here with the torch form in its place: two-sided, with gradients."""
    x = [t.requires_grad_() for t in inputs(LAYOUT, heads=True)]
    y, calls, original = frames(x[:3], x[3], rotary=angles(LAYOUT), **options), [], op.mhla_op

    def in_torch(*given):
        calls.append(Layout(*(tuple(n) if isinstance(n, list) else n for n in given[8:11])))
        return original(*given[:-2], "torch", False)

    monkeypatch.setattr(op, "choose", lambda call, impl: "triton")
    monkeypatch.setattr(op, "mhla_op", in_torch)
    z = frames(x[:3], x[3], rotary=angles(LAYOUT), **options)
    assert calls == [Layout((4, 3, 5), (4, 2, 2), 0)]
    grad = inputs(LAYOUT, hk=4)[2]
    for a, b in zip([y, *torch.autograd.grad(y, x, grad)], [z, *torch.autograd.grad(z, x, grad)], strict=True):
        assert_same(a, b)


def test_packed_and_compiled():
    *_, m = inputs(LAYOUT)
    qkv = torch.randn(2, 60, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    f = lambda x: hk.mhla_qkvpacked(x, m.float(), **LAYOUT, causal="frame")  # noqa: E731
    assert torch.equal(f(qkv), frames(qkv.unbind(2), m.float()))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(qkv), f(qkv))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    (
        ({"causal": "frames"}, 'causal may also be "frame"'),
        ({"blocks": (2, 2, 1)}, "blocks that divide a frame alone"),
        ({"grid": (60,), "blocks": (1,)}, "needs a grid"),
        ({"order": "ahla"}, "for order='la'"),
        ({"grid": (5, 3, 5)}, "needs 75 tokens, got 60"),
        ({"impl": "triton"}, "cannot run here"),
    ),
)
def test_what_is_refused(changes, sentence):
    *x, m = inputs(LAYOUT)
    with pytest.raises(ValueError, match=sentence):
        hk.mhla(*x, m[:1, :1] if changes.get("blocks") == (1,) else m, **{**LAYOUT, "causal": "frame", **changes})


def test_a_state_of_other_frames_is_refused():
    *x, m = inputs(LAYOUT)
    _, state = frames(x, m, return_state=True)
    with pytest.raises(ValueError, match="do not begin where the blocks of"):
        frames(x, m, {"grid": (4, 5, 3), "blocks": (1, 2, 2)}, state=state)
