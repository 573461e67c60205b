"""Padding masks and packed sequences: what one call with each sequence alone gives, with gradients, in every form."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import hla_kernels as hk
from tests.ops.cases import LINEAR, assert_same, extra, l2_error, table, tokens

LENGTHS = (23, 1, 40, 17)
N = 40
TWO_SIDED = [*table(causal=False), pytest.param("softmax_attention", {}, id="softmax"),
             pytest.param("softmax_attention", {"scale": 0.3}, id="softmax-scale")]  # fmt: skip
PACKED_CAUSAL = [*table(causal=True, names=("plain", "ratio_elu1", "anchored")),
                 pytest.param("softmax_attention", {"causal": True}, id="softmax-causal")]  # fmt: skip
FORMS = ("torch", "reference")
OPS = torch.ops.hla_kernels


def mask_of(lengths=LENGTHS, n: int = N) -> torch.Tensor:
    """[B, N]: the real tokens of a sample stand at random places."""
    g = torch.Generator().manual_seed(5)
    mask = torch.zeros(len(lengths), n, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[torch.randperm(n, generator=g)[:length]] = True
    return mask


def offsets(lengths=LENGTHS) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def call(op, x, options, *, packed=False):
    """Output and gradients of x = (q, k, v, ...) or (qkv, ...), the output's gradient being a function of it alone."""
    x = [t.detach().clone().requires_grad_() for t in x]
    y = getattr(hk, op + ("_qkvpacked" if packed else ""))(*x, **options)
    return [y.detach(), *torch.autograd.grad(y, x, y.detach().cos())]


def alone(op, x, more, options, rows):
    """Each sequence in a call of its own, `rows` selecting its tokens; the tokens' results and d more summed."""
    tokens_, total = [], None
    for pick in rows:
        per_token = call(op, [*(pick(t) for t in x), *more], options)
        if more:
            *per_token, d = per_token
            total = d if total is None else total + d
        tokens_.append(per_token)
    return tokens_, total


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(("op", "options"), TWO_SIDED)
def test_a_padded_batch_is_every_sample_alone(op, options, impl):
    mask, x, more = mask_of(), tokens(N, b=len(LENGTHS)), extra(op)
    for t in x:
        t[~mask] = float("nan")  # never read
    q, k, v = x
    ours = call(op, [q, k, v, *more], {**options, "key_padding_mask": mask, "impl": impl})
    rows = [lambda t, i=i: t[i : i + 1, mask[i]] for i in range(len(LENGTHS))]
    wanted, d_more = alone(op, x, more, options, rows)
    for i, sample in enumerate(wanted):
        for found, truth in zip(ours, sample, strict=False):
            assert_same(found[i : i + 1, mask[i]].contiguous(), truth, 1e-9)
            assert not bool(found[i, ~mask[i]].any())
    if more:
        assert_same(ours[-1], d_more, 1e-9)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(("op", "options"), [*TWO_SIDED, *PACKED_CAUSAL])
def test_packed_sequences_are_each_alone(op, options, impl):
    cu, more = offsets(), extra(op)
    x = tokens(int(cu[-1]), b=1)
    ours = call(op, [*x, *more], {**options, "cu_seqlens": cu, "max_seqlen": max(LENGTHS) + 3, "impl": impl})
    rows = [lambda t, i=i: t[:, cu[i] : cu[i + 1]] for i in range(len(LENGTHS))]
    wanted, d_more = alone(op, x, more, options, rows)
    for i, sequence in enumerate(wanted):
        for found, truth in zip(ours, sequence, strict=False):
            assert_same(found[:, cu[i] : cu[i + 1]].contiguous(), truth, 1e-9)
    if more:
        assert_same(ours[-1], d_more, 1e-9)


@pytest.mark.parametrize("impl", FORMS)
def test_scores_far_below_those_of_the_padding(impl):
    """Padded keys have score 0: next to -2000 the real ones must not vanish, whatever the dtype."""
    q, k, v = tokens(12, b=1)
    q, k, mask = -40 * q.abs(), 40 * k.abs(), torch.arange(12)[None] < 8
    truth = call("softmax_attention", [t[:, :8] for t in (q, k, v)], {})
    ours = call("softmax_attention", [q, k, v], {"key_padding_mask": mask, "impl": impl})
    for a, b in zip(ours, truth, strict=True):
        assert_same(a[:, :8].contiguous(), b, 1e-9)


