"""Every Triton kernel at least once, on small shapes: the program that `test_sanitizer` runs under compute-sanitizer.

python sanitized.py hla | blockmix | features [PART OF]

Runs the PART-th of OF shares of a family, and prints the kernels that ran and all that the family has as one line of
JSON.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence

import pytest
import torch
import triton

import hla_kernels.features.rms_norm  # noqa: F401  its operator
from hla_kernels.hla.fused import Spec
from hla_kernels.hla.two_sided import two_sided, two_sided_backward
from tests.ops.blockmix import fused_cases
from tests.ops.fused import cases

DEVICE, BF16, FP16 = "cuda", torch.bfloat16, torch.float16
RATIO, ANCHORED = {"feature_map": "elu1", "normalize": True}, {"center": "k", "mean_path": True}
# op, options, path, N, D, Dv, (heads, key heads)
WHOLE = (
    ("linear_attention", {}, "heads", 70, 64, 64, (2, 2)),
    ("hla3", {}, "halves", 70, 72, 72, (2, 2)),
    ("hla2", {}, "halves", 70, 72, 72, (2, 2)),
    ("ahla", {}, "halves", 70, 64, 64, (2, 2)),
    ("hla3", {}, "halves", 514, 64, 64, (2, 2)),
    ("hla3", RATIO, "halves", 70, 64, 64, (2, 2)),
    ("ahla", RATIO, "halves", 70, 64, 64, (2, 2)),
    ("hla2", ANCHORED, "halves", 70, 72, 72, (2, 2)),
    ("hla2", RATIO, "halves", 70, 72, 72, (2, 2)),
    ("ahla", RATIO, "halves", 70, 72, 72, (2, 2)),
    ("linear_attention", RATIO, "heads", 70, 64, 64, (2, 2)),
    ("linear_attention", RATIO, "split", 600, 72, 72, (2, 2)),
    ("linear_attention", RATIO, "split", 300, 128, 128, (1, 1)),
    ("ahla", RATIO, "split", 37, 40, 40, (2, 2)),
    ("hla3", RATIO, "split", 600, 72, 72, (2, 2)),
    ("polynomial", {}, "split", 70, 64, 64, (2, 2)),
    ("polynomial", {}, "split", 70, 72, 72, (2, 2)),
    *(("polynomial", {"fixed": True}, "split", 70, d, d, (2, 2)) for d in (64, 72)),
    ("polynomial", ANCHORED, "split", 70, 64, 64, (2, 2)),
    *(("polynomial", {"fixed": fixed, **RATIO}, "split", 70, 64, 64, (2, 2)) for fixed in (False, True)),
    ("polynomial", ANCHORED, "split", 600, 40, 40, (4, 2)),
    ("ahla", {}, "split", 1, 128, 128, (1, 1)),
)
# options, grid, blocks, prefix, (B, H, D, Dv), dtype, keywords of `fused_cases.make` (and turned: rotary tables)
BLOCKS = (
    ({}, (20, 21), (2, 3), 3, (2, 2, 72, 72), BF16, {"mask": True}),
    ({}, (6, 7), (3, 3), 3, (2, 2, 72, 72), BF16, {"mask": True}),  # by pairs
    ({}, (32, 33), (1, 1), 0, (1, 2, 64, 64), FP16, {}),
    ({"feature_map": None, "normalize": False}, (32, 32), (4, 4), 0, (1, 2, 128, 128), BF16, {}),
    ({"order": "ahla"}, (12, 13), (2, 3), 1, (2, 2, 64, 64), BF16, {"turned": True, "group": 2}),
    ({"order": "hla2", "feature_map": "elu1"}, (12, 13), (2, 1), 0, (1, 2, 40, 48), BF16, {"mask": True}),
)
# case, channels

# channels, those of half a head if they are rotated
NORMS = ((100, 0), (120, 20))


def kernels_of(package: str) -> set[str]:
    """The names of all kernels that a family launches."""
    names = [x.name for x in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")]
    modules = [importlib.import_module(name) for name in names if "launch" in name]
    return {f.fn.__name__ for x in modules for f in vars(x).values() if isinstance(f, triton.JITFunction)}


def watch(patch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are launched from now on."""
    ran, run = set[str](), triton.JITFunction.run

    def noted(kernel: triton.JITFunction, *args, **options):
        ran.add(kernel.fn.__name__)
        return run(kernel, *args, **options)

    patch.setattr(triton.JITFunction, "run", noted)
    return ran


