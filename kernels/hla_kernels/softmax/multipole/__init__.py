"""Multipole attention: exact for near tokens, others expanded around the mean key of their block.

Symbols. s_tj = s q_t.k_j the scores; b a block of the token grid with n_b tokens, k_b their mean key; a_tb = s q_t.k_b,
which is the mean of s_tj over the block; r_tj = s_tj - a_tb for j in block b.

    near   w_tj = exp(s_tj)                 j within `radius` of t along every axis, or t or j not on the grid
    far    w_tj = exp(a_tb) f(r_tj)         f = 1, 1 + r or 1 + r + r^2 / 2 for degree 0, 1, 2: exp around a_tb
    o_t = sum_j w_tj v_j / sum_j w_tj

The r_tj of a block sum to zero, so that a block without near tokens weighs n_b exp(a_tb) by degree 1, and since
exp(r) >= 1 + r near tokens only add to that: the divisor is positive, though single weights need not be (those of
degree 0 and 2 are). A block of one token is exact, and a radius as large as the grid is softmax. With one block, what
is not near is the expansion of softmax around uniform weights, that of `softmax.taylor` for degree 2.

The split into an exact near field and expansions of far groups is the fast multipole method's (Greengard and Rokhlin,
J. Comput. Phys. 73, 1987).

Two orders of the products, one result; D = Dv, M blocks, V tokens around a block within the radius:
    by tokens  the weights of all pairs, 3 N D multiplications per token
    by blocks  2 M D + M D^2 (degree 1; about M D^3 / 2 for degree 2) + 3 V D a token, linear in N for fixed M, but for
               V, which is at least N / M: from about N = 500 on at D = 64 with 4 x 4 blocks, radius 2, degree 1
In torch (`torch_form`) and in `fused`, the Triton form in bfloat16 and float16, which never writes the weights, the one
with fewer multiplications runs; in Triton by blocks only with degree 0 and 1 (`fused.plan.pools`), and where it reads
all keys of more than 32,768 tokens, `auto` takes torch's (`forms`).

Reading order: reference, layout, heads, by_tokens, by_blocks, torch_form, fused, forms.
"""