@pytest.mark.parametrize("op", hk.OPS)
def test_packed_qkv(op):
    """qkv in one tensor gives the bits of q, k, v, with one packed gradient, under a mask and of packed sequences."""
    more = extra(op)
    for b, n, ragged in (
        (4, N, {"key_padding_mask": mask_of()}),
        (1, sum(LENGTHS), {"cu_seqlens": offsets(), "max_seqlen": 40}),
    ):
        qkv = torch.stack(tokens(n, b=b, h=4, hk=4, d=5, dv=5), 2)
        ours = call(op, [qkv, *more], ragged, packed=True)
        apart = call(op, [*qkv.unbind(2), *more], ragged)
        assert torch.equal(ours[0], apart[0]) and torch.equal(ours[1], torch.stack(apart[1:4], 2))


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("op", hk.OPS)
def test_no_padding_and_nothing_but_padding(op, impl):
    """A mask of ones changes nothing; a sample without real tokens gets zeros and leaves the others alone; so do empty
    sequences."""
    x, more = tokens(12), extra(op)
    plain = call(op, [*x, *more], {})
    full = call(op, [*x, *more], {"key_padding_mask": torch.ones(2, 12, dtype=torch.bool)})
    for a, b in zip(full, plain, strict=True):
        assert_same(a, b, 1e-12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0], mask[1, 5] = False, False
    options = {"feature_map": "elu1", "normalize": True, "eps": 0.0} if op != "softmax_attention" else {}
    half = call(op, [*x, *(c.abs() for c in more)], {**options, "key_padding_mask": mask, "impl": impl})
    single = call(op, [*(t[1:, mask[1]] for t in x), *(c.abs() for c in more)], options)
    for a, b in zip(half[:4], single[:4], strict=True):
        assert not bool(a[~mask].any())
        assert_same(a[1:, mask[1]], b, 1e-12)
    cu = torch.tensor([0, 0, 12, 12], dtype=torch.int32)
    empty = call(op, [*(t[1:] for t in x), *more], {"cu_seqlens": cu, "max_seqlen": 12})
    for a, b in zip(empty, call(op, [*(t[1:] for t in x), *more], {}), strict=True):
        assert_same(a, b, 1e-12)


@pytest.mark.parametrize("op", LINEAR)
def test_opcheck(op):
    x = [t.requires_grad_() for t in tokens(11, d=4, dv=4, dtype=torch.float32)]
    c = extra(op, dtype=torch.float32)[0].requires_grad_() if op == "polynomial" else None
    rest = (op, "elu1", True, None, False, 0.0, None, 1e-6, 1.0, "torch", False, False)
    torch.library.opcheck(OPS.two_sided, (*x, c, *rest, mask_of((7, 11), 11)))
    qkv = torch.randn(1, 11, 3, 4, 4, requires_grad=True)
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    torch.library.opcheck(OPS.two_sided_qkvpacked, (qkv, c, *rest, None, cu, 7))


