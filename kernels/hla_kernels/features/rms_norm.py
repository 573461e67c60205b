"""RMSNorm of 16-bit tokens with weights of any precision, without float32 copies of the tokens.

Optionally fused with relu and rotation, which prepare queries and keys of linear attention in Wan.

y = x r w with r = (mean(x^2) + eps)^(-1/2) over the channels of a token (Zhang and Sennrich, arXiv 1910.07467, Eq 4),
dx = r (g w - x r mean(g w x r)), dw = sum of g x r. torch has such kernels only for x and w of one dtype; under
autocast the dtypes differ, and torch runs each step in float32.

The fused form is f = R relu(y), R the rotation of channels (2i, 2i + 1) of each head (Su et al., arXiv 2104.09864),
rounded once; backward dy = R' df where y > 0, then as above.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.gate import trusted
from ..dispatch.operator import like, saved_op
from ..dispatch.recording import launch

MAX_CHANNELS = 8192
PROGRAMS = 4 * 132  # programs of the backward, each of which sums the weight gradient over some tokens


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [.., C] with weight [C] -> [.., C] in the dtype of x, computed in at least float32.

    The kernels run for 16-bit CUDA tensors of at most 8192 channels in eager mode; all other calls run plain torch
    code, which torch.compile fuses.
    """
    if weight.dtype == x.dtype or not in_kernels(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return torch.ops.hla_kernels.rms_norm(x, weight, eps)[0]


def in_kernels(x: Tensor, weight: Tensor, relu: bool = False, half: int = 0) -> bool:
    """Whether the kernels run for tokens x [.., C], with `relu` and a rotation of heads of 2 `half` channels."""
    if not (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)) or torch.compiler.is_compiling():
        return False
    c = x.shape[-1]
    return c <= MAX_CHANNELS and trusted("rms_norm", x.device, (x.dtype, weight.dtype), (c, relu, half))


def prepared(x: Tensor, weight: Tensor, eps: float, relu: bool, cos: Tensor, sin: Tensor) -> Tensor:
    """Return R relu(rms_norm(x)), or R rms_norm(x) without `relu`, [B, N, C] in the dtype of x.

    x: [B, N, C] supported by `in_kernels`. weight: [C]. cos, sin: [N, D / 2], shared by all heads of D channels,
    without gradient.
    """
    tables = (t.detach().float().contiguous() for t in (cos, sin))
    return torch.ops.hla_kernels.rms_norm(x, weight, eps, relu, *tables)[0]


def _forward(
    x: Tensor, weight: Tensor, eps: float, relu: bool = False, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y, r). y: normalized x, with relu and rotation by float32 tables [N, D / 2] if given. r: float32
    [tokens]."""
    from .fused import norm_rows

    rows, (y, inverses) = _rows(x), _outputs(x)
    if rows.shape[0]:
        with torch.cuda.device_of(x):
            launch(
                norm_rows, rows.shape[0],
                rows, weight.contiguous(), cos, sin, y, inverses, rows.stride(0), eps, **_config(x, relu, cos),
            )  # fmt: skip
    return y, inverses


def _rows(x: Tensor) -> Tensor:
    """Reshape x to [tokens, C] with contiguous channels."""
    x = x.flatten(0, -2)
    return x if x.stride(1) == 1 else x.contiguous()


def _config(x: Tensor, relu: bool, cos: Tensor | None) -> dict[str, int]:
    """Return the sequence length, the constants of relu and rotation, the number of channels and the tile size that
    holds them."""
    n, c = x.shape[-2:]
    width, half = 1 << (c - 1).bit_length(), 1 if cos is None else cos.shape[1]
    return {"N": n, "RELU": relu, "HALF": half, "C": c, "BC": width, "num_warps": min(8, max(1, width // 256))}


def _outputs(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return like(x)[0], x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


def _backward(
    grads: list[Tensor], saved: list[Tensor], x: Tensor, weight: Tensor, _: float, relu: bool, cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dx, dw)."""
    from .fused import norm_grads

    rows, g, (dx,) = _rows(x), _rows(grads[0]), like(x)
    if not rows.shape[0]:
        return dx, torch.zeros_like(weight)
    programs = min(rows.shape[0], PROGRAMS)
    parts = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        launch(
            norm_grads, programs,
            g, rows, weight.contiguous(), cos, sin, saved[0], dx, parts, rows.shape[0], g.stride(0), rows.stride(0),
            **_config(x, relu, cos),
        )  # fmt: skip
    return dx, parts.sum(0).to(weight.dtype)


rms_norm_op, _ = saved_op("rms_norm", _forward, _outputs, _backward, count=2)
