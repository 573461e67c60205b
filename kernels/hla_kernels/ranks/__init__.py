"""Operators whose tokens are shared by the ranks of a process group (context parallelism).

Each rank holds some tokens of every sequence and computes their outputs. Ranks exchange, by operator:

    sums     two-sided la, hla2, ahla, hla3, polynomial: one all-reduce of the moments (`sharded`); mhla: of the moments
             of all blocks (`blocks`); taylor2: of the means, then of the degree-2 moment (`taylor`)
    states   causal la, hla2, ahla, hla3: the state of every rank's segment, merged in the order of the ranks (`scan`)
    heads    softmax, multipole, adaptive_multipole, causal="frame", and causal calls whose states cannot be merged: an
             all-to-all gives each rank all tokens of some heads, a second one undoes it (`heads`; Ulysses, arXiv
             2309.14509)

Two-sided la, hla2, ahla, hla3, polynomial (`two_sided`) and mhla run the Triton form where one device would: its
launches before and after the sums (`hla.fused.shared`, `blockmix.fused.shared`). taylor2, the states of `scan`, and
polynomial as a ratio of heads of 64 or 72 channels run in torch.

Sums and states do not grow with the number of tokens. With heads, n ranks move (n - 1) / n of q, k, v and o.
"""
