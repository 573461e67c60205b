"""Only the state of the very call continues it: names, groups, shapes, devices, finite numbers."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hla_kernels as hk
from hla_kernels.hla.streaming.checks import check_finite
from tests.ops.cases import BOTH_MODES, CAUSAL, LINEAR, OPTIONS, defined, extra, table, tokens


def without(state, *names):
    return dataclasses.replace(state, tensors={n: x for n, x in state.tensors.items() if n not in names})


def with_(state, **tensors):
    return dataclasses.replace(state, tensors={**state.tensors, **tensors})


@pytest.mark.parametrize(("op", "options"), table(causal=False) + table(causal=True))
def test_every_missing_or_foreign_tensor_is_refused(op, options):
    x = (*tokens(5), *extra(op))
    f = getattr(hk, op)
    _, state = f(*x, **options, return_state=True)
    f(*x, **options, state=state)
    broken = [without(state, name) for name in state.tensors]
    broken += [without(state, *state.tensors), with_(state, Z=torch.ones(1)), with_(state, U=state.tensors)]
    for bad in broken:
        with pytest.raises(ValueError, match="holds the tensors"):
            f(*x, **options, state=bad)
        with pytest.raises(ValueError, match="holds the tensors"):
            hk.merge(state, bad)
        if not options["causal"]:
            with pytest.raises(ValueError, match="holds the tensors"):
                hk.read(x[0], bad, *x[3:])


@pytest.mark.parametrize(("op", "options"), table(causal=False) + table(causal=True))
def test_every_shape_is_checked(op, options):
    """One axis of one tensor changed to another size, also to or from the 1 that would broadcast."""
    x = (*tokens(5), *extra(op))
    f = getattr(hk, op)
    _, state = f(*x, **options, return_state=True)
    for name, t in state.tensors.items():
        for axis in range(5):
            bad = t.narrow(axis, 0, 1) if t.shape[axis] > 1 else torch.cat([t, t], axis)
            with pytest.raises(ValueError, match=f"The state's {name} has shape"):
                f(*x, **options, state=with_(state, **{name: bad}))
        with pytest.raises(ValueError, match=f"The state's {name} has shape"):
            f(*x, **options, state=with_(state, **{name: t[0]}))


@pytest.mark.parametrize(("op", "causal"), [row for row in BOTH_MODES if row[0] != "linear_attention"])
def test_groups_belong_to_the_call(op, causal):
    """One query head per key head does not continue as two, nor two as one."""
    f = getattr(hk, op)
    for first, then in ((2, 4), (4, 2)):
        _, state = f(*tokens(5, h=first), *extra(op, first), causal=causal, return_state=True)
        with pytest.raises(ValueError, match="has shape"):
            f(*tokens(5, h=then), *extra(op, then), causal=causal, state=state)


@pytest.mark.parametrize("op", [op for op in CAUSAL if op != "linear_attention"])
def test_summaries_come_together(op):
    x = tokens(5)
    _, state = getattr(hk, op)(*x, causal=True, return_state="mergeable")
    getattr(hk, op)(*x, causal=True, state=state)
    missing = [n for n in ("C0", "R", "W", "X0", "Y0") if n in state.tensors]
    getattr(hk, op)(*x, causal=True, state=without(state, *missing))
    if op == "hla3":
        with pytest.raises(ValueError, match="holds the tensors"):
            getattr(hk, op)(*x, causal=True, state=without(state, "W"))


SUMS = {
    # what the ratio, the mean path and centred keys need beside the moments, two-sided
    ("linear_attention", "ratio_elu1"): {"sum_k"}, ("hla2", "ratio_elu1"): {"sum_q"},
    ("ahla", "ratio_elu1"): {"sum_k"}, ("hla3", "ratio_elu1"): {"sum_k"},
    ("polynomial", "ratio_elu1"): {"sum_q", "sum_k"}, ("linear_attention", "mean_path"): {"sum_k", "sum_v"},
    ("hla2", "mean_path"): {"sum_q", "sum_v"}, ("hla3", "mean_path"): {"sum_k", "sum_v"},
    ("linear_attention", "center_k"): {"sum_k", "sum_v"}, ("hla2", "center_k"): {"sum_k"},
    ("ahla", "center_k"): {"sum_q", "sum_k", "sum_v"}, ("linear_attention", "plain"): set(),
}  # fmt: skip


@pytest.mark.parametrize(("op", "name"), SUMS, ids=str)
def test_only_the_needed_sums(op, name):
    assert defined(op, OPTIONS[name])
    _, state = getattr(hk, op)(*tokens(5), *extra(op), **OPTIONS[name], return_state=True)
    assert {n for n in state.tensors if n.startswith("sum_")} == SUMS[op, name]


@pytest.mark.parametrize(("op", "causal"), BOTH_MODES)
def test_device_and_count(op, causal):
    f, x = getattr(hk, op), (*tokens(5), *extra(op))
    _, state = f(*x, causal=causal, return_state=True)
    with pytest.raises(ValueError, match="is on meta, the tokens are on cpu"):
        f(*x, causal=causal, state=state.to("meta"))
    for n in (torch.ones(1, dtype=torch.int64), torch.tensor(5.0)):
        with pytest.raises(ValueError, match="0-d integer"):
            f(*x, causal=causal, state=dataclasses.replace(state, n=n))
    with pytest.raises(ValueError, match="must be tensors"):
        f(*x, causal=causal, state=dataclasses.replace(state, n=5))


def test_read_checks_the_state():
    q, k, v = tokens(5)
    _, state = hk.hla2(q, k, v, return_state=True)
    with pytest.raises(ValueError, match="rank 5"):
        hk.read(q, with_(state, S=state.tensors["S"][0]))
    with pytest.raises(ValueError, match="The state's C has shape"):
        hk.read(q, with_(state, C=state.tensors["C"][:, :1]))
    with pytest.raises(ValueError, match="is on cpu, the tokens are on meta"):
        hk.read(q.to("meta"), state)
    with pytest.raises(ValueError, match="got int"):
        hk.merge(state, 3)


class Syncs(TorchDispatchMode):
    """How often a value is brought to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", LINEAR)
def test_finite_is_one_flag(op):
    """The host waits once for a good state; a bad one is named."""
    _, state = getattr(hk, op)(*tokens(5), *extra(op), mean_path=True, return_state=True)
    with Syncs() as mode:
        check_finite(state.tensors)
    assert mode.count == 1
    for name, x in state.tensors.items():
        with pytest.raises(ValueError, match=f"The state's {name} holds NaN or Inf"):
            check_finite(with_(state, **{name: x / 0}).tensors)
