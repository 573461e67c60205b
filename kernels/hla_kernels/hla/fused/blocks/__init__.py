"""Kernels for wide heads: one block of a matrix per program, so that any width fits in registers.

Calls chosen by `plan.paths.by_blocks`:

    float32      more than 96 features (except first order without options)
    polynomial   in float32; with more than 64 channels also with features, as a ratio or in float16 (except the ratios
                 of `heads.mixture`); with features of one token and learned coefficients (not as a ratio)
    softmax pair more than 64 channels (up to 256 features), or more than 48 where passes evaluate it

The formulas are in `hla_kernels.hla.gradient`.

    features   tokens, features, centred ones as sums of bfloat16 numbers (planes); gradients back through the map
    tokens     moments Sum a b'; the ratio of every query; out = Sum_i source_i weight_i, for o, dq, dk and dv alike
    matrices   D x D in float32: add and scale the parts of a moment, A B + X, gradients of coefficients
    softmaxes  a ratio of the softmax pair of bfloat16 tokens, evaluated by the passes that read it; softmax_grads: its
               gradients through products of features, for higher orders

Products of planes are exact on tensor cores; two or three planes have 16 or 24 bits. The matrices of a head lie in two
float32 workspaces (`layout`): the state, saved by the forward, and the work space of the backward. For a ratio, v has
an additional column of ones, as in `hla_kernels.hla.moments`. Centring precedes the split into planes, also of values
for the mean path: q (K - kbar)'(V - vbar) + vbar.
"""
