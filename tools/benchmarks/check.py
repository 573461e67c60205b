"""First call of a case on its full shape: its duration and its error against float64."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

import hla_kernels
from benchmarks.peers import Case, coefficients, formula, inputs_with_grad, make, of_operator
from benchmarks.rows import reason
from benchmarks.shapes import ALL_SHAPES

# Relative errors above which a case is not timed. Plain torch in bfloat16 has 2e-3 to 1e-2, and up to 0.1 in the
# gradient of a ratio, a small difference of large sums; a wrong sign or a missing term gives about 1.
WRONG_OUTPUT, WRONG_GRADIENT = 5e-2, 0.5


class Checked(NamedTuple):
    """Result of the first calls of a case.

    errors: relative L2 errors of o and of the worst of dq, dk, dv, by pass. seconds: durations with compilation:
    forward and backward, then forward without gradient. chosen: implementation that `auto` selected (ours only).
    problem: reason why the case cannot be timed.
    """

    rel_err: dict[str, float]
    first_s: dict[str, float]
    ran: str | None = None
    problem: str | None = None


def inputs(shape: str, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random qkv [B, N, 3, H, D] with gradient and a gradient of o [B, N, H, D]."""
    b, h, n, d = ALL_SHAPES[shape].sizes
    generator = torch.Generator(device).manual_seed(seed)
    qkv, grad = (
        torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)
        for size in ((b, n, 3, h, d), (b, n, h, d))
    )
    return qkv.requires_grad_(), grad


def check(case: Case, device: str = "cuda") -> Checked:
    """Run a case once with and once without backward, and compare three heads with float64."""
    try:
        return _check(case, device)
    except Exception as error:  # a failing peer is a result; continue with the others
        return Checked({}, {}, problem=reason(error)["reason"])
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # the processes of the pool share the GPU memory


def _check(case: Case, device: str) -> Checked:
    qkv, grad = inputs(case.shape, 0, device)
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # initialise the libraries before timing
    _wait(device)
    start = time.perf_counter()
    call, c = make(case), coefficients(case, device)
    o = call(qkv, c)
    (found, *_) = torch.autograd.grad(o, inputs_with_grad(qkv, c), grad)
    _wait(device)
    both_s = time.perf_counter() - start
    start = time.perf_counter()
    with torch.no_grad():
        call(qkv, c)
    _wait(device)
    forward_s = time.perf_counter() - start
    forward, backward = errors(case, qkv, o, grad, found, c)
    options = dict(case.options)
    given = (qkv,) if c is None else (qkv, c)
    ran = hla_kernels.explain(case.op, *given, **of_operator(options, qkv)).impl if case.impl == "ours" else None
    problem = None
    if not (forward < WRONG_OUTPUT and backward < WRONG_GRADIENT):
        problem = f"wrong: relative error {forward:.1e} of o, {backward:.1e} of the gradient against float64"
    times = {"forward": round(forward_s, 2), "forward_backward": round(both_s, 2)}
    return Checked({"forward": forward, "forward_backward": backward}, times, ran, problem)


def errors(case: Case, qkv: Tensor, o: Tensor, grad: Tensor, found: Tensor, c: Tensor | None) -> tuple[float, float]:
    """Compute relative L2 errors of o and of the worst of dq, dk, dv over the first, a middle and the last head."""
    b, h = qkv.shape[0], qkv.shape[3]
    squares = torch.zeros(2, 4, dtype=torch.float64, device=qkv.device)  # (difference, reference) x (o, dq, dk, dv)
    for i, j in dict.fromkeys([(0, 0), (b // 2, h // 2), (b - 1, h - 1)]):
        q, k, v = (qkv[i, :, t, j].detach().double()[None, None].requires_grad_() for t in range(3))
        # coefficients are per head, a mixing matrix is shared
        own = None if c is None else (c if case.op == "mhla" else c[j : j + 1]).detach().double()
        exact = formula(case.op, {k: v for k, v in case.options if k != "fixed"}, q, k, v, own)
        right = [exact, *torch.autograd.grad(exact, (q, k, v), grad[i, :, j].double()[None, None])]
        got = [o[i, :, j], *found[i, :, :, j].unbind(1)]
        for place, (x, y) in enumerate(zip(got, right, strict=True)):
            squares[0, place] += (x.detach().double() - y[0, 0].detach()).square().sum()
            squares[1, place] += y.detach().square().sum()
    relative = (squares[0] / squares[1]).sqrt().tolist()
    return relative[0], float(torch.tensor(relative[1:]).max())  # propagates NaN


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
