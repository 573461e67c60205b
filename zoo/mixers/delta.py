"""Delta-rule mixers: causal linear attention over scans of the grid, with a state that forgets."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hla_kernels import DeltaState, delta, delta_rules
from hla_kernels.delta_rule.rules import Arguments
from hla_kernels.sequences import real
from zoo.errors import unknown_name
from zoo.mixers.context import Context, LayerSpec
from zoo.mixers.layers import HeadRMSNorm, OutputGate
from zoo.mixers.options import LocalOptions
from zoo.mixers.protocol import Mixer
from zoo.mixers.scans import DIRECTIONS, SCAN_ORDERS, Order

MAX_BETA = 2.0  # upper bound of beta in `hdla`, where I - beta k k' is a reflection; at 1 it erases the key
GLA_TEMPERATURE = 16.0  # decays are sigmoid(x)^(1/16); GLA, arXiv 2312.06635, section 4.4


@dataclass(frozen=True)
class DeltaOptions(LocalOptions):
    """Options of the delta-rule mixers. Raises ValueError for a value that is not allowed.

    scan: order of the tokens: "raster" keeps it (causal); "alternate" changes the direction from layer to layer
      (forward, backward, by columns, backward by columns); "heads" gives each quarter of the heads one of these; "both"
      adds the forward and the backward pass, at twice the cost; "frame" has no order inside a frame (the first axis of
      the grid): its tokens write to the state before it and read the state after it, for videos that are generated
      piece by piece, without convolutions
    activation: applied to q, k and v, "silu" or "identity"
    post_norm: RMSNorm per head after the mixer
    gate: multiply the output by a gate computed from the hidden states
    """

    depthwise: str = "qkv"
    scan: str = "alternate"
    activation: str = "silu"
    post_norm: bool = True
    gate: bool = True

    def __post_init__(self) -> None:
        if self.scan not in SCAN_ORDERS:
            raise unknown_name("scan", self.scan, SCAN_ORDERS)
        if self.activation not in ("silu", "identity"):
            raise unknown_name("activation", self.activation, ("silu", "identity"))
        for name in ("post_norm", "gate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.scan == "frame" and (self.depthwise or self.lepe or self.cpe):
            raise ValueError("scan='frame' excludes depthwise, lepe and cpe, which read later frames")
        super().__post_init__()

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"depthwise": "", **given} if given.get("scan") == "frame" else given

    @property
    def causal(self) -> bool | str:
        """Whether a token attends only to itself and to earlier tokens; "frame": to its frame and to earlier frames."""
        return self.scan if self.scan == "frame" else self.scan == "raster"

    @property
    def needs_grid(self) -> bool:
        return self.has_convolution or self.scan in ("alternate", "heads", "frame")


class DeltaMixer(Mixer):
    """S_t = (D_t - A_t B_t') S_{t-1} + k_t v_t', o_t = scale S_t' q_t along a scan of the tokens (`hla_kernels.delta`).

    D_t is diagonal, A_t and B_t are [D, r]. q, k and v pass a depthwise convolution over the grid (zero-initialised)
    and the activation; in `hdla`, `deltanet` and `gdn` keys are divided by their length. The output passes a norm per
    head and a gate. All scans but "raster" read text tokens first, then the patches in their order, then class and
    register tokens. The method `arguments` of a subclass computes decays and writing strengths from the hidden states.

    q [B, N, H, D], k and v [B, N, Hk, D] -> o [B, N, H, D]; 2 (1 + r) N D^2 + 2 (1 + r)^2 N C D multiplications per
    head for the rank r of A and chunks of C = 64 tokens. Padded tokens change nothing. With scan="frame" the state
    after a frame is the mean of those that each of its tokens alone would leave; the cost is (2 + r) N D^2 + F D^3 for
    F frames. Options: `DeltaOptions`. Raises ValueError for class tokens, text tokens and padding with scan="frame".
    """

    defaults: ClassVar[DeltaOptions] = DeltaOptions()
    takes_rotations: ClassVar[bool] = True
    unit_keys: ClassVar[bool] = True
    options: DeltaOptions

    def __init__(self, layer: LayerSpec, options: DeltaOptions) -> None:
        super().__init__(layer, options)
        self.layer_index = layer.layer_index
        heads, width = layer.num_heads, layer.head_dim
        self.norm = HeadRMSNorm(heads, width, **layer.placement) if options.post_norm else None
        self.gate = OutputGate(layer.dim, heads * width, **layer.placement) if options.gate else None
        self.build(layer)

    def build(self, layer: LayerSpec) -> None:
        """Create the parameters of the rule."""

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        """Compute the arguments of `hla_kernels.delta` but q from hidden states x [B, N, C] and k, v [B, N, H, D]."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.check(q.shape[1], ctx)
        q, k, values = self._activated(q, k, v, ctx)
        given = _masked(self.arguments(ctx.x, k, values), ctx.key_padding_mask)
        o = self._scanned(q * self.scale, given, ctx)
        o = o if self.norm is None else self.norm(o)
        o = o if self.gate is None else self.gate(o, ctx.x)
        return self.with_lepe(real(o, ctx.key_padding_mask), v, ctx)

    def _activated(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.convolved(q, k, v, ctx)
        if self.options.activation == "silu":
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        if self.unit_keys:
            k = F.normalize(k, dim=-1)
        if ctx.rotate is not None:
            q, k = ctx.rotate(q), ctx.rotate(k)
        groups = q.shape[2] // k.shape[2]
        return q, k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)

    def _scanned(self, q: Tensor, given: Arguments, ctx: Context) -> Tensor:
        """Run the operator over the directions of `scan`, q [B, N, H, D] -> [B, N, H, D]."""
        scan = self.options.scan
        if scan == "frame":
            return self._over_frames(q, given, ctx)
        if scan == "raster":
            return _delta(q, given)
        if scan == "both":
            own = (q * given["k"]).sum(-1, keepdim=True) * given["v"]
            return sum((_run_in_order(Order(i, ctx), q, given) for i in range(2)), -own)
        if scan == "alternate":
            return _run_in_order(Order(self.layer_index % DIRECTIONS, ctx), q, given)
        size, more = divmod(self.num_heads, DIRECTIONS)
        starts = [i * size + min(i, more) for i in range(DIRECTIONS + 1)]
        outs = [
            _run_in_order(Order(i, ctx), q[:, :, h], _apply(given, partial(_select_heads, heads=h)))
            for i, h in enumerate(map(slice, starts, starts[1:]))
            if h.stop > h.start
        ]
        return torch.cat(outs, 2)

    def _over_frames(self, q: Tensor, given: Arguments, ctx: Context) -> Tensor:
        """Run the operator over frames. While a video is streamed, start from the state of earlier frames, and update
        it."""
        if ctx.prefix or ctx.suffix or ctx.key_padding_mask is not None:
            raise ValueError(f"the mixer {self.name!r} with scan='frame' has no class or text tokens and no mask")
        assert ctx.grid is not None
        frame = math.prod(ctx.grid[1:])
        if self.states is None:
            return _delta(q, given, frame)
        found = delta(q, **given, frame=frame, state=self.states.get("delta"), return_state=True)
        o, self.states["delta"] = cast(tuple[Tensor, DeltaState], found)
        return o


def _masked(given: Arguments, mask: Tensor | None) -> Arguments:
    """Set arguments of padded tokens to 0, so that they write, erase and decay nothing."""
    return _apply(given, lambda x: real(x, mask) if x.dim() > 1 else x)


def _delta(q: Tensor, given: Arguments, frame: int = 0) -> Tensor:
    o = delta(q, **given, frame=frame)
    assert isinstance(o, Tensor)
    return o


def _run_in_order(order: Order, q: Tensor, given: Arguments) -> Tensor:
    """Run the operator over the tokens in an order."""
    return order.unpermute(_delta(order.permute(q), _apply(given, lambda x: order.permute(x) if x.dim() > 1 else x)))


def _apply(given: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Apply `change` to every argument."""
    return cast(Arguments, {name: change(cast(Tensor, x)) for name, x in given.items()})


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """Select heads of an argument [H] or [B, N, H, ..]."""
    return x[heads] if x.dim() == 1 else x[:, :, heads]


class RetNet(DeltaMixer):
    """RetNet S_t = gamma S_{t-1} + k_t v_t' with a fixed decay per head (arXiv 2307.08621, Eq. 8).

    gamma = 1 - 2^(-5 - 8 h / H) for head h of H.

    `DeltaMixer` has the shapes, options and errors.
    """

    name = "retnet"
    unit_keys = False

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        h = torch.arange(self.num_heads, device=k.device, dtype=torch.float64)
        return delta_rules.gla(k, v, torch.log1p(-torch.exp2(-5 - 8 * h / self.num_heads)))


class GLA(DeltaMixer):
    """Gated linear attention S_t = diag(f_t) S_{t-1} + k_t v_t' (arXiv 2312.06635, Eq. 3).

    f_t = sigmoid(W2 W1 x_t + b)^(1/16) per channel. `DeltaMixer` has the shapes, options and errors.
    """

    name = "gla"
    unit_keys = False

    def build(self, layer: LayerSpec) -> None:
        self.forget = ChannelDecay(layer)

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        return delta_rules.gla(k, v, self.forget(x) / GLA_TEMPERATURE)


class Mamba2(DeltaMixer):
    """Mamba-2 S_t = exp(-a dt_t) S_{t-1} + dt_t k_t v_t', dt_t = softplus(w.x_t + b) (arXiv 2405.21060, section 5).

    a > 0 is learned per head. `DeltaMixer` has the shapes, options and errors.
    """

    name = "mamba2"
    unit_keys = False

    def build(self, layer: LayerSpec) -> None:
        self.step = HeadDecay(layer)

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        dt, log_f = self.step(x)
        return delta_rules.gla(k * dt.unsqueeze(-1).to(k.dtype), v, log_f)


class DeltaNet(DeltaMixer):
    """DeltaNet S_t = (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t', beta_t = sigmoid(w.x_t) (arXiv 2406.06484).

    The value that the state has for a key of length 1 moves towards v_t. `DeltaMixer` has the shapes, options and
    errors.
    """

    name = "deltanet"

    def build(self, layer: LayerSpec) -> None:
        self.beta = HeadBeta(layer)

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        return delta_rules.delta_net(k, v, self.beta(x))


class GatedDeltaNet(DeltaMixer):
    """Gated DeltaNet S_t = f_t (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t' (arXiv 2412.06464, Eq. 10).

    f_t = exp(-a softplus(w.x_t + b)) per head as in `mamba2`, beta_t as in `deltanet`. `DeltaMixer` has the shapes,
    options and errors.
    """

    name = "gdn"

    def build(self, layer: LayerSpec) -> None:
        self.beta = HeadBeta(layer)
        self.step = HeadDecay(layer)

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        return delta_rules.gated_delta_net(k, v, self.step(x)[1], self.beta(x))


class HDLA(DeltaMixer):
    """HDLA S_t = (I - beta_t k_t k_t') diag(f_t) (I - beta_t k_t k_t') S_{t-1} + k_t v_t'.

    Householder-diagonalised linear attention (openreview.net/forum?id=HVFjzaQeig): f_t = sigmoid(W2 W1 x_t + b) per
    channel, beta_t = 2 sigmoid(w.x_t). The transition is D_t - A_t B_t' of rank 2. `DeltaMixer` has the shapes, options
    and errors.
    """

    name = "hdla"

    def build(self, layer: LayerSpec) -> None:
        self.beta = HeadBeta(layer)
        self.forget = ChannelDecay(layer)

    def arguments(self, x: Tensor, k: Tensor, v: Tensor) -> Arguments:
        return delta_rules.hdla(k, v, self.forget(x), MAX_BETA * self.beta(x))


class HeadBeta(nn.Linear):
    """beta = sigmoid(w.x + b) per head, [B, N, C] -> [B, N, H]; 1/2 at initialisation."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer.dim, layer.num_heads, **layer.placement)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class ChannelDecay(nn.Module):
    """log f = logsigmoid(W2 W1 x + b) per channel: [B, N, C] -> [B, N, H, D] in at least float32; W1 [D, C].

    f starts at 0.99 (`DecayLogits`), so that tokens far back count from the start.
    """

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.down = nn.Linear(layer.dim, layer.head_dim, bias=False, **layer.placement)
        self.up = DecayLogits(layer.head_dim, layer.num_heads * layer.head_dim, **layer.placement)
        self.heads = layer.num_heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x)).unflatten(-1, (self.heads, -1))
        return F.logsigmoid(y.to(torch.promote_types(y.dtype, torch.float32)))


class DecayLogits(nn.Linear):
    """Linear layer whose output is log 99 at initialisation, of which the sigmoid is 0.99."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(99))


class HeadDecay(nn.Linear):
    """(dt, log f) = (softplus(w.x + b), -a dt) per head: [B, N, C] -> two [B, N, H] in at least float32.

    Initially dt runs from 0.001 to 0.1 over the heads and a from 1 to 16, as in Mamba-2.
    """

    def __init__(self, layer: LayerSpec) -> None:
        self.log_rate: nn.Parameter | None = None
        super().__init__(layer.dim, layer.num_heads, **layer.placement)
        self.log_rate = nn.Parameter(torch.empty(layer.num_heads, **layer.placement))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.log_rate is None:
            return
        place = torch.linspace(0, 1, self.out_features, dtype=torch.float64)
        dt = torch.exp(math.log(0.001) + place * math.log(100))
        with torch.no_grad():
            self.bias.copy_(dt.expm1().log())
            self.log_rate.copy_((1 + 15 * place.flip(0)).log())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        assert self.log_rate is not None
        y = super().forward(x)
        dt = F.softplus(y.to(torch.promote_types(y.dtype, torch.float32)))
        return dt, -self.log_rate.to(dt.dtype).exp() * dt
