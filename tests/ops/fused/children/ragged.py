"""Masked and packed sequences in Triton's interpreter. Not collected: `test_interpreter` runs it."""

from __future__ import annotations

import pytest
import torch

from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.plan import paths
from hla_kernels.hla.fused.spec import MOMENTS
from hla_kernels.sequences import WHOLE, Sequences
from tests.helpers.error_rule import LIMITS, features_as_read, relative_error
from tests.ops.fused.cases import FULL, HALF, make, poison

PLAIN = {}
ANCHORED = {"center": "k", "mean_path": True}
RELU_QK = {"center": "qk", "feature_map": "relu", "mean_path": True}
RIDGE = {"ridge": 0.3, "center": "qk", "scale": 0.05}
RATIO, ELU_MEAN = {"feature_map": "elu1", "normalize": True}, {"feature_map": "elu1", "mean_path": True}
RAGGED = [
    ("linear_attention", PLAIN, "heads", (4, 2), HALF),
    ("linear_attention", RATIO, "heads", (2, 2), HALF),
    ("linear_attention", ANCHORED, "split", (4, 2), HALF),
    ("hla2", RELU_QK, "split", (2, 2), FULL),
    ("hla2", RATIO, "split", (2, 1), FULL),
    ("ahla", ANCHORED, "split", (2, 2), FULL),
    ("ahla", RIDGE, "split", (2, 2), HALF),
    ("hla3", PLAIN, "split", (2, 2), FULL),
    ("hla3", RELU_QK, "split", (2, 2), HALF),
    ("ahla", ELU_MEAN, "split", (2, 2), HALF),
    ("polynomial", ANCHORED, "split", (2, 2), FULL),
    ("polynomial", RATIO, "split", (2, 2), FULL),
    ("polynomial", RATIO, "one program", (2, 2), FULL),  # for all moments, in use for bfloat16 tokens
]


def force(patch, path):
    """Calls take this path."""
    patch.setattr(paths, "saves", lambda *a: int(path != "heads"))
    if path == "one program":
        patch.setattr(plan, "reduce_roles", lambda *a: 1)


def both(monkeypatch, op, options, path, tokens, grad, c, ragged):
    """o and the gradients of the Triton form on a path, in parts of 32 tokens or one, and of torch in float64."""
    options = {"feature_map": None, "normalize": False, "center": None, "mean_path": False, "ridge": 0.0,
               "scale": None, "eps": 1e-6, "q_scale": 1.0, **options}  # fmt: skip
    results = []
    for impl, kept in (("triton", grad.dtype), ("torch", torch.float64)):
        x = [t.detach().to(kept).requires_grad_() for t in tokens] + ([] if c is None else [c.clone().requires_grad_()])
        with monkeypatch.context() as patch:
            if impl == "triton":
                poison(patch)
                if path != "planned":
                    force(patch, path)
                if path not in ("planned", "one program"):
                    patch.setattr(plan, "reduce_parts", lambda heads, n, bn: (-(-n // 32), 32))
            q, k, now = x[0], x[1], options
            if impl == "torch":
                q, k, now = features_as_read(q, k, options, grad.dtype)
            more = (c if c is None else x[3], op, *now.values(), impl, False, True)
            y = torch.ops.hla_kernels.two_sided(q, k, x[2], *more, **ragged)[0]
            results.append([y, *torch.autograd.grad(y, x, grad.to(kept))])
    return results


@pytest.mark.parametrize("kind", ("mask", "packed"))
@pytest.mark.parametrize("case", RAGGED, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1].values(), c[2])))
def test_sequences(monkeypatch, case, kind):
    """Padded and packed sequences against the torch form in float64; padding holds NaN, and gets zeros."""
    op, options, path, heads, dtype = case
    tokens, grad, c = make(Spec(op), 40, 16, 16, heads, dtype, "contiguous")
    c = None if c is None else c.abs()
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1, 20:] = False
    ragged = {"mask": mask}
    if kind == "packed":
        cu = torch.tensor([0, 3, 3, 36, 40], dtype=torch.int32)
        ragged = {"cu_seqlens": cu, "max_seqlen": 34}
        tokens, grad = [t[:1] for t in tokens], grad[:1]
    else:
        for t in (*tokens, grad):
            t[~mask] = float("nan")
    results = both(monkeypatch, op, {"q_scale": 0.7, **options}, path, tokens, grad, c, ragged)
    errors = [relative_error(a, t) for a, t in zip(*results, strict=True)]  # coefficients are positive
    assert max(errors) <= LIMITS[dtype], errors
    assert all(bool(t.isfinite().all()) for t in results[0])
    if kind == "mask":
        assert not any(bool(t[~mask].any()) for t in results[0][:4])


