"""Block mixing against its definition, the paper's formula written as loops over blocks, and what it promises."""

import pytest
import torch

import hla_kernels as hk
from hla_kernels.blockmix.call import prepare
from hla_kernels.blockmix.layout import Layout, block_slots, block_table
from hla_kernels.blockmix.reference import reference
from hla_kernels.hla.reference import phi
from tests.ops.blockmix.block_cases import (
    ALL,
    CAUSAL,
    CAUSAL_LAYOUTS,
    LAYOUTS,
    ORDERS,
    angles,
    blocks_by_hand,
    inputs,
    mask_of,
    sizes,
)
from tests.ops.cases import assert_same, l2_error

RATIO = {"feature_map": "elu1"}


def literal(*x, **options):
    """The definition in the dtype of q, without the upcast of `impl="reference"`."""
    call = prepare(*x, **options)
    return reference(call.q, call.k, call.v, call.mixing, call.options, call.mask, call.rotary)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layout(layout):
    """The closed form of a token's block, the table and the slots, against boxes cut by hand."""
    made, by_hand = Layout(layout["grid"], layout["blocks"], layout.get("prefix", 0)), blocks_by_hand(layout)
    n, m = sizes(layout)
    assert (made.n_tokens, made.n_blocks, made.widest) == (n, m, max(map(len, by_hand)))
    table = block_table(made).tolist()
    assert [[t for t in range(n) if table[t] == b] for b in range(m)] == by_hand
    tokens, places = block_slots(made, torch.device("cpu"))
    assert [[t for t in row if t < n] for row in tokens.tolist()] == by_hand
    assert torch.equal(tokens.flatten()[places], torch.arange(n))


