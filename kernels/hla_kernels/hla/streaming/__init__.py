"""Calls that carry a state from one segment of tokens to the next.

A causal state after one more token:

    S = g S + k k'      P = g P + k v'      u = s S q + lambda q      r = s P'q
    linear o = r        hla2 F = g F + u v', o = s F'q      ahla E = g E + k r', o = s E'q + lambda r
    hla3   F = g F + u r', o = s F'q      paper C = g C + q v', G = g G + k (k'C before the token), o = s^2 (S C - G)'q

Reading order: contents (tensors of every state and their shapes), stream (two-sided calls with a state, read-outs),
merge (concatenation of segments). Causal calls with a state run the chunk-parallel form, `hla.causal`.
"""
