"""Parts that mixers share: the learned parts of feature maps, the depthwise position residual, the output gate.

Feature maps without parameters live in `hla_kernels` and are applied inside the operator.

Every part with parameters is the identity at initialisation, so that adding it to a converted model changes nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hla_kernels.features.power import power
from hla_kernels.features.rms_norm import prepared, rms_norm
from zoo.grid import Grid, split_tokens


class Hedgehog(nn.Module):
    """The projection of the learned feature map phi(x) = [softmax(W x), softmax(-W x)]: x -> W x, W = I at first.

    One W [D, D] a head. Hedgehog, arXiv 2402.04347, section 4.1. [B, N, H, D] -> [B, N, H, D].
    """

    def __init__(self, num_heads: int, head_dim: int, device=None, dtype=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device).expand_as(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnhd,hde->bnhe", x, self.weight)


class Power(nn.Module):
    """The learned power in front of relu: x -> |y| y^p / |y^p| with y = relu(x), one p per head in (1, 5).

    The focused function of FLatten Transformer (arXiv 2308.00442), which turns features towards their largest and keeps
    their length; p = 1 + 4 sigmoid(weight) as PolaFormer (arXiv 2501.15061) learns it. [B, N, H, D] -> [B, N, H, D].
    """

    def __init__(self, num_heads: int, exponent: float = 3.0, device=None, dtype=None) -> None:
        """exponent: the initial p, between 1 and 5."""
        super().__init__()
        self.exponent = exponent
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.set(torch.full_like(self.weight, self.exponent, dtype=torch.float64))

    @torch.no_grad()
    def set(self, exponents: Tensor) -> None:
        """Take one exponent per head, [H] between 1 and 5."""
        self.weight.copy_(((exponents - 1) / 4).logit())

    @property
    def power(self) -> Tensor:
        """p of each head, [H] in float32 at least."""
        return 1 + 4 * self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return power(x, self.power)


class DepthwiseResidual(nn.Module):
    """x + depthwise_conv(x) over the token grid, zero-initialised; prefix and suffix tokens pass unchanged.

    The local position term that LePE, LiT and T5 add to linear attention. [B, N, H, D] -> [B, N, H, D]; the grid (H, W)
    or (T, H, W) comes with every call and may change between calls. Raises ValueError for an even kernel and for a grid
    of other dimensions or another size than the tokens.
    """

    def __init__(self, channels: int, kernel_size: int = 3, dims: int = 2, device=None, dtype=None) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"depthwise_kernel must be odd so that the grid keeps its size, got {kernel_size}")
        self.dims = dims
        self.weight = nn.Parameter(torch.zeros(channels, 1, *[kernel_size] * dims, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> Tensor:
        first, patches, last = split_tokens(x, grid, prefix, suffix)
        return torch.cat([first, patches + self.convolve(patches, grid), last], dim=1)

    def convolve(self, patches: Tensor, grid: Grid) -> Tensor:
        """The convolution alone, of the patch tokens [B, prod(grid), H, D]."""
        if len(grid) != self.dims:
            raise ValueError(f"this mixer was built for {self.dims}-D grids (option grid_dims), got the grid {grid}")
        image = patches.flatten(2).transpose(1, 2).unflatten(2, grid)  # [B, H*D, *grid]
        conv = F.conv2d if self.dims == 2 else F.conv3d
        local = conv(image, self.weight, self.bias, padding=self.weight.shape[-1] // 2, groups=len(self.weight))
        return local.flatten(2).transpose(1, 2).unflatten(2, patches.shape[2:]).to(patches.dtype)


class LocalValues(DepthwiseResidual):
    """o + depthwise_conv(v) over the token grid, zero-initialised: LePE (CSWin, arXiv 2107.00652, Eq 7).

    o [B, N, H, D] are the mixed values, v [B, N, Hk, D] those before mixing, each for H / Hk heads of o. Prefix and
    suffix tokens pass. Raises ValueError as `DepthwiseResidual`.
    """

    def forward(self, o: Tensor, v: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> Tensor:  # type: ignore[override]
        _, patches, _ = split_tokens(v, grid, prefix, suffix)
        local = self.convolve(patches, grid).repeat_interleave(o.shape[2] // v.shape[2], dim=2)
        return o + F.pad(local, (0, 0, 0, 0, prefix, suffix)).to(o.dtype)


class OutputGate(nn.Linear):
    """o * 2 sigmoid(W x + b), one gate a channel, open (exactly 1) at first: W = 0, b = 0.

    o [B, N, H, D] are the mixed values, x [B, N, C] the hidden states that enter the attention.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return o * (2 * super().forward(x).sigmoid()).unflatten(-1, o.shape[2:])


