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
from .spec import Moments


class Shared(NamedTuple):
    """A call between the sums; options with a scale. share: [M, 3] of `geometry`. anchor: for a ratio the mean of v
    over all tokens [B * H, Dv]."""

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

    def moments(self, buffer: Tensor, operators: bool = False) -> Moments:
        """View a buffer as moments, or as operators or their gradients."""
        return (self.call().operators if operators else self.call().moments)(buffer)

    def local(self) -> tuple[Tensor]:
        """Return the moments of this device."""
        call = self.call()
        out = call.buffer(call.bh * call.size.moments)
        launch.local_moments(call, self.anchor, call.moments(out))
        return (out,)

    def outputs(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return o, the mixed moments and 1 / den."""
        call = self.call()
        out = torch.empty((*self.q.shape[:3], self.v.shape[3]), dtype=self.q.dtype, device=self.q.device)
        mixed, inverses = torch.empty_like(local), call.buffer(call.bh * call.size.inverses)
        launch.mixed_call(call, out, self._saved(call, local, mixed, inverses))
        return out, mixed, inverses

    def operator_grads(
        self, g: Tensor, local: Tensor, mixed: Tensor, inverses: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the operators, dq (done in first order), and d loss / d den."""
        call = self.call()
        saved = self._saved(call, local, mixed, inverses)
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        dy = call.buffer(call.bh * call.size._replace(left=0).moments)
        operator = launch.operator_of(call, saved.mixed)
        totals = launch.query_call(call, g, dq, operator, saved, call.operators(dy))
        return dy, dq, call.buffer(0) if totals is None else totals

    def token_grads(
        self, g: Tensor, local: Tensor, mixed: Tensor, inverses: Tensor, dy: Tensor, dq: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dk, dv and d mixing, and fill dq."""
        call = self.call()
        saved = self._saved(call, local, mixed, inverses)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.k, self.v))
        operator = launch.operator_of(call, saved.mixed)
        dm = launch.token_grads_call(call, g, (dq, dk, dv), operator, saved, call.operators(dy), self._ratio(totals))
        return dk, dv, dm

    def _saved(self, call: Call, local: Tensor, mixed: Tensor, inverses: Tensor) -> Saved:
        return Saved(call.moments(local), call.moments(mixed), self.anchor, self._ratio(inverses))

    def _ratio(self, x: Tensor) -> Tensor | None:
        return x if self.options.normalize else None
