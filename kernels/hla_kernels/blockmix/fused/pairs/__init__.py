"""First-order block mixing of few tokens by token pairs, tile by tile, instead of moments.

With s_ij = phi(q_i).phi(k_j), the weight w_ij = s m_b(i)b(j) s_ij and r_i = 1 / (sum_j w_ij + eps) (without the ratio
r_i = 1):

    o_i = r_i sum_j w_ij v_j
    e_ij = r_i (do_i.v_j - r_i sum_l w_il do_i.v_l)      the gradient of w_ij (without the ratio r_i do_i.v_j)
    dq_i = s sum_j m e_ij phi(k_j)      dk_j = s sum_i m e_ij phi(q_i)      dv_j = sum_i r_i w_ij do_i
    dm_ab = s sum of s_ij e_ij over the tokens i of block a and j of block b

This takes 9 N^2 D multiplications per head, forward and backward, and avoids moments, which take D / (tokens per block)
times the memory of the tokens. Nothing is saved for the backward. Reading order: tiles, kernels, launch.
`spec.by_pairs` decides when this form runs.
"""
