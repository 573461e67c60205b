"""Depthwise convolutions over the token grid, which every mixer can have: what softmax and linear mixers share."""

from typing import Any, ClassVar

from torch import Tensor, nn

from hla_kernels.sequences import real
from zoo.grid import check_grid
from zoo.mixers.context import Context
from zoo.mixers.layers import DepthwiseResidual, LocalValues


class Local(nn.Module):
    """The parts of a mixer that `zoo.mixers.options.LocalOptions` ask for; a subclass has them in `options`."""

    name: ClassVar[str]
    options: Any

    def build_cpe(self, dim: int, **dd) -> None:
        """The residual of the hidden states."""
        opt = self.options
        self.cpe = DepthwiseResidual(dim, opt.cpe, opt.grid_dims, **dd) if opt.cpe else None

    def build_depthwise(self, heads: dict[str, int], head_dim: int, **dd) -> None:
        """The residuals of q, k and v, by their numbers of heads."""
        opt = self.options
        self.depthwise = nn.ModuleDict(
            {
                t: DepthwiseResidual(heads[t] * head_dim, opt.depthwise_kernel, opt.grid_dims, **dd)
                for t in opt.depthwise
            }
        )

    def build_lepe(self, channels: int, **dd) -> None:
        """The convolution of v that is added to the output."""
        opt = self.options
        self.lepe = LocalValues(channels, opt.lepe, opt.grid_dims, **dd) if opt.lepe else None

    def check_grid(self, n_tokens: int, ctx: Context) -> None:
        """Raise ValueError when a grid is needed and the tokens have none, or another number of tokens."""
        if not self.options.needs_grid:
            return
        if ctx.grid is None:
            raise ValueError(
                f"the mixer {self.name!r} with {self._why_grid()} needs a token grid, but these tokens have none"
            )
        check_grid(n_tokens, ctx.grid, ctx.prefix, ctx.suffix)

    def _why_grid(self) -> str:
        opt = self.options
        local = opt.depthwise or opt.lepe or opt.cpe
        return "depthwise, lepe or cpe" if local else "causal" if opt.causal else "its blocks"

    def placed(self, x: Tensor, ctx: Context) -> Tensor:
        """The hidden states x [B, N, C] with their convolution: what the host projects. ctx: grid, prefix and suffix,
        padding."""
        if self.cpe is None:
            return x
        self.check_grid(x.shape[1], ctx)
        assert ctx.grid is not None
        seen = real(x[:, :, None], ctx.key_padding_mask)
        return self.cpe(seen, ctx.grid, ctx.prefix, ctx.suffix).flatten(2)

    def convolved(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, N, H, D] with their depthwise residuals."""
        tensors = {"q": q, "k": k, "v": v}
        for name, part in self.depthwise.items():
            assert ctx.grid is not None
            seen = real(tensors[name], ctx.key_padding_mask)  # padding is like what lies beyond the border
            tensors[name] = part(seen, ctx.grid, ctx.prefix, ctx.suffix)
        return tensors["q"], tensors["k"], tensors["v"]

    def with_lepe(self, o: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """o [B, N, H, D] with the convolution of v added."""
        if self.lepe is None:
            return o
        assert ctx.grid is not None
        o = self.lepe(o, real(v, ctx.key_padding_mask), ctx.grid, ctx.prefix, ctx.suffix)
        return real(o, ctx.key_padding_mask)
