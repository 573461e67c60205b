"""Adaptive multipole attention: exact for the key tiles with large errors, pooled elsewhere.

Symbols. The token grid is cut into query tiles u and key tiles b. A key tile has n_b keys with mean k_b and variance
var_b per channel, and mean value v_b. s_tj = s q_t.k_j are the scores; below, q_t includes the scale s.

    a_tb = q_t.k_b                                     score of a tile, the mean of its s_tj
    exact  w_tj = exp(s_tj)      j in a key tile selected for the tile of t, or t or j not on the grid
    far    w_tj = exp(a_tb)      j in another tile b
    o_t = (sum_j w_tj v_j + m_t q_t'H) / sum_j w_tj
    m_t = sum of exp(a_tb) over far tiles / number of tiles,  H = sum_b sum_(j in b) (k_j - k_b) v_j'

The far field is pooled attention (degree 0) with an optional first-order term of one D x D matrix per head, as in
piecewise sparse attention (PISA, arXiv 2602.01077). far="variance" adds the second cumulant q_t^2.var_b / 2 to a_tb
instead; it runs in torch, and is no closer to softmax than far="mean". Tiles are selected per query tile and head by
the expected error, mass times variance of the scores (`routing`). The selection is deterministic and has no gradient.
The result is exact with density=1, or with key tiles of one token.

Multiplications per query and head for T tiles and density r: 2 T D for the far field, T D for a selection by "error" or
"mass", 2 r N D for the exact field.

Reading order: layout, reference, pooling, routing, torch_form, fused.
"""
