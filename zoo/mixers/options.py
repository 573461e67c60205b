"""The options that the linear mixers share, validated once."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from zoo.errors import unknown_name

FEATURE_MAPS = ("identity", "relu", "elu1", "softmax", "softmax_pair", "hedgehog", "power")
CENTERS = (None, "k", "qk")
SCANS = ("forward", "both")
BLOCK_ORDERS = ("la", "ahla", "hla2")
MIXINGS = ("softmax", "project", "distance", "fixed")
PRIORS = ("linear", "cos", "exp", "gaussian", "local", "uniform")


@dataclass(frozen=True)
class LocalOptions:
    """Options that every mixer has, softmax included: depthwise convolutions over the token grid, so that mixers can
    be compared with the same ones. Raises ValueError for a value that is not allowed.

    depthwise: which of q, k, v get a depthwise convolution over the grid, e.g. "v" or "qk"; "" for none.
    depthwise_kernel: its odd kernel size.  grid_dims: 2 for images, 3 for video.
    lepe: odd kernel size of a depthwise convolution of v over the grid that is added to the output; 0 for none.
    cpe: the same of the hidden states, added to them before q, k and v are projected (and gates read them): conditional
        positional encoding, Chu et al., arXiv 2102.10882, before each converted attention.
    """

    depthwise: str = ""
    depthwise_kernel: int = 3
    lepe: int = 0
    cpe: int = 0
    grid_dims: int = 2

    def __post_init__(self) -> None:
        names, size = self.depthwise, self.depthwise_kernel
        if not isinstance(names, str) or not set(names) <= set("qkv") or len(set(names)) != len(names):
            raise ValueError(f"depthwise names tensors among q, k and v, such as 'v' or 'qk', got {names!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % 2 == 0:
            raise ValueError(
                f"depthwise_kernel must be a positive odd number so that the grid keeps its size, got {size!r}"
            )
        for name in ("lepe", "cpe"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0 or (size and size % 2 == 0):
                raise ValueError(f"{name} must be an odd kernel size, or 0 for none, got {size!r}")
        if self.grid_dims not in (2, 3):
            raise ValueError(f"grid_dims must be 2 (image) or 3 (video), got {self.grid_dims!r}")

    @property
    def needs_grid(self) -> bool:
        """Whether the result depends on where the tokens lie."""
        return bool(self.depthwise) or self.lepe > 0 or self.cpe > 0


@dataclass(frozen=True)
class MixerOptions(LocalOptions):
    """Options of a linear mixer: `LocalOptions`, and those below. Raises ValueError for a value that is not allowed or
    a pair that contradicts itself.

    feature_map: phi of q and k. The default `power` is relu(x) to a learned exponent per head with the length kept
        (`zoo.mixers.layers.Power`): maps without such contrast, elu1 and relu, make weights so even that the higher
        orders average all tokens. `softmax_pair` and `hedgehog` double the feature width; `hedgehog` is learned, too.
    exponent: of `power` at first, between 1 and 5.
    normalize: divide by the same form with v = 1 (needs a non-negative feature map).
    center: centre phi(k) ("k") or phi(q) and phi(k) ("qk") over the tokens.
    mean_path: o = mean(v) + mixer(v - mean(v)).
    post_norm: RMSNorm of each head after the mixer.
    gate: multiply the output by a gate computed from the hidden states.
    causal: mix over the raster order of the tokens.
    decay: initial value in (0, 1) of a learned decay per head, or None.
    scan: "forward", or "both" to add the pass over the reversed order (halved where weights sum to one).
    ridge: lambda of the second- and third-order key moment (HLA paper, Algorithm 1).
    gains: learned numbers of each head, neutral at first: o -> gain o + shift mean(v), and phi of q and k times a
        temperature (where phi is not the identity). `zoo.conversion.calibrate` solves for them.
    """

    feature_map: str = "power"
    exponent: float = 3.0
    normalize: bool = True
    center: str | None = None
    mean_path: bool = False
    post_norm: bool = False
    gate: bool = False
    causal: bool = False
    decay: float | None = None
    scan: str = "forward"
    ridge: float = 0.0
    gains: bool = False

    def __post_init__(self) -> None:
        for name in ("normalize", "mean_path", "post_norm", "gate", "causal", "gains"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        super().__post_init__()
        if not _is_number(self.ridge) or self.ridge < 0:
            raise ValueError(f"ridge must be a number of at least 0, got {self.ridge!r}")
        if self.feature_map not in FEATURE_MAPS:
            raise unknown_name("feature map", self.feature_map, FEATURE_MAPS)
        if self.center not in CENTERS:
            raise unknown_name("center", self.center, ("k", "qk"))
        if self.scan not in SCANS:
            raise unknown_name("scan", self.scan, SCANS)
        if not _is_number(self.exponent) or not 1 < self.exponent < 5:
            raise ValueError(f"exponent must be a number between 1 and 5, got {self.exponent!r}")
        self._check_normalize()
        if self.decay is not None and not (self.causal and _is_number(self.decay) and 0 < self.decay < 1):
            raise ValueError(
                f"decay needs causal=True and a value in (0, 1), got decay={self.decay!r}, causal={self.causal}"
            )
        if self.scan == "both" and not self.causal:
            raise ValueError("scan='both' needs causal=True: the two-sided form already sees both directions")
        if self.causal and not (self.normalize or self.post_norm or self.decay):
            raise ValueError("causal without normalize grows with the position: set post_norm=True or a decay")
        if self.causal and self.gains:
            raise ValueError("gains adds the mean value of all tokens, which causal=True must not see")

    def _check_normalize(self) -> None:
        if self.normalize and self.feature_map == "identity":
            raise ValueError(
                "normalize=True needs a non-negative feature map (relu, elu1, softmax, softmax_pair, hedgehog, power)"
            )
        if self.normalize and (self.center or self.mean_path):
            raise ValueError(
                "normalize=True excludes center and mean_path: centred weights do not sum to a positive number"
            )

    @property
    def needs_grid(self) -> bool:
        """Whether the result depends on where the tokens lie."""
        # in full: dynamo takes a property of super() for the property itself, which is true
        return bool(self.depthwise) or self.lepe > 0 or self.cpe > 0 or self.causal


@dataclass(frozen=True)
class TwoSidedRatioOptions(MixerOptions):
    """Options of `mala` and `rala`: `MixerOptions` with the ratio and without causality, centring and mean path. Raises
    ValueError too."""

    def __post_init__(self) -> None:
        _refuse_causal(self, "these weights are")
        if self.normalize is not True:
            raise ValueError(f"normalize must be True: the weights are divided by their sum, got {self.normalize!r}")
        super().__post_init__()


@dataclass(frozen=True)
class ResolventOptions(TwoSidedRatioOptions):
    """Options of `resolvent`: those of `mala`, and

    share: the initial c in (0, 1), the weight of each order over that of the order before. Raises ValueError too.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 < self.share < 1:
            raise ValueError(f"share must be a number between 0 and 1, got {self.share!r}")
        super().__post_init__()


