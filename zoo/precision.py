"""Names of precisions in settings, and their torch dtypes."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(DTYPES)


def autocast(device: str, precision: str, cache: bool | None = None) -> torch.autocast:
    """Return the autocast context of `precision`, disabled for fp32. device: device type, such as "cuda"."""
    dtype = None if precision == "fp32" else DTYPES[precision]
    return torch.autocast(device, dtype, dtype is not None, cache)