def finite(*tensors: torch.Tensor) -> None:
    """Buffers start as NaN: what is not written is seen."""
    assert all(bool(x.isfinite().all()) for x in tensors)


def whole(patch: pytest.MonkeyPatch, share: Sequence) -> None:
    """The two-sided operators on their paths."""
    for op, options, path, n, d, dv, heads in share:
        same = d == dv and heads[0] == heads[1]
        inputs = cases.make(Spec(op, **options), n, d, dv, heads, BF16, "packed" if same else "contiguous")
        finite(*cases.run(patch, Spec(op, **options), *inputs, path, True, False))


def ragged() -> None:
    """Padded and packed sequences, some without tokens."""
    options = ("elu1", True, None, False, 0.0, None, 1e-6, 1.0, "triton", False)
    mask = torch.arange(75) < torch.tensor([[75], [0], [33]])
    cu = torch.tensor([0, 3, 3, 68, 75], dtype=torch.int32)
    for rows, where in (((3, 75), (mask, None, 0)), ((1, 75), (None, cu, 66))):
        q, k, v, grad = (torch.randn(*rows, 2, 40).to(BF16) for _ in range(4))
        o, saved = two_sided(q, k, v, None, "ahla", *options, True, *where)
        finite(o, *two_sided_backward(grad, saved, q, k, v, None, "ahla", *options, *where))


def blocks(patch: pytest.MonkeyPatch, share: Sequence) -> None:
    """Block mixing."""
    for options, grid, cuts, prefix, sizes, dtype, more in share:
        o = fused_cases.options_of(grid, cuts, prefix, **options)
        rotary = fused_cases.angles_of(o, sizes, DEVICE) if more.get("turned") else None
        more = {name: x for name, x in more.items() if name != "turned"}
        finite(*fused_cases.triton_form(patch, o, *fused_cases.make(o, sizes, dtype, device=DEVICE, **more), rotary))


def norms(_: pytest.MonkeyPatch, share: Sequence) -> None:
    """RMSNorm of tokens that are rows of a wider tensor, alone and with relu and a rotation."""
    for channels, half in share:
        x = torch.randn(2, 37, channels + 12).to(BF16)[..., :channels].requires_grad_()
        weight = torch.randn(channels, requires_grad=True)
        tables = (torch.rand(37, half), torch.rand(37, half)) if half else (None, None)
        y, inverses = torch.ops.hla_kernels.rms_norm(x, weight, 1e-6, half > 0, *tables)
        finite(y, inverses, *torch.autograd.grad(y, (x, weight), torch.randn_like(y)))


FAMILIES = {
    "hla": (kernels_of("hla_kernels.hla.fused"), whole, WHOLE),
    "blockmix": (kernels_of("hla_kernels.blockmix.fused"), blocks, BLOCKS),
    "features": ({"norm_rows", "norm_grads"}, norms, NORMS),
}


def main(family: str, part: int = 0, of: int = 1) -> None:
    """Run a share of a family."""
    torch.set_default_device(DEVICE)
    known, work, everything = FAMILIES[family]
    patch = pytest.MonkeyPatch()
    ran = watch(patch)
    work(patch, everything[part::of])
    if family == "hla" and part == of - 1:
        ragged()
    torch.cuda.synchronize()
    print(json.dumps({"ran": sorted(ran), "known": sorted(known)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
