"""Block mixing (MHLA): moments of blocks, mixed for each block of queries.

Token-level multi-head linear attention.

Symbols. Token t lies in block b(t) of M; m [M, M] is the mixing matrix, row = block of the query; s the scale of a
moment, M / N by default; phi the feature map, applied to q and k.

    moments of block b   P_b = s Sum_{t in b} k v'    S_b = s Sum k k'    C_b = s Sum q v'    R_b = s Sum k q'
    mixed for block i    P~_i = Sum_b m_ib P_b, and so for S, C, R
    read by t in block i la  o = q P~_i        ahla  o = q R~_i P~_i        hla2  o = q S~_i C~_i
    ratio                divided by the same with v = 1, plus eps, with the row of m of the query's block

With the default scale and uniform mixing, m_ib = 1 / M, a mixed moment is 1 / N times the sum over all tokens, whatever
the sizes of the blocks: the result equals two-sided `linear_attention`, `ahla` or `hla2`. Any row of m that sums to one
keeps the scale of a mean.

Reading order: layout (which token lies in which block), reference (the definition), torch_form, causal,
fused (the Triton form), operator (custom operators), streaming (causal blocks with a state). First order is MHLA:
o_i = q (Sum_b m_ib S_b) / (q . Sum_b m_ib z_b), where the denominator uses the row of the query's block; the released
code divides by something else (tests/ops/test_errata.py). The higher orders are specific to this package.
"""
