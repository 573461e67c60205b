"""The protocol of mixers: a base class with every member that models, training and conversion use."""

from typing import Any, ClassVar

from torch import Tensor, nn

from hla_kernels.sequences import real
from zoo.grid import check_grid
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.layers import DepthwiseResidual, HeadGains, LocalValues
from zoo.mixers.options import LocalOptions, MixerConfig


class Mixer(nn.Module):
    """mixer(q, k, v, ctx) -> o in the place of softmax attention; all tensors [B, N, H, D].

    A subclass defines `name`, `forward`, and where they differ from these the other members. It is built for one
    attention layer with resolved options (`zoo.mixers.MixerConfig.build`), and gives its own parameters their initial
    values in `reset_parameters`, which timm calls again after building a model.

    name: its key in `zoo.mixers.MIXERS`.
    defaults: its options at their defaults; the class of this object says which options there are.
    options: the options of this instance; those that follow from the layer (the blocks of a grid) are filled in.
    forms_matrix: whether it forms the attention matrix, and so honours masks and attention dropout.
    takes_rotations: whether it works in a model with a rotary embedding.
    sums_tokens: whether tokens meet in `operator` alone, so that several devices may share them.
    scale: factor on the scores.
    norm, gains, gate: what it does to its output, in this order: a norm of each head, learned gains (which calibration
        sets), a gate; None for what it has not. Attention maps are computed without norm and gate.
    tag: buffer of the converted layer with name and options, in the state dict; absent from softmax.
    """

    name: ClassVar[str]
    defaults: ClassVar[LocalOptions] = LocalOptions()
    forms_matrix: ClassVar[bool] = False
    takes_rotations: ClassVar[bool] = True
    sums_tokens: ClassVar[bool] = False
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
        """Initialise the parameters that this module itself owns (its parts initialise theirs)."""

    def project_(self) -> None:
        """Bring parameters back to the values that they may have; training calls this after every step."""

    @property
    def layout(self) -> str:
        """How the mixer divides the token grid, for reports; empty if it does not."""
        return ""

    @property
    def early_map(self) -> str | None:
        """The map, identity or relu, that a layer may apply to q and k and then rotate them, in one pass with its
        norms (`Context.prepared`); None if it may not."""
        return None

    def why_not_shared(self) -> str:
        """Why the tokens cannot be shared by several devices (context parallelism); empty if they can."""
        if self.options.needs_grid:
            return "needs other tokens by their place (depthwise, lepe, cpe, causal, blocks)"
        if self.gains is not None or not self.sums_tokens:
            return "reads the tokens of other devices itself (gains, or what this mixer computes)"
        return ""

    def share(self, group: Any) -> None:
        """Let the devices of `group` share the tokens of each sample; called where `why_not_shared` is empty."""

    def check(self, n_tokens: int, ctx: Context) -> None:
        """Raise ValueError when a call needs what the mixer cannot do: a mask, causality, a grid that the tokens do not
        have."""
        if ctx.mask is not None and not self.forms_matrix:
            raise ValueError(
                f"the mixer {self.name!r} cannot honour an attention mask; keep softmax in this layer (keep_softmax=)"
            )
        if ctx.is_causal and not self.forms_matrix and not getattr(self.options, "causal", False):
            raise ValueError(f"the host asks for causal attention: build the mixer {self.name!r} with causal=True")
        self.check_grid(n_tokens, ctx)

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
        return "depthwise, lepe or cpe" if local else "causal" if getattr(opt, "causal", False) else "its blocks"

    def with_cpe(self, x: Tensor, ctx: Context) -> Tensor:
        """The hidden states x [B, N, C] with their convolution (`cpe`): what the layer projects. ctx: grid, prefix and
        suffix, padding."""
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