@pytest.mark.parametrize(("order", "layout", "options"), ALL)
def test_definition(order, layout, options):
    x = inputs(layout, heads=order == "ahla")
    assert_same(hk.mhla(*x, **layout, **options, order=order), literal(*x, **layout, **options, order=order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_paper_formula(order, layout):
    """o_i = q~ (Sum_b m_ib S_b) / (q~ . Sum_b m_ib z_b), block by block; above the first order with two moments."""
    q, k, v, m = inputs(layout, h=1, hk=1, b=1)
    found = hk.mhla(q, k, v, m, **layout, **RATIO, order=order, eps=0.0)[0, :, 0]
    q, k, v = phi(q[0, :, 0], "elu1"), phi(k[0, :, 0], "elu1"), v[0, :, 0]
    blocks = blocks_by_hand(layout)

    def mixed(i, a, b):
        return sum(m[i, j] * a[tokens].T @ b[tokens] for j, tokens in enumerate(blocks))

    for i, tokens in enumerate(blocks):
        for value, wanted in ((v, "o"), (torch.ones_like(v[:, :1]), "z")):
            operator = {
                "la": lambda i, x: mixed(i, k, x),
                "ahla": lambda i, x: mixed(i, k, q) @ mixed(i, k, x),
                "hla2": lambda i, x: mixed(i, k, k) @ mixed(i, q, x),
            }[order](i, value)
            if wanted == "o":
                numerator = q[tokens] @ operator
        assert_same(found[tokens], numerator / (q[tokens] @ operator))


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_rotary_turns_the_numerator_only(order, half, heads):
    layout = LAYOUTS["prefix"]
    x = inputs(layout)
    rotary = angles(layout, heads)
    for options in (RATIO, {"normalize": False}, {"feature_map": "softmax_pair"}):
        options = {**layout, **options, "order": order, "rotary": rotary, "rotary_half": half}
        assert_same(hk.mhla(*x, **options), literal(*x, **options))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("half", [False, True])
def test_an_empty_batch_that_is_turned(half, impl):
    layout = LAYOUTS["prefix"]
    *x, m = inputs(layout)
    x = [t[:0].requires_grad_() for t in x]
    y = hk.mhla(*x, m, **layout, rotary=angles(layout), rotary_half=half, impl=impl)
    assert y.shape == (0, *x[0].shape[1:3], x[2].shape[3])
    assert [t.shape for t in torch.autograd.grad(y.sum(), x)] == [t.shape for t in x]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_rotary_is_what_turned_features_give(order, half):
    layout = LAYOUTS["prefix"]
    x = inputs(layout)
    cos, sin = rotary = angles(layout)
    plain = {**layout, "order": order, "feature_map": None, "normalize": False}

    def turn(t):
        index = torch.arange(6).view(2, 3).T if half else torch.arange(6).view(3, 2)
        a, b = phi(t, "elu1")[..., index[:, 0]], phi(t, "elu1")[..., index[:, 1]]
        out = torch.empty_like(t)
        out[..., index[:, 0]], out[..., index[:, 1]] = (
            a * cos[:, None] - b * sin[:, None],
            a * sin[:, None] + b * cos[:, None],
        )
        return out

    q, k, v, m = x
    numerator = hk.mhla(turn(q), turn(k), v, m, **plain)
    total = hk.mhla(phi(q, "elu1"), phi(k, "elu1"), torch.ones_like(v[..., :1]), m, **plain)
    found = hk.mhla(*x, **layout, **RATIO, order=order, rotary=rotary, rotary_half=half, eps=0.0)
    assert_same(found, numerator / total)


@pytest.mark.parametrize(("layout", "options"), CAUSAL)
def test_causal_definition(layout, options):
    x, options = inputs(layout), {**layout, **options, "causal": True}
    n = sizes(layout)[0]
    whole = literal(*x, **options)
    for count in (n, n - 1, 7, 1):
        found = hk.mhla(*(t[:, :count] for t in x[:3]), x[3], **options)
        assert_same(found, literal(*(t[:, :count] for t in x[:3]), x[3], **options))
        assert_same(found, whole[:, :count])  # the grid is a capacity: what follows does not matter


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_uniform_mixing_is_no_mixing(order, layout):
    """m = 1 / M is the operator without blocks, with the default scale; also over real tokens only."""
    q, k, v, m = inputs(layout)
    uniform, op = torch.full_like(m, 1 / len(m)), hk.linear_attention if order == "la" else getattr(hk, order)
    for mask in (None, mask_of(layout)):
        for options in ({"feature_map": "relu", "normalize": False}, {"feature_map": "elu1", "normalize": True}):
            found = hk.mhla(q, k, v, uniform, **layout, **options, order=order, token_mask=mask)
            assert_same(found, op(q, k, v, **options, key_padding_mask=mask))


@pytest.mark.parametrize("order", ORDERS)
def test_uniform_causal_mixing_is_no_mixing(order):
    layout, op = CAUSAL_LAYOUTS["uneven"], hk.linear_attention if order == "la" else getattr(hk, order)
    q, k, v, m = inputs(layout)
    found = hk.mhla(q, k, v, torch.ones_like(m), **layout, **RATIO, order=order, causal=True)
    assert_same(found, op(q, k, v, causal=True, normalize=True, **RATIO))


@pytest.mark.parametrize("order", ["ahla", "hla2"])
def test_causal_orders_token_by_token(order):
    """The sums over pairs of tokens j <= i <= t (hla2: i <= j <= t), written as loops."""
    layout = {"grid": (7,), "blocks": (3,)}
    q, k, v, m = inputs(layout, b=1, h=1, hk=1)
    found = hk.mhla(q, k, v, m, **layout, order=order, causal=True, feature_map=None, normalize=False)[0, :, 0]
    q, k, v = (x[0, :, 0] for x in (q, k, v))
    block = [i for i, tokens in enumerate(blocks_by_hand(layout)) for _ in tokens]
    for t in range(7):
        wanted = torch.zeros_like(v[0])
        for i in range(t + 1):
            for j in range(t + 1):
                if order == "ahla" and j <= i:
                    inner = q[i] @ k[j]
                elif order == "hla2" and i <= j:
                    inner = q[j] @ k[i]
                else:
                    continue
                wanted += m[block[t], block[i]] * m[block[t], block[j]] * (q[t] @ k[i]) * inner * v[j]
        assert_same(found[t], wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_order_of_tokens_in_a_block(order, layout):
    """Permuting the tokens inside each block permutes the outputs, and outputs move when tokens change blocks."""
    *x, m = inputs(layout)
    g, order_of = torch.Generator().manual_seed(0), list(range(sizes(layout)[0]))
    for block in blocks_by_hand(layout):
        for place, i in zip(block, torch.randperm(len(block), generator=g).tolist(), strict=True):
            order_of[place] = block[i]
    y = hk.mhla(*x, m, **layout, order=order, **RATIO)
    assert_same(hk.mhla(*(t[:, order_of] for t in x), m, **layout, order=order, **RATIO), y[:, order_of])
    if len(m) > 1:
        other = torch.arange(len(order_of)).roll(1)
        moved = hk.mhla(*(t[:, other] for t in x), m, **layout, order=order, **RATIO)
        assert float((moved - y[:, other]).abs().max()) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rank_of_the_weights(layout):
    """First order: rank W <= Sum_b min(n_b, D), which random tokens and mixing reach; without blocks it is D."""
    n, d = sizes(layout)[0], 2
    q, k, _, m = inputs(layout, b=1, h=1, hk=1, d=d)
    eye = torch.eye(n, dtype=q.dtype)[None, :, None]
    w = hk.mhla(q, k, eye, m, **layout, feature_map=None, normalize=False)[0, :, 0]
    bound = sum(min(len(tokens), d) for tokens in blocks_by_hand(layout))
    assert int(torch.linalg.matrix_rank(w)) == min(bound, n)
    w = hk.linear_attention(q, k, eye)[0, :, 0]
    assert int(torch.linalg.matrix_rank(w)) == min(d, n)


@pytest.mark.parametrize("order", ORDERS)
def test_frames_that_see_themselves_and_the_past(order):
    """Autoregressive frames are a mixing without the blocks of later frames: those change nothing before them."""
    layout = {"grid": (3, 4, 5), "blocks": (3, 2, 2)}
    q, k, v, m = inputs(layout)
    frame = torch.arange(12) // 4
    m = m * (frame[:, None] >= frame)
    whole = hk.mhla(q, k, v, m, **layout, **RATIO, order=order)
    changed = [torch.cat([t[:, :40], 3 * t[:, 40:]], 1) for t in (q, k, v)]
    assert torch.equal(hk.mhla(*changed, m, **layout, **RATIO, order=order)[:, :40], whole[:, :40])
    assert float((hk.mhla(*changed, m, **layout, **RATIO, order=order)[:, 40:] - whole[:, 40:]).abs().max()) > 1e-3
    first = hk.mhla(*(t[:, :20] for t in (q, k, v)), m[:4, :4], grid=(1, 4, 5), blocks=(1, 2, 2), order=order, **RATIO)
    assert_same(whole[:, :20], first, 1e-5)  # as if alone, but for eps beside another scale


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("order", ORDERS)
def test_masked_tokens_are_not_read(order, poison):
    layout = LAYOUTS["odd"]
    q, k, v, m = inputs(layout)
    mask = mask_of(layout)
    mask[1, blocks_by_hand(layout)[2]] = False  # a block without any token
    options = {**layout, "order": order, "token_mask": mask, "eps": 0.0}
    for more in (RATIO, {**RATIO, "rotary": angles(layout)}, {"feature_map": None, "normalize": False}):
        truth = [t.clone().requires_grad_() for t in (q, k, v, m)]
        wanted = literal(*truth, **{**options, "eps": 1e-30}, **more)
        x = [t.masked_fill(~mask[..., None, None], poison).requires_grad_() for t in (q, k, v)]
        x.append(m.clone().requires_grad_())
        found = hk.mhla(*x, **options, **more)
        assert_same(found, wanted)
        assert not bool(found[~mask].any())
        for a, b in zip(
            *(torch.autograd.grad(y.square().sum(), z) for y, z in ((found, x), (wanted, truth))), strict=True
        ):
            assert_same(a, b, 1e-9)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_sample_without_real_tokens(order, impl):
    """Zeros and zero gradients without eps, the other sample as if alone."""
    layout = LAYOUTS["odd"]
    x, mask = [t.requires_grad_() for t in inputs(layout)], torch.ones(2, sizes(layout)[0], dtype=torch.bool)
    mask[0], mask[1, 5] = False, False
    options = {**layout, **RATIO, "order": order, "eps": 0.0}
    y = hk.mhla(*x, **options, token_mask=mask, impl=impl)
    alone = hk.mhla(*(t[1:] for t in x[:3]), x[3], **options, token_mask=mask[1:])
    assert not bool(y[~mask].any())
    assert_same(y[1:], alone)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), x) for o in (y, alone)), strict=True):
        assert_same(a, b, 1e-9)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(("order", "layout", "options"), ALL)
