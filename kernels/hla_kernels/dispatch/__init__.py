"""What a call costs the host before its kernels run.

    autograd    which gradients a call may be asked for
    forms       what the checks of a call found, for calls of the same form
    faults      warnings where the Triton form of a call has a known fault
    operator    custom operators with nothing between autograd and the implementation
    recording   the allocations and launches of a kind of call, noted by its second run and repeated by the others
    definition  the slow way: the definition of a checked call
"""
