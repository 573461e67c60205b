"""Multipole attention: softmax attention, exact for near tokens, others expanded around the mean key of their block.

Symbols. s_tj = s q_t.k_j the scores; b a block of the token grid with n_b tokens, k_b their mean key; a_tb = s q_t.k_b,
which is the mean of s_tj over the block; r_tj = s_tj - a_tb for j in block b.

    near   w_tj = exp(s_tj)                 j within `radius` of t along every axis, or t or j not on the grid
    far    w_tj = exp(a_tb) (1 + r_tj)      degree 1, exp expanded around a_tb;  degree 0: exp(a_tb)
    o_t = sum_j w_tj v_j / sum_j w_tj

The r_tj of a block sum to zero, so that a block without near tokens weighs n_b exp(a_tb), and since exp(r) >= 1 + r
near tokens only add to that: the divisor is positive, though single weights need not be. A block of one token is exact,
and so is a radius as large as the grid: then it is softmax. With one block, what is not near is the first-order
expansion of softmax around uniform weights.

The split into an exact near field and expansions of far groups is the fast multipole method's (Greengard and Rokhlin,
J. Comput. Phys. 73, 1987). Reading order: reference, layout, torch_form.
"""