@pytest.mark.parametrize("kind", ["mask", "cu_seqlens"])
@pytest.mark.parametrize("op", hk.OPS)
def test_compile(op, kind):
    """One full graph with gradients, whatever the number of tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    more = extra(op)
    f = lambda x, r: getattr(hk, op)(*x, *more, **r)  # noqa: E731
    dynamic = True if kind == "cu_seqlens" else None  # `max_seqlen` is a symbol too, from the first call on
    compiled, frames = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=counter), set()
    for n in (50, 197, 65):
        x = [t.requires_grad_() for t in tokens(n, b=2 if kind == "mask" else 1)]
        cu = torch.tensor([0, 20, 29, n], dtype=torch.int32)
        ragged = {"key_padding_mask": mask_of((n - 9, 20), n)}
        for t in [*x, ragged["key_padding_mask"]]:
            torch._dynamo.mark_dynamic(t, 1)
            torch._dynamo.mark_static(t, [d for d in range(t.dim()) if d != 1])
        if kind == "cu_seqlens":
            ragged = {"cu_seqlens": cu, "max_seqlen": n}
        a, b = compiled(x, ragged), f(x, ragged)
        frames.add(counter.frame_count)
        assert_same(a, b)
        for g, h in zip(*(torch.autograd.grad(y.sin().sum(), x) for y in (a, b)), strict=True):
            assert_same(g, h)
    assert len(frames) == 1


class Module(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.more = op, extra(op)

    def forward(self, q, k, v, mask):
        return getattr(hk, self.op)(q, k, v, *self.more, key_padding_mask=mask)


@pytest.mark.parametrize("op", hk.OPS)
def test_export(op):
    n = torch.export.Dim("n", min=2, max=8192)
    sizes = {"h": 4, "hk": 4, "d": 8, "dv": 8}
    inputs = (*tokens(50, **sizes), mask_of((33, 50), 50))
    program = torch.export.export(Module(op), inputs, dynamic_shapes=({1: n}, {1: n}, {1: n}, {1: n}))
    x = (*tokens(97, **sizes), mask_of((97, 20), 97))
    assert_same(program.module()(*x), Module(op)(*x))


@pytest.mark.parametrize("op", hk.OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(op, dtype):
    """No worse than the definition rounds, garbage in the padding or not; autocast gives the same bits."""
    mask, low = mask_of(), [t.to(dtype) for t in tokens(N, b=len(LENGTHS))]
    more = extra(op, dtype=torch.float32)
    options = {} if op == "softmax_attention" else {"center": "k", "mean_path": True}
    truth = getattr(hk, op)(*(t.double() for t in low), *more, **options, key_padding_mask=mask)
    y = getattr(hk, op)(*low, *more, **options, key_padding_mask=mask)
    assert y.dtype == dtype and l2_error(y, truth) < 2 * torch.finfo(dtype).eps
    with torch.autocast("cpu", dtype=dtype):
        z = getattr(hk, op)(*(t.float() for t in low), *more, **options, key_padding_mask=mask)
    assert torch.equal(y, z)


@pytest.mark.parametrize("op", hk.OPS)
def test_explain(op):
    x = (*tokens(12), *extra(op))
    mask = torch.ones(2, 12, dtype=torch.bool)
    assert hk.explain(op, *x, key_padding_mask=mask).impl == "torch"
    with pytest.raises(ValueError, match="did you mean 'key_padding_mask'"):
        hk.explain(op, *x, key_paddign_mask=mask)


MASK, CU = torch.ones(2, 6, dtype=torch.bool), torch.tensor([0, 2, 6], dtype=torch.int32)
BAD = {
    "both": ({"key_padding_mask": MASK, "cu_seqlens": CU, "max_seqlen": 4}, "use one of them"),
    "mask_type": ({"key_padding_mask": MASK.float()}, "must be a tensor of torch.bool, got torch.float32"),
    "mask_list": ({"key_padding_mask": [True] * 6}, "must be a tensor of torch.bool, got list"),
    "mask_shape": ({"key_padding_mask": MASK[:, :5]}, r"shape \[batch, tokens\] = \[2, 6\], got \(2, 5\)"),
    "mask_device": ({"key_padding_mask": MASK.to("meta")}, "must be on the device of q"),
    "batch": ({"cu_seqlens": CU, "max_seqlen": 4}, "a batch of one, got a batch of 2"),
    "alone": ({"max_seqlen": 4}, "max_seqlen needs cu_seqlens"),
    "long": ({"cu_seqlens": CU.long(), "max_seqlen": 4}, "torch.int32, got torch.int64"),
    "rank": ({"cu_seqlens": CU[None], "max_seqlen": 4}, r"shape \[sequences \+ 1\]"),
    "short": ({"cu_seqlens": CU[:1], "max_seqlen": 4}, r"shape \[sequences \+ 1\]"),
    "no_length": ({"cu_seqlens": CU}, "max_seqlen must be an int of at least 1, the longest sequence, got None"),
    "zero_length": ({"cu_seqlens": CU, "max_seqlen": 0}, "of at least 1, the longest sequence, got 0"),
    "too_long": ({"cu_seqlens": CU, "max_seqlen": 3}, "at least the longest sequence, 4, got 3"),
    "end": ({"cu_seqlens": CU - CU[1], "max_seqlen": 4}, "from 0 to the number of tokens, 6"),
    "falling": ({"cu_seqlens": torch.tensor([0, 7, 6]).int(), "max_seqlen": 7}, "from 0 to the number of tokens, 6"),
    "causal": ({"key_padding_mask": MASK, "causal": True}, "needs causal=False"),
    "frames": ({"cu_seqlens": CU, "max_seqlen": 4, "causal": "frame", "frame": 3}, "causal='frame'|softmax.* no"),
    "state": ({"key_padding_mask": MASK, "return_state": True}, "do not go with a state|no state"),
}


@pytest.mark.parametrize(("options", "sentence"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("op", hk.OPS)
def test_bad_calls_say_what_is_allowed(op, options, sentence):
    if op == "polynomial" and options.get("causal"):
        sentence = "two-sided only"
    b = 1 if "cu_seqlens" in options and "batch" not in sentence else 2
    with pytest.raises(ValueError, match=sentence):
        getattr(hk, op)(*tokens(6, b=b), *extra(op), **options)
