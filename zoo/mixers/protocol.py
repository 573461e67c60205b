"""Base class of mixers, with every member that models, training and conversion use."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hla_kernels
from hla_kernels.sequences import real
from zoo.grid import check_grid
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.layers import DepthwiseResidual, HeadGains, LocalValues
from zoo.mixers.options import LocalOptions, MixerConfig


class Mixer(nn.Module):
    """Token mixer mixer(q, k, v, ctx) -> o that replaces softmax attention; all tensors are [B, N, H, D].

    A subclass defines `name`, `forward`, and overrides other members as needed. It is built for one attention layer
    with resolved options (`zoo.mixers.MixerConfig.build`) and initialises its own parameters in `reset_parameters`,
    which timm calls again after building a model.

    name: key in `zoo.mixers.MIXERS`.
    defaults: default options; the class of this object defines which options exist.
    options: options of this instance, with values derived from the layer (the blocks of a grid) filled in.
    forms_matrix: whether the attention matrix is formed, so that masks and attention dropout work.
    takes_rotations: whether `forward` applies `ctx.rotate`; without it, models with a rotary embedding are refused.
    shares_tokens: whether tokens interact in `run` and in sums over `group` only, as context parallelism needs.
    group: devices that share the tokens of each sample; None for one device.
    states: what a mixer with causal="frame" keeps of the earlier frames of a streamed video; None if none is streamed.
    scale: factor on the scores.
    norm, gains, gate: applied to the output in this order: norm per head, learned gains (set by calibration), gate;
        None if absent. Attention maps are computed without norm and gate.
    tag: buffer with name and options, in the state dict of a converted layer; softmax has none.
    """

    name: ClassVar[str]
    defaults: ClassVar[LocalOptions] = LocalOptions()
    forms_matrix: ClassVar[bool] = False
    takes_rotations: ClassVar[bool] = False
    shares_tokens: ClassVar[bool] = False
    group: ProcessGroup | None = None
    states: dict[str, Any] | None = None
    options: LocalOptions
    tag: Tensor

    def __init__(self, layer: LayerSpec, options: LocalOptions) -> None:
        super().__init__()
        self.options, self.num_heads, self.head_dim = options, layer.num_heads, layer.head_dim
        self.scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
        self.norm: nn.Module | None = None
        self.gains: HeadGains | None = None
        self.gate: nn.Module | None = None
        self._build_convolutions(layer)

    def _build_convolutions(self, layer: LayerSpec) -> None:
        opt, values = self.options, layer.kv_heads * layer.head_dim
        channels = {"q": layer.num_heads * layer.head_dim, "k": values, "v": values}
        self.cpe = DepthwiseResidual(layer.dim, opt.cpe, opt.grid_dims, **layer.placement) if opt.cpe else None
        self.depthwise = nn.ModuleDict(
            {
                t: DepthwiseResidual(channels[t], opt.depthwise_kernel, opt.grid_dims, **layer.placement)
                for t in opt.depthwise
            }
        )
        self.lepe = LocalValues(values, opt.lepe, opt.grid_dims, **layer.placement) if opt.lepe else None

    @property
    def config(self) -> MixerConfig:
        """Name and options, as they are stored with a model."""
        return MixerConfig(self.name, self.options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]. Raises ValueError as `check`."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise the parameters that this module itself owns (submodules initialise their own)."""

    def project_(self) -> None:
        """Project parameters back to their allowed range; training calls this after each optimizer step."""

    @property
    def layout(self) -> str:
        """Division of the token grid, for reports; empty if the grid is not divided."""
        return ""

    @property
    def fusable_map(self) -> str | None:
        """Feature map (identity or relu) that the layer may fuse with its q/k norms and rotation (`Context.prepared`).

        None if feature map and rotation must be applied by the mixer.
        """
        return None

    @property
    def takes_text(self) -> bool:
        """Whether joint attention gives this mixer its text tokens too, before or after the image tokens.

        Text queries and text keys must then have softmax weights.
        """
        return False

    def why_not_shared(self) -> str:
        """Return the reason why context parallelism cannot share the tokens between devices; empty if it can."""
        opt = self.options
        if opt.depthwise or opt.lepe or opt.cpe:
            return "convolves neighbouring tokens (depthwise, lepe, cpe), which other devices hold"
        return "" if self.shares_tokens else "passes a state along its own order of the tokens, not that of the devices"

    def share(self, group: ProcessGroup) -> None:
        """Share the tokens of each sample among the devices of `group`; called only if `why_not_shared` is empty."""
        for mixer in self.modules():  # with its branch
            if isinstance(mixer, Mixer):
                mixer.group = group

    def run(self, operator: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """Run an operator of `hla_kernels` on the tokens of this device, or of all devices that share them."""
        if self.group is None:
            return operator(q, k, v, **options)
        return hla_kernels.sharded(operator, q, k, v, group=self.group, **options)

    def check(self, n_tokens: int, ctx: Context) -> None:
        """Raise ValueError for a rotation, mask, causality or missing grid that the mixer does not support."""
        if ctx.rotate is not None and not self.takes_rotations:
            raise ValueError(f"the mixer {self.name!r} cannot honour a rotary embedding (takes_rotations is False)")
        if ctx.mask is not None and not self.forms_matrix:
            raise ValueError(
                f"the mixer {self.name!r} cannot honour an attention mask; keep softmax in this layer (keep_softmax=)"
            )
        if ctx.key_padding_mask is not None and self.group is not None:
            raise ValueError(f"the mixer {self.name!r} cannot honour a padding mask of tokens that devices share")
        if ctx.is_causal and not self.forms_matrix and getattr(self.options, "causal", False) is not True:
            raise ValueError(f"the host asks for causal attention: build the mixer {self.name!r} with causal=True")
        self.check_grid(n_tokens, ctx)

    def check_grid(self, n_tokens: int, ctx: Context) -> None:
        """Raise ValueError if a grid is needed but missing, or does not match the number of tokens of one device."""
        if not self.options.needs_grid:
            return
        if ctx.grid is None:
            raise ValueError(
                f"the mixer {self.name!r} with {self._why_grid()} needs a token grid, but these tokens have none"
            )
        if self.group is None:
            check_grid(n_tokens, ctx.grid, ctx.prefix, ctx.suffix)

    def _why_grid(self) -> str:
        opt = self.options
        local = opt.depthwise or opt.lepe or opt.cpe
        return "depthwise, lepe or cpe" if local else "causal" if getattr(opt, "causal", False) else "its blocks"

    def with_cpe(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the convolution `cpe` to the hidden states [B, N, C] before they are projected to q, k, v.

        ctx: its grid, prefix, suffix and padding mask are used.
        """
        if self.cpe is None:
            return x
        self.check_grid(x.shape[1], ctx)
        assert ctx.grid is not None
        masked = real(x[:, :, None], ctx.key_padding_mask)
        return self.cpe(masked, ctx.grid, ctx.prefix, ctx.suffix).flatten(2)

    def convolved(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Add the depthwise residuals to q, k, v [B, N, H, D]."""
        tensors = {"q": q, "k": k, "v": v}
        for name, conv in self.depthwise.items():
            assert ctx.grid is not None
            masked = real(tensors[name], ctx.key_padding_mask)  # padded tokens count as zeros, as beyond the border
            tensors[name] = conv(masked, ctx.grid, ctx.prefix, ctx.suffix)
        return tensors["q"], tensors["k"], tensors["v"]

    def with_lepe(self, o: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Add the depthwise convolution of v to o [B, N, H, D]."""
        if self.lepe is None:
            return o
        assert ctx.grid is not None
        o = self.lepe(o, real(v, ctx.key_padding_mask), ctx.grid, ctx.prefix, ctx.suffix)
        return real(o, ctx.key_padding_mask)