class HeadGains(nn.Module):
    """Numbers of each head, neutral at first: gain and shift of o -> gain o + shift mean(v), and if there is a feature
    map its temperature.

    gain, shift [H], temperature [groups], by which queries and keys of a group are multiplied before the map.
    o [B, N, H, D], v [B, N, Hk, D]; the mean is over the tokens of mask [B, N], and the others keep their zeros.
    """

    def __init__(self, num_heads: int, groups: int | None, device=None, dtype=None) -> None:
        """groups: number of temperatures; None: there is no feature map."""
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.gain = nn.Parameter(torch.ones(num_heads, **dd))
        self.shift = nn.Parameter(torch.zeros(num_heads, **dd))
        self.temperature = None if groups is None else nn.Parameter(torch.ones(groups, **dd))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.shift)
        if self.temperature is not None:
            nn.init.ones_(self.temperature)

    @torch.no_grad()
    def set(self, gain: Tensor | float, shift: Tensor | float, temperature: Tensor | float = 1.0) -> None:
        """Take numbers [H]; the temperature of a group is the mean of those of its heads."""
        for parameter, value in ((self.gain, gain), (self.shift, shift)):
            parameter.copy_(torch.as_tensor(value, device=parameter.device))
        if self.temperature is not None:
            t = torch.as_tensor(temperature, device=self.gain.device).expand_as(self.gain)
            self.temperature.copy_(t.to(torch.float64).unflatten(0, (len(self.temperature), -1)).mean(1))

    def apply_temperature(self, x: Tensor) -> Tensor:
        """q or k [B, N, H or Hk, D] times the temperature of its group; x itself without a temperature."""
        if self.temperature is None:
            return x
        t = self.temperature.repeat_interleave(x.shape[2] // len(self.temperature))
        return x * t[:, None].to(x.dtype)

    def forward(self, o: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        mean = mean_value(v, mask).repeat_interleave(o.shape[2] // v.shape[2], dim=2)
        out = (o * self.gain[:, None] + mean * self.shift[:, None]).to(o.dtype)
        return out if mask is None else out.where(mask[:, :, None, None], 0)


def mean_value(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of v [B, N, Hk, D] over the tokens of mask [B, N], [B, 1, Hk, D], summed in float32 at least."""
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if mask is None:
        return v.mean(1, keepdim=True)
    live = mask[:, :, None, None]
    return v.where(live, 0).sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp(min=1)


class HeadRMSNorm(nn.Module):
    """RMSNorm over D of each head, with one gain per head and channel: [B, N, H, D] -> [B, N, H, D]."""

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6, device=None, dtype=None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor) -> Tensor:
        return F.rms_norm(o, o.shape[-1:], eps=self.eps) * self.weight


class TokenRMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the channels of a token, which under autocast forms no float32 tensors: a live module becomes one
    by a change of class, and back."""

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        """how: nothing, or what `prepared` does besides (whether to take the positive part, cos, sin)."""
        assert self.eps is not None
        return prepared(x, self.weight, self.eps, *how) if how else rms_norm(x, self.weight, self.eps)


def swap_rms_norm(norm: nn.Module, ours: bool) -> None:
    """Make a plain nn.RMSNorm with weights a `TokenRMSNorm`, or one of these plain again; other modules are left."""
    plain = type(norm) is nn.RMSNorm and norm.weight is not None and norm.eps is not None and norm.weight.dim() == 1
    if plain and ours:
        norm.__class__ = TokenRMSNorm
    elif type(norm) is TokenRMSNorm and not ours:
        norm.__class__ = nn.RMSNorm  # type: ignore[assignment]