@pytest.mark.parametrize(
    ("op", "options"),
    (*((op, options) for op in MOMENTS for options in (ELU_MEAN, {"center": "k"})), ("hla2", {"center": "qk"})),
    ids=str,
)
def test_of_a_token_that_is_its_own_mean_nothing_is_left(monkeypatch, op, options):
    """Alone, and behind and before others: products of its features cancel, and not up to their rounding."""
    spec = Spec(op, **options)
    (q, k, v), grad, c = make(spec, 4, 16, 16, (2, 2), HALF, "contiguous")
    for cu, one in ((None, 0), ([0, 1, 4], 0), ([0, 3, 4], 3)):
        seqs = WHOLE if cu is None else Sequences(None, torch.tensor(cu, dtype=torch.int32), 3)
        x = [t[:1, :1] if cu is None else t[:1] for t in (q, k, v, grad)]
        with monkeypatch.context() as patch:
            poison(patch)
            force(patch, "split")
            outs = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3])
            o, saved = fused.forward(*x[:3], c, spec, True, seqs)
            fused.backward(x[3], *x[:3], c, spec, outs, saved, seqs)
        mean = spec.mean_path
        for got, expected in ((o, x[2] * mean), (outs[0], x[0] * 0), (outs[1], x[1] * 0), (outs[2], x[3] * mean)):
            assert torch.equal(got[:, one], expected[:, one])


def test_a_centred_key_alone_has_no_gradient_beside_a_ridge(monkeypatch):
    """Its product and the row that cancels it were rounded alike."""
    spec = Spec("hla2", center="k", ridge=0.3)
    tokens, grad, none = make(spec, 38, 32, 32, (2, 2), HALF, "contiguous")
    x, seqs = [t[:1] for t in (*tokens, grad)], Sequences(None, torch.tensor([0, 37, 38], dtype=torch.int32), 37)
    with monkeypatch.context() as patch:
        poison(patch)
        force(patch, "split")
        outs = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3])
        _, saved = fused.forward(*x[:3], none, spec, True, seqs)
        fused.backward(x[3], *x[:3], none, spec, outs, saved, seqs)
    assert outs[1][:, 37].abs().max() <= 1e-4 * outs[1].abs().max()


# op, options, path: the operators are far below 2**-14, the least number of float16 that has all its digits
SMALL = (
    ("linear_attention", {"scale": 2.0**-18}, "heads"), ("linear_attention", {"scale": 2.0**-18, **ANCHORED}, "split"),
    ("hla2", {"scale": 2.0**-12}, "split"), ("ahla", {"scale": 2.0**-10, **RELU_QK}, "split"),
    ("hla3", {"scale": 2.0**-9}, "split"), ("hla3", {"scale": 2.0**-12, "feature_map": "elu1"}, "split"),
    ("polynomial", {"scale": 2.0**-18}, "split"),
)  # fmt: skip


@pytest.mark.parametrize(("op", "options", "path"), SMALL, ids=str)
def test_operators_below_the_numbers_of_float16(monkeypatch, op, options, path):
    """Sequences of one token, none and two. Results are multiples of 2**-24, which adds half of one per number."""
    tokens, grad, c = make(Spec(op), 3, 64, 64, (2, 2), HALF, "contiguous")
    ragged = {"cu_seqlens": torch.tensor([0, 1, 1, 3], dtype=torch.int32), "max_seqlen": 2}
    results = both(monkeypatch, op, options, path, [t[:1] for t in tokens], grad[:1], c, ragged)
    for name, a, t in zip("oqkv", *(x[:4] for x in results), strict=True):
        assert (a.double() - t).norm() <= LIMITS[HALF] * t.norm() + 2.0**-25 * t.numel() ** 0.5, name
