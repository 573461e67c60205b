"""Wide heads: one block of a matrix a program, so that any width fits in registers.

What `plan.paths.by_blocks` sends here: float32 beyond 96 features (but the first order of the tokens as they are),
`polynomial` in float32 and, of more than 64 channels, of features, as a ratio or in float16 (but for the ratios that
`heads.mixture` takes), or of features of one token if it learns its coefficients (not as a ratio), the softmax pair of
more than 64 channels (features of up to 256 columns), more than 48 where passes evaluate it. The formulas are those of
`hla_kernels.hla.gradient`:

    features   tokens, features, centred ones as sums of bfloat16 numbers (planes); gradients back through the map
    tokens     moments Sum a b'; the ratio of every query; out = Sum_i source_i weight_i, for o, dq, dk and dv alike
    matrices   D x D in float32: add and scale the parts of a moment, A B + X, gradients of coefficients
    softmaxes  a ratio of both softmaxes of bfloat16 tokens, evaluated by the passes that read them; softmax_grads: what
               comes back through products of features, which those of higher order read as they are

Products of planes are exact on tensor cores; two or three have 16 or 24 bits. A head's matrices lie in two float32
workspaces (`layout`): the state, which a forward keeps for its backward, and what the backward adds. Of a ratio v has a
column of ones more, as in `hla_kernels.hla.moments`; tokens that are centred are so before they are split, values for
the mean path too: q (K - kbar)'(V - vbar) + vbar.
"""
