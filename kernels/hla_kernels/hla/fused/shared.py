"""The split path of tokens that several devices share: launches before and after the sums over them.

    own_sums         sums of this device's tokens; then they are added over the devices
    outputs          operator from the sums of all tokens, and o of this device's
    readout_grads    gradient of the operator from this device's dy; then they are added over the devices
    token_grads      dq, dk, dv of this device's tokens

All devices compute the D x D algebra. A device without tokens launches that alone, on zeros. Numbers of tokens are read
on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...dispatch.operator import like
from ...sequences import WHOLE, Sequences
from . import launch, plan
from .launch.call import Call, Saved
from .spec import Spec


def own_sums(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
    """Return the sums of this device's tokens, with room for their number behind them."""
    call = Call(spec._replace(scale=1.0), q, k, v, None, WHOLE)
    new = torch.empty if call.most > 0 else torch.zeros
    out = new(call.bh * call.lay.K + 1, device=q.device)
    if call.most > 0:
        sums = out[:-1].view(call.bh, call.lay.K)
        launch.add_parts_call(call, *launch.reduce_call(call, sums, False), sums)
    return out


class Shared(NamedTuple):
    """A call between the sums: tokens, coefficients, the table of the numbers of tokens, and the number of devices."""

    spec: Spec
    q: Tensor
    k: Tensor
    v: Tensor
    coefficients: Tensor | None
    counts: Tensor
    devices: int

    def call(self) -> Call:
        """Return the sizes of the launches."""
        seqs = Sequences(told=(None, self.counts, None))
        call = Call(self.spec._replace(scale=1.0), self.q, self.k, self.v, self.coefficients, seqs)
        call.prec = plan.precisions(self.spec, call.w, self.q.dtype, call.most * self.devices, call.planned)
        return call

    def outputs(self, sums: Tensor, o: Tensor, buffer: Tensor) -> tuple[()]:
        """Fill o, and the buffer with operators and states for the backward."""
        call = self.call()
        saved = Saved.of(buffer, call)
        launch.combine_call(call, sums, 1, saved.state)
        launch.middle_call(call, saved, False)
        if call.most > 0:
            launch.apply_call(call, o, saved)
        return ()

    def readout_grads(self, g: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this device's part of the gradient of the operators; dq, done for a ratio of first order and new
        otherwise; and what `token_grads` reads of another ratio."""
        call, first = self.call(), self.spec.alone(self.q.dtype)
        dq, ratio = torch.empty_like(self.q, memory_format=torch.contiguous_format), None if first else call.ratio()
        if call.most == 0:
            length = call.lay.fd * (call.lay.dv + 1) if first else call.lay.KG
            grads = torch.zeros(call.bh, length, device=g.device)
        elif first:
            grads = launch.first_query_call(call, g, dq, Saved.of(buffer, call))
        else:
            grads = launch.readout_grad(call, g, Saved.of(buffer, call), ratio)
        return grads, dq, call.buffer(0) if ratio is None else ratio

    def token_grads(
        self, g: Tensor, buffer: Tensor, grads: Tensor, dq: Tensor, ratio: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dk, dv and d coefficients of all tokens (empty if there are none) and fill dq."""
        call, dc = self.call(), None
        saved = Saved.of(buffer, call)
        dk, dv = like(self.k, self.v)
        keys = launch.head_grads(self.q, (dk, dv), None)
        if not self.spec.alone(self.q.dtype):
            weights, rows, dc = launch.middle_grads(call, grads, saved)
            if call.most > 0:
                of = ratio if self.spec.normalize else None
                launch.apply_grads_call(call, g, (dq, *keys), saved, of, weights, rows)
        elif call.most > 0:
            launch.first_key_call(call, (dq, *keys), saved, grads)
        if call.most > 0:
            launch.sum_heads(keys, (dk, dv))
        return dk, dv, call.buffer(0) if dc is None else launch.coefficients_grad(call, dc)
