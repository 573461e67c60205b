"""What a call costs the host before its kernels run.

    operator    custom operators with nothing between autograd and the implementation
    recording   launches
"""
