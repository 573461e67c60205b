"""Higher-order linear attention: first, second and third order, and their per-head mixture.

Symbols. q_t, k_t, v_t: query, key, value of token t after the feature map phi; s the scale of a moment; lambda the
ridge.

    moments     P = s Sum k v'   S = s Sum k k'   C = s Sum q v'   R = s Sum k q'   Qm = s Sum q q'
    two-sided   linear  o = q P        weights  s A           A = phi(Q) phi(K)'
                hla2    o = q S C               s^2 A A'
                ahla    o = q R P               s^2 A A
                hla3    o = q S Qm P            s^3 A A' A
    causal      compositions of LA(q, k, v)_t = s Sum_{j<=t} gamma^(t-j) (q_t.k_j) v_j:
                hla2  LA(q, LA(q,k,k), v)    ahla  LA(q, k, LA(q,k,v))    hla3  LA(q, LA(q,k,k), LA(q,k,v))

Reading order: reference (definitions), moments, two_sided and gradient (one matrix per head), chunked and causal
(chunk-parallel), streaming (states: segments, merge). Zhang et al., Higher-order Linear Attention, arXiv
2510.27258; the causal compositions replace the paper's (S, C, G) recurrences and are equal to its masked operators
without decay.
"""
