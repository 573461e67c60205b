"""Bad input: a ValueError with one clear sentence each."""

import dataclasses

import pytest
import torch

import hla_kernels as hk
from tests.ops.cases import CAUSAL, LINEAR, extra, tokens


def x(n=6, **sizes):
    return list(tokens(n, **sizes))


def bad_tensors():
    q, k, v = x()
    cases = {
        "rank": ((q[0], k, v), "rank 4"),
        "not_a_tensor": ((q, k, None), "v must be a tensor"),
        "batch": ((q, k[:1], v), "one batch size"),
        "length": ((q, k[:, :5], v), "same number of tokens"),
        "value_length": ((q, k, v[:, :5]), "same number of tokens"),
        "key_value_heads": ((q, k, v[:, :, :1]), "same number of heads"),
        "heads": ((q[:, :, :3], k, v), "must divide"),
        "more_key_heads": ((q[:, :, :1], k, v), "must divide"),
        "head_dim": ((q, k[..., :4], v), "same head dimension"),
        "empty": (tuple(t[:, :0] for t in (q, k, v)), "N = 0"),
        "empty_dim": ((q[..., :0], k[..., :0], v), "between 1 and 256"),
        "integers": ((q.long(), k.long(), v.long()), "float16, bfloat16, float32 or float64"),
        "float8": (tuple(t.to(torch.float8_e4m3fn) for t in (q, k, v)), "float16, bfloat16, float32 or float64"),
        "sparse": ((q, k, v.to_sparse()), "v must be a dense tensor"),
        "nested": ((torch.nested.nested_tensor([q[0], q[1]]), k, v), "q must be a dense tensor"),
        "complex": (tuple(t.to(torch.complex64) for t in (q, k, v)), "float16, bfloat16, float32 or float64"),
        "dtypes": ((q, k.float(), v), "one dtype"),
        "device": ((q, k.to("meta"), v), "one device"),
        "wide_head": (tuple(x(d=257)), "between 1 and 256"),
        "wide_value": (tuple(x(dv=300)), "between 1 and 256"),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("inputs", "message"), bad_tensors())
@pytest.mark.parametrize("op", hk.OPS)
def test_tensors(op, inputs, message):
    for causal in (False, True):
        if causal and op == "polynomial":
            continue
        with pytest.raises(ValueError, match=message):
            getattr(hk, op)(*inputs, *extra(op), causal=causal)


def test_head_dim_at_the_limit():
    assert hk.ahla(*x(d=256, dv=256)).shape == (2, 6, 4, 256)


