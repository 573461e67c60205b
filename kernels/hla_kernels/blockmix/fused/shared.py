"""Block mixing of tokens that several devices share: launches before and after the sums over them.

    local            moments of this device's tokens in all blocks; then they are added over the devices
    outputs          mixed moments, and o of this device's tokens
    operator_grads   gradients of the operators from this device's dy; then they are added over the devices
    token_grads      dq, dk, dv of this device's tokens, and d mixing
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...dispatch.operator import like
from ..layout import BlockOptions
from . import launch
from .launch import Call
from .spec import Moments, Saved, Sizes


class Shared(NamedTuple):
    """A call between the sums; options with a scale. share: [M, 3] of `geometry`. Stages share a buffer, which holds
    `Saved`; for a ratio its anchor is the mean of v over all tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    options: BlockOptions
    cos: Tensor | None
    sin: Tensor | None
    share: Tensor

    def call(self) -> Call:
        """Return the sizes of the launches."""
        rotary = None if self.cos is None or self.sin is None else (self.cos, self.sin)
        return Call(*self[:5], None, rotary, self.share)

    def size(self) -> Sizes:
        """Return the floats in the buffer."""
        return Sizes.of(self.q, self.v, self.options, self.cos is not None)

    def local(self, buffer: Tensor) -> tuple[()]:
        """Compute the moments of this device."""
        saved = Saved.of(buffer, self.size())
        launch.local_moments(self.call(), saved.anchor, saved.local)
        return ()

    def outputs(self, buffer: Tensor, o: Tensor) -> tuple[()]:
        """Compute o, the mixed moments and 1 / den."""
        launch.mixed_call(self.call(), o, Saved.of(buffer, self.size()))
        return ()

    def operator_grads(self, g: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the operators, dq (done in first order), and d loss / d den."""
        call, (dq,) = self.call(), like(self.q)
        saved, size = Saved.of(buffer, call.size), call.size.operators()
        dy, operator = call.buffer(size.moments), launch.operator_of(call, saved.mixed)
        totals = launch.query_call(call, g, dq, operator, saved, Moments.of(dy, size))
        return dy, dq, call.buffer(0) if totals is None else totals

    def token_grads(
        self, g: Tensor, buffer: Tensor, dy: Tensor, dq: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dk, dv and d mixing, and fill dq."""
        call, (dk, dv) = self.call(), like(self.k, self.v)
        saved, grads = Saved.of(buffer, call.size), Moments.of(dy, call.size.operators())
        operator = launch.operator_of(call, saved.mixed)
        ratio = totals if self.options.normalize else None
        return dk, dv, launch.token_grads_call(call, g, (dq, dk, dv), operator, saved, grads, ratio)
