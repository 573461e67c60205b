"""Bad input of the operators beside the linear ones, and what is taken though it is unusual."""

import re
import warnings

import pytest
import torch

import hla_kernels as hk
from tests.ops.cases import extra, tokens


def x(n=6, **sizes):
    return list(tokens(n, **sizes))


OTHERS = {
    "mhla": ((torch.ones(4, 4),), {"grid": (2, 3), "blocks": (2, 2)}), "taylor2": ((torch.ones(4, 2),), {}),
    "multipole": ((), {"grid": (2, 3), "blocks": (2, 2)}),
    "adaptive_multipole": ((), {"grid": (2, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("op", OTHERS)
def test_options_of_the_other_operators(op):
    """Unknown names and numbers that no float holds."""
    more, options = OTHERS[op]
    f = getattr(hk, op)
    with pytest.raises(ValueError, match="did you mean 'q_scale'"):
        f(*x(), *more, **options, qscale=1.0)
    for name in {"mhla": ("scale", "q_scale", "eps")}.get(op, ("q_scale",)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            f(*x(), *more, **options, **{name: 10**400})
    if "multipole" in op:
        return
    packed, qkv = getattr(hk, f"{op}_qkvpacked"), torch.stack(x(d=3, dv=3, hk=4), 2)
    with pytest.raises(ValueError, match="did you mean 'q_scale'"):
        packed(qkv, *more, **options, qscale=1.0)
    assert torch.equal(packed(qkv, *more, **options), f(*qkv.unbind(2), *more, **options))
    for name in options:
        with pytest.raises(ValueError, match=f"mhla_qkvpacked needs {name}"):
            packed(qkv, *more, **{other: value for other, value in options.items() if other != name})


def test_a_radius_beyond_the_grid_is_softmax():
    q, k, v = x()
    found = hk.multipole(q, k, v, **OTHERS["multipole"][1], radius=10**400)
    torch.testing.assert_close(found, hk.softmax_attention(q, k, v, scale=1.0))


def test_narrow_as_a_list():
    q, k, v = x()
    results = [hk.taylor2(q, k, v, torch.ones(4, 2), narrow=kind((q[..., :2], k[..., :2]))) for kind in (tuple, list)]
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="narrow must be two tensors"):
        hk.taylor2(q, k, v, torch.ones(4, 2), narrow=[q])


@pytest.mark.parametrize("op", hk.OPS)
def test_max_seqlen_beyond_all_tokens(op):
    """The padded batch of the torch form is never longer than all tokens together."""
    q, k, v = x(b=1)
    more, cu = extra(op), torch.tensor([0, 2, 6]).int()
    tight, loose = (getattr(hk, op)(q, k, v, *more, cu_seqlens=cu, max_seqlen=m) for m in (4, 2**24))
    torch.testing.assert_close(tight, loose)
    with pytest.raises(ValueError, match="max_seqlen must be at most"):
        getattr(hk, op)(q, k, v, *more, cu_seqlens=cu, max_seqlen=2**40)


@pytest.mark.parametrize("op", [*hk.OPS, "mhla", "taylor2", "multipole", "adaptive_multipole"])
def test_autocast_leaves_float64_keys_alone(op):
    """And computes with them all the same."""
    q, k, v = x()
    more, options = OTHERS.get(op, (extra(op), {}))
    with torch.autocast("cpu", torch.bfloat16):
        found = getattr(hk, op)(q.float(), k, v, *more, **options)
        wanted = getattr(hk, op)(q.float(), k.float(), v.float(), *more, **options)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0.03)


EPS = [("hla3", "softmax", {}, True), ("hla3", "softmax", {"eps": 1e-9}, False), ("hla2", "softmax", {}, False),
       ("hla3", "elu1", {}, False), ("hla2", "softmax", {"q_scale": 1e-3}, True),
       ("hla3", "softmax", {"causal": True}, False)]  # fmt: skip


@pytest.mark.parametrize(("op", "feature_map", "options", "warned"), EPS)
def test_an_eps_beside_which_the_divisor_is_small(op, feature_map, options, warned):
    """The warning comes where eps changes a tenth of the result or more, for what the usual features of 64 channels
    are."""
    tokens_ = x(40, d=64)
    call = {"feature_map": feature_map, "normalize": True, **options}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hk.explain(op, *tokens_, **call)
    assert ["smaller eps" in str(w.message) for w in found] == [True] * warned
    if not call.get("causal"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, exact = getattr(hk, op)(*tokens_, **call), getattr(hk, op)(*tokens_, **{**call, "eps": 1e-30})
        assert (float((y - exact).norm() / exact.norm()) > 0.09) == warned


@pytest.mark.parametrize("op", [x for x in hk.__all__ if x.removesuffix("_qkvpacked") in (*hk.OPS, *OTHERS)])
def test_docstrings_name_the_order_of_axes_and_what_a_mask_means(op):
    """Both are the other way round in torch: [B, H, N, D], and True for padding in nn.MultiheadAttention."""
    text = " ".join(getattr(hk, op).__doc__.split())
    assert any(x in text for x in ("tokens before heads", "as `linear_attention`", "qkv [B, N, 3, H, D]"))
    assert re.search("_mask.*True for real tokens", text)
