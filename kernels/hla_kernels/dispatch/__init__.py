"""Host side of a call, with little overhead before the kernels run.

    forms       cache of check results, for calls of the same form
    verify      first-use check of a Triton form on a machine that the GPU tests did not cover, warnings of faults
    trial       small seeded input of that check
    gate        conditions of every Triton form, and of functions without `impl`
    operator    custom operators with little overhead, and which gradients a call needs
    recording   allocations and launches of a call, recorded once and replayed
"""
