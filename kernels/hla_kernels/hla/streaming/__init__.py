"""Calls that carry a state from one segment of tokens to the next.

Reading order: recurrent (one token at a time: what a state is), contents (the tensors of every state and their shapes),
stream (two-sided calls with a state, read-outs), summaries and merge (putting one segment behind another). Causal calls
with a state run the chunk-parallel form, `hla.causal`.
"""
