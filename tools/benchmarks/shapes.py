"""Shapes of the benchmark, their memory floors and target speeds."""

from typing import NamedTuple

PASSES = ("forward", "forward_backward")
OPS = ("linear_attention", "hla2", "ahla", "hla3", "polynomial")


class Targets(NamedTuple):
    """Minimum fraction of the memory floor by pass, and minimum speed-up over cuDNN SDPA, forward and backward."""

    forward: float
    forward_backward: float
    times_cudnn: float


class Shape(NamedTuple):
    """Shape [B, N, H, D] of q, k and v in bfloat16. long: whether the tokens of a head exceed on-chip memory."""

    title: str
    b: int
    h: int
    n: int
    d: int
    long: bool
    targets: Targets | None = None

    @property
    def sizes(self) -> list[int]:
        """[B, H, N, D], as in result files."""
        return [self.b, self.h, self.n, self.d]

    @property
    def token_bytes(self) -> int:
        """T = 2 B H N D: bytes of one of q, k, v, o."""
        return 2 * self.b * self.h * self.n * self.d


SHAPES = {
    "vit224": Shape("ViT-S 224", 256, 6, 197, 64, False, Targets(0.70, 0.60, 4.5)),
    "vit512": Shape("ViT-S 512", 64, 6, 1025, 64, False, Targets(0.75, 0.65, 8)),
    "dit256": Shape("DiT-XL 256", 64, 16, 256, 72, False, Targets(0.60, 0.50, 3.8)),
    "dit512": Shape("DiT-XL 512", 32, 16, 1024, 72, False, Targets(0.60, 0.50, 6.5)),
    "tokens16k": Shape("16k tokens", 4, 16, 16384, 64, True, Targets(0.85, 0.70, 55)),
    "wan480p": Shape("Wan 480p", 2, 12, 32760, 128, True, Targets(0.75, 0.65, 85)),
}
# `mhla`: shape -> its grid, and the blocks along each axis
GRIDS = {
    "wan800": ((21, 30, 50), ((7, 3, 5), (3, 5, 10))),
    "wan480p": ((21, 30, 52), ((7, 3, 5), (3, 5, 10))),
    "dits512": ((32, 32), ((4, 4),)),
    "dit256": ((16, 16), ((4, 4),)),
}
# `multipole`: shape -> grid, degree -> blocks along each axis, and radius of the near field
FIELDS: dict[str, tuple[tuple[int, ...], dict[int, tuple[int, ...]], int]] = {
    "dit256": ((16, 16), {0: (8, 8), 1: (8, 8)}, 2),
    "dits512": ((32, 32), {0: (16, 16), 1: (8, 8)}, 2),
    "tokens4k": ((64, 64), {0: (16, 16), 1: (8, 8)}, 2),
    "tokens16k": ((128, 128), {0: (32, 32), 1: (8, 8)}, 2),
    "wan480p": ((21, 30, 52), {0: (7, 10, 13), 1: (3, 5, 7)}, 1),
}
ALL_SHAPES = SHAPES | {
    "tokens4k": Shape("4k tokens", 16, 16, 4096, 64, False),
    "wan800": Shape("Wan 480x800", 2, 12, 31500, 128, True),
    "dits512": Shape("DiT-S 512", 32, 6, 1024, 64, False),
}


class MixedTargets(NamedTuple):
    """Targets of `mhla`, forward and backward.

    Maximum time relative to `linear_attention` with the same options; minimum speed-up over the formulation of the
    paper in eager torch, and over cuDNN SDPA.
    """

    times_linear: float
    times_eager: float | None = None
    times_cudnn: float | None = None


MIXED_TARGETS = {
    "wan800": MixedTargets(1.6, 8, 50),
    "wan480p": MixedTargets(1.6, 8, 50),
    "dits512": MixedTargets(1.8),
}
SLOWDOWN = 1.15  # allowed factor of a feature map with denominator, or of centring, over the plain form


def floor_bytes(shape: Shape, op: str, which: str) -> int:
    """Return the minimum bytes of a pass: 4 T forward (q, k, v, o), 11 T with backward (q, k, v, do, three gradients).

    If the tokens of a head exceed on-chip memory, higher orders read q again after the moments, and k, v again in the
    backward pass: 5 T and 14 T.
    """
    again = shape.long and op in OPS and op != "linear_attention"
    return shape.token_bytes * {"forward": 5 if again else 4, "forward_backward": 14 if again else 11}[which]


def floor_us(shape: Shape, op: str, which: str, bytes_per_s: float) -> float:
    """Return the time of the minimum bytes in microseconds, at a copy rate that counts bytes read and written."""
    return floor_bytes(shape, op, which) / bytes_per_s * 1e6
