"""Geometry of queries and keys on the grid.

A tile of queries is a patch of PT x PY x PX tokens, a box of the grid. It reads one by one the keys of all blocks that
intersect its neighbourhood, which is a box of the grid too.

`grid` and `blocks` are tuples of three axes (T, Y, X); `outer` are the numbers of tokens before and after the grid. The
patches of the grid are followed by tiles of outer tokens, whose neighbourhood is the whole grid. ALL: all keys are read
one by one, and no block is pooled.
"""

import triton
import triton.language as tl

EVERYWHERE = tl.constexpr(1 << 20)  # a radius larger than any grid


@triton.jit
def block_of(x, length, m):
    """Return the block of a position, as `blockmix.layout.block_of`."""
    return ((x + 1) * m - 1) // length


@triton.jit
def start_of(b, length, m):
    """Return the first position of a block."""
    return b * length // m


@triton.jit
def patches(grid, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr):
    """Return the number of patches along each axis."""
    return tl.cdiv(grid[0], PT), tl.cdiv(grid[1], PY), tl.cdiv(grid[2], PX)


@triton.jit
def corner(patch, grid, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr):
    """Return the first token of a patch along each axis."""
    _, ny, nx = patches(grid, PT, PY, PX)
    return patch // (ny * nx) * PT, patch // nx % ny * PY, patch % nx * PX


@triton.jit
def tile_of(patch, grid, outer, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr):
    """Return (row, validity, (t, y, x)) of the tokens of a tile, and whether it lies on the grid."""
    nt, ny, nx = patches(grid, PT, PY, PX)
    on_grid = patch < nt * ny * nx
    i = tl.arange(0, PT * PY * PX)
    ct, cy, cx = corner(patch, grid, PT, PY, PX)
    t, y, x = ct + i // (PY * PX), cy + i // PX % PY, cx + i % PX
    row = outer[0] + (t * grid[1] + y) * grid[2] + x
    number = (patch - nt * ny * nx) * (PT * PY * PX) + i
    beyond = tl.where(number < outer[0], number, number + grid[0] * grid[1] * grid[2])
    inside = tl.where(on_grid, (t < grid[0]) & (y < grid[1]) & (x < grid[2]), number < outer[0] + outer[1])
    return tl.where(on_grid, row, beyond), inside, (t, y, x), on_grid


@triton.jit
def touched_along(first, size, on_grid, length, m, radius, ALL: tl.constexpr):
    """Return the first and last block along an axis that intersect the neighbourhood of a patch."""
    if ALL:
        lowest, highest = first * 0, first * 0 + m - 1
    else:
        lowest = tl.where(on_grid, block_of(tl.maximum(first - radius, 0), length, m), 0)
        last = tl.minimum(first + size - 1 + radius, length - 1)
        highest = tl.where(on_grid, block_of(last, length, m), m - 1)
    return lowest, highest


@triton.jit
def touched(
    patch, on_grid, grid, blocks, radius, ALL: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr
):
    """Return the first and last block along each axis whose keys a tile of queries reads one by one."""
    ct, cy, cx = corner(patch, grid, PT, PY, PX)
    t = touched_along(ct, PT, on_grid, grid[0], blocks[0], radius, ALL)
    y = touched_along(cy, PY, on_grid, grid[1], blocks[1], radius, ALL)
    x = touched_along(cx, PX, on_grid, grid[2], blocks[2], radius, ALL)
    return t, y, x


@triton.jit
def box_of(near, grid, blocks):
    """Return the first token and the number of tokens along each axis of a box of blocks."""
    ft = start_of(near[0][0], grid[0], blocks[0])
    fy = start_of(near[1][0], grid[1], blocks[1])
    fx = start_of(near[2][0], grid[2], blocks[2])
    st = start_of(near[0][1] + 1, grid[0], blocks[0]) - ft
    sy = start_of(near[1][1] + 1, grid[1], blocks[1]) - fy
    sx = start_of(near[2][1] + 1, grid[2], blocks[2]) - fx
    return (ft, fy, fx), (st, sy, sx)


