"""Choice of the path of a call from its form and its sizes (`path`)."""

from __future__ import annotations

import torch

from ..spec import MAX_D, Spec, Widths

PROGRAMS = 2 * 132  # programs of a reduce, two per multiprocessor of an H200
SHORT = 256  # tokens for which one launch of linear attention is faster than three, however few heads there are


def narrow(w: Widths) -> bool:
    """Whether a matrix is one block of at most 64 x 64."""
    return w.F.D1 <= 64 and w.F.D2 == 0 and w.V.D1 <= 64 and w.V.D2 == 0


def cut(w: Widths) -> bool:
    """Whether there are 64 channels and up to 16 more."""
    return w.F.D1 == w.V.D1 == 64 and 0 < w.F.D2 <= 16 and 0 < w.V.D2 <= 16


def plain(spec: Spec) -> bool:
    """Whether nothing but moments is summed."""
    return not spec.sums


def halved(spec: Spec, w: Widths, dtype: torch.dtype, own: bool) -> bool:
    """Whether a call with many heads uses `heads.summed`: higher orders, plain or as a ratio, and centred keys, with
    float16 factors (`heads.halves`) whose products fit in registers and whose results are rounded to bfloat16. own: no
    padding, and one key head per query head. Only combinations tested on a GPU: assemblers are prone to errors in
    kernels that fill the registers."""
    fits = w.F.D == w.V.D and w.F.D in (64, 72)
    higher = spec.op in ("hla2", "ahla", "hla3")
    centred = spec.center == "k" and not spec.normalize and (higher or spec.op == "linear_attention")
    form = centred or (higher and spec.center is None and not spec.mean_path)
    return own and fits and form and spec.ridge == 0 and dtype == torch.bfloat16


def few_heads(batch_heads: int, n: int, most: int) -> int | torch.SymInt:
    """Return 1 if one program per head, with at most so many tokens, does not fill the GPU, else 0."""
    return 1 - torch.sym_min(1, batch_heads // 128) * (1 - torch.sym_min(1, n // (most + 1)))


def saves(
    spec: Spec, w: Widths, batch_heads: int, n: int, dtype: torch.dtype, own: bool, save: bool = True
) -> int | torch.SymInt:
    """Return 1 if the forward uses several programs per head, which saves its moments for the backward, else 0; `save`:
    a backward follows. No branch on sizes, which may be symbolic while compiling."""
    small, first = narrow(w) or cut(w), spec.op == "linear_attention"
    long: int | torch.SymInt = 1
    if first and (narrow(w) or (small and not save)):
        long = torch.sym_min(1, n // (SHORT + 1))
    if first and plain(spec) and small:
        return long * few_heads(batch_heads, n, 512 if save else 2048)
    few = long * few_heads(batch_heads, n, 2048)
    if halved(spec, w, dtype, own) and narrow(w):  # about three heads per multiprocessor may be longer
        few *= 1 - torch.sym_min(1, batch_heads // 384) * (1 - torch.sym_min(1, n // 4609))
    return few if (spec.alone(dtype) and small) or halved(spec, w, dtype, own) else 1


def path(
    spec: Spec, w: Widths, batch_heads: int, n: int, dtype: torch.dtype, own: bool, save: bool = True
) -> str:
    """The name in `launch.PATHS` of the forward and the backward of a call, or without `save` of a forward that
    no backward follows."""
    split = bool(saves(spec, w, batch_heads, n, dtype, own, save))
    if spec.alone(dtype):
        return "first_split" if split else "first"
    if split:
        return "split"
    return "summed" if halved(spec, w, dtype, own) else "heads"


def too_wide(spec: Spec, w: Widths, dtype: torch.dtype) -> str | None:
    """Return the reason why the matrices of a head are too large for the kernels, or None."""
    width = max(w.F.D, w.V.D)
    if dtype == torch.float32 and spec.op == "polynomial":
        return "polynomial has no Triton form in float32"
    exact = spec.op != "linear_attention" or not plain(spec) or spec.feature_map == "elu1"  # products are "ieee"
    if dtype == torch.float32 and width > 96 and exact:
        return f"{width} features in float32 are more than 96"
    if spec.op in ("hla3", "polynomial") and w.wide > 96 and not w.F.D == w.V.D == MAX_D:
        widths = f"{w.F.D} features and {w.V.D} value channels"
        return f"{spec.op} of {widths} has no Triton form: beyond 96, both must be {MAX_D}"
    if spec.op == "polynomial" and spec.ridge and w.wide > 96:
        return f"polynomial of {width} features with a ridge, more than 96, has no Triton form"
    most = 64 if dtype != torch.bfloat16 else 72 if spec.normalize else MAX_D
    if spec.op == "polynomial" and width > most:
        return f"polynomial of {width} features, more than {most}, has no Triton form in {dtype}"
    return None
