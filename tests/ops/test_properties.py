"""What must hold whatever the numbers are: permutations, causality, batches, strides, limits of the options."""

import pytest
import torch

import hla_kernels as hk
from hla_kernels.hla.reference import phi
from tests.ops.cases import CAUSAL, LINEAR, OPTIONS, assert_same, defined, extra, table, tokens

NAMES = ("plain", "ratio_elu1", "anchored_qk", "ridge")
BOTH = table(causal=False, names=NAMES) + table(causal=True, names=NAMES)


@pytest.mark.parametrize(("op", "options"), table(causal=False, names=NAMES))
def test_permutation_equivariance(op, options):
    x, order = tokens(33), torch.randperm(33)
    y = getattr(hk, op)(*x, *extra(op), **options)
    assert_same(getattr(hk, op)(*[t[:, order] for t in x], *extra(op), **options), y[:, order])


@pytest.mark.parametrize(("op", "options"), table(causal=True, names=NAMES))
def test_causality(op, options):
    """Tokens from 70 on do not change the output before, nor its gradient."""
    x = [t.requires_grad_() for t in tokens(130)]
    y = getattr(hk, op)(*x, **options)
    changed = [torch.cat([t[:, :70], 10 * t[:, 70:]], 1) for t in x]
    assert torch.equal(getattr(hk, op)(*changed, **options)[:, :70], y[:, :70])
    for g in torch.autograd.grad(y[:, :70].sum(), x):
        assert not bool(g[:, 70:].any())


@pytest.mark.parametrize(("op", "options"), BOTH)
def test_batch_invariance(op, options):
    x = tokens(70, b=3)
    y = getattr(hk, op)(*x, *extra(op), **options)
    assert_same(getattr(hk, op)(*[t[1:2] for t in x], *extra(op), **options), y[1:2], 1e-13)


@pytest.mark.parametrize(("op", "options"), BOTH)
def test_strides(op, options):
    """Slices of one packed projection, and tensors stored heads first."""
    x = tokens(20, h=4, hk=4, d=6, dv=6)
    options = {**options, **({"decay": 0.8} if "decay" in options else {})}
    y = getattr(hk, op)(*x, *extra(op), **options)
    packed = torch.stack(x, 2).unbind(2)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    for other in (packed, heads_first):
        z = getattr(hk, op)(*other, *extra(op), **options)
        assert z.is_contiguous()
        assert_same(z, y, 1e-13)


@pytest.mark.parametrize("op", CAUSAL)
def test_two_sided_is_the_sum_over_everything(op):
    """The last token of causal linear attention sees what every token sees two-sided; decay 1 is no decay; a small
    decay forgets."""
    x = tokens(50)
    f = getattr(hk, op)
    if op == "linear_attention":
        assert_same(f(*x, causal=True, scale=1 / 50)[:, -1], f(*x)[:, -1])
    assert torch.equal(f(*x, causal=True, decay=1.0), f(*x, causal=True))
    assert_same(f(*x, causal=True, decay=torch.ones(4, dtype=torch.float64)), f(*x, causal=True))
    alone = torch.cat([f(*[t[:, i : i + 1] for t in x], causal=True) for i in range(50)], 1)
    assert_same(f(*x, causal=True, decay=1e-14), alone)


@pytest.mark.parametrize("op", LINEAR)
def test_constant_values(op):
    """Normalised weights and weights with the mean path sum to one: constant values come out unchanged."""
    q, k, v = tokens(70)
    v = torch.ones_like(v) * torch.arange(1.0, 4.0, dtype=torch.float64)
    for name in ("ratio_elu1", "mean_path", "anchored", "anchored_qk"):
        for causal in (False, True):
            options = {**OPTIONS[name], "causal": causal}
            if not defined(op, options):
                continue
            if options.get("normalize"):
                options["eps"] = 0.0
            y = getattr(hk, op)(q, k, v, *extra(op), **options)
            assert_same(y, v.repeat_interleave(2, dim=2).expand_as(y).contiguous(), 1e-9)


def test_polynomial_contains_the_orders():
    x = tokens(30)
    for i, op in enumerate(CAUSAL):
        c = torch.zeros(4, 4, dtype=torch.float64)
        c[:, i] = 1
        for name in ("plain", "ratio_elu1", "anchored_qk"):
            assert_same(hk.polynomial(*x, c, **OPTIONS[name]), getattr(hk, op)(*x, **OPTIONS[name]))


@pytest.mark.parametrize("op", LINEAR)
def test_scale_does_not_grow_with_tokens(op):
    """The default two-sided scale is a mean: repeating all tokens changes nothing."""
    x = tokens(20)
    y = getattr(hk, op)(*x, *extra(op))
    assert_same(getattr(hk, op)(*[torch.cat([t, t], 1) for t in x], *extra(op))[:, :20], y)


@pytest.mark.parametrize(
    ("op", "options"), table(False) + table(True, names=("plain", "ridge", "ridge_all", "ratio_elu1", "anchored_qk"))
)
def test_q_scale_is_a_factor_of_the_queries(op, options):
    """q_scale = c is c phi(q), with gradients: written as features outside the operator, identity inside."""
    q, k, v = tokens(20)
    c = 0.37
    name = options.get("feature_map")
    inside = {**options, "q_scale": c}
    outside = {**inside, "feature_map": "identity", "q_scale": 1.0}
    results = []
    for changes in (inside, outside):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        given = x if changes is inside else [c * phi(x[0], name), phi(x[1], name), x[2]]
        y = getattr(hk, op)(*given, *extra(op), **changes)
        results.append([y, *torch.autograd.grad(y, x, y.detach().cos())])
    for ours, truth in zip(*results, strict=True):
        assert_same(ours, truth, 1e-9)


@pytest.mark.parametrize("op", LINEAR)
def test_states_of_scaled_and_doubled_features(op):
    """A state of the softmax pair holds 2 D features; a stream of segments and `read` agree with one call."""
    x, options = tokens(20), {"feature_map": "softmax_pair", "normalize": True, "q_scale": 0.3}
    f, more = getattr(hk, op), extra(op)
    _, state = f(*[t[:, :8] for t in x], *more, **options, return_state=True)
    y, state = f(*[t[:, 8:] for t in x], *more, **options, state=state, return_state=True)
    assert_same(y, f(*x, *more, **options)[:, 8:])
    assert_same(hk.read(x[0][:, 8:], state, *more), y)