@dataclass(frozen=True)
class MesaOptions(MixerOptions):
    """Options of `mesa`: `MixerOptions` without the ratio, causality, centring and mean path, and

    ridge: the initial lambda over the mean of the diagonal of K'K, above 0. Raises ValueError too.
    """

    ridge: float = 0.1

    def __post_init__(self) -> None:
        _refuse_causal(self, "mesa is")
        if not _is_number(self.ridge) or not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge must be a positive number: mesa inverts K'K + lambda I, got {self.ridge!r}")
        for name in ("normalize", "center", "mean_path"):
            if getattr(self, name):
                raise ValueError(f"mesa has no {name}, got {name}={getattr(self, name)!r}")
        super().__post_init__()


@dataclass(frozen=True)
class PolynomialOptions(MixerOptions):
    """Options of `poly`: `MixerOptions`, and coefficients, the initial c1..c4 of its orders. Raises ValueError too."""

    coefficients: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        c = self.coefficients
        if not isinstance(c, tuple) or len(c) != 4 or not all(map(_is_number, c)):
            raise ValueError(f"coefficients are the four numbers c1..c4, got {c!r}")
        if self.causal:
            raise ValueError("poly is two-sided only; use la, hla2, ahla or hla3 with causal=True")
        super().__post_init__()


