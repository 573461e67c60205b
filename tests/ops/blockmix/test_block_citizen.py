"""torch citizenship of `mhla`: opcheck, fullgraph compile and export, autocast, meta tensors, empty batches, flops,
refusals of what has no derivative, and the sentences of bad calls."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import hla_kernels as hk
from hla_kernels.blockmix.call import prepare
from hla_kernels.blockmix.operator import flat
from hla_kernels.blockmix.torch_form import evaluate, gradient
from tests.ops.blockmix.block_cases import LAYOUTS, ORDERS, angles, inputs, mask_of
from tests.ops.cases import assert_same, l2_error

ODD = LAYOUTS["odd"]
MODES = {
    **{order: {**ODD, "order": order} for order in ORDERS},
    "rotary": {**ODD, "rotary": angles(ODD)},
    "masked": {**ODD, "token_mask": mask_of(ODD)},
    "plain": {**LAYOUTS["prefix"], "order": "ahla", "feature_map": None, "normalize": False},
    "causal": {"grid": (35,), "blocks": (4,), "causal": True},
}
CALLS = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
FEW = pytest.mark.parametrize("options", [MODES[name] for name in ("hla2", "rotary", "masked", "causal")])


@FEW
def test_opcheck(options):
    x = [t.requires_grad_() for t in inputs(options, dtype=torch.float32)]
    call = prepare(*x, **options)
    arguments = (*x, call.mask, *(call.rotary or (None, None)), *flat(call.options))
    torch.library.opcheck(torch.ops.hla_kernels.mhla, arguments)


@FEW
def test_compile(options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: hk.mhla(*x, **options), fullgraph=True, backend=counter)
    for seed in (0, 1):
        x = [t.requires_grad_() for t in inputs(options, seed=seed)]
        a, b = compiled(*x), hk.mhla(*x, **options)
        assert_same(a, b)
        for g, h in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (a, b)), strict=True):
            assert_same(g, h)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_for_every_grid(dynamic):
    """The grid may be read off the shape of the input: one more graph when it first changes, none after."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def f(q, k, v, m):
        x = [t.flatten(1, 2) for t in (q, k, v)]
        return hk.mhla(*x, m, grid=q.shape[1:3], blocks=(2, 3))

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=counter)
    first = 1
    for i, grid in enumerate(((4, 6), (5, 7), (6, 9), (3, 8))):
        *x, m = inputs({"grid": grid, "blocks": (2, 3)})
        x = [t.unflatten(1, grid) for t in x]
        assert_same(compiled(*x, m), f(*x, m))
        first = counter.frame_count if i == 0 else first  # a keyword float that became a symbol is traced twice
        assert counter.frame_count <= first + min(i, 1)


class Module(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, m):
        return hk.mhla(q, k, v, m, **self.options)


@FEW
def test_export(options):
    x = inputs(options)
    batch = torch.export.Dim("b", min=1, max=64)
    shapes = ({0: batch}, {0: batch}, {0: batch}, None)
    module = Module(options)
    program = torch.export.export(module, x, dynamic_shapes=None if "token_mask" in options else shapes)
    more = x if "token_mask" in options else (*(torch.cat([t, 2 * t]) for t in x[:3]), x[3])
    assert_same(program.module()(*more), module(*more))


