"""Blocks of the token grid: their choice, the base class of mixers with blocks, and the mixing matrix.

Row i of the mixing matrix holds the weights of all blocks for the queries of block i; rows sum to one at
initialisation. Block 0 holds the prefix (class, register tokens), if any: its row is uniform, and its weight in every
other row is 1 / M.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from zoo.grid import Grid
from zoo.mixers.base import LinearMixer
from zoo.mixers.context import LayerSpec
from zoo.mixers.options import MixerOptions

MAX_BLOCK_RATIO = 8 / 7  # largest M / sqrt(N) of choose_blocks
DIVIDING = "dividing"  # value of the option `blocks` that selects `dividing_blocks`
MIN_PRIOR_WEIGHT = 1e-4  # lower bound inside a softmax, where a weight of zero would never train
KNOTS = 16  # number of knots of the piecewise linear weight of mixing="distance"
DECAY_LENGTH = 3.0  # decay length of the prior "exp", in blocks
LOCAL_RADIUS = 1.5  # radius of the prior "local", in blocks


@torch.compiler.assume_constant_result  # a search that the compiler should not trace
def choose_blocks(grid: Grid, causal: bool = False) -> Grid:
    """Choose the number of blocks along each axis of a grid of N tokens: M nearly cubic blocks with M^2 near N.

    MHLA proposes M^2 <= N, for which mixing blocks costs at most as much as the tokens. M may be up to 8 / 7 sqrt(N),
    so that 14 x 14 tokens get 16 blocks, as 16 x 16 tokens do. Minimises |log(sqrt(N) / M)| + log(longest / shortest
    side), plus log(1.5) if the blocks do not divide the grid. With `causal`, only the first axis is divided.
    """
    return _chosen(tuple(grid), causal)


@functools.lru_cache(maxsize=64)
def _chosen(grid: Grid, causal: bool) -> Grid:
    target = math.sqrt(math.prod(grid))
    limit = max(1, int(target * MAX_BLOCK_RATIO))
    counts = [range(1, min(n, limit) + 1) if axis == 0 or not causal else (1,) for axis, n in enumerate(grid)]

    def cost(blocks: Grid) -> tuple[float, float]:
        sides = [n / m for n, m in zip(grid, blocks, strict=True) if n > 1]
        elongation = 0.0 if causal or not sides else math.log(max(sides) / min(sides))
        uneven = math.log(1.5) * any(n % m for n, m in zip(grid, blocks, strict=True))
        return round(abs(math.log(target / math.prod(blocks))) + elongation + uneven, 9), elongation

    return min((blocks for blocks in itertools.product(*counts) if math.prod(blocks) <= limit), key=cost)


@torch.compiler.assume_constant_result
def dividing_blocks(grid: Grid, causal: bool = False) -> Grid:
    """Choose the number of blocks along each axis as earlier versions did: M^2 <= N nearly cubic blocks of equal size.

    If this gives M below sqrt(N) / 4, blocks may differ by one token along an axis.
    """
    limit = math.isqrt(math.prod(grid))
    lengths = (grid[0], *(1 for _ in grid[1:])) if causal else grid
    even = _fewest_sides(grid, [[m for m in range(1, n + 1) if n % m == 0] for n in lengths], limit, causal)
    if math.prod(even) >= limit / 4:
        return even
    return _fewest_sides(grid, [list(range(1, min(n, limit) + 1)) for n in lengths], limit, causal)


def _fewest_sides(grid: Grid, counts: list[list[int]], limit: int, causal: bool) -> Grid:
    """Minimise log(longest / shortest side) + log(limit / M) over `counts` with at most `limit` blocks.

    Ties are broken by the smaller first term.
    """

    def cost(blocks: Grid) -> tuple[float, float]:
        sides = [n / m for n, m in zip(grid, blocks, strict=True) if n > 1]
        elongation = 0.0 if causal or not sides else math.log(max(sides) / min(sides))
        return round(elongation + math.log(limit / math.prod(blocks)), 9), elongation

    return min((blocks for blocks in itertools.product(*counts) if math.prod(blocks) <= limit), key=cost)


@dataclass(frozen=True)
class BlockedOptions(MixerOptions):
    """Options of mixers that divide the token grid into blocks. Raises ValueError for a value that is not allowed.

    blocks: number of blocks along each axis of the grid, such as [4, 4]; none: chosen for the grid of the converted
      model; "dividing": chosen so that they divide the grid, the meaning of none in earlier files
    """

    blocks: tuple[int, ...] | str | None = None

    def __post_init__(self) -> None:
        b = self.blocks
        if b not in (None, DIVIDING) and not (isinstance(b, tuple) and b and all(type(m) is int and m >= 1 for m in b)):
            raise ValueError(f"blocks must be positive integers, one per axis, such as [4, 4], got {b!r}")
        super().__post_init__()

    @property
    def needs_grid(self) -> bool:
        """Whether the token grid is needed: always."""
        return True

    @property
    def needs_blocks(self) -> bool:
        """Whether the grid is divided into blocks."""
        return True

    @property
    def follows_grid(self) -> bool:
        """Whether blocks are chosen anew for the grid of each call, if not given."""
        return False

    def blocks_of(self, grid: Grid) -> Grid:
        """Return the given blocks, or choose blocks for `grid`."""
        if isinstance(self.blocks, tuple):
            return self.blocks
        choose = dividing_blocks if self.blocks == DIVIDING else choose_blocks
        if self.causal == "frame":  # blocks of one frame
            return (1, *choose(tuple(grid[1:])))
        return choose(tuple(grid), bool(self.causal))

    def for_grid(self, grid: Grid) -> Self:
        return self if self.follows_grid else replace(self, blocks=self.blocks_of(grid))


class BlockedMixer(LinearMixer):
    """Base class of mixers that divide the token grid, (H, W) or (T, H, W), into blocks.

    Blocks that do not divide the grid differ by one token along an axis. Without the option `blocks`, they are chosen
    for the grid of the host (`choose_blocks`).
    """

    options: BlockedOptions

    def __init__(self, layer: LayerSpec, options: BlockedOptions) -> None:
        """Raises ValueError if neither blocks nor a grid is given."""
        needed = options.needs_blocks
        if needed and not isinstance(options.blocks, tuple) and layer.grid is None:
            raise ValueError(f"the mixer {self.name!r} needs blocks, such as [4, 4]: the model has no default grid")
        super().__init__(layer, options.for_grid(layer.grid or ()))
        self.grid, self.prefix = layer.grid, layer.prefix
        self.blocks = options.blocks_of(layer.grid or ()) if needed else ()
        if needed and len(self.blocks) != options.grid_dims:
            raise ValueError(f"blocks={list(self.blocks)} must have one number for each of {options.grid_dims} axes")

    @property
    def layout(self) -> str:
        return "x".join(map(str, self.blocks)) + (" of " + "x".join(map(str, self.grid)) if self.grid else "")

    def check_blocks(self, grid: Grid, blocks: Grid) -> None:
        """Raise ValueError if `grid` cannot be divided into `blocks`."""
        if len(grid) != len(blocks) or any(m > n for m, n in zip(blocks, grid, strict=True)):
            raise ValueError(
                f"the token grid {grid} cannot be divided into the blocks {blocks} of the mixer "
                f"{self.name!r}; convert with blocks={list(replace(self.options, blocks=None).blocks_of(grid))}"
            )


def block_distances(blocks: Grid, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> Tensor:
    """Compute the distances between block centres, in blocks, [M, M]."""
    axes = [torch.arange(m, dtype=dtype, device=device) for m in blocks]
    centres = torch.cartesian_prod(*axes).reshape(-1, len(blocks))
    return (centres[:, None] - centres[None]).square().sum(-1).sqrt()


def grid_diagonal(blocks: Grid) -> float:
    """Return the length of the diagonal of the grid, in blocks, over the axes with more than one block."""
    return math.hypot(*(m for m in blocks if m > 1)) or 1.0


def prior_weight(prior: str, distance: Tensor, farthest: Tensor) -> Tensor:
    """Compute the unnormalised prior weight of a block at `distance` (in blocks); `farthest` is the row maximum.

    linear 1 - d / max; cos cos(pi/4 d / max); exp exp(-d / 3); gaussian exp(-d^2 / (2 (max / 3)^2)); local [d <= 1.5];
    uniform 1. These are the locality initialisations of MHLA, whose code takes the maximum over all rows and normalises
    columns.
    """
    relative = distance / farthest.clamp(min=1e-9)
    return {
        "linear": lambda: 1 - relative,
        "cos": lambda: (math.pi / 4 * relative).cos(),
        "exp": lambda: (-distance / DECAY_LENGTH).exp(),
        "gaussian": lambda: (-4.5 * relative.square()).exp(),
        "local": lambda: (distance <= LOCAL_RADIUS).to(distance.dtype),
        "uniform": lambda: torch.ones_like(distance),
    }[prior]()


def prior_matrix(prior: str, blocks: Grid, prefix: bool, causal: bool = False) -> Tensor:
    """Compute the prior [M, M] in float64; rows sum to one, with `causal` over the blocks up to the diagonal."""
    d = block_distances(blocks)
    w = prior_weight(prior, d, d.amax(-1, keepdim=True))
    if prefix:
        m = len(w) + 1
        w = torch.cat([(w.sum(-1, keepdim=True) / (m - 1)), w], 1)  # weight 1 / M after normalisation
        w = torch.cat([torch.ones(1, m, dtype=w.dtype), w])
    w = w.tril() if causal else w
    return w / w.sum(-1, keepdim=True)


class BlockMixing(nn.Module):
    """Mixing matrix [M, M], or [H, M, M] with `num_heads`, with its parametrisation `kind`.

    softmax: softmax over each row of M times the learned logits, which start at the logarithm of the prior. The factor
        M makes an optimizer step change a weight of 1 / M by about as much as in "project".
    project: learned weights, initialised to the prior. `project_` clips them to [0, 1] after each optimizer step, as in
        MHLA; rows then need not sum to one. Without that call, negative weights count as 0.
    distance: softmax over 16 times learned logits, which depend on the distance between the centres of two blocks
        only: piecewise linear with 16 knots, up to the diagonal of the grid. Distances are relative to the size of the
        grid, so the matrix serves any number of blocks; `blocks` is used for the prior only.
    fixed: the prior; nothing is learned.
    """

    def __init__(
        self, kind: str, prior: str, blocks: Grid, prefix: bool, num_heads: int | None = None, causal: bool = False,
        device=None, dtype=None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.matrix: Tensor
        self.kind, self.prior, self.blocks, self.prefix, self.causal = kind, prior, tuple(blocks), prefix, causal
        m = math.prod(blocks) + prefix
        self.gain = KNOTS if kind == "distance" else m  # independent of M for a function of distance
        heads = () if num_heads is None else (num_heads,)
        if kind == "fixed":
            self.register_buffer("matrix", torch.empty(m, m, device=device, dtype=dtype))
        elif kind == "distance":
            self.knots = nn.Parameter(torch.empty(*heads, KNOTS, device=device, dtype=dtype))
            if prefix:  # logits of (prefix, prefix), (grid, prefix) and (prefix, grid)
                self.prefix_logits = nn.Parameter(torch.empty(*heads, 3, device=device, dtype=dtype))
        else:
            self.weight = nn.Parameter(torch.empty(*heads, m, m, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.kind == "distance":
                self._reset_knots()
                return
            prior = prior_matrix(self.prior, self.blocks, self.prefix, self.causal)
            if self.kind == "fixed":
                self.matrix.copy_(prior)
            else:
                prior = prior.clamp(min=MIN_PRIOR_WEIGHT).log() / self.gain if self.kind == "softmax" else prior
                self.weight.copy_(prior.to(self.weight).expand_as(self.weight))

    def _reset_knots(self) -> None:
        """Initialise the knots to the prior; the prefix gets the mean weight."""
        x = torch.linspace(0, 1, KNOTS, dtype=torch.float64, device="cpu")  # even if meta is the default device
        farthest = x.new_tensor(math.hypot(*(m - 1 for m in self.blocks)))
        w = prior_weight(self.prior, x * grid_diagonal(self.blocks), farthest).clamp(min=MIN_PRIOR_WEIGHT)
        self.knots.copy_((w.log() / self.gain).to(self.knots).expand_as(self.knots))
        if self.prefix:
            self.prefix_logits.zero_()
            self.prefix_logits[..., 1] = w.mean().log().item() / self.gain

    def project_(self) -> None:
        """Clip the weights of kind "project" to [0, 1]; training calls this after each optimizer step."""
        if self.kind == "project":
            with torch.no_grad():
                self.weight.clamp_(0, 1)

    def forward(self, blocks: Grid | None = None) -> Tensor:
        """Return the matrix in at least float32, for `blocks` if the kind is "distance"."""
        if self.kind == "fixed":
            return self.matrix
        w = self._logits(tuple(blocks or self.blocks)) if self.kind == "distance" else self.weight
        w = w if w.dtype == torch.float64 else w.float()
        if self.causal:
            w = w.masked_fill(torch.ones_like(w, dtype=torch.bool).triu(1), 0 if self.kind == "project" else -math.inf)
        return w.clamp(min=0) if self.kind == "project" else (self.gain * w).softmax(-1)

    def _logits(self, blocks: Grid) -> Tensor:
        """Compute logits [.., M, M], interpolated between the knots; distances are relative to the grid's diagonal."""
        dtype = torch.promote_types(self.knots.dtype, torch.float32)
        position = block_distances(blocks, dtype, self.knots.device) * ((KNOTS - 1) / grid_diagonal(blocks))
        low = position.floor().clamp(max=KNOTS - 2).long()
        fraction = (position - low).to(self.knots.dtype)
        logits = torch.lerp(self.knots[..., low], self.knots[..., low + 1], fraction)
        if not self.prefix:
            return logits
        own, of_grid, of_prefix = self.prefix_logits.unbind(-1)
        m = logits.shape[-1]
        first = torch.cat([own[..., None], of_prefix[..., None].expand(*own.shape, m)], -1)
        column = of_grid[..., None, None].expand(*own.shape, m, 1)
        return torch.cat([first[..., None, :], torch.cat([column, logits], -1)], -2)
