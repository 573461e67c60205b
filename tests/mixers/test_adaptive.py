"""Adaptive multipole attention: every form against explicit sums, its tile selection, and softmax."""

import itertools
import math

import pytest
import torch

import hla_kernels as hk
from hla_kernels.softmax.adaptive import torch_form
from hla_kernels.softmax.adaptive.layout import Field, box_of, tokens_of
from hla_kernels.softmax.adaptive.reference import reference, routing
from tests.ops.cases import assert_same, l2_error, tokens

CASES = {  # grid, q_tile, k_tile, prefix, suffix
    "uneven": ((6, 7), 8, 4, 2, 1),
    "video": ((3, 3, 4), 8, 2, 0, 3),
    "line": ((23,), 4, 4, 1, 0),
    "even": ((8, 8), 16, 4, 0, 0),
}
SELECTS, FARS = ("error", "mass", "mean", "near"), ("first", "variance", "mean", "none")


@pytest.fixture(params=[1, 2**25], ids=["by tiles", "at once"])
def block(request, monkeypatch):
    """One query tile at a time, recomputed in the backward, or all of them."""
    monkeypatch.setattr(torch_form, "BLOCK", request.param)


def setting(case, dtype=torch.float64, seed=0):
    """q, k, v with a common mean of the keys, as in trained models, and the options of a call."""
    grid, q_tile, k_tile, prefix, suffix = CASES[case]
    q, k, v = tokens(math.prod(grid) + prefix + suffix, h=4, hk=2, d=6, dv=3, dtype=dtype, seed=seed)
    sizes = {"grid": grid, "q_tile": q_tile, "k_tile": k_tile, "prefix": prefix, "suffix": suffix}
    return (q, k + 1, v), {**sizes, "density": 0.3, "q_scale": 0.4}


def mask_of(n, kept):
    """The last tokens of a sample are padding, and every fifth before them."""
    real = torch.arange(n) < torch.tensor(kept)[:, None]
    return real & ((torch.arange(n) % 5 != 3) | (torch.tensor(kept)[:, None] == n))