@triton.jit
def axes_of(m, blocks):
    """Return (t, y, x) of blocks from their indices."""
    return m // (blocks[1] * blocks[2]), m // blocks[2] % blocks[1], m % blocks[2]


@triton.jit
def block_box(m, grid, blocks):
    """Return `box_of` for a single block."""
    at = axes_of(m, blocks)
    return box_of(((at[0], at[0]), (at[1], at[1]), (at[2], at[2])), grid, blocks)


@triton.jit
def quotient(a, inverse):
    """Return a // b from 1 / b, for 0 <= a < 2^22; exact, since the rounding error is below 1 / (2 b)."""
    return ((a.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def inverses(x):
    """Return 1 / x along each axis."""
    return tl.div_rn(1.0, x[0] * 1.0), tl.div_rn(1.0, x[1] * 1.0), tl.div_rn(1.0, x[2] * 1.0)


@triton.jit
def in_box(e, first, size, per_size, grid, outer, PT: tl.constexpr):
    """Return (row, validity, (t, y, x), whether outer) of the e-th token of a box, which is followed by the outer
    tokens. per_size: `inverses` of size. PT = 1: the first axis has one position."""
    line = quotient(e, per_size[2])
    x = first[2] + e - line * size[2]
    if PT == 1:
        t, y = line * 0, first[1] + line
    else:
        plane = quotient(line, per_size[1])
        t, y = first[0] + plane, first[1] + line - plane * size[1]
    number = e - size[0] * size[1] * size[2]
    is_outer = number >= 0
    row = outer[0] + (t * grid[1] + y) * grid[2] + x
    row = tl.where(is_outer, tl.where(number < outer[0], number, number + grid[0] * grid[1] * grid[2]), row)
    return row, number < outer[0] + outer[1], (t, y, x), is_outer


@triton.jit
def block_at(at, is_outer, per_length, blocks, PT: tl.constexpr):
    """Return the block of each token of the grid, 0 for outer tokens. per_length: `inverses` of the grid."""
    block = quotient((at[1] + 1) * blocks[1] - 1, per_length[1])
    if PT > 1:
        block += quotient((at[0] + 1) * blocks[0] - 1, per_length[0]) * blocks[1]
    return tl.where(is_outer, 0, block * blocks[2] + quotient((at[2] + 1) * blocks[2] - 1, per_length[2]))


@triton.jit
def within(a, b, radius):
    """Return |a_i - b_j| <= radius, [I, J]."""
    return (a[:, None] - b[None, :] + radius).to(tl.uint32, bitcast=True) <= (2 * radius).to(tl.uint32, bitcast=True)


@triton.jit
def is_near(i, j, radius, PT: tl.constexpr):
    """Return which pairs of tokens of the grid are near, [I, J]."""
    near = within(i[1], j[1], radius) & within(i[2], j[2], radius)
    if PT > 1:
        near = near & within(i[0], j[0], radius)
    return near


@triton.jit
def is_touched(near, at):
    """Return which blocks (t, y, x) lie in a box of blocks."""
    inside = (at[0] >= near[0][0]) & (at[0] <= near[0][1]) & (at[1] >= near[1][0]) & (at[1] <= near[1][1])
    return inside & (at[2] >= near[2][0]) & (at[2] <= near[2][1])


@triton.jit
def reads(patch, grid, blocks, outer, radius, ALL: tl.constexpr, PT: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr):
    """Return the geometry of a tile of queries: (`tile_of`, the blocks read key by key, the radius of a query, the
    number of keys read one by one, their box with its `inverses`)."""
    tile = tile_of(patch, grid, outer, PT, PY, PX)
    near = touched(patch, tile[3], grid, blocks, radius, ALL, PT, PY, PX)
    first, size = box_of(near, grid, blocks)
    reach = tl.where(tile[3], radius, EVERYWHERE)
    return tile, near, reach, size[0] * size[1] * size[2] + outer[0] + outer[1], (first, size, inverses(size))
