"""Gradients that autograd needs from a call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def needs_backward(*tensors: Tensor | None) -> bool:
    """Whether autograd will record this call."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def are_fixed(coefficients: Tensor | None) -> bool:
    """Whether there are coefficients whose gradient is not needed. While exporting, grad mode is ignored: the exported
    program may be trained."""
    if coefficients is None or torch.compiler.is_exporting():
        return coefficients is not None and not coefficients.requires_grad
    return not needs_backward(coefficients)


def refuse_forward_mode(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError for dual tensors: the custom operators have no forward-mode rule, and torch would silently
    return zero tangents."""
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{op} has no forward-mode derivative here (torch.func.jvp, jacfwd, dual tensors); use reverse "
                'mode, or impl="reference" or return_state=True with impl="torch", which are plain torch code.'
            )
