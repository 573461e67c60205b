"""Second-order Taylor attention: softmax expanded around uniform weights, o = vbar + residuals.

Symbols. s_tj = s q_t.(k_j - kbar) the scores with centred keys, to which softmax is invariant; r_tj the scores of the
degree-2 term, s_tj or those of a narrower pair of queries and keys; nu_j = v_j - vbar; c = (c1, c2) of a head.

    weights    w_tj = c1 s_tj + c2 r_tj^2 / 2
    plain      o_t = vbar + mean_j w_tj nu_j
    ratio      o_t = vbar + (mean_j w_tj nu_j) / (1 + c2 mean_j r_tj^2 / 2)

With c = (1, 1) the ratio is exactly sum_j f(s_tj) v_j / sum_j f(s_tj), f(x) = 1 + x + x^2 / 2, the degree-2 Taylor
polynomial of exp: positive, so that the weights are an average like softmax's. The divisor is 1 or more for c2 >= 0.

Two orders of the products, one result (`torch_form`):
    by tokens  the weights of a block of queries at a time, N (D + R + Dv) multiplications per token
    by state   F(x) = [x, x_a x_b (a <= b)], one moment mean_j F(k_j) [nu_j, 1]: about (D + R (R + 1) / 2) 2 Dv a token,
               linear in N; R the width of the degree-2 pair
In torch the one with fewer multiplications runs: by state from about N = 2,100 on at R = D = Dv = 64 and 180 with
R = 16. `fused`, the Triton form in bfloat16 and float16, goes by tokens and never writes the weights; on an H200 it is
faster than both up to about 160,000 tokens at D = 64, or 15,000 with R = 16, and `auto` takes it until then
(`fused.plan.too_many`). Neither form's memory grows with N^2: a block of features or weights at a time in torch, at
1.3 GB for 16 heads of 16,384 tokens forward and backward with R = 16, and a tile in Triton, 183 MB there.

The feature x -> (1, x, x x' / sqrt 2) of exp's expansion is that of Arora et al., Based, arXiv 2402.18668, section 4.1;
centred keys and the mean-value path are what `zoo` adds at conversion. Reading order: reference, torch_form,
gradient, operator, fused.
"""
