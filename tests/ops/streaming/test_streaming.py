"""States: segments = whole, decoding, merging (associative, equal to the whole), packing, two-sided read-outs,
sizes."""

import pickle
from itertools import pairwise

import pytest
import torch
from torch.utils import _pytree as pytree

import hla_kernels as hk
from tests.ops.cases import CAUSAL, LINEAR, assert_same, error, extra, table, tokens

CUTS = (0, 1, 2, 70, 134, 150)
ALL = table(causal=False) + table(causal=True)


def mode(op, options):
    """Higher-order causal centring has no merge."""
    centred = options["causal"] and "center" in options and op != "linear_attention"
    return True if centred else "mergeable"


def segments(op, options):
    q, k, v = tokens(CUTS[-1], b=1)
    return [(q[:, a:b], k[:, a:b], v[:, a:b], *extra(op)) for a, b in pairwise(CUTS)]


def assert_same_state(a, b):
    assert int(a.n) == int(b.n) and set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        assert error(a.tensors[name], b.tensors[name]) < 1e-10, name


@pytest.mark.parametrize(("op", "options"), ALL)
def test_segments(op, options):
    f, q = getattr(hk, op), tokens(CUTS[-1], b=1)
    whole, last = f(*q, *extra(op), **options, return_state=mode(op, options))
    assert_same(whole, f(*q, *extra(op), **options))
    state, outputs = None, []
    for part in segments(op, options):
        y, state = f(*part, **options, state=state, return_state=mode(op, options))
        outputs.append(y)
        state = state.pack()
    assert_same_state(state.unpack(), last)
    if options["causal"]:
        assert_same(torch.cat(outputs, 1), whole)
    else:  # the last segment has seen everything, and so has a read-out of any query
        assert_same(outputs[-1], whole[:, CUTS[-2] :])
        assert_same(hk.read(q[0], state, *extra(op)), whole)


@pytest.mark.parametrize(("op", "options"), [row for row in ALL if mode(*row.values) == "mergeable"])
def test_merge(op, options):
    """Left fold = right fold = tree = whole."""
    f = getattr(hk, op)
    _, whole = f(*tokens(CUTS[-1], b=1), *extra(op), **options, return_state="mergeable")
    a, b, c, d, e = (f(*part, **options, return_state="mergeable")[1] for part in segments(op, options))
    left = hk.merge(hk.merge(hk.merge(hk.merge(a, b), c), d), e)
    right = hk.merge(a, hk.merge(b, hk.merge(c, hk.merge(d, e))))
    tree = hk.merge(hk.merge(a.pack(), b.pack()), hk.merge(c, hk.merge(d, e)))
    for state in (left, right, tree):
        assert state.mergeable
        assert_same_state(state, whole)


@pytest.mark.parametrize("decay", [None, 0.9])
@pytest.mark.parametrize("op", CAUSAL)
def test_decode_after_merge(op, decay):
    """A merged state continues like the state of the whole, one token at a time."""
    f, (q, k, v) = getattr(hk, op), tokens(40)
    options = {"causal": True, "decay": decay, "feature_map": "elu1", "normalize": True}
    whole = f(q, k, v, **options)
    _, a = f(q[:, :11], k[:, :11], v[:, :11], **options, return_state=True)  # the left side needs no summaries
    _, b = f(q[:, 11:30], k[:, 11:30], v[:, 11:30], **options, return_state="mergeable")
    state = hk.merge(a, b)
    assert state.mergeable == (op == "linear_attention")
    for t in range(30, 40):
        y, state = f(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], **options, state=state, return_state=True)
        assert_same(y, whole[:, t : t + 1])


@pytest.mark.parametrize("op", [op for op in CAUSAL if op != "linear_attention"])
def test_merge_refuses_centring(op):
    f, x = getattr(hk, op), tokens(5)
    _, state = f(*x, causal=True, center="k", return_state=True)
    with pytest.raises(ValueError, match="no finite summary"):
        hk.merge(state, state)
    with pytest.raises(ValueError, match="no finite summary"):
        f(*x, causal=True, center="k", return_state="mergeable")


@pytest.mark.parametrize("op", [op for op in CAUSAL if op != "linear_attention"])
def test_merge_needs_summaries(op):
    f, x = getattr(hk, op), tokens(5)
    _, state = f(*x, causal=True, return_state=True)
    assert not state.mergeable
    with pytest.raises(ValueError, match="mergeable"):
        hk.merge(state, state)
    with pytest.raises(ValueError, match="summaries"):
        f(*x, causal=True, state=state, return_state="mergeable")


SIZES = {
    # (op, causal): numbers per head of q for D = 6, Dv = 4, with two query heads per key head
    ("linear_attention", True): {"P": (1, 6, 4)},
    ("hla2", True): {"S": (1, 6, 6), "F": (2, 6, 4)},
    ("ahla", True): {"P": (1, 6, 4), "E": (2, 6, 4)},
    ("hla3", True): {"S": (1, 6, 6), "P": (1, 6, 4), "F": (2, 6, 4)},
    ("linear_attention", False): {"P": (1, 6, 4)},
    ("hla2", False): {"S": (1, 6, 6), "C": (2, 6, 4)},
    ("ahla", False): {"R": (2, 6, 6), "P": (1, 6, 4)},
    ("hla3", False): {"S": (1, 6, 6), "Qm": (2, 6, 6), "P": (1, 6, 4)},
}


@pytest.mark.parametrize(("op", "causal"), SIZES, ids=str)
def test_sizes(op, causal):
    """Small states; what depends on keys and values alone is kept (and computed) once per key head."""
    x = tokens(9, d=6, dv=4, dtype=torch.bfloat16)
    _, state = getattr(hk, op)(*x, causal=causal, return_state=True)
    assert {name: tuple(t.shape[2:]) for name, t in state.tensors.items()} == SIZES[op, causal]
    assert all(t.dtype == torch.float32 for t in state.tensors.values())
    packed = state.pack()
    if "S" in state.tensors:
        assert packed.tensors["S"].shape[-1] == 6 * 7 // 2 and packed.nbytes < state.nbytes
    assert_same_state(packed.unpack(), state)


@pytest.mark.parametrize("op", LINEAR)
def test_state_is_a_pytree(op):
    _, state = getattr(hk, op)(*tokens(9), *extra(op), return_state=True)
    leaves, spec = pytree.tree_flatten(state)
    assert len(leaves) == 1 + len(state.tensors)
    assert_same_state(pytree.tree_unflatten(leaves, spec), state)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert_same_state(pickle.loads(pickle.dumps(state)), state)


def test_state_moves():
    x = [t.requires_grad_() for t in tokens(9)]
    _, state = hk.hla2(*x, causal=True, return_state=True)
    assert state.tensors["S"].requires_grad and not state.detach().tensors["S"].requires_grad
    moved = state.to(torch.float32)
    assert moved.tensors["S"].dtype == torch.float32 and moved.n.dtype == torch.int64
    assert state.to("meta").tensors["F"].device.type == "meta"
