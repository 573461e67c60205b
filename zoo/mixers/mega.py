"""Mega: gated softmax attention of queries and keys that are moving averages over the grid."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hla_kernels.sequences import real
from zoo.grid import Grid, join_tokens, split_tokens
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.layers import OutputGate
from zoo.mixers.low_rank import TwoSidedMixer, attention
from zoo.mixers.options import LocalOptions

LOGIT_STD = 0.2  # standard deviation of the initial logits, as published
LARGEST_STEP = 1 - 1e-6  # of alpha delta, so that its complement has a logarithm


@dataclass(frozen=True)
class MegaOptions(LocalOptions):
    """Options of `mega`. Raises ValueError for a value that is not allowed.

    averages: number of moving averages per channel, direction and axis of the grid
    """

    averages: int = 16

    def __post_init__(self) -> None:
        if type(self.averages) is not int or self.averages < 1:
            raise ValueError(f"averages must be a positive number, got {self.averages!r}")
        super().__post_init__()

    @property
    def needs_grid(self) -> bool:
        return True


class MovingAverage(nn.Module):
    """Residual x + sum over axes and directions of damped moving averages y_t = sum_h eta_h s_th over the grid.

    s_th = alpha_h x_t + (1 - alpha_h delta_h) s_(t-1)h with learned alpha and delta in (0, 1), eta zero at
    initialisation: Mega, arXiv 2209.10655, Eq. 6 and 7, with beta contained in eta. It is a convolution with the
    kernel sum_h eta_h alpha_h (1 - alpha_h delta_h)^t, computed by FFT. [B, N, H, D] -> [B, N, H, D]; prefix and suffix
    tokens pass unchanged. Raises ValueError for a grid of other dimensions.
    """

    def __init__(self, channels: int, averages: int, dims: int, device=None, dtype=None) -> None:
        super().__init__()
        shape = 2, dims, channels, averages  # directions first
        self.alpha, self.delta, self.eta = (
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(3)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.alpha, std=LOGIT_STD)
        nn.init.normal_(self.delta, std=LOGIT_STD)
        nn.init.zeros_(self.eta)

    def forward(self, x: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> Tensor:
        dims = self.eta.shape[1]
        if len(grid) != dims:
            raise ValueError(f"this mixer was built for {dims}-D grids (option grid_dims), got the grid {grid}")
        first, patches, last = split_tokens(x, grid, prefix, suffix)
        wide = patches.flatten(2).unflatten(1, grid).to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):  # there is no FFT in bfloat16
            averages = torch.stack([self._along(wide, axis) for axis in range(dims)]).sum(0)
        return join_tokens(first, patches + averages.flatten(1, -2).view_as(patches).to(x.dtype), last)

    def _along(self, x: Tensor, axis: int) -> Tensor:
        """Convolve x [B, *grid, C] along an axis of the grid, in both directions."""
        length, x = x.shape[axis + 1], x.movedim(axis + 1, -1)  # [.., C, length]
        before, after = self.kernels(axis, length, x.dtype)
        circular = torch.cat([before[:, :1] + after[:, :1], before[:, 1:], torch.zeros_like(before[:, :1]),
                              after[:, 1:].flip(1)], 1)  # fmt: skip
        spectrum = torch.fft.rfft(x, 2 * length) * torch.fft.rfft(circular)
        return torch.fft.irfft(spectrum, 2 * length)[..., :length].movedim(-1, axis + 1)

    def kernels(self, axis: int, length: int, dtype: torch.dtype) -> Tensor:
        """Compute the kernels of both directions, [2, C, length]: weights of the tokens at distance 0, 1, .."""
        alpha, delta, eta = (t[:, axis].to(dtype) for t in (self.alpha, self.delta, self.eta))
        alpha = alpha.sigmoid()
        decay = torch.log1p(-(alpha * delta.sigmoid()).clamp(max=LARGEST_STEP))  # [2, C, averages]
        powers = (decay[..., None] * torch.arange(length, device=decay.device)).exp()
        return torch.einsum("sch,scht->sct", eta * alpha, powers)


class Mega(TwoSidedMixer):
    """Mega: softmax attention of q and k with two-sided damped moving averages over the grid, and an output gate.

    arXiv 2209.10655, section 3. Published are averages of the hidden states before the projections of q and k, scans of
    the raster order instead of the axes of the grid, a SiLU gate, Laplace or softmax weights, and a gated residual of
    the block, which the host replaces. Gate and averages start at the identity, where the mixer equals softmax.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 N^2 D multiplications per head, without the FFT. Options:
    `MegaOptions`. Raises ValueError for a missing grid.
    """

    name = "mega"
    defaults = MegaOptions()
    options: MegaOptions

    def __init__(self, layer: LayerSpec, options: MegaOptions) -> None:
        super().__init__(layer, options)
        d, dd = layer.head_dim, layer.placement
        common = options.averages, options.grid_dims
        self.average_q = MovingAverage(layer.num_heads * d, *common, **dd)
        self.average_k = MovingAverage(layer.kv_heads * d, *common, **dd)
        self.gate = OutputGate(layer.dim, layer.num_heads * d, **dd)

    def convolved(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        assert ctx.grid is not None
        q, k, v = super().convolved(q, k, v, ctx)
        q, k = (real(t, ctx.key_padding_mask) for t in (q, k))  # padded tokens count as zeros
        layout = ctx.grid, ctx.prefix, ctx.suffix
        return self.average_q(q, *layout), self.average_k(k, *layout), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        return attention(q, k, v, self.scale, ctx.key_padding_mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        assert self.gate is not None
        return self.gate(super().forward(q, k, v, ctx), ctx.x)

    def why_not_shared(self) -> str:
        return super().why_not_shared() and "averages tokens along the grid, parts of which other devices hold"
