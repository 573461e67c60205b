"""Precision and evaluation mode of forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(DTYPES)


def autocast(device: str, precision: str, cache: bool | None = None) -> torch.autocast:
    """Return the autocast context of `precision`, disabled for fp32. device: device type, such as "cuda"."""
    dtype = None if precision == "fp32" else DTYPES[precision]
    return torch.autocast(device, dtype, dtype is not None, cache)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Context in which models are in evaluation mode; afterwards each has the mode that it had before."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, before in zip(models, training, strict=True):
            model.train(before)
