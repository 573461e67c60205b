"""Softmax attention, the quadratic baseline o = softmax(s Q K') V, and its approximations."""
