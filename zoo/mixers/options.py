"""Options shared by several mixers. Options of a single mixer are defined in its file, as a subclass.

The docstring of a class explains each option on a line `name: meaning`, from which `--help` is generated
(`zoo.config.field_docs`). Values are checked when an instance is created.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from zoo.errors import nearest, unknown_name
from zoo.grid import Grid
from zoo.mixers.context import LayerSpec

if TYPE_CHECKING:
    from zoo.mixers.protocol import Mixer

FEATURE_MAPS = ("identity", "relu", "elu1", "softmax", "softmax_pair", "hedgehog", "power")
CENTERS = (None, "k", "qk")
SCANS = ("forward", "both")


@dataclass(frozen=True)
class LocalOptions:
    """Options of every mixer, softmax included: depthwise convolutions over the token grid.

    Raises ValueError for a value that is not allowed.

    depthwise: tensors among q, k, v that get a depthwise convolution over the grid, such as "v" or "qk"; "" for none
    depthwise_kernel: odd kernel size of `depthwise`
    lepe: odd kernel size of a depthwise convolution of v that is added to the output (LePE); 0 for none
    cpe: odd kernel size of a depthwise convolution of the hidden states, added before q, k and v are projected
      (conditional positional encoding, arXiv 2102.10882); 0 for none
    grid_dims: 2 for images, 3 for video; default: taken from the converted model
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
    def has_convolution(self) -> bool:
        """Whether there is a depthwise convolution over the token grid."""
        return bool(self.depthwise) or self.lepe > 0 or self.cpe > 0

    @property
    def needs_grid(self) -> bool:
        """Whether the token grid is needed. In subclasses not super().needs_grid, of which dynamo in torch 2.11 returns
        the property object, which is always true."""
        return self.has_convolution

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the given options with those that their names imply."""
        return given

    def for_grid(self, grid: Grid) -> Self:
        """Return these options with values that depend on the token grid filled in, if not given."""
        return self


@dataclass(frozen=True)
class MixerOptions(LocalOptions):
    """Options of linear mixers, in addition to `LocalOptions`.

    Raises ValueError for a value that is not allowed and for contradictory options.

    feature_map: phi of q and k: identity, relu, elu1, softmax, softmax_pair, hedgehog or power. The default `power`
      raises relu(x) to a learned exponent per head and keeps its norm (`zoo.mixers.layers.Power`); with elu1 and relu,
      higher orders have nearly uniform weights. `softmax_pair` and `hedgehog` double the feature width; `hedgehog` is
      learned
    exponent: initial exponent of `power`, between 1 and 5
    normalize: divide by the sum of the weights (needs a non-negative feature map)
    center: subtract the token mean from phi(k) ("k") or from phi(q) and phi(k) ("qk"); none for neither
    mean_path: compute mean(v) + mixer(v - mean(v))
    post_norm: RMSNorm per head after the mixer
    gate: multiply the output by a gate computed from the hidden states
    causal: mix in the raster order of the tokens; "frame": in the order of frames (the first axis of the grid), where
      tokens attend to their own frame and to earlier ones, so that videos can be generated piece by piece
    decay: initial value in (0, 1) of a learned decay per head; none for no decay
    scan: "forward", or "both" to add the pass in reversed order; a token counts itself once, except if weights sum to
      one, when the passes are averaged
    ridge: lambda of the second- and third-order key moment (HLA paper, Algorithm 1)
    gains: learn a gain and a shift per head, o -> gain o + shift mean(v), initialised to 1 and 0, and a temperature of
      phi (unless phi is the identity); `zoo.conversion.calibrate` solves for them
    """

    two_sided: ClassVar[bool] = False  # whether causal=True is an error
    refused: ClassVar[tuple[str, ...]] = ()  # inherited options that the mixer does not have

    feature_map: str = "power"
    exponent: float = 3.0
    normalize: bool = True
    center: str | None = None
    mean_path: bool = False
    post_norm: bool = False
    gate: bool = False
    causal: bool | str = False
    decay: float | None = None
    scan: str = "forward"
    ridge: float = 0.0
    gains: bool = False

    def __post_init__(self) -> None:
        if self.causal and self.two_sided:
            raise ValueError(f"this mixer is two-sided only; causal=True is for {', '.join(_causal_mixers())}")
        for name in self.refused:
            if getattr(self, name):
                raise ValueError(f"this mixer has no option {name}, got {name}={getattr(self, name)!r}")
        for name in ("normalize", "mean_path", "post_norm", "gate", "gains"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.causal != "frame" and not isinstance(self.causal, bool):
            raise ValueError(f"causal must be True, False or 'frame', got {self.causal!r}")
        super().__post_init__()
        if not is_number(self.ridge) or self.ridge < 0:
            raise ValueError(f"ridge must be a number of at least 0, got {self.ridge!r}")
        if self.feature_map not in FEATURE_MAPS:
            raise unknown_name("feature map", self.feature_map, FEATURE_MAPS)
        if self.center not in CENTERS:
            raise unknown_name("center", self.center, ("k", "qk"))
        if self.scan not in SCANS:
            raise unknown_name("scan", self.scan, SCANS)
        if not is_number(self.exponent) or not 1 < self.exponent < 5:
            raise ValueError(f"exponent must be a number between 1 and 5, got {self.exponent!r}")
        self._check_normalize()
        if self.decay is not None and not (self.causal and is_number(self.decay) and 0 < self.decay < 1):
            raise ValueError(
                f"decay needs causal=True and a value in (0, 1), got decay={self.decay!r}, causal={self.causal}"
            )
        if self.scan == "both" and not self.causal:
            raise ValueError("scan='both' needs causal=True: the two-sided form already sees both directions")
        if self.causal and not (self.normalize or self.post_norm or self.decay):
            raise ValueError("causal without normalize grows with the position: set post_norm=True or a decay")
        if self.causal and self.gains:
            raise ValueError("gains adds the mean value of all tokens, which causal=True must not see")
        if self.causal == "frame" and (self.depthwise or self.lepe or self.cpe or self.scan != "forward"):
            raise ValueError("causal='frame' excludes depthwise, lepe, cpe and scan='both', which read later frames")

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
        """Whether the token grid is needed."""
        return self.has_convolution or bool(self.causal)


@dataclass(frozen=True)
class TwoSidedRatioOptions(MixerOptions):
    """`MixerOptions` of two-sided mixers whose weights are divided by their sum; raises ValueError otherwise."""

    two_sided = True

    def __post_init__(self) -> None:
        if self.normalize is not True:
            raise ValueError(f"normalize must be True: the weights are divided by their sum, got {self.normalize!r}")
        super().__post_init__()


def is_number(x: object) -> bool:
    """Whether x is an int or a float, but not a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool)


