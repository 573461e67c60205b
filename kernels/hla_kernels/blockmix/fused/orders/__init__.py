"""Higher orders of block mixing, `ahla` and `hla2`.

`middle`: the product of two mixed moments per block, and its gradients. `grads`: the gradients of tokens.

    ahla  O = R~ P~    hla2  O = S~ C~    stored transposed: P', C' and O' [V, F], left factors R' and S [F, F]
"""
