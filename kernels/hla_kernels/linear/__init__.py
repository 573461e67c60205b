"""Causal linear attention with decay, LA(q, k, v)_t = Sum_{j<=t} gamma^(t-j) (q_t.k_j) v_j: the one stage that every
causal operator is a composition of (`chunked.stage`)."""
