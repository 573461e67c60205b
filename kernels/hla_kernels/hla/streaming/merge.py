"""merge: combine the states of two neighbouring segments. read: two-sided read-out of queries.

Two-sided states add. Causal states form a semidirect monoid, rho_B = gamma^(n_B):

    linear  P  = rho_B P_A + P_B                        (also S, C and every running sum)
    hla2    F  = rho_B F_A + F_B + s rho_B S_A C0_B
    ahla    E  = rho_B E_A + E_B + s rho_B R_B P_A
    hla3    F  = rho_B F_A + F_B + s rho_B (S_A X0_B + Y0_B P_A + s S_A W_B P_A)
            X0 = X0_A + X0_B + s W_B P_A      Y0 = Y0_A + Y0_B + s S_A W_B      W = W_A + rho_A W_B
    paper   G  = rho_B G_A + G_B + (rho_B / gamma) S0_B C_A

C0, R, S0 are undecayed and add. These correct the published decayed merges (Zhang et al., arXiv 2510.27258, sections
4.3, 6.3 and 7.3), which are not associative or do not equal their own serial rules; tests/ops/test_errata.py shows
both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...options import Options, is_paper
from .checks import check_names
from .state import State, merge_obstacle, missing_summaries

UNDECAYED = ("C0", "R", "S0")


def merge(a: State, b: State) -> State:
    """Merge the states of segment a and of segment b, which follows it (the order matters if causal).

    a, b: states of the same operator, options, decay and shapes. Two-sided: sums add. Causal: the monoids above; b must
    have the summaries of `return_state="mergeable"`, and the result is mergeable if both are. Associative. Raises
    ValueError if the states do not match, if b has no summaries, and for causal centring of higher orders, which has no
    finite merge.
    """
    for state in (a, b):
        if not isinstance(state, State):
            raise ValueError(f"merge needs two States returned with return_state, got {type(state).__name__}.")
        check_names(state)
    if a.packed and b.packed:
        return merge(a.unpack(), b.unpack()).pack()
    a, b = a.unpack(), b.unpack()
    _check(a, b)
    if not a.options.causal:
        return State(a.op, a.options, a.n + b.n, {name: x + b.tensors[name] for name, x in a.tensors.items()})
    x, y = a.tensors, b.tensors
    rho_a, rho_b = ((x["gamma"].log() * state.n).exp() if "gamma" in x else 1.0 for state in (a, b))
    shared = [name for name in x if name in y]
    out = {name: x[name] + y[name] if name in UNDECAYED else rho_b * x[name] + y[name] for name in shared}
    if "gamma" in x:
        out["gamma"] = x["gamma"]
    s = 1.0 if a.options.scale is None else a.options.scale
    if is_paper(a.op, a.options):
        out["G"] = out["G"] + (rho_b / x["gamma"]) * (y["S0"] @ x["C"])
    elif a.op == "hla2":
        out["F"] = out["F"] + s * rho_b * (x["S"] @ y["C0"])
    elif a.op == "ahla":
        out["E"] = out["E"] + s * rho_b * (y["R"] @ x["P"])
    elif a.op == "hla3":
        _merge_third(x, y, out, s, rho_a, rho_b)
    return State(a.op, a.options, a.n + b.n, out)


Tensors = dict[str, Tensor]


def _merge_third(x: Tensors, y: Tensors, out: Tensors, s: float, rho_a: Any, rho_b: Any) -> None:
    """Merge third-order states with four products of D x D matrices."""
    seen = s * (x["S"] @ y["W"])  # S_A W_B
    out["F"] = out["F"] + s * rho_b * (x["S"] @ y["X0"] + y["Y0"] @ x["P"] + seen @ x["P"])
    if "W" in x:
        out["X0"] = x["X0"] + y["X0"] + s * (y["W"] @ x["P"])
        out["Y0"] = x["Y0"] + y["Y0"] + seen
        out["W"] = x["W"] + rho_a * y["W"]


def _check(a: State, b: State) -> None:
    for name, x, y in (("operator", a.op, b.op), *zip(Options._fields, a.options, b.options, strict=True)):
        if x != y:
            raise ValueError(f"merge needs states of the same {name}, got {x!r} and {y!r}.")
    obstacle = merge_obstacle(a.op, a.options)
    if obstacle is not None:
        raise ValueError(obstacle)
    if missing_summaries(b):
        raise ValueError(
            f"merge needs the summaries {', '.join(missing_summaries(b))} of its right state: "
            'compute it with return_state="mergeable".'
        )
    for name in a.tensors:
        if name in b.tensors and a.tensors[name].shape != b.tensors[name].shape:
            shapes = tuple(a.tensors[name].shape), tuple(b.tensors[name].shape)
            raise ValueError(f"merge needs states of the same shapes, got {name} {shapes[0]} and {shapes[1]}.")
    compare = "gamma" in a.tensors and not torch.compiler.is_compiling() and a.tensors["gamma"].device.type == "cpu"
    if compare and not torch.equal(a.tensors["gamma"], b.tensors["gamma"]):
        raise ValueError("merge needs states of the same decay, got two different decay tensors.")
