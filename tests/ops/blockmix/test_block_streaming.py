"""Causal block mixing in pieces: decoding is the parallel form, over any length, and what a state refuses."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import hla_kernels as hk
from tests.ops.blockmix.block_cases import CAUSAL, CAUSAL_LAYOUTS, ORDERS, angles, inputs, sizes
from tests.ops.cases import assert_same

UNEVEN = CAUSAL_LAYOUTS["uneven"]
PIECES = {"tokens": [1], "mixed": [3, 1, 9, 1, 1, 6], "one": [20]}


def in_pieces(x, m, lengths, rotary=None, state=None, **options):
    outs, at = [], 0
    for length in lengths:
        part = slice(at, at + length)
        tables = None if rotary is None else tuple(t[part] for t in rotary)
        y, state = hk.mhla(
            *(t[:, part] for t in x), m, **options, rotary=tables, causal=True, state=state, return_state=True
        )
        outs.append(y)
        at += length
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("lengths", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(("layout", "options"), CAUSAL)
def test_pieces_are_the_whole(layout, options, lengths):
    n = sizes(layout)[0]
    starts = [0, *itertools.takewhile(lambda at: at < n, itertools.accumulate(itertools.cycle(lengths))), n]
    for heads in (0, 4):
        *x, m = inputs(layout, heads=bool(heads))
        rotary = angles(layout, heads) if heads else None
        whole = hk.mhla(*x, m, **layout, **options, causal=True, rotary=rotary)
        found, state = in_pieces(x, m, [b - a for a, b in itertools.pairwise(starts)], rotary, **layout, **options)
        assert_same(found, whole)
        assert int(state.n) == n and all(x.shape[3] == sizes(layout)[1] for x in state.tensors.values())


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_flow_through_a_state(order):
    x = [t.requires_grad_() for t in inputs(UNEVEN)]
    options = {**UNEVEN, "feature_map": "elu1", "order": order}
    y, _ = in_pieces(x[:3], x[3], [4, 1, 15, 5], **options)
    whole = hk.mhla(*x, **options, causal=True)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), x) for o in (y, whole)), strict=True):
        assert_same(a, b, 1e-9)


def test_a_longer_grid_continues():
    """Blocks of four tokens: decoded beyond the first grid, with a larger matrix whose corner is the first one."""
    short, long = {"grid": (12,), "blocks": (3,), "prefix": 1}, {"grid": (40,), "blocks": (10,), "prefix": 1}
    *x, m = inputs(long)
    whole = hk.mhla(*x, m, **long, causal=True)
    first, state = in_pieces([t[:, :13] for t in x], m[:4, :4], [13], **short)
    rest, state = in_pieces([t[:, 13:] for t in x], m, [1, 7, 1, 19], state=state, **long)
    assert_same(torch.cat([first, rest], 1), whole)
    with pytest.raises(ValueError, match=r"The grid \(40,\) holds 41 tokens, the state has 41 and 1 more came"):
        in_pieces([t[:, :1] for t in x], m, [1], state=state, **long)


@pytest.mark.parametrize("order", ORDERS)
def test_compiled_decoding_is_one_graph(order):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    *x, m = inputs(UNEVEN)
    options = {**UNEVEN, "order": order, "causal": True}
    whole = hk.mhla(*x, m, **options)
    step = torch.compile(
        lambda q, k, v, state: hk.mhla(q, k, v, m, **options, state=state, return_state=True),
        fullgraph=True,
        backend=counter,
    )
    _, state = hk.mhla(*(t[:, :9] for t in x), m, **options, return_state=True)
    for i in range(9, 18):
        y, state = step(*(t[:, i : i + 1] for t in x), state)
        assert_same(y, whole[:, i : i + 1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("order", ["ahla", "hla2"])
def test_state_of_the_higher_orders(order):
    *x, m = inputs(UNEVEN)
    _, state = hk.mhla(*x, m, **UNEVEN, causal=True, order=order, return_state=True)
    names = ("R", "P", "E") if order == "ahla" else ("S", "C", "E")
    assert list(state.tensors) == [*names, *(f"z{name}" for name in names)]
    with pytest.raises(ValueError, match="it cannot continue"):
        hk.mhla(*x, m, **UNEVEN, causal=True, state=state)


def test_what_a_state_is():
    *x, m = inputs(UNEVEN, dtype=torch.bfloat16)
    y, state = hk.mhla(*x, m, **UNEVEN, causal=True, return_state=True)
    assert y.dtype == torch.bfloat16 and {name: t.dtype for name, t in state.tensors.items()} == {
        "P": torch.float32,
        "zP": torch.float32,
    }
    b, hk_, blocks, d, dv = 2, 2, 6, 6, 3
    assert state.nbytes == 4 * b * hk_ * blocks * d * (dv + 1)
    leaves, spec = pytree.tree_flatten(state)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.options == state.options and all(again.tensors[k] is t for k, t in state.tensors.items())
    assert "state" in hk.explain("mhla", *x, m, **UNEVEN, causal=True, return_state=True).why_not["reference"]


BAD = {
    "two_sided": ({"causal": False}, "need causal=True"),
    "kind": ({"state": torch.ones(1)}, "state must be a BlockState returned by mhla"),
    "options": ({"normalize": False}, "it cannot continue"),
    "layout": ({"grid": (25,), "blocks": (5,)}, "do not begin where the blocks of"),
    "flag": ({"return_state": "mergeable"}, "return_state must be True or False"),
    "impl": ({"impl": "reference"}, "has no state"),
}


@pytest.mark.parametrize(("changes", "sentence"), BAD.values(), ids=BAD)
def test_refusals(changes, sentence):
    *x, m = inputs(UNEVEN)
    x = [t[:, :3] for t in x]
    _, state = hk.mhla(*x, m, **UNEVEN, causal=True, return_state=True)
    with pytest.raises(ValueError, match=sentence):
        hk.mhla(*x, m, **{**UNEVEN, "causal": True, "state": state, **changes})


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_only_the_state_of_the_call_continues_it(order, normalize):
    """As for `State`: names, shapes also where another size would broadcast, count, device, finite numbers."""
    *x, m = inputs(UNEVEN)
    x = [t[:, :3] for t in x]
    options = {**UNEVEN, "order": order, "normalize": normalize, "causal": True}
    _, state = hk.mhla(*x, m, **options, return_state=True)

    def refused(sentence, tensors=None, tokens=x, n=state.n):
        with pytest.raises(ValueError, match=sentence):
            hk.mhla(*tokens, m, **options, state=hk.BlockState(state.options, n, tensors or state.tensors))

    for name, t in state.tensors.items():
        rest = {other: y for other, y in state.tensors.items() if other != name}
        refused("holds the tensors", rest or {"Q": t})
        refused("must be tensors", {**rest, name: t.tolist()})
        refused(f"The state's {name} holds NaN or Inf", {**rest, name: t / 0})
        refused(f"The state's {name} is on meta", {**rest, name: t.to("meta")})
        refused(f"The state's {name} has shape", {**rest, name: t[0]})
        turned = name == "S" or (name == "P" and order != "hla2")  # by the angles of each query head
        for axis in range(6):
            if axis == 2 and turned:
                continue
            bad = t.narrow(axis, 0, 1) if t.shape[axis] > 1 else torch.cat([t, t], axis)
            refused(f"The state's {name} has shape", {**rest, name: bad})
    refused("holds the tensors", {**state.tensors, "G": torch.ones(1)})
    refused("0-d integer", n=torch.tensor([3]))
    refused("number of its tokens", n=torch.tensor(-1))
    for change in ({"h": 2}, {"h": 8}, {"b": 1}, {"hk": 4}, {"d": 4}, {"dv": 2}):
        if order == "la" and "h" in change:  # moments of keys alone are those of any number of query heads
            continue
        tokens = [t[:, :3] for t in inputs(UNEVEN, **change)[:3]]
        refused("has shape", tokens=tokens)


@pytest.mark.parametrize("order", ORDERS)
def test_a_state_of_another_precision_continues(order):
    *x, m = inputs(UNEVEN)
    options = {**UNEVEN, "order": order, "causal": True}
    for first, then in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        _, state = hk.mhla(*(t[:, :9].to(first) for t in x), m, **options, return_state=True)
        found = hk.mhla(*(t[:, 9:].to(then) for t in x), m, **options, state=state)
        assert found.dtype == then
        assert_same(found.double(), hk.mhla(*x, m, **options)[:, 9:], 1e-5)
