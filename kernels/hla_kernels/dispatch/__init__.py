"""What a call costs the host before its kernels run.

    operator    custom operators with nothing between autograd and the implementation
    recording   the allocations and launches of a kind of call, made by its first call and repeated by the others
"""
