"""Block mixing of tokens that several devices share: launches before and after the sums over them.

    local            moments of this device's tokens in all blocks; then they are added over the devices
    outputs          mixed moments, and o of this device's tokens
    operator_grads   gradients of the operators from this device's dy; then they are added over the devices
    token_grads      dq, dk, dv of this device's tokens, and d mixing
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..options import BlockOptions
from . import launch
from .launch import Call, Saved
from .spec import Moments, Sizes, moments_dtype


class Shared(NamedTuple):
    """A call between the sums; options with a scale. share: [M, 3] of `geometry`. anchor: for a ratio the mean of v
    over all tokens [B * H, Dv]. Stages share a buffer, see `launch.Saved`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    options: BlockOptions
    cos: Tensor | None
    sin: Tensor | None
    share: Tensor
    anchor: Tensor | None

    def call(self) -> Call:
        """Return the sizes of the launches."""
        rotary = None if self.cos is None or self.sin is None else (self.cos, self.sin)
        return Call(*self[:5], None, rotary, self.share)

    def size(self) -> tuple[int, Sizes, torch.dtype]:
        """Return heads of the batch, the floats per head in the buffer, and the dtype of moments."""
        (b, n, h, d), dtype = self.q.shape, moments_dtype(self.q.dtype, self.options, self.cos is not None)
        return b * h, Sizes.of(self.options, n, d, self.v.shape[3], dtype), dtype

    def moments(self, buffer: Tensor, operators: bool = False) -> Moments:
        """View a buffer as moments, or as operators or their gradients."""
        heads, size, dtype = self.size()
        return Moments.of(buffer, heads, size._replace(left=0) if operators else size, dtype)

    def local(self, saved: Tensor) -> tuple[()]:
        """Compute the moments of this device."""
        call = self.call()
        launch.local_moments(call, self.anchor, call.moments(saved))
        return ()

    def outputs(self, saved: Tensor, o: Tensor) -> tuple[()]:
        """Compute o, the mixed moments and 1 / den."""
        call = self.call()
        launch.mixed_call(call, o, self._saved(call, saved))
        return ()

    def operator_grads(self, g: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the operators, dq (done in first order), and d loss / d den."""
        call = self.call()
        saved = self._saved(call, buffer)
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        dy = call.buffer(call.bh * call.size._replace(left=0).moments)
        operator = launch.operator_of(call, saved.mixed)
        totals = launch.query_call(call, g, dq, operator, saved, call.operators(dy))
        return dy, dq, call.buffer(0) if totals is None else totals

    def token_grads(
        self, g: Tensor, buffer: Tensor, dy: Tensor, dq: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dk, dv and d mixing, and fill dq."""
        call = self.call()
        saved = self._saved(call, buffer)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        operator = launch.operator_of(call, saved.mixed)
        ratio = totals if self.options.normalize else None
        dm = launch.token_grads_call(call, g, (dq, dk, dv), operator, saved, call.operators(dy), ratio)
        return dk, dv, dm

    def _saved(self, call: Call, buffer: Tensor) -> Saved:
        return Saved.of(call, buffer)._replace(anchor=self.anchor)