BAD_OPTIONS = {
    "feature_map": ({"feature_map": "rleu"}, "did you mean 'relu'"),
    "beginning of a feature_map": ({"feature_map": "elu"}, "did you mean 'elu1'"),
    "feature_map_far": ({"feature_map": 3}, "allowed are 'identity'"),
    "feature_map_function": ({"feature_map": torch.relu}, "of type builtin_function_or_method: allowed are"),
    "center": ({"center": "kq"}, "did you mean"),
    "decay_rule": ({"decay_rule": "papers"}, "did you mean 'paper'"),
    "impl": ({"impl": "torhc"}, "did you mean 'torch'"),
    "return_state": ({"return_state": "yes"}, "return_state must be"),
    "ridge": ({"ridge": -0.1}, "ridge must be"),
    "ridge_nan": ({"ridge": float("nan")}, "ridge must be"),
    "eps": ({"eps": -1.0}, "eps must be"),
    "scale": ({"scale": float("inf")}, "scale must be"),
    "scale_text": ({"scale": "big"}, "scale must be"),
    "q_scale": ({"q_scale": float("nan")}, "q_scale must be"),
    **{f"huge_{name}": ({name: 10**400}, f"{name} must be") for name in ("scale", "q_scale", "ridge", "eps")},
    "huge_decay": ({"causal": True, "decay": 10**400}, r"\(0, 1\]"),
    "negative_q_scale": ({"normalize": True, "feature_map": "relu", "q_scale": -1.0}, "q_scale > 0"),
    "two_sided_decay": ({"decay": 0.9}, "causal=True"),
    "decay_zero": ({"causal": True, "decay": 0.0}, r"\(0, 1\]"),
    "decay_large": ({"causal": True, "decay": 1.5}, r"\(0, 1\]"),
    "decay_nan": ({"causal": True, "decay": float("nan")}, r"\(0, 1\]"),
    "decay_type": ({"causal": True, "decay": "slow"}, "decay must be None"),
    "decay_shape": ({"causal": True, "decay": torch.ones(3)}, "shape"),
    "decay_rank": ({"causal": True, "decay": torch.ones(4, 1)}, "shape"),
    "decay_integers": ({"causal": True, "decay": torch.ones(4, dtype=torch.long)}, "floating point"),
    "decay_values": ({"causal": True, "decay": torch.tensor([0.5, 1.1])}, r"\(0, 1\]"),
    "signed_ratio": ({"normalize": True}, "non-negative feature_map"),
    "centred_ratio": ({"normalize": True, "feature_map": "relu", "center": "k"}, "center"),
    "mean_path_ratio": ({"normalize": True, "feature_map": "relu", "mean_path": True}, "mean_path"),
    "negative_ratio": ({"normalize": True, "feature_map": "relu", "scale": -1.0}, "scale > 0"),
    "causal_text": ({"causal": "no"}, "causal must be True or False, got 'no'"),
    "normalize_text": ({"normalize": "false", "feature_map": "relu"}, "normalize must be True or False"),
    "mean_path_number": ({"mean_path": 1}, "mean_path must be True or False"),
    "return_state_number": ({"return_state": 1}, "return_state must be"),
    "ridge_bool": ({"ridge": True}, "ridge must be"),
    "decay_bool": ({"causal": True, "decay": True}, "decay must be None"),
    "not_a_state": ({"state": 3}, "state must be a State"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
@pytest.mark.parametrize("op", LINEAR)
def test_options(op, options, message):
    if options.get("causal") is True and op == "polynomial":
        message = "two-sided only|decay"
    with pytest.raises(ValueError, match=message):
        getattr(hk, op)(*x(), *extra(op), **options)


@pytest.mark.parametrize("op", CAUSAL)
def test_decay_is_checked_as_it_is_used(op):
    """1e-46 is a float64 but 0 in float32, whose logarithm is -inf; 1e-39 has lost its digits."""
    f = getattr(hk, op)
    low, high = [t.bfloat16() for t in x()], x()
    for small in (1e-46, 1e-39):
        for decay in (small, torch.tensor([0.5, small], dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"in \(0, 1\] and at least 1.2e-38 in torch.float32"):
                f(*low, causal=True, decay=decay)
            assert bool(torch.isfinite(f(*high, causal=True, decay=decay)).all())
    assert bool(torch.isfinite(f(*low, causal=True, decay=1e-37)).all())


@pytest.mark.parametrize("op", [*CAUSAL, "mhla"])
def test_the_advice_to_pad_a_causal_call_at_the_end(op):
    """With any finite numbers: outputs of the real tokens and their gradients are those of the call without padding."""
    more = (torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).double(),) if op == "mhla" else ()
    options = {"causal": True, "feature_map": "elu1", "normalize": True}
    options |= {"grid": (12,), "blocks": (4,)} if op == "mhla" else {}
    mask = torch.ones(2, 12, dtype=torch.bool)
    with pytest.raises(ValueError, match="pad at the end with finite numbers"):
        getattr(hk, op)(*x(12), *more, **options, **{"token_mask" if op == "mhla" else "key_padding_mask": mask})
    results = []
    for fill in (None, 0.0, 1e6):
        tokens_ = [t[:, :7].clone().requires_grad_() for t in x(12)]
        given = tokens_ if fill is None else [torch.cat([t, torch.full_like(t[:, :5], fill)], 1) for t in tokens_]
        y = getattr(hk, op)(*given, *more, **options)[:, :7]
        results.append([y, *torch.autograd.grad(y.square().sum(), tokens_)])
    for padded in results[1:]:
        for a, b in zip(padded, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_too_many_features(causal):
    with pytest.raises(ValueError, match="makes 258 features of a head dimension of 129"):
        hk.linear_attention(*x(d=129), feature_map="softmax_pair", causal=causal)
    assert hk.linear_attention(*x(d=128), feature_map="softmax_pair", causal=causal).shape[1] == 6


def test_ratio_with_vouched_features():
    """feature_map="identity" says: q and k are non-negative already."""
    q, k, v = x()
    assert bool(torch.isfinite(hk.ahla(q.abs(), k.abs(), v, feature_map="identity", normalize=True)).all())


@pytest.mark.parametrize("op", ["linear_attention", "polynomial"])
def test_ridge_is_second_order(op):
    with pytest.raises(ValueError, match="ridge is defined for hla2, ahla, hla3"):
        getattr(hk, op)(*x(), *extra(op), ridge=0.1)


def test_paper_rule():
    with pytest.raises(ValueError, match="centred"):
        hk.hla2(*x(), causal=True, decay=0.9, decay_rule="paper", center="k")
    with pytest.raises(ValueError, match="signed"):
        hk.hla2(*x(), causal=True, decay=0.9, decay_rule="paper", normalize=True, feature_map="relu")
    hk.hla2(*x(), causal=True, decay_rule="paper", normalize=True, feature_map="relu")  # no decay: the cascade


@pytest.mark.parametrize(
    "options",
    [{"feature_map": "relu"}, {"normalize": True}, {"center": "k"}, {"mean_path": True}, {"decay": 0.9}, {"ridge": 0.1},
     {"decay_rule": "paper"}, {"eps": 1e-3}, {"return_state": True}, {"state": 3}],
    ids=str,
)  # fmt: skip
def test_softmax_refuses_linear_options(options):
    with pytest.raises(ValueError, match="softmax_attention"):
        hk.softmax_attention(*x(), **options)


def test_polynomial():
    q, k, v = x()
    with pytest.raises(ValueError, match="two-sided only"):
        hk.polynomial(q, k, v, *extra("polynomial"), causal=True)
    for bad in (None, torch.ones(4), torch.ones(3, 4), torch.ones(4, 3), [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"\[heads, 4\] = \[4, 4\]"):
            hk.polynomial(q, k, v, bad)
    for dtype in (torch.long, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="floating point"):
            hk.polynomial(q, k, v, torch.ones(4, 4).to(dtype))
    qkv = torch.stack([q, q, q], 2)
    with pytest.raises(ValueError, match="on the device of q, cpu, got meta"):
        hk.polynomial(q, k, v, torch.ones(4, 4, device="meta"))
    with pytest.raises(ValueError, match="on the device of q, cpu, got meta"):
        hk.polynomial_qkvpacked(qkv, torch.ones(4, 4, device="meta"))
    with pytest.raises(ValueError, match="on the device of q, cpu, got meta"):
        _, state = hk.polynomial(q, k, v, torch.ones(4, 4), return_state=True)
        hk.read(q, state, torch.ones(4, 4, device="meta"))


@pytest.mark.parametrize("op", hk.OPS)
def test_packed(op):
    f = getattr(hk, op + "_qkvpacked")
    for bad in (torch.zeros(2, 6, 4, 5), torch.zeros(2, 6, 2, 4, 5), None):
        with pytest.raises(ValueError, match=r"\[batch, tokens, 3, heads, head dim\]"):
            f(bad, *extra(op))


def test_coefficients_of_another_operator():
    """No call takes what it would not use."""
    q, k, v = x()
    _, state = hk.hla2(q, k, v, return_state=True)
    c = torch.ones(4, 4)
    for call in (
        lambda: hk.hla2_qkvpacked(torch.stack([q, q, q], 2), coefficients=c),
        lambda: hk.explain("hla2", q, k, v, c),
        lambda: hk.sharded("hla2", q, k, v, group=None, coefficients=c),
        lambda: hk.read(q, state, c),
    ):
        with pytest.raises(ValueError, match="coefficients belong to polynomial, hla2 takes none"):
            call()


def test_names_of_calls_without_a_signature():
    q, k, v = x()
    with pytest.raises(ValueError, match="did you mean 'normalize'"):
        hk.ahla_qkvpacked(torch.stack([q, q, q], 2), normalise=True)
    with pytest.raises(ValueError, match="did you mean 'normalize'"):
        hk.sharded("ahla", q, k, v, group=None, normalise=True)
    with pytest.raises(ValueError, match="did you mean 'ahla'"):
        hk.sharded("alha", q, k, v, group=None)
    for impl in ("reference", "triton"):
        with pytest.raises(ValueError, match=f'impl="{impl}" cannot run tokens spread over ranks'):
            hk.sharded("ahla", q, k, v, group=None, impl=impl)


def test_names():
    with pytest.raises(ValueError, match="did you mean 'hla2'"):
        hk.explain("hla22", *x())
    with pytest.raises(ValueError, match=r"did you mean 'multipole'\? .*'taylor2'"):
        hk.explain("multipol", *x())
    with pytest.raises(ValueError, match="group must be a process group"):
        hk.sharded("ahla", *x(), group="world")
    with pytest.raises(ValueError, match="did you mean 'causal'"):
        hk.explain("hla2", *x(), casual=True)
    with pytest.raises(ValueError, match="no state"):
        hk.hla2(*x(), impl="reference", return_state=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", CAUSAL)
def test_states(op, causal):
    f, other = getattr(hk, op), getattr(hk, "ahla" if op != "ahla" else "hla2")
    options = {"causal": causal, "feature_map": "relu"}
    _, state = f(*x(), **options, return_state=True)
    with pytest.raises(ValueError, match=f"belongs to {op}"):
        other(*x(), **options, state=state)
    for change in ({"feature_map": "elu1"}, {"scale": 0.5}, {"mean_path": True}, {"causal": not causal}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}="):
            f(*x(), **{**options, **change}, state=state)
        _, changed = f(*x(), **{**options, **change}, return_state=True)
        with pytest.raises(ValueError, match=f"same {next(iter(change))}"):
            hk.merge(state, changed)
    for sizes in ({"b": 3}, {"h": 8, "hk": 4}, {"d": 7}, {"dv": 7}):
        with pytest.raises(ValueError, match="has shape"):
            f(*x(**sizes), **options, state=state)
    for poison in (float("nan"), float("inf")):
        broken = dataclasses.replace(state, tensors={name: t * poison for name, t in state.tensors.items()})
        with pytest.raises(ValueError, match="NaN or Inf"):
            f(*x(), **options, state=broken)


def test_state_of_another_decay():
    _, state = hk.hla2(*x(), causal=True, decay=torch.tensor([0.9, 0.8]), return_state="mergeable")
    _, other = hk.hla2(*x(), causal=True, decay=torch.tensor([0.9, 0.7]), return_state="mergeable")
    with pytest.raises(ValueError, match="another decay"):
        hk.hla2(*x(), causal=True, decay=torch.tensor([0.9, 0.7]), state=state)
    with pytest.raises(ValueError, match="decay="):
        hk.hla2(*x(), causal=True, decay=0.9, state=state)
    with pytest.raises(ValueError, match="same decay"):
        hk.merge(state, other)


def test_read():
    q, k, v = x()
    _, state = hk.ahla(q, k, v, return_state=True)
    _, causal = hk.ahla(q, k, v, causal=True, return_state=True)
    with pytest.raises(ValueError, match="two-sided"):
        hk.read(q, causal)
    with pytest.raises(ValueError, match="heads"):
        hk.read(q[:, :, :2], state)
    with pytest.raises(ValueError, match="q must have shape"):
        hk.read(q[..., :2], state)
    with pytest.raises(ValueError, match="floating point"):
        hk.read(q.long(), state)
    with pytest.raises(ValueError, match="must be a State"):
        hk.read(q, 3)
    _, mixed = hk.polynomial(q, k, v, *extra("polynomial"), return_state=True)
    with pytest.raises(ValueError, match="coefficients"):
        hk.read(q, mixed)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_explain_needs_the_tensors_of_a_call(count):
    with pytest.raises(ValueError, match=rf"needs the tensors of the call, q, k, v .*got {count}\."):
        hk.explain("hla2", *[torch.zeros(1, 4, 2, 8)] * count)


GRID = {"grid": (4, 5), "blocks": (2, 2)}
EXPLAINED = {
    "mhla_option": ("mhla", 1, {**GRID, "featuremap": "relu"}, "did you mean 'feature_map'"),
    "mhla_grid": ("mhla", 1, {"grid": (4, 5)}, "mhla cannot be called so: .*'blocks'"),
    "mhla_mixing": ("mhla", 0, GRID, "mhla cannot be called so: .*'mixing'"),
    "taylor2_option": ("taylor2", 1, {"normalise": True}, "did you mean 'normalize'"),
    "taylor2_coefficients": ("taylor2", 0, {}, "taylor2 cannot be called so: .*'coefficients'"),
    "multipole_option": ("multipole", 0, {**GRID, "radios": 1}, "did you mean 'radius'"),
    "multipole_tokens": ("multipole", 1, GRID, "multipole cannot be called so: too many"),
}


@pytest.mark.parametrize(("op", "more", "options", "message"), EXPLAINED.values(), ids=EXPLAINED)
def test_explain_of_the_other_operators(op, more, options, message):
    tensors = x(20, h=4, hk=4, d=4, dv=4)
    for inputs in (tensors, [torch.stack(tensors, 2)]):
        with pytest.raises(ValueError, match=message):
            hk.explain(op, *inputs, *[torch.ones(4, 4)] * more, **options)


def test_explain_of_functions():
    qkv = torch.stack(x(20, h=4, hk=4, d=4, dv=4), 2)
    assert hk.explain(hk.ahla_qkvpacked, qkv).impl == hk.explain("ahla", qkv).impl == "torch"
    assert hk.explain(hk.mhla_qkvpacked, qkv, torch.ones(4, 4), **GRID).impl == "torch"
    assert hk.explain("mhla", *qkv.unbind(2), mixing=torch.ones(4, 4), **GRID).impl == "torch"
