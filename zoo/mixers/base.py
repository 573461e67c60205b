"""Base class of linear mixers: everything around their one `hla_kernels` operator."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import ClassVar

import torch
from torch import Tensor, nn

from hla_kernels import MAX_HEAD_DIM
from hla_kernels.checks import RIDGED
from hla_kernels.features import feature, feature_width
from hla_kernels.features.power import power_pair
from zoo.mixers.context import Context, LayerSpec, Rotation
from zoo.mixers.layers import HeadGains, HeadRMSNorm, Hedgehog, OutputGate, Power
from zoo.mixers.options import MixerOptions
from zoo.mixers.protocol import Mixer

# learned map -> map that the operator applies after it; features of `power` are not negative already
LEARNED_MAPS = {"hedgehog": "softmax_pair", "power": "identity"}
EPS = 1e-12  # added to denominators; products of small features (softmax map, third order) must stay far above it
ONES = 16  # width of the all-ones value matrix used to compute a separate denominator; 16 is the Triton minimum
SMALLEST_DECAY = 1e-30  # lower bound of a learned decay: the operators take its logarithm


class LinearMixer(Mixer):
    """Linear mixer mixer(q, k, v, ctx) -> o, linear in the number of tokens; all tensors are [B, N, H, D].

    A subclass sets `name`, `operator` and `operator_packed` (functions of `hla_kernels`) and, if needed, `defaults`.
    The host calls `with_cpe` and projects to q, k, v. The mixer then applies depthwise residuals, feature map, rotary
    embedding, operator (one or two directions), RMSNorm per head, gains, LePE and gate. If no step before the operator
    changes q, k, v and the host has them in one tensor, the packed operator reads that tensor.

    With a rotary embedding, the feature map is applied before the rotation. The denominator uses the unrotated
    features, so that it stays positive; for `power` it uses the norms of the rotated channel pairs, an upper bound of
    the numerator, so that weights sum to at most one.
    Raises ValueError for a mask or a missing grid that the mixer does not support.
    """

    operator: ClassVar[Callable[..., Tensor]]
    operator_packed: ClassVar[Callable[..., Tensor]]
    defaults: ClassVar[MixerOptions] = MixerOptions()
    takes_rotations: ClassVar[bool] = True
    options: MixerOptions
    frame: int = 0  # tokens per frame of the current call, if causal="frame"

    def __init__(self, layer: LayerSpec, options: MixerOptions) -> None:
        super().__init__(layer, options)
        self._check_host(layer.head_dim)
        heads, dd = layer.num_heads, layer.placement
        self.phi_q = self._feature_module(heads, **dd)
        self.phi_k = self._feature_module(layer.kv_heads, **dd)
        if options.decay is not None:
            self.decay_logit = nn.Parameter(torch.empty(heads, **dd))
        self.norm = HeadRMSNorm(heads, layer.head_dim, **dd) if options.post_norm else None
        groups = None if options.feature_map == "identity" else layer.kv_heads
        self.gains = HeadGains(heads, groups, **dd) if options.gains else None
        if self.lepe is not None:
            self._modules["lepe"] = self._modules.pop("lepe")  # last, the parameter order of earlier checkpoints
        self.gate = OutputGate(layer.dim, heads * layer.head_dim, **dd) if options.gate else None
        LinearMixer.reset_parameters(self)  # a subclass initialises its own parameters when it has made them

    def _check_host(self, head_dim: int) -> None:
        if self.options.ridge and not self.defaults.ridge and self.name not in RIDGED:
            raise ValueError(f"ridge is defined for {', '.join([*RIDGED, 'mesa'])} only, not for {self.name!r}")
        width = feature_width(head_dim, self._inner_map)
        if width > MAX_HEAD_DIM:
            raise ValueError(
                f"heads of {head_dim} channels have {width} features with {self.options.feature_map!r}, "
                f"at most {MAX_HEAD_DIM} are allowed"
            )

    def _feature_module(self, num_heads: int, **dd) -> nn.Module:
        if self.options.feature_map == "hedgehog":
            return Hedgehog(num_heads, self.head_dim, **dd)
        opt = self.options
        return Power(num_heads, opt.exponent, **dd) if opt.feature_map == "power" else nn.Identity()

    def reset_parameters(self) -> None:
        if self.options.decay is not None:
            nn.init.constant_(self.decay_logit, math.log(self.options.decay / (1 - self.options.decay)))

    @staticmethod
    def split_qkv(*tokens: Tensor) -> tuple[Tensor, ...]:
        """Return (q, k, v), given as they are or as one packed qkv [B, N, 3, H, D]."""
        return tokens if len(tokens) == 3 else tokens[0].unbind(2)

    def operate(self, *tokens: Tensor, **options) -> Tensor:
        """Run the operator on (q, k, v) or on one packed qkv; `options` are its keyword arguments."""
        if len(tokens) == 1 and self.group is None:
            return self.operator_packed(*tokens, **options)
        return self.run(self.operator, *self.split_qkv(*tokens), **options)

    def extra_repr(self) -> str:
        options = ((f, getattr(self.options, f.name)) for f in fields(self.options))
        return ", ".join([self.name, *(f"{f.name}={value!r}" for f, value in options if value != f.default)])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check(q.shape[1], ctx)
        o = self._core(q, k, v, ctx)
        if self.norm is not None:
            o = self.norm(o)
        if self.gains is not None:
            o = self.gains(o, v, ctx.key_padding_mask, self.group)
        o = self.with_lepe(o, v, ctx)
        return o if self.gate is None else self.gate(o, ctx.x)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Compute the operator and the steps before it."""
        if ctx.qkv is not None and self._reads_packed(ctx):
            return self._mix(ctx.key_padding_mask, ctx.qkv)
        return self._scan(ctx.key_padding_mask, *self._features(*self.convolved(q, k, v, ctx), ctx))

    def check(self, n_tokens: int, ctx: Context) -> None:
        super().check(n_tokens, ctx)
        if self.options.causal == "frame":
            assert ctx.grid is not None
            if ctx.prefix or ctx.suffix:
                raise ValueError(f"the mixer {self.name!r} with causal='frame' has no class or text tokens")
            self.frame = math.prod(ctx.grid[1:])
        if ctx.key_padding_mask is not None and self.options.causal:
            raise ValueError(f"the mixer {self.name!r} with causal=True cannot honour a padding mask: pad at the end")

    def why_not_shared(self) -> str:
        if self.options.scan == "both":
            return "scans the tokens backward too (scan='both'), against the order of the devices"
        return super().why_not_shared()

    def _reads_packed(self, ctx: Context) -> bool:
        """Whether the operator reads q, k and v unmodified."""
        opt = self.options
        plain = opt.feature_map not in LEARNED_MAPS and not self._has_temperature
        return ctx.rotate is None and not opt.depthwise and plain and opt.scan == "forward"

    @property
    def _has_temperature(self) -> bool:
        """Whether the feature map has a temperature; with the identity it would duplicate the gain."""
        return self.options.gains and self.options.feature_map != "identity"

    def _features(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """Return the operator inputs (q, k, v).

        With a rotary embedding: (q, k) of the denominator, then rotated phi q, rotated phi k and v.
        """
        q, k = self._projected(q, k)
        if ctx.rotate is None:
            return q, k, v
        q, k = feature(q, self._inner_map), feature(k, self._inner_map)
        invariant = self._rotation_invariant(ctx.rotate)
        return invariant(q), invariant(k), ctx.rotate(q), ctx.rotate(k), v

    def _rotation_invariant(self, rotate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the function of features in the denominator: norms of channel pairs for `power`, else the identity."""
        if self.options.feature_map == "power" and isinstance(rotate, Rotation):
            return rotate.lengths
        return lambda features: features

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the temperature and the learned part of the feature map to q and k."""
        if self._has_temperature:
            assert self.gains is not None
            q, k = self.gains.apply_temperature(q), self.gains.apply_temperature(k)
        if isinstance(self.phi_q, Power) and isinstance(self.phi_k, Power):
            return power_pair(q, k, self.phi_q(), self.phi_k())
        return self.phi_q(q), self.phi_k(k)

    def _scan(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        """Mix in one direction, or add both and count the token itself once; weights that sum to one are averaged."""
        o = self._mix(mask, *tensors)
        if self.options.scan == "forward":
            return o
        o = o + self._mix(mask, *(t.flip(1) for t in tensors)).flip(1)
        return o / 2 if self.options.normalize or self.options.mean_path else o - self._alone(*tensors)

    def _alone(self, *tensors: Tensor) -> Tensor:
        """Mix every token with itself only; causal mixers take no mask."""
        each = (t.flatten(0, 1).unsqueeze(1).to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            o = self._weighted(None, *each, impl="reference")
        return o.view(*tensors[0].shape[:3], -1).to(tensors[-1].dtype)

    @property
    def _inner_map(self) -> str:
        """Feature map that the operator applies."""
        return LEARNED_MAPS.get(self.options.feature_map, self.options.feature_map)

    def _mix(self, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        """Mix (qkv), (q, k, v) or the five tensors of `_features` in one direction; mask [B, N] of real tokens."""
        return self._weighted(mask, *tensors)

    def _weighted(self, mask: Tensor | None, *tensors: Tensor, **more: str) -> Tensor:
        """Compute `_mix` with further options of the operator."""
        opt, common = self.options, {**self._operator_options(), "key_padding_mask": mask, **more}
        weights = {"center": opt.center, "mean_path": opt.mean_path, **common}
        if len(tensors) < 5:
            ratio = {"normalize": True, "eps": EPS} if opt.normalize else {}
            return self._streamed("weights", *tensors, feature_map=self._inner_map, **ratio, **weights)
        q, k, rotated_q, rotated_k, v = tensors
        o = self._streamed("weights", rotated_q, rotated_k, v, **weights)
        if opt.normalize:  # from unrotated features: rotated ones could have a negative sum
            ones = v.new_ones(ONES).expand(*v.shape[:-1], ONES)
            o = o / (self._streamed("sums", q, k, ones, **common)[..., :1] + EPS)
        return o

    def _streamed(self, name: str, *tokens: Tensor, **options) -> Tensor:
        """Run the operator. While a video is streamed, start from the state `name` of earlier frames, and update it."""
        if self.states is None:
            return self.operate(*tokens, **options)
        o, self.states[name] = self.operate(*tokens, state=self.states.get(name), return_state=True, **options)
        return o

    def _operator_options(self) -> dict[str, object]:
        options: dict[str, object] = {"causal": self.options.causal} if self.options.causal else {}
        if self.options.causal == "frame":
            options["frame"] = self.frame
        if self.options.feature_map == "identity":
            options["q_scale"] = self.scale
        if self.options.ridge:
            options["ridge"] = self.options.ridge
        if self.options.decay is not None:
            options["decay"] = self.decay()
        return options

    def decay(self) -> Tensor:
        """Learned decay per head, [H] in (0, 1], in at least float32 since bfloat16 rounds 0.999 to 1."""
        logit = self.decay_logit if self.decay_logit.dtype == torch.float64 else self.decay_logit.float()
        return logit.sigmoid().clamp(min=SMALLEST_DECAY)
