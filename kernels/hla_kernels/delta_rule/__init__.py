"""Delta-rule family: linear attention with diagonal plus low-rank state transitions.

    S_t = (D_t - A_t B_t') S_{t-1} + K_t V_t'      o_t = S_t' q_t      S [D, Dv] per head, D_t = diag(exp(log_f_t))

A_t, B_t [D, r] with r = 0 to 3 columns, K_t [D, s], V_t [Dv, s] with s = 1 to 3. `rules`: arguments of the published
members (HDLA, DeltaNet, gated DeltaNet and DeltaProduct, KDA, GLA, RetNet, Mamba-2, RWKV-7). `reference`: the
recurrence token by token. `chunked`: the same in chunks of tokens, or over frames. `operator`: the custom operator.
`fused`: its Triton form, with the kernels in `walk` and `gradients` and their `tiles`. `call`: checks, and the state
between segments of tokens.
"""
