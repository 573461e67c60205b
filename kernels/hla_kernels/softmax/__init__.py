"""Softmax attention, the quadratic baseline: o = softmax(s Q K') V; and `taylor`, its expansion to second order."""
