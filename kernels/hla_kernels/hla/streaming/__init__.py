"""Calls that carry a state from one segment of tokens to the next.

Reading order: recurrent (the serial algorithm, which defines a state), contents (tensors of every state and their
shapes), stream (two-sided calls with a state, read-outs), summaries and merge (concatenation of segments). Causal calls
with a state run the chunk-parallel form, `hla.causal`.
"""