def test_gradients(order, layout, options, heads):
    x = [t.requires_grad_() for t in inputs(layout, heads)]
    options = {**layout, **options, "order": order, "rotary": angles(layout) if heads else None}
    y = hk.mhla(*x, **options)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    ours, wanted = (torch.autograd.grad(o, x, weights) for o in (y, literal(*x, **options)))
    for a, b in zip(ours, wanted, strict=True):
        assert_same(a, b, 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_grouped_heads_turned_by_their_own_angles(order, key_heads, causal):
    """A shared key is turned by the angles of each query head that reads it."""
    layout = CAUSAL_LAYOUTS["uneven"]
    x = [t.requires_grad_() for t in inputs(layout, h=4, hk=key_heads)]
    for more in (RATIO, {"feature_map": None, "normalize": False}):
        options = {**layout, **more, "order": order, "causal": causal, "rotary": angles(layout, 4)}
        y, wanted = hk.mhla(*x, **options), literal(*x, **options)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
        for a, b in zip(*(torch.autograd.grad(o, x, weights) for o in (y, wanted)), strict=True):
            assert_same(a, b, 1e-9)


@pytest.mark.parametrize(("layout", "options"), CAUSAL)
def test_causal_gradients(layout, options):
    x = [t.requires_grad_() for t in inputs(layout)]
    options = {**layout, **options, "causal": True}
    ours, wanted = (torch.autograd.grad(f(*x, **options).square().sum(), x) for f in (hk.mhla, literal))
    for a, b in zip(ours, wanted, strict=True):
        assert_same(a, b, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
def test_rounding(order, dtype):
    """At most twice the error of the definition evaluated in the same precision, forward and backward."""
    layout = LAYOUTS["odd"]
    options, x = {**layout, **RATIO, "order": order}, inputs(layout, dtype=dtype)
    errors = []
    truth = [t.double().requires_grad_() for t in x]
    y = literal(*truth, **options)
    wanted = [y, *torch.autograd.grad(y.sum(), truth)]
    for form in (hk.mhla, literal):
        low = [t.clone().requires_grad_() for t in x]
        y = form(*low, **options)
        assert y.dtype == dtype
        found = [y, *torch.autograd.grad(y.sum(), low)]
        errors.append([l2_error(a, b) for a, b in zip(found, wanted, strict=True)])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs, errors


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_token_reads_the_query_of_another(layout):
    """The divisor is of the token's own query; the released code's is not (tests/ops/test_errata.py)."""
    q, k, v, m = inputs(layout)
    y = hk.mhla(q, k, v, m, **layout, **RATIO)
    changed = q.clone()
    changed[:, 2] *= 3
    assert torch.equal(
        hk.mhla(changed, k, v, m, **layout, **RATIO)[:, torch.arange(q.shape[1]) != 2],
        y[:, torch.arange(q.shape[1]) != 2],
    )
