"""Four published formulas shown wrong, and ours shown right, each against the masked matrix definition in float64.

1-3: Zhang et al., Higher-order Linear Attention, arXiv 2510.27258. 4: the released code of MHLA (token-level multi-head
linear attention) against its paper.
"""

from functools import reduce

import torch

import hla_kernels as hk
from tests.ops.cases import error, literal, tokens

G = 0.8
N = 13


def one_head():
    """q, k, v [N, D] of one head, and the same as operator inputs [1, N, 1, D]."""
    x = tokens(N, b=1, h=1, hk=1, d=5, dv=4)
    return [t[0, :, 0] for t in x], x


def outer(a, b):
    return a[:, None] * b[None, :]


def tree(merge, leaves):
    """A balanced fold."""
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return merge(tree(merge, leaves[:middle]), tree(merge, leaves[middle:]))


def segment_states(op, x, **options):
    """Mergeable states of uneven segments."""
    cuts = [(0, 1), (1, 4), (4, 5), (5, 11), (11, N)]
    return [getattr(hk, op)(*[t[:, a:b] for t in x], **options, return_state="mergeable")[1] for a, b in cuts]


def test_decayed_second_order_merge():
    """Section 4: G_AB = rho_B G_A + G_B + S_B (rho_B C_A) with decayed S is not associative, nor equal to its own
    serial rule."""
    (q, k, v), x = one_head()

    def published(a, b):
        rho, s, c, g = b
        return a[0] * rho, rho * a[1] + s, rho * a[2] + c, rho * a[3] + g + s @ (rho * a[2])

    leaves = [(G, outer(k[t], k[t]), outer(q[t], v[t]), torch.zeros(5, 4, dtype=torch.float64)) for t in range(N)]
    left, balanced = reduce(published, leaves)[3], tree(published, leaves)[3]
    assert error(left, balanced) > 0.01
    options = {"causal": True, "decay": G, "decay_rule": "paper"}
    truth = literal("hla2", *x, **options)[0, -1, 0]  # the serial rule, unrolled into a masked matrix
    for g, s, c in ((fold[3], fold[1], fold[2]) for fold in (reduce(published, leaves), tree(published, leaves))):
        assert error(q[-1] @ (s @ c - g), truth) > 0.01

    states = segment_states("hla2", x, **options)
    for ours in (reduce(hk.merge, states), tree(hk.merge, states)):
        s, c, g = (ours.tensors[name][0, 0, 0] for name in ("S", "C", "G"))
        assert error(q[-1] @ (s @ c - g), truth) < 1e-12


def test_paper_rule_is_not_the_masked_operator():
    """Its serial rule itself is not masked HLA2 with decay: tokens i > j do not cancel. The cascade is, by
    construction."""
    _, x = one_head()
    paper = hk.hla2(*x, causal=True, decay=G, decay_rule="paper")
    cascade = hk.hla2(*x, causal=True, decay=G)
    assert error(paper, cascade) > 0.01
    assert error(hk.hla2(*x, causal=True, decay_rule="paper"), hk.hla2(*x, causal=True)) < 1e-12


def test_decayed_ahla_merge():
    """Section 6: E_AB = rho_B E_A + E_B + R_B (rho_B P_A) needs an undecayed R; with R_AB = rho_B R_A + R_B it is
    wrong."""
    (q, k, v), x = one_head()

    def merge(r_decay):
        def f(a, b):
            rho, r, p, e = b
            return a[0] * rho, (rho if r_decay else 1) * a[1] + r, rho * a[2] + p, rho * a[3] + e + r @ (rho * a[2])

        return f

    leaves = [(G, outer(k[t], q[t]), outer(k[t], v[t]), outer(k[t], (q[t] @ k[t]) * v[t])) for t in range(N)]
    truth = literal("ahla", *x, causal=True, decay=G)[0, -1, 0]
    assert error(q[-1] @ reduce(merge(True), leaves)[3], truth) < 1e-12  # a left fold over tokens hides the error
    assert error(q[-1] @ tree(merge(True), leaves)[3], truth) > 0.01
    assert error(q[-1] @ tree(merge(False), leaves)[3], truth) < 1e-12
    ours = tree(hk.merge, segment_states("ahla", x, causal=True, decay=G))
    assert error(q[-1] @ ours.tensors["E"][0, 0, 0], truth) < 1e-12


def test_third_order_identity():
    """Theorem 7.1 / Eq 7.5: the increment of S S^Q P - G1 - G2 - G3 drops the generic triples (i, u, j)."""
    (q, k, v), x = one_head()
    zero = torch.zeros(5, 5, dtype=torch.float64)
    s, sq, p = zero, zero, zero[:, :4]
    published, correct = p, p
    for t in range(N):
        dk, dq, dp = outer(k[t], k[t]), outer(q[t], q[t]), outer(k[t], v[t])
        published = published + s @ dq @ dp + dk @ sq @ dp + dk @ dq @ p + dk @ dq @ dp
        correct = correct + (s + dk) @ dq @ (p + dp)
        s, sq, p = s + dk, sq + dq, p + dp
    truth = literal("hla3", *x, causal=True)[0, -1, 0]
    assert error(q[-1] @ published, truth) > 0.1
    assert error(q[-1] @ correct, truth) < 1e-12
    assert error(hk.hla3(*x, causal=True)[0, -1, 0], truth) < 1e-12
    for decay in (None, G):
        options = {"causal": True, "decay": decay}
        ours = tree(hk.merge, segment_states("hla3", x, **options))
        assert error(q[-1] @ ours.tensors["F"][0, 0, 0], literal("hla3", *x, **options)[0, -1, 0]) < 1e-12


def test_mhla_denominator():
    """Released: n_{i,p} = sum_b m_ib (q_{b,p}.z_b), which mixes the queries of other blocks; paper: q_{i,p}.(sum_b m_ib
    z_b)."""
    blocks, width, d = 4, 6, 5
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(blocks, width, d, generator=gen, dtype=torch.float64) for _ in range(3))
    mix = torch.rand(blocks, blocks, generator=gen, dtype=torch.float64)

    def outputs(q, released):
        kv = torch.einsum("ib,bde->ide", mix, k.mT @ v)
        z = k.sum(1)
        if released:
            total = torch.einsum("ib,bpd,bd->ip", mix, q, z)
        else:
            total = torch.einsum("ipd,ib,bd->ip", q, mix, z)
        return (q @ kv) / total[..., None]

    changed = q.clone()
    changed[0, 2] *= 3  # one token's query
    for released, leaks in ((True, True), (False, False)):
        difference = (outputs(changed, released) - outputs(q, released)).abs().amax(-1)
        difference[0, 2] = 0
        assert bool((difference > 1e-6).any()) == leaks
    x = [t.reshape(1, blocks * width, 1, d) for t in (q, k, v)]
    ours = hk.mhla(*x, mix, grid=(blocks * width,), blocks=(blocks,), feature_map="identity", eps=0.0)
    assert error(ours.reshape(blocks, width, d), outputs(q, released=False)) < 1e-12
    assert error(ours.reshape(blocks, width, d), outputs(q, released=True)) > 0.1
