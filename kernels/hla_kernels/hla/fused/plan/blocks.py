"""Choice of the calls that run by blocks of matrices (`fused.blocks`), and the tiles of its kernels."""

from __future__ import annotations

import torch

from ..spec import MAX_D, Spec


def blocked(spec: Spec, d: int, dv: int, dtype: torch.dtype) -> bool:
    """Whether a call runs by blocks: its matrices fit neither in registers nor in shared memory, or need float32
    accuracy on tensor cores, or are faster by blocks."""
    width = max(2 * d if spec.feature_map == "softmax_pair" else d, dv)
    mapped = spec.feature_map not in (None, "identity")
    if spec.op == "polynomial" and width > 64 and (mapped or spec.normalize or dtype == torch.float16):
        return True
    if spec.op == "polynomial" and dtype == torch.float32:
        return True
    if 48 < d <= 64 and spec.op != "polynomial" and softmaxes(spec, dtype, True):
        return True
    plain = spec.op == "linear_attention" and not spec.sums and not mapped
    return width > MAX_D or (dtype == torch.float32 and width > 96 and not plain)


def block_config(kernel: str, width: int = 128, digits: int = 1) -> dict[str, int]:
    """Return the tiles of the kernels of `blocks`; width: columns of a result; digits: of `tokens.add_products`.

    Tensor cores, which truncate their accumulator, sum at most 32 tokens. Chained products use four warps for 64 rows;
    with eight warps, the layouts of the two products would differ.
    """
    cols = 128 if width > 64 else 64
    warps = cols // 16 if digits == 1 else 4
    if kernel in ("split", "slopes"):
        return {"BN": 32, "num_warps": 4, "num_stages": 1}
    if kernel == "sums":
        return {"BN": 32, "num_warps": 4, "num_stages": 2}
    if kernel == "product":
        return {"ROWS": 32, "COLS": 32, "DEPTH": 16, "num_warps": 1, "num_stages": 3}
    if kernel == "moments":
        return {"ROWS": 64, "COLS": cols, "BN": 32, "num_warps": warps, "num_stages": 3}
    return {"BN": 64, "COLS": cols, "INNER": 16 if kernel == "ratio" else 32, "num_warps": warps, "num_stages": 3}


def softmaxes(spec: Spec, dtype: torch.dtype, save: bool) -> bool:
    """Whether a call by blocks evaluates the softmax pair in the passes that read it (`blocks.softmaxes`); `polynomial`
    does so only in a forward without backward."""
    form = spec.normalize and spec.center is None and not spec.mean_path and (spec.op != "polynomial" or not save)
    return spec.feature_map == "softmax_pair" and form and dtype == torch.bfloat16


def pair_config(kernel: str, width: int) -> dict[str, int]:
    """Return the tiles of `blocks.softmaxes` ("divide": of its ratio); width: channels. These passes are bound by
    latency: more warps with fewer registers are faster unless they spill."""
    wide = width > 80
    if kernel == "features":
        return {"BN": 32, "num_warps": 4, "num_stages": 1}
    if kernel == "grads":
        return {"BN": 128, "num_warps": 8, "num_stages": 1}
    if kernel == "values":  # eight warps are slower at 64
        return {"BN": 32, "num_warps": 8 if width > 64 else 4, "num_stages": 3} | ({"maxnreg": 128} if wide else {})
    if kernel == "tokens":
        return {"BN": 64, "num_warps": 8, "num_stages": 1} if wide else {"BN": 64, "num_warps": 4, "num_stages": 2}
    if kernel == "moments":
        columns = {"COLS": 64} if 64 < width <= 80 else {"COLS": 128}
        return {"ROWS": 64, **columns, "BN": 32 if wide else 64, "num_warps": 4, "num_stages": 3}
    if kernel == "divide" and width > 96:
        return {"BN": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168}
    return {"BN": 64, "num_warps": 8 if wide else 4, "num_stages": 2}
