"""The frame of a linear mixer: everything around the one operator call that tells the mixers apart."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hla_kernels.features import FEATURE_MAPS, feature
from zoo.features import DepthwiseResidual, HeadRMSNorm, Hedgehog, OutputGate, SoftmaxPair
from zoo.mixers.context import Context
from zoo.mixers.options import MixerOptions, resolve_options


class LinearMixer(nn.Module):
    """mixer(q, k, v, ctx) -> o with a cost linear in the number of tokens; all tensors [B, N, H, D].

    A subclass sets `name`, `operator` (of `hla_kernels`) and, where they differ, `defaults`. The order of the steps:
    depthwise residuals, feature map, rotation, operator (one or two directions), head norm, gate.

    With a rotary host, phi is applied before the rotation and the denominator is that of the unrotated features, so
    that it stays positive. Raises ValueError when the call needs what the mixer cannot do (a mask, a missing grid).
    """

    name: ClassVar[str]
    operator: ClassVar[Callable[..., Any]]
    defaults: ClassVar[MixerOptions] = MixerOptions()

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        device=None,
        dtype=None,
        **options,
    ) -> None:
        """dim: width C of the hidden states. num_kv_heads: heads of k and v when several heads of q share them.

        scale: factor on q with the identity map, head_dim ** -0.5 if None.
        """
        super().__init__()
        self.options = opt = resolve_options(self.defaults, options)
        self.num_heads, self.head_dim = num_heads, head_dim
        heads = {"q": num_heads, "k": num_kv_heads or num_heads, "v": num_kv_heads or num_heads}
        self.scale = head_dim**-0.5 if scale is None else scale
        dd = {"device": device, "dtype": dtype}
        self.depthwise = nn.ModuleDict(
            {
                t: DepthwiseResidual(heads[t] * head_dim, opt.depthwise_kernel, opt.grid_dims, **dd)
                for t in opt.depthwise
            }
        )
        self.phi_q = self._feature_module(heads["q"], **dd)
        self.phi_k = self._feature_module(heads["k"], **dd)
        if opt.decay is not None:
            self.decay_logit = nn.Parameter(torch.empty(num_heads, **dd))
        self.norm = HeadRMSNorm(num_heads, head_dim, **dd) if opt.post_norm else nn.Identity()
        self.gate = OutputGate(dim, num_heads * head_dim, **dd) if opt.gate else None
        self.reset_parameters()

    def _feature_module(self, num_heads: int, **dd) -> nn.Module:
        if self.options.feature_map == "hedgehog":
            return Hedgehog(num_heads, self.head_dim, **dd)
        return SoftmaxPair() if self.options.feature_map == "softmax_pair" else nn.Identity()

    def reset_parameters(self) -> None:
        """Initialise the parameters that this module itself owns (its parts initialise theirs)."""
        if self.options.decay is not None:
            nn.init.constant_(self.decay_logit, math.log(self.options.decay / (1 - self.options.decay)))

    def operate(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """The operator on features q, k and values v; `options` are those of the `hla_kernels` signature."""
        return self.operator(q, k, v, **options)

    def extra_repr(self) -> str:
        changed = {n: v for n, v in vars(self.options).items() if v != getattr(MixerOptions(), n)}
        return ", ".join([self.name, *(f"{n}={v!r}" for n, v in changed.items())])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self._check(ctx)
        q, k, v = self._local(q, k, v, ctx)
        o = self._mix(q, k, v, ctx)
        if self.options.scan == "both":
            o = o + self._mix(q.flip(1), k.flip(1), v.flip(1), ctx).flip(1)
            if self.options.normalize or self.options.mean_path:
                o = o / 2
        o = self.norm(o)
        return o if self.gate is None else self.gate(o, ctx.x)

    def _check(self, ctx: Context) -> None:
        if ctx.mask is not None:
            raise ValueError(
                f"the mixer {self.name!r} cannot honour an attention mask; keep softmax in this layer (keep_softmax=)"
            )
        if ctx.is_causal and not self.options.causal:
            raise ValueError(f"the host asks for causal attention: build the mixer {self.name!r} with causal=True")
        if self.options.needs_grid and ctx.grid is None:
            raise ValueError(
                f"the mixer {self.name!r} with depthwise or causal needs a token grid, but these tokens have none"
            )

    def _local(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        tensors = {"q": q, "k": k, "v": v}
        for name, part in self.depthwise.items():
            assert ctx.grid is not None
            tensors[name] = part(tensors[name], ctx.grid, ctx.prefix, ctx.suffix)
        return tensors["q"], tensors["k"], tensors["v"]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        opt = self.options
        common = self._operator_options()
        name = opt.feature_map
        if name == "identity":
            q = q * self.scale
        q, k = self.phi_q(q), self.phi_k(k)
        inside = name if name in FEATURE_MAPS else "identity"
        weights = {"center": opt.center, "mean_path": opt.mean_path}
        if ctx.rotate is None:
            return self.operate(q, k, v, feature_map=inside, normalize=opt.normalize, **weights, **common)
        q, k = feature(q, inside), feature(k, inside)
        o = self.operate(ctx.rotate(q), ctx.rotate(k), v, **weights, **common)
        if opt.normalize:  # of the unrotated features: a rotation would make the sum signed
            o = o / (self.operate(q, k, torch.ones_like(v[..., :1]), **common) + 1e-6)
        return o

    def _operator_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": True} if self.options.causal else {}
        if self.options.ridge:
            options["ridge"] = self.options.ridge
        if self.options.decay is not None:
            options["decay"] = self.decay_logit.sigmoid()
        return options
