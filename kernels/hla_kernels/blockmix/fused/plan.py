"""The static table: tiles, warps and stages of every pass, and into how many programs it is cut. No tuning at run time.

The entries of float32 tokens are for the interpreter, in which sums are exact enough to test the rest.
"""

from __future__ import annotations

import torch

from ...hla.fused.plan import PROGRAMS
from ...hla.fused.spec import split_width

Config = dict[str, int]
# of bfloat16 heads of 128 channels on an H200: tokens (of `mix`: columns) of a tile, warps, stages, and of `grads` rows
WIDE = {
    "reduce": (32, 4, 4),
    "reduce_norm": (64, 4, 3),
    "reduce_two": (32, 4, 3),  # features in two digits
    "query": (64, 8, 3),
    "query_two": (32, 8, 2),
    "apply": (64, 4, 2),
    "apply_two": (64, 8, 2),
    "mix": (128, 8, 3),
    "mix_many": (64, 4, 3),  # more than 128 blocks
    "grads": (64, 4, 3, 64),
}


def tile(name: str) -> Config:
    """An entry of WIDE."""
    bn, warps, stages = WIDE[name]
    return {"BN": bn, "num_warps": warps, "num_stages": stages}


def wide(w: dict[str, int]) -> int:
    """Columns of the wider of the two tiles."""
    return max(w["F1"] + w["F2"], w["V1"] + w["V2"])


