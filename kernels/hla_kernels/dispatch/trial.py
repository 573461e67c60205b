"""Small seeded input of the first-use check of a Triton form (`verify`)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..blockmix.call import BlockCall
from ..delta_rule.call import DeltaCall
from ..features import feature_width
from ..hla import fused
from ..hla.stages.plan import walk_heads, walks
from ..sequences import Sequences
from ..softmax.adaptive.call import AdaptiveCall
from .operator import are_fixed, needs_backward
from .verify import Run

TENSORS = (
    "mixing", "key_padding_mask", "token_mask", "cu_seqlens", "rotary", "fixed", "decay_heads", "streams", "shared",
)  # fmt: skip
N = 197  # tokens of a trial, unless a grid says otherwise
DEVICE = "cuda"  # the current one
HEADS = 384  # of many short sequences: the kernels that keep a head in one program


def trial_of(call: Any) -> tuple | None:
    """Return what the kernels of a checked call depend on, as constants: (operator, dtype, (H, Hk, D, Dv), options);
    None for an operator without a check. Options are pairs of a keyword and its value, without numbers that are not
    compiled into kernels; for a name in `TENSORS` it is a shape, or whether there is such a tensor."""
    q, k, v = call.q, call.k, call.v
    if isinstance(call, DeltaCall):
        numbers = tuple(len(range(x)) for x in (q.shape[2], q.shape[3], v.shape[4], call.a.shape[3]))
        options: tuple = (("channels", call.log_f.shape[3] > 1), ("ab", (call.a.dtype, call.b.dtype)))
        return ("delta", q.dtype, numbers, options)
    # ranges have constant lengths while dynamo traces dynamic shapes
    widths = tuple(len(range(x)) for x in (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))
    if isinstance(call, BlockCall):
        o, turned = call.options, None if call.rotary is None else tuple(int(x) for x in call.rotary[0].shape)
        options = (
            ("grid", tuple(int(x) for x in o.layout.grid)), ("blocks", tuple(int(x) for x in o.layout.blocks)),
            ("prefix", int(o.layout.prefix)), ("order", o.order), ("causal", o.causal), ("feature_map", o.feature_map),
            ("normalize", o.normalize), ("rotary_half", o.rotary_half), ("moments", o.moments),
            ("token_mask", call.mask is not None), ("rotary", turned),
        )  # fmt: skip
        return ("mhla", q.dtype, widths, (*options, ("mixing", tuple(int(x) for x in call.mixing.shape))))
    if isinstance(call, AdaptiveCall):
        edge = (("prefix", min(1, call.field.prefix)), ("suffix", min(1, call.field.suffix)))
        options = (("grid", (24, 24)), *edge, ("select", call.select), ("density", 0.3), ("k_tile", call.field.k_tile))
        more = (("far", call.far), ("q_scale", widths[2] ** -0.5), ("key_padding_mask", call.mask is not None))
        return ("adaptive_multipole", q.dtype, widths, (*options, *more))
    if not hasattr(call, "coefficients"):
        return None
    return _causal(call, widths) if call.options.causal else _two_sided(call, widths)


def _two_sided(call: Any, widths: tuple[int, ...]) -> tuple:
    o, seqs = call.options, call.sequences
    options: tuple = (
        ("feature_map", o.feature_map), ("normalize", o.normalize), ("center", o.center), ("mean_path", o.mean_path),
        ("ridge", 0.1 if o.ridge else 0.0), ("key_padding_mask", seqs.mask is not None),
        ("cu_seqlens", seqs.cu_seqlens is not None), ("fixed", are_fixed(call.coefficients)),
    )  # fmt: skip
    # sizes may be symbolic while tracing: then every variant is tried
    if not torch.compiler.is_compiling() and all(type(x) is int for x in (*call.q.shape, *call.v.shape)):
        spec, features = _spec(call.op, options, widths[2])
        variant = fused.variant_of(*fused.sizes_of(call.q, call.v, spec, seqs, features))
        saves = needs_backward(call.q, call.k, call.v, call.coefficients)
        options += (("variant", variant), ("backward", saves))
    return (call.op, call.q.dtype, widths, options)


@functools.lru_cache(maxsize=256)
def _spec(op: str, pairs: tuple, d: int) -> tuple[fused.Spec, int]:
    """Return the spec of options, and the number of features of the Triton form."""
    return fused.Spec(op, **{name: x for name, x in pairs if name in fused.Spec._fields}).of_softmax(d)


def _causal(call: Any, widths: tuple[int, ...]) -> tuple:
    o, heads = call.options, None
    if call.gamma is not None:  # -1: no gradient
        heads = int(call.gamma.numel()) if call.gamma.requires_grad else -1
    streams = call.state is not None or bool(call.return_state)
    order = (("causal", o.causal), ("frame", N if o.frame else 0), ("decay_rule", o.decay_rule))
    options = (*order, ("scale", 0.02), ("decay_heads", heads), ("streams", streams))
    return (call.op, call.q.dtype, widths, (*options, ("feature_map", o.feature_map), ("normalize", o.normalize)))


def shared_trial(form: tuple) -> tuple:
    """Return the trial of the same call by the kernels of tokens shared by ranks, for any number of tokens."""
    *rest, pairs = form
    return (*rest, (*[x for x in pairs if x[0] not in ("variant", "backward")], ("shared", True)))


def runs(form: tuple) -> Iterator[Run]:
    """Return the runs that check a form on the current CUDA device, one for each path of its operator."""
    if form[0] in FUNCTIONS:
        yield FUNCTIONS[form[0]](*form[1:])
        return
    op, dtype, widths, pairs = form
    if op == "delta":
        yield _delta_run(dtype, widths, **dict(pairs))
        return
    for batch, n in sizes(form):
        each = _adaptive_run if op == "adaptive_multipole" else _run
        yield each(op, dtype, widths, dict(pairs), batch, n)


def sizes(form: tuple) -> list[tuple[int, int]]:
    """Return (B, N) of the trials of a form."""
    op, dtype, (h, hk, d, dv), pairs = form
    options = dict(pairs)
    if "grid" in options:
        outer = options["prefix"] + options.get("suffix", 0)
        return [(2, outer + int(torch.tensor(options["grid"]).prod()))]
    if options.get("causal"):
        tried = [(2, 2 * N if options["frame"] else N), (1, 8 * N)]  # one segment, and several
        batch, n = -(-walk_heads(dv) // h), 4 * N
        walk = (batch * h, n, feature_width(d, options["feature_map"]), dv)
        rest = (options["decay_heads"] is not None, options["normalize"], options["frame"], False)
        walking = walks("paper" if options["decay_rule"] == "paper" else op, dtype, walk, *rest)
        return [*tried, (batch, n)] if walking else tried
    spec, d = _spec(op, pairs, d)
    many = -(-HEADS // h)
    if "shared" in options:  # the split path alone
        return [(2, N), (1, 8 * N), (1, 42 * N)]
    tried = [(2, N), (many, N), (many, 3 * N), (-(-128 // h), 3 * N), (1, 8 * N), (1, 42 * N)]
    tried += [(-(-heads // h), 11 * N) for heads in (132, 192, 300)]  # which fill a GPU in part, once, in two parts
    found: dict[tuple, tuple[int, int]] = {}
    for batch, n in tried:
        q = torch.empty(batch, n, h, d, dtype=dtype, device="meta")
        v = torch.empty(batch, n, hk, dv, dtype=dtype, device="meta")
        seqs = Sequences(q if options["key_padding_mask"] or options["cu_seqlens"] else None, None, 0)
        found.setdefault(fused.variant_of(*fused.sizes_of(q, v, spec, seqs)), (batch, n))
    if (wanted := options.get("variant")) is None:
        return list(found.values())
    if wanted in found:
        return [found[wanted]]
    # a ratio of many heads and many tokens is too large for a trial: the two nearest variants lack its `middle` only
    return [found[x] for x in sorted(found, key=lambda x: sum(map(operator.eq, x, wanted)))[-2:]]


def _delta_run(dtype: torch.dtype, sizes: tuple[int, ...], channels: bool, ab: tuple[torch.dtype, ...]) -> Run:
    """Return the function that runs `delta` in two pieces, forward and backward."""
    import hla_kernels

    (h, d, dv, r), random = sizes, torch.Generator(DEVICE).manual_seed(0)
    shapes: list[tuple[int, ...]] = [(h, d), (h, d), (h, dv), (h, d) if channels else (h,), *((h, r, d),) * 2, (h, dv)]
    q, k, v, f, a, b, grad = (torch.randn(2, N, *x, generator=random, device=DEVICE) for x in shapes)
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = [*(x.to(dtype) for x in (q, k, v)), -f.abs(), (a / d).to(ab[0]), (b / d).to(ab[1])]
    for x in inputs:
        x.requires_grad_()

    def run(impl: str) -> list[Tensor]:
        state, outputs = None, []
        for piece in (slice(0, N // 2), slice(N // 2, N)):
            q, k, v, log_f, a, b = (x[:, piece] for x in inputs)
            more = {"a": a, "b": b} if r else {}
            y, state = hla_kernels.delta(q, k, v, log_f=log_f, state=state, return_state=True, impl=impl, **more)  # type: ignore[arg-type]
            outputs.append(y)
        y = torch.cat(outputs, 1)
        used = inputs if r else inputs[:4]
        return [y.detach(), *torch.autograd.grad(y, used, grad.to(y.dtype))]

    return run


def _run(op: str, dtype: torch.dtype, widths: tuple[int, ...], options: dict[str, Any], batch: int, n: int) -> Run:
    """Return the function that runs the public operator, forward and backward, on the same random input each time."""
    (h, hk, d, dv), random = widths, torch.Generator(DEVICE).manual_seed(0)
    of_tensors = {name: options.pop(name, None) for name in TENSORS}
    backward = options.pop("backward", None)  # None: with and without one
    options.pop("variant", None)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random, device=DEVICE).to(dtype)

    q, k, v, grad = (normal(batch, n, *x) for x in ((h, d), (hk, d), (hk, dv), (h, dv)))
    if options.get("normalize") and options.get("feature_map") in (None, "identity"):
        q, k = q.abs(), k.abs()  # as the features of a ratio are
    if dtype == torch.float16 and not options.get("normalize", True):  # third orders would overflow
        v, grad = v / 64, grad / 64
    leaves, more = [q, k, v], (h, 4) if op == "polynomial" else of_tensors["mixing"]
    if of_tensors["cu_seqlens"]:
        q, k, v, grad = (x.flatten(0, 1)[None] for x in (q, k, v, grad))
        leaves, cu = [q, k, v], torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=DEVICE)
        options |= {"cu_seqlens": cu, "max_seqlen": n}
    for name in ("key_padding_mask", "token_mask"):
        if of_tensors[name]:
            options[name] = torch.rand(batch, n, generator=random, device=DEVICE) < 0.7
    if of_tensors["rotary"]:
        angle = normal(*of_tensors["rotary"], dtype=torch.float32)
        options["rotary"] = (angle.cos(), angle.sin())
    if more:
        leaves.append(normal(*more, dtype=torch.float32).abs() + 0.1)
    if heads := of_tensors["decay_heads"]:
        options["decay"] = torch.linspace(0.9, 0.99, heads, device=DEVICE) if heads > 0 else 0.9
    inputs = leaves[:3] if of_tensors["fixed"] else list(leaves)
    if isinstance(options.get("decay"), Tensor):
        inputs.append(options["decay"])
    for x in inputs:
        x.requires_grad_()

    def run(impl: str) -> list[Tensor]:
        f, one = _operator(op, of_tensors["shared"] and impl == "triton"), []
        if of_tensors["streams"]:
            cut = n - (options["frame"] or 50)
            y, state = f(*(x[:, :cut] for x in leaves), impl=impl, return_state=True, **options)
            if not options["frame"]:  # other kernels compute a single token, and all tokens without a backward
                token = [x[:, cut : cut + 1] for x in leaves]
                with torch.no_grad():
                    one = [f(*token, impl=impl, state=state, return_state=True, **options)[0]]
                    whole, state_after = f(*leaves, impl=impl, return_state=True, **options)
                    one += [whole, f(*leaves, impl=impl, state=state_after, return_state=True, **options)[0]]
                    one.append(f(*leaves, impl=impl, state=state_after, **options))
            y = torch.cat([y, f(*(x[:, cut:] for x in leaves), impl=impl, state=state, **options)], 1)
            return [y.detach(), *one, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]
        if not backward:  # kernels that keep nothing
            with torch.no_grad():
                one = [f(*leaves, impl=impl, **options)]
        if backward is False:
            return one
        y = f(*leaves, impl=impl, **options)
        return [y.detach(), *one, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]

    return run


def _operator(op: str, of_ranks: bool) -> Callable:
    """Return the public operator, or the one that runs the kernels of tokens shared by ranks."""
    import hla_kernels

    if not of_ranks:
        return getattr(hla_kernels, op)
    from ..ranks.sharded import on_one_rank

    return lambda *tokens, impl, **options: on_one_rank(op, *tokens, **options)


def _adaptive_run(
    op: str, dtype: torch.dtype, widths: tuple[int, ...], options: dict[str, Any], batch: int, n: int
) -> Run:
    """Return the function that runs `adaptive_multipole`, forward and backward, and sums the scores of the selected
    tiles.

    Rounding exchanges tiles of nearly equal scores. So the torch form reads the tiles that the Triton form selected,
    and the sums [B, H, U] compare the selections.
    """
    from ..softmax.adaptive import call, fused, reference, torch_form

    (h, hk, d, dv), random = widths, torch.Generator(DEVICE).manual_seed(0)
    shapes = ((h, d), (hk, d), (hk, dv), (h, dv))
    q, k, v, grad = (torch.randn(batch, n, *x, generator=random, device=DEVICE).to(dtype) for x in shapes)
    k *= torch.linspace(0.5, 2, n, device=DEVICE).to(dtype)[:, None, None]  # tiles of different variance
    mask = torch.rand(batch, n, generator=random, device=DEVICE) < 0.7
    options["key_padding_mask"] = mask if options["key_padding_mask"] else None
    checked = call.prepare(*(x.requires_grad_() for x in (q, k, v)), **options)
    found, own = torch_form.selection(checked)
    tiles = [own]

    def run(impl: str) -> list[Tensor]:
        if impl == "triton":
            tiles.append(fused.chosen(checked))
            y = fused.evaluate(checked)
        elif impl == "torch":
            y = torch_form.evaluate(checked, tiles[-1])
        else:
            y = reference.definition(checked)
        sums = found.gather(-1, tiles[-1] if impl == "triton" else own).sum(-1)
        return [y.detach(), sums, *torch.autograd.grad(y, (q, k, v), grad.to(y.dtype))]

    return run


def _power_run(dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> Run:
    """Return the function that runs `power_pair`, forward and backward."""
    from ..features.power import power_op, power_torch

    h, hk, d = sizes
    return _function_run(
        power_op, lambda q, k, of_q, of_k: (power_torch(q, of_q), power_torch(k, of_k)),
        dtypes, ((2, N, h, d), (2, N // 2, hk, d), (h,), (hk,)), 2,
    )  # fmt: skip


def _norm_run(dtypes: tuple[torch.dtype, ...], sizes: tuple[int, ...]) -> Run:
    """Return the function that runs `rms_norm`, perhaps with relu and a rotation, forward and backward."""
    from ..features.rms_norm import PROGRAMS, rms_norm_op

    c, relu, half = sizes
    angle = torch.linspace(0, 6, PROGRAMS * half, device=DEVICE).view(PROGRAMS, half)
    tables = (angle.cos(), angle.sin()) if half else (None, None)

    def plain(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        y = torch.nn.functional.rms_norm(x.float(), (c,), weight.float(), 1e-6)
        y = y.relu() if relu else y
        if half:
            even, odd = y.unflatten(-1, (-1, half, 2)).unbind(-1)
            cos, sin = (t[:, None] for t in (angle.cos(), angle.sin()))
            y = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-3)
        return (y.to(x.dtype),)

    kernels = lambda x, weight: rms_norm_op(x, weight, 1e-6, bool(relu), *tables)[:1]  # noqa: E731
    return _function_run(kernels, plain, dtypes, ((2, PROGRAMS, c), (c,)), 1)


def _function_run(
    kernels: Callable, plain: Callable, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...], count: int
) -> Run:
    """Return the function that runs the kernels or the torch form of a function, forward and backward. Its `count`
    outputs have the shapes of its first arguments; the others, a number per head or channel, are between 1 and 2."""
    random = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(x, generator=random, device=DEVICE) for x in shapes]
    inputs = [x if i < count else 1 + x.sigmoid() for i, x in enumerate(inputs)]
    inputs = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    grads = [torch.randn(x.shape, generator=random, device=DEVICE).to(x.dtype) for x in inputs[:count]]

    def run(impl: str) -> list[Tensor]:
        found = (kernels if impl == "triton" else plain)(*inputs)
        return [*(x.detach() for x in found), *torch.autograd.grad(found, inputs, grads)]

    return run


FUNCTIONS = {"power_pair": _power_run, "rms_norm": _norm_run}  # without `impl`
