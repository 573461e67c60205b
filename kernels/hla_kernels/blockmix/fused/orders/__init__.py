"""Higher orders of block mixing, `ahla` and `hla2`.

The product of two mixed moments per block, its gradients (`middle`), and the gradients of tokens that enter both
(`grads`).

    ahla  O = R~ P~    hla2  O = S~ C~    kept transposed: P', C' and O' [V, F], the left factors R' and S [F, F]
"""