def reduce_config(w: dict[str, int], dtype: torch.dtype, normalize: bool, ratio: bool, digits: int) -> Config:
    """Tiles of `reduce_moments`; ROWS of a tile are what the warps hold at once, 16 bytes a thread. digits: those of
    features, of both operands."""
    if digits > 2:
        config = {"BN": 32, "num_warps": 8, "num_stages": 2}
    elif wide(w) == 128 and dtype != torch.float32:
        config = tile("reduce_two" if ratio or digits > 1 else "reduce_norm" if normalize else "reduce")
    elif (ratio or digits > 1) and dtype != torch.float32:
        config = {"BN": 32, "num_warps": 4 if wide(w) == 64 else 8, "num_stages": 3}
    elif dtype == torch.float32:
        config = {"BN": 32, "num_warps": 8, "num_stages": 2}
    elif wide(w) <= 64:
        config = {"BN": 32, "num_warps": 4, "num_stages": 3}
    else:
        config = {"BN": 64, "num_warps": 8, "num_stages": 3}
    rows = config["num_warps"] * 32 * (16 // dtype.itemsize) // w["F1"]
    return {**config, "ROWS": max(1, min(rows, config["BN"]))}


def one_pass(w: dict[str, int], normalize: bool, dtype: torch.dtype, digits: int) -> bool:
    """Whether dq and the gradients of the mixed moments fit in the registers of one pass."""
    return not normalize or (wide(w) <= 64 and dtype != torch.float32 and digits == 1)


def query_config(w: dict[str, int], dtype: torch.dtype, normalize: bool, digits: int) -> Config:
    """Tiles of `query_grads`."""
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    if wide(w) > 80:
        return tile("query_two" if digits > 1 else "query")
    return {"BN": 64, "num_warps": 4, "num_stages": 1 if normalize else 2}


def apply_config(w: dict[str, int], dtype: torch.dtype, digits: int, products: int = 1) -> Config:
    """Tiles of the passes that write rows; products: matrices that a token is multiplied by."""
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    if wide(w) > 64 and products > 1:
        return {"BN": 64, "num_warps": 8, "num_stages": 1}
    if wide(w) == 128:
        return tile("apply_two" if digits > 1 else "apply")
    return {"BN": 64, "num_warps": 8 if wide(w) > 64 and digits > 1 else 4, "num_stages": 2}


def key_passes(w: dict[str, int], digits: int) -> tuple[int, ...]:
    """PARTs of `key_products`: dv and dk in one pass, or one after the other where their operands do not fit."""
    return (1, 2) if wide(w) > 64 and digits > 1 else (0,)


def padded(m: int) -> int:
    """MP: rows of the padded mixing matrix, whole tiles of rows."""
    rows = mix_rows(m, torch.bfloat16)
    return max(-(-m // rows) * rows, sum(split_width(m)))


def mix_rows(m: int, dtype: torch.dtype) -> int:
    """Rows of a tile of `mix`: all, or 64 where they and the columns do not fit together."""
    whole = max(16, 1 << (m - 1).bit_length())
    return min(whole, 128 if dtype != torch.float32 and m <= 128 else 64)


def pair_config(w: dict[str, int], digits: int, keys: bool = False) -> Config:
    """Tiles of the form by pairs: BM queries and BN keys, of which one stays and the other goes by."""
    goes_by = 32 if keys or digits > 1 or wide(w) > 64 else 64
    tiles = {"BM": goes_by, "BN": 64} if keys else {"BM": 64, "BN": goes_by}
    return {**tiles, "num_warps": 4 if wide(w) <= 64 else 8, "num_stages": 2}


def mix_config(m: int, dtype: torch.dtype) -> Config:
    """Tiles of `mix`."""
    k1, k2 = split_width(m)
    rows = mix_rows(m, dtype)
    if dtype == torch.float32 or m > 256:
        return {"BM": rows, "BK": min(rows, 32), "BC": 64, "num_warps": 4, "num_stages": 3}
    columns, warps, stages = WIDE["mix_many" if m > 128 else "mix"]
    warps = warps if rows > 64 or m > 128 else 4
    return {"BM": rows, "K1": k1, "K2": k2, "BC": columns, "num_warps": warps, "num_stages": stages}


def product_grid(w: dict[str, int], rows: int, programs: int) -> tuple[tuple[int], Config]:
    """(Grid, tiles) of the products of moments, cut into blocks of their rows."""
    br = min(64, max(16, 1 << (rows - 1).bit_length()))
    return (programs * -(-rows // br),), {"BR": br, "num_warps": 8 if wide(w) > 64 else 4, "num_stages": 1}


def mix_parts(heads: int, tiles: int, columns: int, bc: int) -> tuple[int, int]:
    """(parts, tiles of columns of a part) of `mix`: four programs a multiprocessor."""
    whole = -(-columns // bc)
    parts = max(1, min(whole, round(2 * PROGRAMS / (heads * tiles))))
    chunk = -(-whole // parts)
    return -(-whole // chunk), chunk


def grads_config(m: int, dtype: torch.dtype) -> Config:
    """Tiles of `mixing_grads`."""
    if m > 64 and dtype != torch.float32:
        columns, warps, stages, rows = WIDE["grads"]
        return {"BM": rows, "BC": columns, "num_warps": warps, "num_stages": stages}
    bm = min(mix_rows(m, dtype), 64)
    columns = 32 if dtype == torch.float32 else 64 if bm > 16 else 256
    return {"BM": bm, "BC": columns, "num_warps": 4 if bm > 16 else 2, "num_stages": 3}


def reduce_parts(programs: int, widest: int, bn: int) -> tuple[int, int]:
    """(parts, tokens of a part) of a pass whose parts are added behind it: enough programs to fill the chip."""
    parts = max(1, min(-(-widest // 256), PROGRAMS // programs))
    chunk = -(-widest // (parts * bn)) * bn
    return -(-widest // chunk), chunk


def apply_parts(programs: int, widest: int, bn: int) -> tuple[int, int]:
    """(parts, tokens of a part) of a pass that only writes: up to 8 tiles a program while the chip is full."""
    tiles = max(1, min(8, programs * -(-widest // bn) // (4 * PROGRAMS)))
    chunk = tiles * bn
    return -(-widest // chunk), chunk


def column_parts(heads: int, tiles: int, columns: int, bc: int) -> tuple[int, int]:
    """(parts, tiles of columns of a part) of the sums of `mixing_grads`."""
    whole = -(-columns // bc)
    parts = max(1, min(-(-whole // 4), round(2 * PROGRAMS / (heads * tiles))))
    chunk = -(-whole // parts)
    return -(-whole // chunk), chunk
