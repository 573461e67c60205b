"""Positions of the matrices of a head in its two workspaces."""

from __future__ import annotations

from typing import NamedTuple

from ..spec import Spec

MOMENTS = {"linear_attention": "P", "hla2": "SC", "ahla": "RP", "hla3": "SWP", "polynomial": "PSCRW"}
# moment -> its two factors
TOKENS = {"P": ("k", "v"), "S": ("k", "k"), "C": ("q", "v"), "R": ("k", "q"), "W": ("q", "q")}


class Place(NamedTuple):
    """Matrix in a workspace: index of the workspace (0 state, 1 backward), first element, rows, columns, pitch."""

    base: int
    off: int
    rows: int
    cols: int
    pitch: int


class Layout(NamedTuple):
    """Widths of a head: features f, values v, values and their ones e; `at` has every matrix by its name, `state` and
    `work` are the lengths of the two workspaces."""

    f: int
    v: int
    e: int
    at: dict[str, Place]
    state: int
    work: int


def pitch(width: int) -> int:
    """Return the pitch of a row, a multiple of 64 bytes."""
    return -(-width // 16) * 16


def features(spec: Spec, d: int, mapped: bool = True) -> int:
    """Return the number of columns of phi."""
    return 2 * d if mapped and spec.feature_map == "softmax_pair" else d


def is_centred(spec: Spec, source: str) -> bool:
    """Whether moments use centred tokens of this source: keys, queries and, for the mean path, values."""
    return {"q": spec.center == "qk", "k": spec.center is not None, "v": spec.mean_path}.get(source, False)


def layout(spec: Spec, d: int, dv: int) -> Layout:
    """Moments, U (what S is multiplied by), X (a term of a mixture), M, sums of tokens; in the backward three
    products, dM, the gradients of moments by their lower case names, the sum of the output's gradient."""
    f = features(spec, d)
    e = dv + int(spec.normalize)
    third, mixed = spec.op in ("hla3", "polynomial"), spec.op == "polynomial"
    moments = [(name, f, e if TOKENS[name][1] == "v" else f) for name in MOMENTS[spec.op]]
    first = spec.op == "linear_attention"  # whose P is M
    state = [*moments, *[("U", f, e)] * third, *[("X", f, e)] * mixed, *[("M", f, e)] * (not first)]
    state += [("sum_q", 1, f), ("sum_k", 1, f), ("sum_v", 1, dv)]
    work = [*[("SG", f, e)] * third, *[("RG", f, e), ("WSG", f, e)] * mixed]
    work += [("dM", f, e), *[(name.lower(), rows, cols) for name, rows, cols in moments] * (not first)]
    work += [("sum_g", 1, dv)]
    at, lengths = {}, []
    for base, matrices in enumerate((state, work)):
        off = 0
        for name, rows, cols in matrices:
            at[name] = Place(base, off, rows, cols, pitch(cols))
            off += rows * pitch(cols)
        lengths.append(off)
    if first:
        at["M"], at["p"] = at["P"], at["dM"]
    return Layout(f, dv, e, at, *lengths)