def tiles_by_hand(grid, size, prefix):
    """Lists of tokens, tile by tile in raster order."""
    box, found = box_of(grid, size), {}
    for token, place in enumerate(itertools.product(*(range(n) for n in grid))):
        found.setdefault(tuple(x // s for x, s in zip(place, box, strict=True)), []).append(prefix + token)
    return [found[at] for at in sorted(found)]


def interleaved(place, box):
    """The bits of the coordinates within a box, highest bits and first axes first."""
    return [format(x % s, "08b")[i] for i in range(8) for x, s in zip(place, box, strict=True)]


def by_hand(q, k, v, *, grid, q_tile, k_tile, prefix, suffix, density, q_scale, select, far):
    """One head, one query tile and one query at a time."""
    own, theirs = tiles_by_hand(grid, q_tile, prefix), tiles_by_hand(grid, k_tile, prefix)
    n, out = q.shape[1], torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    places = list(itertools.product(*(range(x) for x in grid)))
    centre = [[(max(x) + min(x)) / 2 for x in zip(*(places[j - prefix] for j in t), strict=True)] for t in theirs]
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[2])):
        keys, values, queries = k[b, :, h // 2], v[b, :, h // 2], q_scale * q[b, :, h]
        means, variances = (torch.stack([f(keys[t]) for t in theirs]) for f in (mean, variance))
        moment = sum((keys[t] - m).T @ values[t] for t, m in zip(theirs, means, strict=True))
        sizes = torch.tensor([len(t) for t in theirs], dtype=q.dtype)
        for tile in own:
            total = torch.zeros(len(theirs), dtype=q.dtype)
            near = sorted(tile, key=lambda t: interleaved(places[t - prefix], box_of(grid, q_tile)))
            for part in (near[i : i + 4] for i in range(0, len(near), 4)):
                x = queries[part].mean(0)
                mass = sizes * (means @ x + variances @ x.square() / 2).exp()
                mass = len(part) * mass / mass.sum()
                total += mass * (variances @ x.square()) if select == "error" else mass
            if select == "mean":
                x = queries[tile].mean(0)
                total = means @ x
            if select == "near":
                c = [(max(x) + min(x)) / 2 for x in zip(*(places[j - prefix] for j in tile), strict=True)]
                total = torch.tensor([-sum((x - y) ** 2 for x, y in zip(c, d, strict=True)) for d in centre])
            order = sorted(range(len(theirs)), key=lambda i, total=total: (-float(total[i]), i))
            chosen = order[: max(1, round(density * len(theirs)))]
            for t in tile:
                power = means @ queries[t] + (variances @ queries[t].square() / 2 if far == "variance" else 0)
                w = (keys @ queries[t]).exp()
                for i in set(range(len(theirs))) - set(chosen):
                    w[theirs[i]] = power[i].exp() if far != "none" else 0
                rest = power.exp()[[i for i in range(len(theirs)) if i not in chosen]].sum() / len(theirs)
                first = rest * (queries[t] @ moment) if far == "first" else 0
                out[b, t, h] = (w @ values + first) / w.sum()
        for t in [*range(prefix), *range(n - suffix, n)]:
            out[b, t, h] = (keys @ queries[t]).softmax(0) @ values
    return out


def mean(x):
    return x.mean(0)


def variance(x):
    return x.var(0, unbiased=False)


@pytest.mark.parametrize(
    ("case", "select", "far"),
    [
        *((case, "error", "first") for case in CASES), ("uneven", "mass", "first"), ("video", "mean", "first"),
        ("uneven", "near", "first"), ("even", "error", "variance"), ("video", "mass", "mean"),
        ("uneven", "error", "none"),
    ],
)  # fmt: skip
def test_the_definition_by_hand(case, select, far):
    x, more = setting(case)
    more |= {"select": select, "far": far}
    assert_same(hk.adaptive_multipole(*x, **more, impl="reference"), by_hand(*x, **more))


@pytest.mark.parametrize(
    ("case", "select", "far", "masked"),
    [
        *((case, "error", "first", masked) for case in CASES for masked in (False, True)),
        ("uneven", "mass", "first", True), ("video", "mean", "first", True), ("uneven", "near", "first", True),
        ("video", "error", "variance", False), ("even", "error", "mean", False), ("uneven", "mass", "none", True),
    ],
)  # fmt: skip
def test_definition_and_gradients(block, case, select, far, masked):
    x, more = setting(case)
    x, n = [t.requires_grad_() for t in x], x[0].shape[1]
    more |= {"select": select, "far": far, "key_padding_mask": mask_of(n, (n, n // 2)) if masked else None}
    y, wanted = hk.adaptive_multipole(*x, **more), hk.adaptive_multipole(*x, **more, impl="reference")
    assert y.is_contiguous()
    assert_same(y, wanted)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    for a, b in zip(torch.autograd.grad(y, x, weights), torch.autograd.grad(wanted, x, weights), strict=True):
        assert_same(a, b)


def test_gradients_given_the_routing_are_those_of_differences():
    """Of a definition whose routing is kept: the choice has no gradient, all else is exact."""
    x, more = setting("line")
    field = Field(more["grid"], more["prefix"], more["suffix"], more["q_tile"], more["k_tile"])
    x = [t[:1, :, :1, :2].clone().requires_grad_() for t in x]
    chosen = routing(*x[:2], field, "error", field.exact(0.3), 0.4)
    run = lambda *t: reference(*t, chosen, field, "first", 0.4)  # noqa: E731
    assert torch.autograd.gradcheck(run, x)
    ours = torch.autograd.grad(hk.adaptive_multipole(*x, **more).square().sum(), x)
    for a, b in zip(ours, torch.autograd.grad(run(*x).square().sum(), x), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("far", "exact"), [*((far, {"density": 1.0}) for far in FARS), *((far, {"k_tile": 1}) for far in FARS[:3])]
)
def test_all_exact_or_tiles_of_one_token_are_softmax(block, exact, far):
    x, more = setting("uneven")
    y = hk.adaptive_multipole(*x, **{**more, **exact, "far": far})
    assert_same(y, hk.softmax_attention(*x, scale=0.4))


@pytest.mark.parametrize("far", FARS[:3])
def test_the_error_to_softmax_vanishes_with_the_scores(far):
    x, more = setting("even")
    error = []
    for size in (0.02, 0.01):
        y = hk.adaptive_multipole(size * x[0], *x[1:], **more, far=far)
        error.append(float((y - hk.softmax_attention(size * x[0], *x[1:], scale=0.4)).abs().max()))
    assert error[1] < 0.6 * error[0]


def test_the_first_order_term_takes_the_first_order_error_away_where_nothing_is_exact_but_one_tile():
    """Far weights that are all alike make m_t H the whole first-order term: what is left is of second order."""
    x, more = setting("even")
    more |= {"density": 1e-9, "k_tile": 4}
    error = {}
    for far in ("mean", "first"):
        y = hk.adaptive_multipole(1e-4 * x[0], *x[1:], **more, far=far)
        error[far] = float((y - hk.softmax_attention(1e-4 * x[0], *x[1:], scale=0.4)).norm())
    assert error["first"] < 0.4 * error["mean"]  # the exact tile's own part of H is counted too


def test_ties_are_broken_by_the_index():
    """Keys that are all alike: every score is the same, the first tiles are exact."""
    x, more = setting("even")
    field = Field(more["grid"], 0, 0, more["q_tile"], more["k_tile"])
    for select in ("error", "mass", "mean"):
        chosen = routing(x[0], torch.ones_like(x[1]), field, select, 5, 0.4)
        assert chosen[..., :5].all() and not chosen[..., 5:].any()


def test_samples_of_a_batch_do_not_mix(block):
    x, more = setting("uneven")
    y = hk.adaptive_multipole(*x, **more)
    assert_same(hk.adaptive_multipole(*(t.flip(0) for t in x), **more), y.flip(0))
    assert_same(hk.adaptive_multipole(*(t[1:] for t in x), **more), y[1:])


def test_what_is_padded_is_not_read(block):
    x, more = setting("uneven")
    n = x[0].shape[1]
    mask = mask_of(n, (n, 20))
    y = hk.adaptive_multipole(*x, **more, key_padding_mask=mask)
    broken = [torch.where(mask[..., None, None], t, math.nan).requires_grad_() for t in x]
    z = hk.adaptive_multipole(*broken, **more, key_padding_mask=mask)
    assert_same(z, y)
    assert not y[~mask].any()
    assert all(t.isfinite().all() for t in torch.autograd.grad(z.square().sum(), broken))
    x = [t.requires_grad_() for t in x]
    for impl in ("auto", "reference"):
        y = hk.adaptive_multipole(*x, **more, key_padding_mask=mask_of(n, (n, 0)), impl=impl)
        assert not y[1].any()
    y = hk.adaptive_multipole(*x, **more, key_padding_mask=mask_of(n, (n, 0)))
    assert all(t.isfinite().all() for t in torch.autograd.grad(y.square().sum(), x))


def test_padding_at_the_end_of_a_grid_is_the_smaller_grid():
    """Whole key tiles and query tiles of padding."""
    (q, k, v), more = setting("even")
    more |= {"select": "near", "density": 1.0}
    mask = (torch.arange(64) < 32).expand(2, 64)
    y = hk.adaptive_multipole(q, k, v, **more, key_padding_mask=mask)[:, :32]
    assert_same(y, hk.adaptive_multipole(q[:, :32], k[:, :32], v[:, :32], **{**more, "grid": (4, 8)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding(block, dtype):
    """At most twice the error of the definition in the same dtype, forward and backward, worst of three seeds; by
    distance, because rounding changes any other choice."""
    ours, plain = [0.0] * 4, [0.0] * 4
    for seed in range(3):
        x, more = setting("uneven", dtype, seed)
        truth = grads("reference", [t.double() for t in x], more)
        for errors, impl in ((ours, "torch"), (plain, "reference")):
            for i, (a, b) in enumerate(zip(grads(impl, x, more), truth, strict=True)):
                errors[i] = max(errors[i], l2_error(a, b))
    assert all(a <= 2 * b for a, b in zip(ours, plain, strict=True)), (ours, plain)


def grads(impl, x, more):
    x = [t.detach().clone().requires_grad_() for t in x]
    y = hk.adaptive_multipole(*x, **more, select="near", impl=impl)
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), x)]


def test_scores_of_any_size_give_an_average(block):
    (q, k, v), more = setting("uneven")
    y = hk.adaptive_multipole(100 * q, k, torch.ones_like(v), **more)
    assert_same(y, torch.ones_like(y))
    x = [t.float().requires_grad_() for t in (100 * q, k, v)]
    y = hk.adaptive_multipole(*x, **more)
    assert all(t.isfinite().all() for t in (y, *torch.autograd.grad(y.square().sum(), x)))


def test_an_empty_batch(block):
    x, more = setting("uneven")
    x = [t[:0].requires_grad_() for t in x]
    y = hk.adaptive_multipole(*x, **more)
    assert y.shape == (0, 45, 4, 3)
    assert [t.shape for t in torch.autograd.grad(y.sum(), x)] == [t.shape for t in x]


def test_explain_and_compile():
    """One graph, forward and backward."""
    x, more = setting("uneven")
    x = [t.requires_grad_() for t in x]
    assert hk.explain("adaptive_multipole", *x, **more).impl == "torch"
    compiled = torch.compile(lambda *x: hk.adaptive_multipole(*x, **more), backend="aot_eager", fullgraph=True)
    y, wanted = compiled(*x), hk.adaptive_multipole(*x, **more)
    assert_same(y, wanted)
    sums = [torch.autograd.grad(t.square().sum(), x) for t in (y, wanted)]
    for a, b in zip(*sums, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(("grid", "size", "box"), [
    ((32, 32), 16, (4, 4)), ((64, 64), 64, (8, 8)), ((21, 30, 52), 64, (3, 5, 4)), ((100,), 16, (16,)),
    ((5, 1), 64, (5, 1)),
])  # fmt: skip
def test_boxes_cut_a_grid_into_few_compact_tiles(grid, size, box):
    assert box_of(grid, size) == box
    table = tokens_of(Field(grid, 2, 3, size, 1), size)
    n = math.prod(grid) + 5
    assert sorted(t for t in table.flatten().tolist() if t < n) == list(range(n))
    real = [[t for t in row if t < n] for row in table.tolist()]
    assert [sorted(row) for row in real[: -(-5 // size) * -1]] == tiles_by_hand(grid, size, 2)


@pytest.mark.parametrize(("grid", "size", "first"), [
    ((32, 32), 64, [0, 1, 32, 33, 2, 3, 34, 35, 64]), ((8, 8, 8), 64, [0, 1, 8, 9, 64, 65, 72, 73, 2]),
    ((100,), 16, [0, 1, 2, 3, 4]), ((6, 3), 16, [0, 1, 3, 4, 2, 5, 6]),
])  # fmt: skip
def test_consecutive_tokens_of_a_tile_are_close(grid, size, first):
    assert tokens_of(Field(grid, 0, 0, size, 1), size)[0, : len(first)].tolist() == first


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grid": (6, 6)}, "needs 39 tokens, got 45"),
        ({"grid": (6, 0)}, "grid must be"),
        ({"select": "eror"}, "did you mean 'error'"),
        ({"far": "second"}, "allowed are 'first'"),
        ({"density": 0}, "density"),
        ({"density": 1.5}, "density"),
        ({"k_tile": 12}, "k_tile must be a power of two"),
        ({"q_tile": True}, "q_tile must be a power of two"),
        ({"prefix": -1}, "prefix must be"),
        ({"impl": "triton"}, "cannot run here"),
        ({"q_scale": math.inf}, "q_scale must be a finite number"),
        ({"densty": 0.5}, "density"),
    ],
)
def test_calls_that_are_refused(options, sentence):
    x, more = setting("uneven")
    with pytest.raises(ValueError, match=sentence):
        hk.adaptive_multipole(*x, **{**more, **options})