@CALLS
def test_autocast(options):
    """Tokens are cast on entry, the mixing stays in float32: the same bits as the call on bfloat16 tokens."""
    x = [t.requires_grad_() for t in inputs(options, dtype=torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hk.mhla(*x, **options)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
    low = [t.detach().bfloat16().requires_grad_() for t in x[:3]] + [x[3].detach().requires_grad_()]
    z = hk.mhla(*low, **options)
    assert torch.equal(y, z)
    z.float().sum().backward()
    for a, b in zip(x, low, strict=True):
        assert a.grad.dtype == torch.float32 and torch.equal(a.grad.to(b.dtype), b.grad)


@CALLS
def test_meta_and_empty_batch(options):
    x = inputs(options)
    moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if "rotary" in moved:
        moved["rotary"] = tuple(t.to("meta") for t in moved["rotary"])
    y = hk.mhla(*(t.to("meta") for t in x), **moved)
    assert y.shape == (2, x[0].shape[1], 4, 3) and y.device.type == "meta"
    empty = [t[:0].clone().requires_grad_() for t in x[:3]] + [x[3].requires_grad_()]
    if "token_mask" in options:
        options = {**options, "token_mask": options["token_mask"][:0]}
    y = hk.mhla(*empty, **options)
    assert y.shape == (0, x[0].shape[1], 4, 3)
    for t, g in zip(empty, torch.autograd.grad(y.sum(), empty), strict=True):
        assert g.shape == t.shape and not bool(g.any())


def test_derivatives_that_do_not_exist():
    x = [t.requires_grad_() for t in inputs(ODD)]
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: hk.mhla(q, *x[1:], **ODD), (x[0],), (torch.ones_like(x[0]),))
    (g,) = torch.autograd.grad(hk.mhla(*x, **ODD).square().sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(g.square().sum(), x[0])


def test_explain_and_reference():
    x = inputs(ODD, dtype=torch.bfloat16)
    chosen = hk.explain("mhla", *x, **ODD)
    assert chosen.impl == "torch" and "not on cpu" in chosen.why_not["triton"]
    assert hk.explain(hk.mhla, *x, **ODD, impl="reference").impl == "reference"
    with pytest.raises(ValueError, match="run on CUDA devices"):
        hk.mhla(*x, **ODD, impl="triton")
    a, b = (hk.mhla(*x, **ODD, impl=impl) for impl in ("auto", "reference"))
    assert a.dtype == b.dtype == torch.bfloat16 and l2_error(a, b) < 2 * torch.finfo(torch.bfloat16).eps


def test_slots_made_without_gradients_serve_those_with():
    layout = {"grid": (7, 3), "blocks": (3, 2)}  # of no other test: its slots are made here
    x = inputs(layout)
    with torch.inference_mode():
        y = hk.mhla(*x, **layout)
    x = [t.requires_grad_() for t in x]
    z = hk.mhla(*x, **layout)
    z.sum().backward()
    assert torch.equal(y, z)


def counted(f) -> int:
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("order", [*ORDERS, "causal la", "causal ahla", "causal hla2"])
def test_flops(order, heads):
    """The formulas are the products that run, forward and backward, without the column of the divisor."""
    layout = {"grid": (6, 4), "blocks": (3, 1)}
    x = [t.requires_grad_() for t in inputs(layout, heads, h=3, hk=3, d=5, dv=4)]
    kind = {"order": order.split()[-1], "causal": order.startswith("causal")}
    call = prepare(*x, **layout, **kind, normalize=False)
    inside = counted(lambda: evaluate(*x, call.options))
    back = counted(lambda: gradient(torch.ones_like(x[2]), *x, call.options, None, None))
    y = hk.mhla(*x, **layout, **kind, normalize=False)
    assert counted(lambda: hk.mhla(*x, **layout, **kind)) == inside > 0
    assert counted(lambda: torch.autograd.grad(y.sum(), x)) == back > inside


@pytest.mark.parametrize("order", [*ORDERS, "causal"])
def test_packed(order):
    """qkv in one tensor: the values, gradients, operations and refusals of the three."""
    layout = {"grid": (12,), "blocks": (4,)} if order == "causal" else {"grid": (3, 4), "blocks": (2, 2)}
    options = {"order": "la", "causal": True} if order == "causal" else {"order": order}
    q, k, v, m = inputs(layout, hk=4, dv=6)
    qkv = torch.stack((q, k, v), 2).requires_grad_()
    x = [t.requires_grad_() for t in (*qkv.detach().unbind(2), m)]
    y, z = hk.mhla(*x, **layout, **options), hk.mhla_qkvpacked(qkv, m, **layout, **options)
    grads, packed = torch.autograd.grad(y.sum(), x), torch.autograd.grad(z.sum(), (qkv, m))
    torch.testing.assert_close((y, torch.stack(grads[:3], 2), grads[3]), (z, *packed))
    three = counted(lambda: torch.autograd.grad(hk.mhla(*x, **layout, **options).sum(), x))
    one = counted(lambda: torch.autograd.grad(hk.mhla_qkvpacked(qkv, m, **layout, **options).sum(), (qkv, m)))
    assert one == three > 0
    assert hk.explain("mhla", qkv, m, **layout, **options).impl == "torch"
    torch.testing.assert_close(hk.mhla_qkvpacked(qkv, m, **layout, **options, impl="reference"), z)
    with pytest.raises(ValueError, match="qkv must have shape"):
        hk.mhla_qkvpacked(q, m, **layout, **options)


BAD = {
    "mixing": ({"mixing": torch.ones(5, 5)}, r"mixing must have shape \[6, 6\] or \[4, 6, 6\], got \(5, 5\)"),
    "integers": ({"mixing": torch.ones(6, 6, dtype=torch.int64)}, "mixing must be floating point"),
    "prefix_block": ({"grid": (2, 17), "prefix": 1, "blocks": (2, 3)}, "one block is the prefix"),
    "tokens": ({"grid": (5, 8)}, r"grid \(5, 8\) with 0 prefix tokens needs 40 tokens, got 35"),
    "axes": ({"blocks": (6,)}, "one number for each axis"),
    "too_many": ({"blocks": (6, 1)}, "more blocks than tokens"),
    "zero": ({"blocks": (0, 3)}, "blocks must be one positive integer for each axis"),
    "float": ({"grid": (5.0, 7)}, "grid must be one positive integer for each axis"),
    "negative": ({"prefix": -1}, "prefix must be"),
    "order": ({"order": "hla3"}, "Unknown order 'hla3': did you mean 'hla2'"),
    "map": ({"feature_map": "rellu"}, "did you mean 'relu'"),
    "signed": ({"feature_map": None}, "divides by a signed sum"),
    "flag": ({"normalize": "no"}, "normalize must be True or False"),
    "scale": ({"scale": float("inf")}, "scale must be None or a finite number"),
    "negative_scale": ({"scale": -1.0}, "needs scale > 0"),
    "eps": ({"eps": -1e-6}, "eps must be a finite number"),
    "q_scale": ({"q_scale": float("nan")}, "q_scale must be a finite number"),
    "mask": ({"token_mask": torch.ones(2, 34, dtype=torch.bool)}, r"shape \[batch, tokens\] = \[2, 35\]"),
    "impl": ({"impl": "tritn"}, "did you mean 'triton'"),
    "causal_blocks": ({"causal": True}, "runs of the raster order"),
    "rotary": ({"rotary": (torch.ones(35, 2), torch.ones(35, 2))}, "rotary must be cos and sin of shape"),
    "learned": ({"rotary": (torch.ones(35, 3, requires_grad=True), torch.ones(35, 3))}, "rotary has no gradient"),
    "one_table": ({"rotary": torch.ones(2, 35, 3)}, "rotary must be two tensors"),
}


@pytest.mark.parametrize(("changes", "sentence"), BAD.values(), ids=BAD)
def test_bad_calls(changes, sentence):
    q, k, v, m = inputs(ODD, dtype=torch.float32)
    with pytest.raises(ValueError, match=sentence):
        hk.mhla(q, k, v, **{**ODD, "mixing": m, **changes})


def test_unknown_option_of_explain():
    with pytest.raises(ValueError, match="did you mean 'blocks'"):
        hk.explain("mhla", *inputs(ODD), **ODD, block=3)
