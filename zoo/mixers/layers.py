"""Layers shared by mixers: feature maps, depthwise convolutions, norms, gains and the output gate.

Feature maps without parameters live in `hla_kernels` and are applied inside the operator. All layers but the feature
maps are the identity at initialisation, so adding them to a converted model does not change its output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hla_kernels.features.power import power
from hla_kernels.features.rms_norm import prepared, rms_norm
from hla_kernels.ranks.collectives import add_tokens
from zoo.grid import Grid, join_tokens, split_tokens


class Hedgehog(nn.Module):
    """Projection x -> W x of the learned feature map phi(x) = [softmax(W x), softmax(-W x)].

    One W [D, D] per head, initialised to the identity. Hedgehog, arXiv 2402.04347, section 4.1. [B, N, H, D] -> [B, N,
    H, D].
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
    """Learned power map x -> |y| y^p / |y^p| with y = relu(x) and one p per head in (1, 5).

    The focused function of FLatten Transformer (arXiv 2308.00442): it sharpens features and keeps their norm.
    p = 1 + 4 sigmoid(weight), learned as in PolaFormer (arXiv 2501.15061). [B, N, H, D] -> [B, N, H, D].
    """

    def __init__(self, num_heads: int, exponent: float = 3.0, device=None, dtype=None) -> None:
        """exponent: initial p, between 1 and 5."""
        super().__init__()
        self.exponent = exponent
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.set(torch.full_like(self.weight, self.exponent, dtype=torch.float64))

    @torch.no_grad()
    def set(self, exponents: Tensor) -> None:
        """Set one exponent per head, [H] between 1 and 5."""
        self.weight.copy_(((exponents - 1) / 4).logit())

    @property
    def power(self) -> Tensor:
        """Exponent p per head, [H] in at least float32."""
        return 1 + 4 * self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).sigmoid()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Map x, or without x return the exponents: hooks that load a module's weights run at its calls alone."""
        return self.power if x is None else power(x, self.power)


