"""Triton forms against float64 in Triton's interpreter. Not collected: `test_interpreter` runs it in its own process.

The error is that of rounding inputs of tile products and outputs once: the interpreter computes in float32.
"""

from __future__ import annotations

import json

import pytest
import torch

from hla_kernels.features import feature
from hla_kernels.hla import fused
from hla_kernels.hla.fused import Spec, plan
from hla_kernels.hla.fused.launch.blocks import Blocks
from hla_kernels.hla.fused.launch.call import Call
from hla_kernels.hla.fused.plan import paths, tuning
from tests.ops.citizen import test_rms_norm as norms
from tests.ops.fused.cases import BY_BLOCKS, FULL, HALF, OF_MIXTURES, make, poison, relative_error, run, truth

OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")
PLAIN = {}
FIXED = {"fixed": True}
ANCHORED = {"center": "k", "mean_path": True}
RELU_QK = {"center": "qk", "feature_map": "relu", "mean_path": True}
RIDGE = {"ridge": 0.3, "center": "qk", "scale": 0.05}
SCALE = {"scale": 0.2}
RATIO, RELU_EPS = {"feature_map": "elu1", "normalize": True}, {"feature_map": "relu", "normalize": True, "eps": 0.5}
RATIO_SOFTMAX, RATIO_PAIR = ({"feature_map": x, "normalize": True} for x in ("softmax", "softmax_pair"))
ELU = {"feature_map": "elu1"}
ELU_ANCHORED, ELU_MEAN, ELU_QK = {**ELU, **ANCHORED}, {**ELU, "mean_path": True}, {**ELU, "center": "qk"}
SOFTMAX = {"feature_map": "softmax"}
SOFTMAX_ANCHORED, PAIR_QK = {**SOFTMAX, **ANCHORED}, {"feature_map": "softmax_pair", "center": "qk"}
CASES = [
    ("linear_attention", PLAIN, "heads", 37, 16, 16, (2, 2), FULL, "packed"),
    ("linear_attention", ANCHORED, "split", 37, 40, 40, (2, 2), HALF, "packed"),
    ("linear_attention", RELU_QK, "two_step", 37, 64, 64, (2, 2), HALF, "strided"),
    ("linear_attention", SCALE, "split", 33, 72, 40, (2, 1), FULL, "contiguous"),
    ("linear_attention", PLAIN, "split", 37, 128, 128, (1, 1), FULL, "strided"),
    ("linear_attention", RATIO, "heads", 37, 64, 64, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "split", 37, 40, 40, (2, 2), FULL, "strided"),
    ("hla2", RATIO, "heads", 70, 64, 64, (2, 2), HALF, "packed"),
    ("hla2", RATIO, "two_step", 37, 40, 40, (2, 2), FULL, "contiguous"),
    ("hla2", RATIO, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", RATIO, "heads", 37, 72, 72, (2, 2), HALF, "packed"),
    ("linear_attention", {**RATIO, "eps": 0.5}, "split", 70, 128, 128, (1, 1), HALF, "strided"),
    ("hla3", RATIO, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", RATIO, "heads", 70, 32, 32, (2, 2), FULL, "packed"),
    ("ahla", RATIO, "two_step", 70, 64, 64, (2, 2), HALF, "packed"),
    ("ahla", RATIO, "split", 37, 64, 64, (4, 2), HALF, "contiguous"),
    ("ahla", RATIO, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla3", RATIO, "whole", 37, 40, 40, (1, 1), HALF, "packed"),
    ("linear_attention", {"feature_map": "elu1"}, "split", 37, 64, 64, (4, 2), HALF, "contiguous"),
    ("ahla", RATIO_SOFTMAX, "two_step", 37, 40, 40, (2, 2), FULL, "packed"),
    ("hla3", RATIO, "two_step", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla3", RATIO, "split", 37, 40, 40, (1, 1), FULL, "packed"),
    *(("polynomial", RATIO, "split", n, d, d, (2, 2), FULL, "packed") for n, d in ((37, 40), (60, 72))),
    ("hla2", PLAIN, "split", 37, 128, 128, (1, 1), HALF, "packed"),
    ("hla2", ANCHORED, "heads", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla2", RELU_QK, "split", 37, 72, 72, (2, 2), FULL, "strided"),
    ("hla2", RIDGE, "two_step", 33, 40, 40, (2, 2), FULL, "packed"),
    ("hla2", SCALE, "split", 33, 16, 48, (4, 2), FULL, "contiguous"),
    ("hla2", PLAIN, "heads", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla2", ANCHORED, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", PLAIN, "two_step", 37, 64, 64, (2, 2), HALF, "packed"),
    ("ahla", ANCHORED, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("ahla", RELU_QK, "heads", 37, 40, 16, (4, 2), FULL, "contiguous"),
    ("ahla", RIDGE, "split", 33, 16, 16, (2, 2), FULL, "strided"),
    ("hla3", PLAIN, "whole", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla3", ANCHORED, "two_step", 37, 40, 40, (1, 1), FULL, "packed"),
    ("hla3", RELU_QK, "split", 37, 64, 64, (2, 2), HALF, "strided"),
    ("hla3", RIDGE, "heads", 33, 16, 16, (2, 1), FULL, "contiguous"),
    ("linear_attention", PLAIN, "split", 37, 128, 16, (2, 2), HALF, "ones"),
    ("ahla", PLAIN, "split", 37, 128, 16, (1, 1), HALF, "ones"),
    ("polynomial", RELU_QK, "split", 37, 40, 40, (1, 1), FULL, "strided"),
    # float16 factors; in use for bfloat16 tokens
    ("hla2", PLAIN, "halves", 37, 72, 72, (2, 2), HALF, "packed"),
    ("ahla", SCALE, "halves_two_step", 70, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", PLAIN, "halves", 70, 64, 64, (2, 2), HALF, "contiguous"),
    ("hla3", SCALE, "halves", 37, 72, 72, (1, 1), HALF, "packed"),
    *((op, PLAIN, "halves" + x, 514, 64, 64, (1, 1), HALF, "packed") for op in OPS[1:4] for x in ("", "_two_step")),
    ("hla3", PLAIN, "halves", 37, 64, 64, (1, 1), HALF, "packed"),
    # 16 tokens beyond whole tiles are apart, 17 are not
    *((op, PLAIN, "halves", n, 64, 64, (1, 1), HALF, "packed") for op, n in (("hla2", 80), ("hla3", 80), ("hla2", 81))),
    ("ahla", RATIO, "halves", 70, 64, 64, (2, 2), HALF, "packed"),
    ("hla2", RATIO, "halves", 37, 72, 72, (1, 1), HALF, "packed"),
    *((x, RATIO, "halves_two_step", 37, d, d, (1, 1), HALF, "contiguous") for x, d in (("hla2", 64), ("ahla", 72))),
    *((op, RATIO, "halves_in_two_step", n, 64, 64, (1, 1), HALF, "packed") for op in OPS[1:4] for n in (37, 150)),
    *(("hla3", RELU_EPS, "halves", 37, d, d, (2, 2), HALF, "strided") for d in (64, 72)),
    ("linear_attention", ANCHORED, "halves_two_step", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla2", {"center": "k"}, "halves", 37, 64, 64, (2, 2), HALF, "packed"),
    ("hla3", ANCHORED, "halves_two_step", 70, 64, 64, (2, 2), HALF, "packed"),
    ("hla3", ANCHORED, "halves_two_step", 37, 72, 72, (2, 2), HALF, "packed"),
    *OF_MIXTURES,
    # two neighbouring heads a program; in use for bfloat16 tokens
    *((op, PLAIN, "pairs", 70, 72, 72, (2, 2), HALF, "packed") for op in ("linear_attention", "hla2", "hla3")),
    ("ahla", PLAIN, "pairs", 37, 72, 72, (4, 4), HALF, "contiguous"),
    *((op, PLAIN, "halves_by_pairs", 37, 72, 72, (2, 2), HALF, "packed") for op in ("hla2", "ahla", "hla3")),
    ("linear_attention", PLAIN, "pairs_two_step", 37, 72, 72, (2, 2), HALF, "packed"),
    *(("linear_attention", x, "divided", 37, 72, 72, (2, 2), HALF, "packed") for x in (RATIO, RELU_EPS)),
    # features shifted where something is centred, softmaxes centred along their features
    ("linear_attention", ELU_MEAN, "heads", 37, 40, 40, (2, 2), FULL, "packed"),
    ("hla2", ELU_MEAN, "split", 37, 72, 72, (2, 2), HALF, "packed"),
    ("hla2", ELU_ANCHORED, "two_step", 70, 40, 40, (2, 1), FULL, "contiguous"),
    ("ahla", ELU_ANCHORED, "split", 70, 64, 64, (2, 2), HALF, "packed"),
    ("ahla", ELU_QK, "two_step", 37, 40, 40, (2, 2), FULL, "strided"),
    ("hla3", ELU_QK, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("hla3", ELU_MEAN, "heads", 37, 40, 40, (1, 1), FULL, "packed"),
    ("hla2", {**SOFTMAX, "scale": 2.0}, "split", 37, 72, 72, (1, 1), HALF, "packed"),
    ("ahla", SOFTMAX, "two_step", 37, 40, 40, (2, 2), FULL, "packed"),
    ("hla3", SOFTMAX_ANCHORED, "two_step", 37, 72, 72, (1, 1), FULL, "packed"),
    ("ahla", PAIR_QK, "split", 37, 40, 40, (2, 1), FULL, "contiguous"),
    ("hla2", RATIO_PAIR, "split", 37, 40, 40, (1, 1), HALF, "packed"),
    ("hla3", RATIO_PAIR, "two_step", 37, 32, 32, (2, 2), HALF, "packed"),
    ("polynomial", PLAIN, "split", 37, 40, 40, (1, 1), HALF, "packed"),
    ("polynomial", ELU_ANCHORED, "split", 60, 40, 40, (1, 1), HALF, "packed"),
    ("polynomial", RATIO_SOFTMAX, "split", 37, 40, 40, (1, 1), FULL, "packed"),
    *BY_BLOCKS,
]
# largest measured: float32 1e-5, float16 5e-4 (its eps is 1e-3)
TOLERANCE = {FULL: 3e-5, HALF: 1e-3}


def check(got, expected, tolerance):
    errors = [relative_error(x, y) for x, y in zip(got, expected, strict=True)]
    assert all(e <= tolerance for e in errors), errors


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1].values(), c[2], c[4])))
def test_matches_float64(monkeypatch, case):
    op, options, path, n, d, dv, heads, dtype, layout = case
    spec = Spec(op, **options)
    inputs = make(spec, n, d, dv, heads, dtype, layout)
    got = run(monkeypatch, spec, *inputs, path, save=layout != "contiguous", packed=layout == "packed")
    check(got, truth(spec, *inputs), TOLERANCE[dtype])


@pytest.mark.parametrize("op", ("linear_attention", "ahla", "hla3"))
@pytest.mark.parametrize("options", ({"scale": 5.0}, {"q_scale": 1e-4, "eps": 0.0}), ids=str)
def test_ratio_of_any_scale(monkeypatch, op, options):
    """float16 has 5 digits before and 4 behind the point: the scale of moments cancels, and must not leave them."""
    spec = Spec(op, **{**RATIO, **options})
    inputs = make(spec, 37, 16, 16, (2, 2), HALF)
    path = {"linear_attention": "heads", "ahla": "two_step"}.get(op, "split")
    check(run(monkeypatch, spec, *inputs, path, True, True), truth(spec, *inputs), TOLERANCE[HALF])


@pytest.mark.parametrize("layout", ("expanded", "turned"))
def test_coefficients_of_any_strides(layout):
    spec = Spec("polynomial")
    tokens, grad, c = make(spec, 20, 16, 16, (2, 2), FULL)
    c = c[:1].expand(2, 4) if layout == "expanded" else c.T.contiguous().T
    x = [*(t.detach().requires_grad_() for t in tokens), c.detach().requires_grad_()]
    options = ("polynomial", None, False, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True)
    y = torch.ops.hla_kernels.two_sided(*x, *options)[0]
    check([y, *torch.autograd.grad(y, x, grad)], truth(spec, tokens, grad, c), TOLERANCE[FULL])


def test_pairs_with_a_gradient_of_another_layout(monkeypatch):
    spec = Spec("linear_attention")
    tokens, grad, none = make(spec, 37, 72, 72, (2, 2), HALF, "contiguous")
    turned = grad.transpose(1, 2).contiguous().transpose(1, 2)
    outs = [run(monkeypatch, spec, tokens, g, none, "pairs", True, False) for g in (grad, turned)]
    assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))


def test_several_parts_of_a_head(monkeypatch):
    monkeypatch.setattr(plan, "reduce_parts", lambda heads, n, bn: (-(-n // 64), 64))
    spec = Spec("hla2", center="k", mean_path=True)
    inputs = make(spec, 130, 32, 32, (1, 1), FULL)
    first, second = (run(monkeypatch, spec, *inputs, "split", True, True) for _ in range(2))
    check(first, truth(spec, *inputs), TOLERANCE[FULL])
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(("options", "d"), [(PLAIN, 40), (RELU_QK, 72), (RATIO, 32)])
def test_exact_products_of_bfloat16(monkeypatch, options, d):
    """Those of bfloat16, which the interpreter lacks, on float32 tokens: d coefficients to the digits of float32."""
    words = {"PREC": "ieee", "MID": "tf32", "WHOLE": "tf32", "EXACT": "blocks"}
    monkeypatch.setattr(plan, "precisions", lambda *a: words)
    spec = Spec("polynomial", **options)
    inputs = make(spec, 20, d, d, (1, 1), FULL, "strided")
    check(run(monkeypatch, spec, *inputs, "split", True, False), truth(spec, *inputs), TOLERANCE[FULL])


def test_polynomial_of_one_program_a_head(monkeypatch):
    """Its forward alone: where a backward follows it is another one."""
    spec = Spec("polynomial")
    tokens, grad, c = make(spec, 37, 16, 16, (2, 2), FULL)
    monkeypatch.setattr(paths, "splits", lambda *a: 0)
    check([fused.forward(*tokens, c, spec)[0]], truth(spec, tokens, grad, c)[:1], TOLERANCE[FULL])


@pytest.mark.parametrize("n", (1, 2))
@pytest.mark.parametrize("path", ("heads", "split"))
def test_one_and_two_tokens(monkeypatch, n, path):
    spec = Spec("hla3")
    inputs = make(spec, n, 32, 32, (2, 2), FULL)
    check(run(monkeypatch, spec, *inputs, path, True, True), truth(spec, *inputs), TOLERANCE[FULL])


@pytest.mark.parametrize("save", (False, True))
def test_through_the_custom_operators(monkeypatch, save):
    """q, k, v and packed give the same bits, with gradients, from an expanded gradient; no rows."""
    ops = torch.ops.hla_kernels
    rest = ("ahla", None, False, "k", True, 0.0, None, 1e-6, 1.0, "triton", False, save)
    spec = Spec("ahla", center="k", mean_path=True)
    qkv = torch.randn(2, 33, 3, 2, 16, requires_grad=True)
    tokens = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    with monkeypatch.context() as patch:
        poison(patch)
        y, z = ops.two_sided(*tokens, None, *rest)[0], ops.two_sided_qkvpacked(qkv, None, *rest)[0]
        y.sum().backward()
        z.sum().backward()
    assert torch.equal(y, z) and torch.equal(torch.stack([x.grad for x in tokens], 2), qkv.grad)
    got = [y, *(x.grad for x in tokens)]
    check(got, truth(spec, tokens, torch.ones_like(y), None), TOLERANCE[FULL])
    assert ops.two_sided(*[x[:0] for x in tokens], None, *rest)[0].shape == (0, 33, 2, 16)


def test_opcheck_with_saved_state():
    rest = ("hla2", "elu1", True, None, False, 0.0, None, 1e-6, 1.0, "triton", False, True)
    x = [torch.randn(1, 5, 1, 16, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(torch.ops.hla_kernels.two_sided, (*x, None, *rest))
    qkv = torch.randn(1, 5, 3, 1, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.hla_kernels.two_sided_qkvpacked, (qkv, None, *rest))


@pytest.mark.parametrize("name", ("elu1", "softmax"))
def test_features_of_blocks_are_not_biased(name):
    """Sums of features are to the digits of float32: what an exponential is wrong by must not add up."""
    spec = Spec("polynomial", name)
    tokens, _, c = make(spec, 64, 64, 64, (2, 2), FULL, "contiguous")
    call = Call(spec, *tokens, c)
    planes = Blocks(call, call.buffer(0)).split(tokens[0], True)
    found = planes.first.new_empty(0).set_(planes.first.untyped_storage()).view(planes.terms, -1).double().sum(0)
    error = found / feature(tokens[0].double(), name).flatten() - 1
    assert error.mean().abs() <= 1e-8 and error.square().mean().sqrt() <= 1e-7


RAGGED = [
    ("linear_attention", {"feature_map": "elu1", "normalize": True}, "heads", (2, 2), HALF),
    ("linear_attention", ANCHORED, "split", (4, 2), HALF),
    ("hla2", RELU_QK, "heads", (2, 2), FULL),
    ("hla2", {"feature_map": "elu1", "normalize": True}, "split", (2, 1), FULL),
    ("ahla", ANCHORED, "two_step", (2, 2), FULL),
    ("ahla", RIDGE, "split", (2, 2), HALF),
    ("hla3", PLAIN, "split", (2, 2), FULL),
    ("hla3", RELU_QK, "heads", (2, 2), HALF),
    ("ahla", ELU_ANCHORED, "split", (2, 2), HALF),
    ("hla2", SOFTMAX, "two_step", (2, 2), FULL),
    ("polynomial", ANCHORED, "split", (2, 2), FULL),
    ("polynomial", {"feature_map": "elu1", "normalize": True}, "split", (2, 2), FULL),
    ("polynomial", {**PAIR_QK, "mean_path": True}, "blocks", (2, 1), FULL),
]


@pytest.mark.parametrize("kind", ("mask", "packed"))
@pytest.mark.parametrize("case", RAGGED, ids=lambda c: "-".join(str(x) for x in (c[0], *c[1].values(), c[2])))
def test_sequences(monkeypatch, case, kind):
    """Padded and packed sequences against the torch form in float64; padding holds NaN, and gets zeros."""
    op, options, path, heads, dtype = case
    options = {"feature_map": None, "normalize": False, "center": None, "mean_path": False, "ridge": 0.0,
               "scale": None, "eps": 1e-6, "q_scale": 0.7, **options}  # fmt: skip
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
    results = []
    for impl, kept in (("triton", dtype), ("torch", torch.float64)):
        x = [t.detach().to(kept).requires_grad_() for t in tokens] + ([] if c is None else [c.clone().requires_grad_()])
        with monkeypatch.context() as patch:
            if impl == "triton":
                poison(patch)
                patch.setattr(paths, "blocked", lambda *a: path == "blocks")
                for name in ("splits", "saves"):
                    patch.setattr(paths, name, lambda *a: int(path == "split"))
                patch.setattr(paths, "at_once", lambda *a: path != "two_step")
                patch.setattr(plan, "reduce_parts", lambda heads, n, bn: (-(-n // 32), 32))
            more = (c if c is None else x[3], op, *options.values(), impl, False, True)
            y = torch.ops.hla_kernels.two_sided(*x[:3], *more, **ragged)[0]
            results.append([y, *torch.autograd.grad(y, x, grad.to(kept))])
    check(*results, TOLERANCE[dtype])
    assert all(bool(t.isfinite().all()) for t in results[0])
    if kind == "mask":
        assert not any(bool(t[~mask].any()) for t in results[0][:4])


@pytest.mark.parametrize("on", (True, False))
def test_a_sample_does_not_see_the_batch(monkeypatch, on):
    """With a plan that depends on B * H: the same bits alone and in a batch if and only if it was asked for."""
    monkeypatch.setattr(plan, "reduce_parts", lambda heads, n, bn: (2, 64) if heads % 2 == 0 else (4, 32))
    spec = Spec("ahla", center="k", mean_path=True)
    tokens, grad, _ = make(spec, 100, 16, 16, (1, 1), FULL, "contiguous")
    results = []
    plan.set_batch_invariant(on)
    try:
        for rows in (slice(0, 2), slice(1, 2)):
            x = [t[rows] for t in tokens]
            outs = tuple(torch.empty_like(t) for t in x)
            o, saved = fused.forward(*x, None, spec, save=True)
            fused.backward(grad[rows], *x, None, spec, outs, saved)
            results.append(torch.stack([t[-1] for t in (o, *outs)]))
    finally:
        plan.set_batch_invariant(False)
    assert torch.equal(*results) == on


def test_batch_invariance_is_true_or_false():
    with pytest.raises(ValueError, match="takes True or False, got 1"):
        plan.set_batch_invariant(1)


def test_tuning(monkeypatch, tmp_path):
    """The fastest tiles by the timer are kept and used again; those that fail, or give other results, are not."""
    spec, file = Spec("ahla"), tmp_path / "tuned.json"
    inputs = make(spec, 40, 16, 16, (1, 1), FULL)
    expected, used = truth(spec, *inputs), []

    def entry(direction, spec, w, dtype):  # a table of three entries, by width
        return {"BN": {16: 32, 64: 16, 128: 64}.get(w["F1"], 32), "BO": 32, "num_warps": 4, "num_stages": 2}

    def work():
        used.clear()
        return run(monkeypatch, spec, *inputs, "heads", True, False)

    def launched(kernel, *args, tiles=tuning.STATE.choose):
        config = tiles(kernel, *args)
        used.append((kernel, config["BN"]))
        if config["BN"] == 64:
            raise RuntimeError("does not fit")
        return config

    monkeypatch.setattr(plan, "head_config", entry)
    monkeypatch.setattr(tuning.STATE, "choose", launched)
    tuning.set_tuning(file)
    try:
        found = tuning.search(work, timer=lambda f: 1.0 if ("head_forward", 16) in used else 2.0)
        assert (found.before_ms, found.after_ms) == (2.0, 1.0)
        assert {kernel: c["BN"] for kernel, c in found.changed.items()} == {"head_forward": 16}
        check(work(), expected, TOLERANCE[FULL])
        assert used == [("head_forward", 16), ("head_backward", 32)]
        ((name, kernels),) = json.loads(file.read_text()).items()
        assert "cpu, triton" in name and "N <= 64, heads <= 2" in name
        file.write_text(json.dumps({name.replace("cpu,", "another,"): kernels}))  # tiles of another device
        tuning.set_tuning(file)
        work()
        assert used[0] == ("head_forward", 32)
        kernels["head_forward"]["BN"] = 8  # no shipped configuration
        file.write_text(json.dumps({name: kernels}))
        tuning.set_tuning(file)
        work()
        assert used[0] == ("head_forward", 32)
        tuning.set_tuning(None)
        work()
        assert used[0] == ("head_forward", 32)
        monkeypatch.setattr(tuning, "_close", lambda x, y: False)
        tuning.set_tuning(file)
        assert not tuning.search(work, timer=lambda f: float(len(used))).changed
    finally:
        tuning.set_tuning(None)


@pytest.mark.parametrize("channels", [48, 100])
def test_rms_norm(monkeypatch, channels):
    """float16 tokens that are rows of a wider tensor, float32 weights."""
    x, weight, grad = norms.inputs(HALF, channels)
    exact = norms.results(norms.by_hand, *(t.double() for t in (x, weight, grad)))
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: torch.ops.hla_kernels.rms_norm(*t, 1e-6)[0], x, weight, grad)
    assert [t.dtype for t in got] == [HALF, HALF, FULL]
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))  # measured 2.1e-4


@pytest.mark.parametrize(("channels", "width", "relu"), [(48, 16, True), (120, 40, False)])
def test_prepared_queries(monkeypatch, channels, width, relu):
    """The same, then the positive part and the rotation."""
    x, weight, grad = norms.inputs(HALF, channels)
    turns = norms.tables(x, width)
    both = [t.double() for t in turns]
    exact = norms.results(
        lambda x, w: norms.prepared_by_hand(x, w, relu, *both), *(t.double() for t in (x, weight, grad))
    )
    with monkeypatch.context() as patch:
        poison(patch)
        got = norms.results(lambda *t: norms.prepared(*t, 1e-6, relu, *turns), x, weight, grad)
    assert all(relative_error(a, b) <= 4e-4 for a, b in zip(got, exact, strict=True))
