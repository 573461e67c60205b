"""Static table of tiles, warps, stages and number of programs per pass, without tuning at run time.

Entries for float32 tokens are used with the Triton interpreter only, for accurate tests.
"""

from __future__ import annotations

import torch

from ...hla.fused.plan import PROGRAMS, divided
from ...hla.fused.spec import Widths, split_width

Config = dict[str, int]
COLUMNS = (64, 80, 128)  # of the wider tile, at most
# 16-bit tokens on an H200, for these columns: tokens per tile, warps, stages and, if limited, registers per thread.
# _norm: with a ratio, _two: features in two digits (or gradients of a ratio), products: two matrices per token
TABLE: dict[str, tuple[tuple[int, ...], ...]] = {
    "reduce": ((32, 4, 3), (64, 8, 3), (32, 4, 4)),
    "reduce_norm": ((32, 4, 3), (64, 8, 3), (64, 4, 3)),
    "reduce_two": ((32, 4, 3), (32, 8, 3), (32, 4, 3)),
    "query": ((64, 4, 1), (64, 4, 2), (64, 4, 3)),
    "query_two": ((64, 4, 2), (64, 4, 2), (64, 4, 2)),
    "read": ((64, 4, 2), (64, 4, 2), (64, 8, 3)),
    "read_norm": ((64, 4, 2), (64, 4, 2), (64, 4, 2, 168)),
    "read_two": ((64, 4, 2), (64, 8, 2), (64, 4, 1)),
    "read_norm_two": ((64, 4, 2), (64, 8, 2), (64, 8, 2)),
    "rows": ((64, 4, 2), (64, 4, 2), (64, 4, 2)),
    "rows_two": ((64, 4, 2), (64, 8, 2), (64, 8, 2)),
    "key": ((64, 4, 1), (64, 4, 2), (64, 4, 2)),
    "key_norm": ((64, 4, 2), (64, 4, 2), (64, 4, 2)),
    "key_two": ((64, 4, 2), (64, 8, 2), (64, 8, 3)),
    "products": ((64, 4, 2), (64, 8, 1), (64, 8, 1)),
}
# columns per tile, warps, stages, and for `grads` rows per tile
MIX = {
    "mix": (128, 8, 3),
    "mix_many": (64, 4, 3),  # more than 128 blocks
    "back": (64, 8, 4),
    "back_many": (64, 4, 3),
    "grads": (64, 4, 3, 64),
}


def tile(w: Widths, name: str) -> Config:
    """Return an entry of TABLE."""
    bn, warps, stages, *registers = next(x for x, most in zip(TABLE[name], COLUMNS, strict=True) if w.wide <= most)
    limit = {"maxnreg": registers[0]} if registers else {}
    return {"BN": bn, "num_warps": warps, "num_stages": stages, **limit}


def reduce_config(w: Widths, dtype: torch.dtype, normalize: bool, ratio: bool, digits: int) -> Config:
    """Return the tiles of `blockmix_reduce_moments`; digits: number of digits of the features in both operands."""
    if digits > 2 or dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 2}
    return tile(w, "reduce" + ("_two" if digits > 1 or ratio else "_norm" if normalize else ""))


