"""Attention over pairs of tokens: definitions, and 2-simplicial attention in windows of a grid.

Symbols. Each output token i reads pairs (j, k) of tokens, with two keys k1, k2 and two values v1, v2 per token; s is
the scale, * the elementwise product.

    product     o_i = mean_j (q1_i.k1_j) (q2_i.k2_j) .. v_j, two factors: triple, three: quad
    2-simplex   o_i = sum_jk p_ijk v1_j * v2_k, p = softmax over (j, k) of s sum_d q_id k1_jd k2_kd
    Strassen    the same with the scores s (q_i.k1_j + k1_j.k2_k + k2_k.q_i)

`reference` has all of them without a limit on the pairs, `window` the 2-simplex for pairs of neighbours. Sources:
2-simplicial attention, arXiv 2507.02754, Eq. 5 to 7; Strassen attention, arXiv 2501.19215, section 3.
"""
