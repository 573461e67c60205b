"""Operators whose tokens are shared by ranks: equal to the operator on all tokens, forward and backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hla_kernels as hk
from tests.ops.ranks.processes import gathered, noise, ranks_of

GRID, BLOCKS = (4, 2, 3), (2, 1, 2)  # 24 tokens; shares cut blocks and frames
SHARES = {2: {"both": (13, 11), "one": (24, 0)}, 3: {"all": (9, 4, 11), "not the second": (14, 0, 10)}}
HEADS, KEY_HEADS, WIDTH = 6, 3, 8
CAUSAL: dict[str, Any] = {"causal": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "la": ("linear_attention", {"feature_map": "elu1", "normalize": True}),
    "ahla of many tokens": ("ahla", {"times": 44, "scale": 0.01, "mean_path": True}),  # summed in parts
    "hla2": ("hla2", {"center": "qk", "mean_path": True, "ridge": 0.1}),
    "ahla": ("ahla", {"feature_map": "relu", "normalize": True, "ridge": 0.2}),
    "hla3": ("hla3", {"center": "k", "q_scale": 0.5}),
    "polynomial": ("polynomial", {"center": "k", "mean_path": True}),
    "mhla": ("mhla", {"grid": GRID, "blocks": BLOCKS}),
    "mhla of order ahla": ("mhla", {"grid": GRID, "blocks": BLOCKS, "order": "ahla", "normalize": False}),
    "mhla of order hla2": ("mhla", {"grid": GRID, "blocks": (4, 2, 1), "order": "hla2", "feature_map": "elu1"}),
    "mhla with a prefix": ("mhla", {"grid": (22,), "blocks": (4,), "prefix": 2, "scale": 0.3}),
    "mhla with rotation": ("mhla", {"grid": GRID, "blocks": BLOCKS, "rotary": True}),
    "taylor2": ("taylor2", {"q_scale": 0.4}),
    "taylor2 of a narrow pair": ("taylor2", {"narrow": 3, "normalize": False}),
    "causal la": ("linear_attention", {**CAUSAL, "feature_map": "elu1", "normalize": True}),
    "causal la with means": ("linear_attention", {**CAUSAL, "center": "qk", "mean_path": True, "decay": 0.9}),
    "causal hla2": ("hla2", {**CAUSAL, "decay": "heads", "scale": 0.3, "ridge": 0.1}),
    "causal hla2 of the paper": ("hla2", {**CAUSAL, "decay": 0.8, "decay_rule": "paper"}),
    "causal ahla": ("ahla", {**CAUSAL, "feature_map": "relu", "normalize": True, "ridge": 0.2}),
    "causal hla3": ("hla3", {**CAUSAL, "decay": "key heads", "scale": 0.2}),
    "causal hla2 with means": ("hla2", {**CAUSAL, "center": "k", "decay": "heads"}),
    "by frames": ("ahla", {"causal": "frame", "frame": 6, "feature_map": "elu1", "normalize": True}),
    "softmax": ("softmax_attention", {"scale": 0.3}),
    "causal softmax": ("softmax_attention", CAUSAL),
    "multipole": ("multipole", {"grid": GRID, "blocks": BLOCKS, "radius": 1, "q_scale": 0.4}),
    "adaptive": ("adaptive_multipole", {"grid": GRID, "density": 0.5, "q_tile": 4, "k_tile": 2, "q_scale": 0.4}),
}  # fmt: skip


def tensor_options(op: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Learned options of a call."""
    found = {}
    if op == "polynomial":
        found["coefficients"] = noise(HEADS, 4, seed=5)
    if op == "taylor2":
        found["coefficients"] = noise(HEADS, 2, seed=5).abs()
    if op == "mhla":
        count = torch.Size(options["blocks"]).numel() + (options.get("prefix", 0) > 0)
        found["mixing"] = noise(HEADS, count, count, seed=6).softmax(-1)
    if options.get("decay") in ("heads", "key heads"):
        found["decay"] = torch.linspace(0.6, 1, HEADS if options["decay"] == "heads" else KEY_HEADS).double()
    return found


def operate(case: str, shares: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """o and the gradients of a case; with `shares`, of the tokens of this rank."""
    op, options = CASES[case]
    options = dict(options)
    times = options.pop("times", 1)
    n, shares = 24 * times, None if shares is None else tuple(times * share for share in shares)
    widths = {"q": (HEADS, WIDTH), "k": (KEY_HEADS, WIDTH), "v": (KEY_HEADS, 5), "grad": (HEADS, 5)}
    tokens = {name: noise(2, n, *shape, seed=seed) for seed, (name, shape) in enumerate(widths.items())}
    if "narrow" in options:
        tokens["q2"] = noise(2, 24, HEADS, options["narrow"], seed=8)
        tokens["k2"] = noise(2, 24, KEY_HEADS, options["narrow"], seed=9)
    angles = noise(n, WIDTH // 2, seed=7)
    if shares is not None:
        tokens = {name: t.split(shares, 1)[dist.get_rank()] for name, t in tokens.items()}
        angles = angles.split(shares)[dist.get_rank()]
    grad = tokens.pop("grad")
    learned = tensor_options(op, options)
    leaves = {name: t.clone().requires_grad_() for name, t in (tokens | learned).items()}
    options |= {name: leaves[name] for name in learned}
    if options.get("rotary"):
        options["rotary"] = (angles.cos(), angles.sin())
    if "narrow" in options:
        options["narrow"] = (leaves["q2"], leaves["k2"])
    q, k, v = (leaves[name] for name in "qkv")
    if shares is not None:
        o = hk.sharded(op, q, k, v, group=dist.group.WORLD, **options)
    else:
        o = getattr(hk, op)(q, k, v, **options)
    o.backward(grad)
    return {"o": o.detach(), **{name: t.grad for name, t in leaves.items()}}


ranks = ranks_of(operate, CASES, SHARES)


@pytest.mark.parametrize("case", CASES)
def test_an_operator_sees_the_tokens_of_all_ranks(ranks, case):
    wanted = operate(case)
    for shares in SHARES[len(ranks)]:
        for name, whole in wanted.items():
            parts = [rank[f"{case}, {shares}"][name] for rank in ranks]
            torch.testing.assert_close(gathered(parts, whole), whole, rtol=1e-9, atol=1e-9, msg=f"{shares}: {name}")