def rows_at_once(w: Widths, dtype: torch.dtype, config: Config) -> int:
    """Return the rows of a tile that the warps hold at once, with 16 bytes per thread."""
    rows = config["num_warps"] * 32 * (16 // dtype.itemsize) // w.F.D1
    return max(1, min(rows, config["BN"]))


def one_pass(w: Widths, normalize: bool, dtype: torch.dtype, digits: int) -> bool:
    """Whether dq and the gradients of the mixed moments fit in the registers of one pass."""
    return not normalize or (w.wide <= 64 and dtype != torch.float32 and digits == 1)


def query_config(w: Widths, dtype: torch.dtype, digits: int, whole: bool) -> tuple[Widths, Config]:
    """Return (widths of one program, tiles) of `blockmix_query_grads` in one pass. Two programs split wide features of
    a head, unless they are needed as a `whole` or are not a power of two."""
    if dtype == torch.float32:
        return w, {"BN": 32, "num_warps": 8, "num_stages": 1, "SPLIT": 1}
    config = {**tile(w, "query" + "_two" * (digits > 1)), "SPLIT": 1}
    if w.wide <= 80:
        return w, config
    if whole or w.F.D != w.F.D1:
        return w, {**config, "num_warps": 8}
    return w._replace(F=w.F._replace(D=w.F.D // 2, D1=w.F.D1 // 2)), {**config, "SPLIT": 2}


def apply_config(w: Widths, dtype: torch.dtype, name: str, normalize: bool, digits: int) -> Config:
    """Return the tiles of a pass that writes rows: "read", "rows", "key", or "products" of the higher orders."""
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    norm = "_norm" if normalize and (name == "read" or (name == "key" and digits == 1)) else ""
    two = "_two" if name != "products" and digits > 1 else ""
    return tile(w, name + norm + two)


def apart(w: Widths, digits: int) -> bool:
    """Whether dk and dv of a higher order take a pass each, because their operands do not fit together."""
    return w.wide > 64 and digits > 1


def padded(m: int) -> int:
    """Return MP, the rows of the padded mixing matrix (full tiles)."""
    rows = mix_rows(m, torch.bfloat16)
    return max(-(-m // rows) * rows, sum(split_width(m, 32)))


def mix_rows(m: int, dtype: torch.dtype) -> int:
    """Return the rows per tile of `blockmix_mix`: all, or 64 if all do not fit together with the columns."""
    whole = max(16, 1 << (m - 1).bit_length())
    return min(whole, 128 if dtype != torch.float32 and m <= 128 else 64)


def mix_config(m: int, dtype: torch.dtype, back: bool = False) -> Config:
    """Return the tiles of `blockmix_mix` (back: that sums gradients too), or of `blockmix_mix_long`, which have BK."""
    k1, k2 = split_width(m, 32)
    rows = mix_rows(m, dtype)
    if dtype == torch.float32 or m > 256:
        return {"BM": rows, "BK": min(rows, 32), "BC": 64, "num_warps": 4, "num_stages": 3}
    columns, warps, stages = MIX[("back" if back else "mix") + "_many" * (m > 128)]
    warps = warps if rows > 64 or m > 128 else 4
    return {"BM": rows, "K1": k1, "K2": k2, "BC": columns, "num_warps": warps, "num_stages": stages}


def product_grid(w: Widths, rows: int, programs: int) -> tuple[int, Config]:
    """Return (programs, tiles) of the products of moments, cut into blocks of rows."""
    br = min(64, max(16, 1 << (rows - 1).bit_length()))
    return programs * -(-rows // br), {"BR": br, "num_warps": 8 if w.wide > 64 else 4, "num_stages": 1}


def grads_config(m: int, dtype: torch.dtype) -> Config:
    """Return the tiles of `blockmix_mixing_grads`."""
    if m > 64 and dtype != torch.float32:
        columns, warps, stages, rows = MIX["grads"]
        return {"BM": rows, "BC": columns, "num_warps": warps, "num_stages": stages}
    bm = min(mix_rows(m, dtype), 64)
    columns = 32 if dtype == torch.float32 else 64 if bm > 16 else 256
    return {"BM": bm, "BC": columns, "num_warps": 4 if bm > 16 else 2, "num_stages": 3}


def reduce_parts(programs: int, widest: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part) of a pass whose parts are added afterwards: enough programs to fill the GPU."""
    return divided(widest, max(1, min(-(-widest // 256), PROGRAMS // programs)), bn)


def anchor_parts(n: int, heads: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part) of the mean of v: a thousand tokens, or fewer to fill the GPU."""
    return divided(n, max(-(-n // 1024), min(-(-n // 256), -(-2 * PROGRAMS // heads))), bn)


def apply_parts(programs: int, widest: int, bn: int) -> tuple[int, int]:
    """Return (parts, tokens per part) of a pass that only writes: up to 8 tiles per program if the GPU is full."""
    chunk = bn * max(1, min(8, programs * -(-widest // bn) // (4 * PROGRAMS)))
    return -(-widest // chunk), chunk


def mix_parts(heads: int, tiles: int, columns: int, config: Config, back: bool = False) -> tuple[int, int]:
    """Return (parts, tiles of columns per part) of `blockmix_mix`: four programs per multiprocessor; two if it sums
    gradients with its largest tiles, where each program stores a large gradient of the mixing matrix."""
    whole, few = -(-columns // config["BC"]), back and config["BM"] > 64
    return divided(whole, max(1, min(whole, round((1 if few else 2) * PROGRAMS / (heads * tiles)))))


def column_parts(heads: int, tiles: int, columns: int, bc: int) -> tuple[int, int]:
    """Return (parts, tiles of columns per part) of the sums of `blockmix_mixing_grads`."""
    whole = -(-columns // bc)
    return divided(whole, max(1, min(-(-whole // 4), round(2 * PROGRAMS / (heads * tiles)))))