class MixerConfig(NamedTuple):
    """Name and options of a mixer, used from the configuration to the checkpoint.

    name: key of `zoo.mixers.MIXERS`. options: all options, with defaults filled in.
    """

    name: str
    options: LocalOptions

    @classmethod
    def parse(cls, name: str, given: Mapping[str, Any], keywords: Iterable[str] = ()) -> "MixerConfig":
        """Parse a mixer name and options. keywords: other arguments of the caller, suggested for an unknown option.

        Raises ValueError for an unknown name or option, with the nearest valid one, and for a value that is not
        allowed.
        """
        defaults = mixer_class(name).defaults
        known = [f.name for f in fields(defaults)]
        if "mixer_options" in given:
            raise ValueError("pass options of the mixer as keywords, such as lepe=3, without mixer_options=")
        for option in given:
            if option not in known:
                raise unknown_name(f"{name} option", option, known, nearest(str(option), [*known, *keywords]))
        tuples = {key: tuple(x) for key, x in given.items() if isinstance(x, list)}  # YAML and JSON have no tuples
        return cls(name, replace(defaults, **defaults.completed({**given, **tuples})))

    def for_grid(self, grid: Grid) -> "MixerConfig":
        """Fill in options that depend on the token grid, such as blocks, if not given."""
        return self._replace(options=self.options.for_grid(grid))

    def build(self, layer: LayerSpec) -> "Mixer":
        """Build the mixer for an attention layer. Raises ValueError for options that do not fit the layer."""
        return mixer_class(self.name)(layer, self.options)

    def plain_options(self) -> dict[str, Any]:
        """Return all options as JSON values (tuples become lists), the input of `parse`."""
        return json.loads(json.dumps(asdict(self.options)))


def mixer_class(name: str) -> "type[Mixer]":
    """Return the class of the mixer `name`. Raises ValueError for an unknown one, with the nearest valid name."""
    from zoo.mixers import MIXERS  # circular import

    if name not in MIXERS:
        raise unknown_name("mixer", name, MIXERS)
    return MIXERS[name]


def _causal_mixers() -> list[str]:
    from zoo.mixers import MIXERS  # circular import

    return [name for name, kind in MIXERS.items() if not getattr(kind.defaults, "two_sided", True)]