class DepthwiseResidual(nn.Module):
    """Depthwise residual x + conv(x) over the token grid, zero-initialised; prefix and suffix tokens pass unchanged.

    [B, N, H, D] -> [B, N, H, D]. The grid (H, W) or (T, H, W) is an argument of each call and may change between calls.
    Raises ValueError for an even kernel size and for a grid that does not match the dimensions or the tokens.
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
        return join_tokens(first, patches + self.convolve(patches, grid), last)

    def convolve(self, patches: Tensor, grid: Grid) -> Tensor:
        """Convolve the patch tokens [B, prod(grid), H, D], without the residual."""
        if len(grid) != self.dims:
            raise ValueError(f"this mixer was built for {self.dims}-D grids (option grid_dims), got the grid {grid}")
        image = patches.flatten(2).transpose(1, 2).unflatten(2, grid)  # [B, H*D, *grid]
        conv = F.conv2d if self.dims == 2 else F.conv3d
        local = conv(image, self.weight, self.bias, padding=self.weight.shape[-1] // 2, groups=len(self.weight))
        return local.flatten(2).transpose(1, 2).unflatten(2, patches.shape[2:]).to(patches.dtype)


class LocalValues(DepthwiseResidual):
    """LePE o + conv(v): depthwise convolution over the token grid, zero-initialised (CSWin, arXiv 2107.00652, Eq. 7).

    o [B, N, H, D] are the mixed values, v [B, N, Hk, D] the values before mixing; each value head serves H / Hk heads.
    Prefix and suffix tokens pass unchanged. Raises ValueError like `DepthwiseResidual`.
    """

    def forward(self, o: Tensor, v: Tensor, grid: Grid, prefix: int = 0, suffix: int = 0) -> Tensor:  # type: ignore[override]
        _, patches, _ = split_tokens(v, grid, prefix, suffix)
        local = self.convolve(patches, grid).repeat_interleave(o.shape[2] // v.shape[2], dim=2)
        return o + F.pad(local, (0, 0, 0, 0, prefix, suffix)).to(o.dtype)


class OutputGate(nn.Linear):
    """Output gate o * 2 sigmoid(W x + b), one gate per channel; exactly 1 at initialisation (W = 0, b = 0).

    o [B, N, H, D] are the mixed values, x [B, N, C] the hidden states that enter the attention.
    """

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return o * (2 * super().forward(x).sigmoid()).unflatten(-1, o.shape[2:])


class HeadGains(nn.Module):
    """Learned gain and shift per head, o -> gain o + shift mean(v), and the temperature of the feature map.

    gain, shift: [H], initialised to 1 and 0.
    temperature: [groups], initialised to 1; multiplies the queries and keys of a group before the feature map.
    o [B, N, H, D], v [B, N, Hk, D]. The mean is over the real tokens of mask [B, N]; padded tokens stay zero.
    """

    def __init__(self, num_heads: int, groups: int | None, device=None, dtype=None) -> None:
        """groups: number of temperatures; None without a feature map."""
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
        """Set values per head, [H] each; the temperature of a group is the mean over its heads."""
        for parameter, value in ((self.gain, gain), (self.shift, shift)):
            parameter.copy_(torch.as_tensor(value, device=parameter.device))
        if self.temperature is not None:
            t = torch.as_tensor(temperature, device=self.gain.device).expand_as(self.gain)
            self.temperature.copy_(t.to(torch.float64).unflatten(0, (len(self.temperature), -1)).mean(1))

    def apply_temperature(self, x: Tensor) -> Tensor:
        """Multiply q or k [B, N, H or Hk, D] by the temperature of its group, if there is one."""
        if self.temperature is None:
            return x
        t = self.temperature.repeat_interleave(x.shape[2] // len(self.temperature))
        return x * t[:, None].to(x.dtype)

    def forward(self, o: Tensor, v: Tensor, mask: Tensor | None = None, group: ProcessGroup | None = None) -> Tensor:
        mean = mean_value(v, mask, group).repeat_interleave(o.shape[2] // v.shape[2], dim=2)
        out = (o * self.gain[:, None] + mean * self.shift[:, None]).to(o.dtype)
        return out if mask is None else out.where(mask[:, :, None, None], 0)


def mean_value(v: Tensor, mask: Tensor | None = None, group: ProcessGroup | None = None) -> Tensor:
    """Average v [B, N, Hk, D] over the real tokens of mask [B, N] in at least float32 -> [B, 1, Hk, D].

    group: devices that share the tokens; not together with a mask.
    """
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if group is not None:
        total, count = add_tokens(v, group)
        return total / count
    if mask is None:
        return v.mean(1, keepdim=True)
    valid = mask[:, :, None, None]
    return v.where(valid, 0).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)


class HeadRMSNorm(nn.Module):
    """RMSNorm over the D channels of each head, one weight per head and channel: [B, N, H, D] -> [B, N, H, D]."""

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6, device=None, dtype=None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor) -> Tensor:
        return F.rms_norm(o, o.shape[-1:], eps=self.eps) * self.weight


class TokenRMSNorm(nn.RMSNorm):
    """nn.RMSNorm without float32 temporaries under autocast; `swap_rms_norm` changes the class of a module."""

    def forward(self, x: Tensor, early: tuple[bool, Tensor, Tensor] | None = None) -> Tensor:
        """[..., C] -> [..., C]. early: (whether to apply relu, cos, sin), fused with the norm."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps) if early is None else prepared(x, self.weight, self.eps, *early)


def swap_rms_norm(norm: nn.Module, fused: bool) -> None:
    """Turn an nn.RMSNorm with weights into a `TokenRMSNorm` (fused) or back; other modules are unchanged."""
    plain = type(norm) is nn.RMSNorm and norm.weight is not None and norm.eps is not None and norm.weight.dim() == 1
    if plain and fused:
        norm.__class__ = TokenRMSNorm
    elif type(norm) is TokenRMSNorm and not fused:
        norm.__class__ = nn.RMSNorm  # type: ignore[assignment]
