"""Second-order Taylor attention: softmax expanded around uniform weights, o = vbar + residuals.

Symbols. s_tj = s q_t.(k_j - kbar): scores with centred keys (softmax is invariant to centring). r_tj: scores of the
degree-2 term, either s_tj or the scores of a narrower pair of queries and keys. nu_j = v_j - vbar. c = (c1, c2) per
head.

    weights    w_tj = c1 s_tj + c2 r_tj^2 / 2
    plain      o_t = vbar + mean_j w_tj nu_j
    ratio      o_t = vbar + (mean_j w_tj nu_j) / (1 + c2 mean_j r_tj^2 / 2)

With c = (1, 1) the ratio is exactly sum_j f(s_tj) v_j / sum_j f(s_tj), where f(x) = 1 + x + x^2 / 2 is the degree-2
Taylor polynomial of exp. f is positive, so the result is a weighted average, as in softmax. The denominator is at least
1 for c2 >= 0.

Two equivalent orders of products (`torch_form`), R the width of the degree-2 pair:
    by tokens  weights of one block of queries at a time, N (D + R + Dv) multiplications per token
    by state   F(x) = [x, x_a x_b (a <= b)] and one moment mean_j F(k_j) [nu_j, 1], linear in N: about
               (D + R (R + 1) / 2) 2 Dv multiplications per token
The torch form runs the order with fewer multiplications: by state from about N = 2,100 on at R = D = Dv = 64, and from
180 on with R = 16. There is no Triton form. Memory does not grow with N^2: a block of features or weights exists at a
time. Forward and backward of 16 heads of 16,384 tokens with R = 16 take 1.3 GB.

The feature map x -> (1, x, x x' / sqrt 2) is from Arora et al., Based, arXiv 2402.18668, section 4.1, without centred
keys and the mean-value path. Reading order: reference, torch_form, gradient, operator.
"""
