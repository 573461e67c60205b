"""Adaptive multipole attention: exact for the key tiles with large errors, pooled elsewhere.

Symbols. The token grid is cut into query tiles u and key tiles b; of the n_b keys of a tile k_b is the mean, var_b the
variance of each channel, v_b the mean value. s_tj = s q_t.k_j are the scores, q_t below has the scale s.

    a_tb = q_t.k_b,  b_tb = a_tb + q_t^2.var_b / 2     the score of a tile, and with the second cumulant
    exact  w_tj = exp(s_tj)      j in a key tile that is chosen for the tile of t, or t or j not on the grid
    far    w_tj = exp(b_tb)      j in another tile b
    o_t = (sum_j w_tj v_j + m_t q_t'H) / sum_j w_tj
    m_t = sum of exp(b_tb) over far tiles / number of tiles,  H = sum_b sum_(j in b) (k_j - k_b) v_j'

The far field of degree 0 with the variance is that of pooled keys; the first-order term with one D x D matrix per head
is that of piecewise sparse attention (PISA, arXiv 2602.01077). The tiles are chosen for each query tile and head by the
expected error, mass times variance of the scores (`routing`); the choice is deterministic and has no gradient. With
density=1 everything is exact, as are key tiles of one token.

Multiplications per query and head, T tiles, density r: 5 T D for the far field, 4 T D for a choice by "error" or
"mass", 2 r N D for the exact one.

Reading order: layout, reference, pooling, routing, torch_form, fused, forms.
"""
