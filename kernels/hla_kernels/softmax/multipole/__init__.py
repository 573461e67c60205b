"""Multipole attention: exact for near tokens, others expanded around the mean key of their block.

Symbols. s_tj = s q_t.k_j: scores. b: a block of the token grid with n_b tokens and mean key k_b. a_tb = s q_t.k_b: mean
of s_tj over the block. r_tj = s_tj - a_tb for j in block b.

    near   w_tj = exp(s_tj)                 j within `radius` of t along every axis, or t or j not on the grid
    far    w_tj = exp(a_tb) f(r_tj)         f = 1, 1 + r or 1 + r + r^2 / 2 for degree 0, 1, 2: exp around a_tb
    o_t = sum_j w_tj v_j / sum_j w_tj

The r_tj of a block sum to zero, so with degree 1 a block without near tokens has the total weight n_b exp(a_tb), and
near tokens only increase it, since exp(r) >= 1 + r. The denominator is therefore positive. Single weights are positive
for degree 0 and 2, but not always for degree 1. Blocks of one token are exact. A radius as large as the grid gives
softmax. With one block, the far field is the expansion of softmax around uniform weights (`softmax.taylor` for degree
2).

The split into an exact near field and expansions of far groups is the fast multipole method's (Greengard and Rokhlin,
J. Comput. Phys. 73, 1987).

Two equivalent orders of products; D = Dv, M blocks, V tokens of a block and its neighbourhood:
    by tokens  weights of all pairs, 3 N D multiplications per token
    by blocks  2 M D + M D^2 (degree 1; about M D^3 / 2 for degree 2) + 3 V D multiplications per token, linear in N for
               fixed M except for V >= N / M; cheaper from about N = 500 on at D = 64 with 4 x 4 blocks, radius 2,
               degree 1
The order with fewer multiplications runs in `torch_form`, for some queries or blocks at a time, so that memory is
bounded. There is no Triton form: `softmax.adaptive`, which has one, is closer to softmax with as many exact keys.

Reading order: reference, layout, by_tokens, by_blocks, torch_form.
"""
