"""Mixers whose tokens are shared by ranks equal the mixer on all tokens, forward and backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops.ranks.processes import gathered, noise, ranks_of
from zoo.mixers import MIXERS, Context, build_mixer

GRID, WIDTH, HEADS = (4, 2, 3), 8, 3
SHARES = {2: {"both": (13, 11)}, 3: {"not the second": (14, 0, 10)}}
BLOCKED: dict[str, Any] = {"blocks": [2, 1, 2]}
OPTIONS: dict[str, dict[str, Any]] = {"mhla": BLOCKED, "mhla2": BLOCKED, "multipole": BLOCKED}
SHARED = [name for name, kind in MIXERS.items() if kind.shares_tokens]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, OPTIONS.get(name, {})) for name in SHARED},
    "gains": ("rala", {"gains": True}),
    "causal": ("hla3", {"causal": True, "decay": 0.9}),
    "frames": ("ahla", {"causal": "frame"}),
    "adaptive": ("multipole", {"select": "error", "density": 0.5, "q_tile": 4, "k_tile": 2, "branch": "la"}),
    "branch of blocks": ("multipole", {"density": 0.5, "q_tile": 4, "k_tile": 2, "branch": "mhla", **BLOCKED}),
}


def operate(case: str, shares: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """o and the gradients of a mixer; with `shares`, of the tokens of this rank."""
    name, options = CASES[case]
    torch.manual_seed(0)
    layer = {"dim": HEADS * WIDTH, "num_heads": HEADS, "head_dim": WIDTH, "grid": GRID, "dtype": torch.float64}
    mixer = build_mixer(name, **layer, **options, grid_dims=3)
    for p in mixer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    tokens = {n: noise(2, 24, HEADS, WIDTH, seed=seed) for seed, n in enumerate(("q", "k", "v", "grad"))}
    if shares is not None:
        assert not mixer.why_not_shared()
        mixer.share(dist.group.WORLD)
        tokens = {name: t.split(shares, 1)[dist.get_rank()] for name, t in tokens.items()}
    grad = tokens.pop("grad")
    leaves = {n: t.clone().requires_grad_() for n, t in tokens.items()}
    o = mixer(**leaves, ctx=Context(x=leaves["q"].detach().flatten(2), grid=GRID))
    o.backward(grad)
    learned = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mixer.named_parameters()}
    return {"o": o.detach(), **{n: t.grad for n, t in leaves.items()}, **learned}


ranks = ranks_of(operate, CASES, SHARES)


@pytest.mark.parametrize("case", CASES)
def test_a_mixer_sees_the_tokens_of_all_ranks(ranks, case):
    wanted = operate(case)
    for shares in SHARES[len(ranks)]:
        for name, whole in wanted.items():
            parts = [rank[f"{case}, {shares}"][name] for rank in ranks]
            found = gathered(parts, whole) if name in ("o", "q", "k", "v") else sum(parts)
            error = (found - whole).norm() / whole.norm().clamp(min=1e-3)
            assert error < 1e-5, f"{shares}: {name} {error}"  # moments of mesa and resolvent are at least float32


@pytest.mark.parametrize("name", SHARED)
def test_padding_of_shared_tokens_is_refused(name):
    layer = {"dim": HEADS * WIDTH, "num_heads": HEADS, "head_dim": WIDTH, "grid": GRID, "grid_dims": 3}
    mixer = build_mixer(name, **layer, **OPTIONS.get(name, {}))
    mixer.group = object()
    q = torch.randn(1, 24, HEADS, WIDTH)
    ctx = Context(x=q.flatten(2), grid=GRID, key_padding_mask=torch.ones(1, 24, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot honour a padding mask"):
        mixer(q, q, q, ctx)
