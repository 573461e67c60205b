"""Launches of `heads.mixture`: `polynomial` plain or with centred keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ....dispatch.recording import launch
from ..heads.mixture import mixture_forward, mixture_moments, mixture_operator
from ..heads.mixture.weights import mixture_products, mixture_weights
from ..plan.special import MATRICES, mixture_config
from . import apply_call, apply_grads_call
from .call import Call, Outs, Saved, area, half_room, placed, unfused


def square(call: Call) -> dict:
    """Return the constexpr arguments of all kernels."""
    return {"F": call.w.F, "KF": MATRICES * area(call)}


def tiles(call: Call, kernel: str) -> dict[str, int]:
    """Return the tiles of a kernel."""
    return call.tiles(mixture_config, kernel, call.w)


def means(call: Call) -> dict:
    """Return the constexpr arguments of kernels that sum tokens in addition to moments. A ratio centres values too."""
    flags = call.pick("CENTER", "MEAN")
    return {"L": call.lay.vectors(), **flags, "MEAN": flags["MEAN"] or call.spec.normalize}


def kept_of(call: Call, saved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Float16 matrices [B * H, MATRICES, F, F], units [B * H, 8], vectors [B * H, K] and operators [B * H, D, D] of a
    buffer of `plan.special.mixture_floats`, or room for what a forward needs of an empty one."""
    lay = call.lay.vectors()
    sizes = (8, MATRICES * area(call) // 2, lay.K, lay.matrix_floats(call.q.element_size()))
    buffer = saved if saved.numel() > 0 else call.buffer(call.bh * sum(sizes))
    units, kept, vectors, matrix = buffer.split([call.bh * x for x in sizes])
    return kept.view(torch.float16), units, vectors.view(call.bh, lay.K), matrix.view(call.q.dtype).view(call.bh, -1)


def mixture_forward_call(call: Call, o: Tensor, saved: Tensor) -> None:
    """Compute o; store tensors for the backward unless `saved` is empty. One launch at 64 channels, otherwise three."""
    q, k, v = call.q, call.k, call.v
    kept, units, vectors, matrix = kept_of(call, saved)
    at, a = placed(q, k, v, o)
    if call.w.F.D2 == 0:
        launch(
            mixture_forward, call.bh,
            q, k, v, o, kept, units, vectors, matrix, call.coefficients, *at, call.n, call.h, call.scale, ALIGN=a,
            SAVE=saved.numel() > 0, **means(call), **square(call), **tiles(call, "forward"),
        )  # fmt: skip
        return
    moments_call(call, kept, units, vectors)
    launch(
        mixture_operator, call.bh,
        kept, units, matrix, call.coefficients, call.h, **square(call), **tiles(call, "operator"),
    )  # fmt: skip
    call.lay = call.lay.vectors()
    apply_call(call, o, Saved(vectors, matrix))


def moments_call(call: Call, kept: Tensor, units: Tensor, vectors: Tensor) -> None:
    """Fill the moments, their units and the sums of tokens."""
    q, k, v = call.q, call.k, call.v
    at, a = placed(q, k, v)
    launch(
        mixture_moments, 3 * call.bh,
        q, k, v, kept, units, vectors, *at, call.n, call.h, call.scale, ALIGN=a, **means(call), **square(call),
        **tiles(call, "moments"),
    )  # fmt: skip


def mixture_backward_call(call: Call, g: Tensor, outs: Outs, saved: Tensor) -> Tensor | None:
    """Two launches, three at 72 channels: weights of each head, then its tokens by several programs. Returns parts
    [B, H, ., 4] of d coefficients if they are learned."""
    kept, units, vectors, matrix = kept_of(call, saved)
    weights, rows, dc = weights_call(call, g, kept, units, vectors, None)
    call.lay = call.lay.vectors()
    apply_grads_call(call, g, outs, Saved(vectors, matrix), None, weights, rows, False)
    return dc


def weights_call(
    call: Call, g: Tensor, kept: Tensor, units: Tensor, vectors: Tensor, grads: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return weights, rows and parts of d coefficients, of what was kept and g, or of grads of `readout_grad`."""
    q, lay, wide = call.q, call.lay, call.w.F.D2 > 0
    weights = call.buffer(call.bh, lay.KW, dtype=q.dtype)
    rows = call.buffer(call.bh, 3 * lay.fd if call.spec.sums else 0)
    dc = call.buffer(call.b, call.h, 3 if wide else 1, 4) if call.spec.learned else None
    room = half_room(call, 2) if wide else kept
    common = {**square(call), "KR": 2 * area(call)}
    at, a = placed(q, g)
    launch(
        mixture_weights, call.bh,
        q, g, kept, units, room, weights, rows, grads, vectors, call.coefficients, dc, *at, call.n, call.h, call.scale,
        ALIGN=a, **means(call), **common, **unfused(call), **tiles(call, "weights"),
    )  # fmt: skip
    if wide:
        launch(
            mixture_products, 4 * call.bh,
            kept, units, room, weights, rows, grads, vectors, call.coefficients, dc, call.n, call.h, call.scale,
            L=lay.vectors(), **common, **tiles(call, "products"), **unfused(call),
        )  # fmt: skip
    return weights, rows, dc