@dataclass(frozen=True)
class BlockOptions(MixerOptions):
    """Options of `mhla` and `mhla2`: `MixerOptions` without centring, mean path, decay, ridge and scan, and

    order: "la", "ahla" or "hla2" (`hla_kernels.mhla`).
    blocks: blocks along each axis of the grid, such as (4, 4); None: chosen for the grid of the host.
    mixing: "softmax", "project", "distance" or "fixed" (`zoo.mixers.block_mixing.BlockMixing`).
    prior: "linear", "cos", "exp", "gaussian", "local" or "uniform", what the mixing is at first.
    per_head: one mixing matrix for each head in the place of one for all.
    """

    order: str = "la"
    blocks: tuple[int, ...] | None = None
    mixing: str = "softmax"
    prior: str = "linear"
    per_head: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("order", BLOCK_ORDERS), ("mixing", MIXINGS), ("prior", PRIORS)):
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), allowed)
        check_blocks(self.blocks)
        if not isinstance(self.per_head, bool) or (self.per_head and self.mixing == "fixed"):
            raise ValueError(f"per_head must be True or False, and False for mixing='fixed', got {self.per_head!r}")
        for name in ("center", "mean_path", "decay", "ridge"):
            if getattr(self, name):
                raise ValueError(f"block mixing has no {name}, got {name}={getattr(self, name)!r}")
        if self.scan != "forward":
            raise ValueError("block mixing has one direction, scan must be 'forward'")
        super().__post_init__()

    @property
    def needs_grid(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class TaylorOptions(MixerOptions):
    """Options of `taylor2`: `MixerOptions` without another feature map, centring or causality, and

    coefficients: the initial c1, c2 of the two terms of the expansion.
    width: channels of a head that the degree-2 term reads, through one learned projection of q and one of k; None for
        all of them as they are. Raises ValueError too.
    """

    coefficients: tuple[float, ...] = (1.0, 1.0)
    width: int | None = None

    def __post_init__(self) -> None:
        c = self.coefficients
        if not isinstance(c, tuple) or len(c) != 2 or not all(map(_is_number, c)):
            raise ValueError(f"coefficients are the two numbers c1, c2, got {c!r}")
        if self.width is not None and (not isinstance(self.width, int) or self.width < 1):
            raise ValueError(f"width must be a positive number of channels or None, got {self.width!r}")
        if self.causal:
            raise ValueError("taylor2 is two-sided only; use la, hla2, ahla or hla3 with causal=True")
        super().__post_init__()

    def _check_normalize(self) -> None:
        if self.feature_map != "identity" or self.center != "k" or self.mean_path is not True:
            raise ValueError(
                "taylor2 expands softmax around its mean value: feature_map='identity', center='k' and mean_path=True "
                f"are fixed, got {self.feature_map!r}, {self.center!r} and {self.mean_path}"
            )


@dataclass(frozen=True)
class MultipoleOptions(MixerOptions):
    """Options of `multipole`: `MixerOptions` without a feature map, centring, mean path and causality, and

    blocks: blocks along each axis of the grid, such as (4, 4); None: chosen for the grid of the host.
    radius: tokens at most so far along every axis of the grid are near, and exact.
    degree: of the expansion of the others around the mean key of their block, 0, 1 or 2. Raises ValueError too.
    """

    blocks: tuple[int, ...] | None = None
    radius: int = 2
    degree: int = 1

    def __post_init__(self) -> None:
        check_blocks(self.blocks)
        if type(self.radius) is not int or self.radius < 0:
            raise ValueError(f"radius must be a number of tokens of at least 0, got {self.radius!r}")
        if type(self.degree) is not int or self.degree not in (0, 1, 2):
            raise ValueError(f"degree must be 0, 1 or 2, got {self.degree!r}")
        if self.causal:
            raise ValueError("multipole is two-sided only; use la, hla2, ahla, hla3 or mhla with causal=True")
        super().__post_init__()

    def _check_normalize(self) -> None:
        if self.feature_map != "identity" or self.center or self.mean_path or self.normalize is not True:
            raise ValueError(
                "multipole averages with positive sums of weights near those of softmax: feature_map='identity', "
                f"normalize=True, center=None and mean_path=False are fixed, got {self.feature_map!r}, "
                f"{self.normalize}, {self.center!r} and {self.mean_path}"
            )

    @property
    def needs_grid(self) -> bool:
        """Always."""
        return True


def check_blocks(b: Any) -> None:
    """Raise ValueError unless b is None or a positive number of blocks for each axis."""
    if b is not None and not (isinstance(b, tuple) and b and all(type(m) is int and m >= 1 for m in b)):
        raise ValueError(f"blocks are positive integers, one for each axis, such as [4, 4], got {b!r}")


def _refuse_causal(options: MixerOptions, which: str) -> None:
    if options.causal:
        raise ValueError(f"{which} two-sided only; use la, hla2, ahla or hla3 with causal=True")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def resolve_options(defaults: Any, changes: dict[str, Any], kind: str = "mixer") -> Any:
    """`defaults` with `changes`. Raises ValueError for an unknown option, with the nearest valid name."""
    known = [f.name for f in fields(defaults)]
    for name in changes:
        if name not in known:
            raise unknown_name(f"{kind} option", name, known)
    lists = {name: tuple(x) for name, x in changes.items() if isinstance(x, list)}  # YAML and JSON have no tuples
    changes = {**changes, **lists}
    return replace(defaults, **changes)
