"""Times of adaptive multipole attention in float32, beside its torch form and scaled_dot_product_attention.

    python docs/adaptive_float32.py [json]

select="error", density 0.1; medians of eager calls on the current CUDA device. Writes runs/adaptive-float32.json.
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import hla_kernels
from zoo.io import result_file, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # where the benchmarks are

from benchmarks.timing import measure

FILE = Path("runs/adaptive-float32.json")
SHAPES = ((32, 6, 1024, 64), (4, 16, 4096, 64), (1, 12, 16384, 64))  # [B, H, N, D]
K_TILES = (16, 32)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of calls launched one by one."""
    call()  # compiles
    return round(measure([call]).launched_us / 1e3, 3)


def both(call: Callable[..., Tensor], tokens: list[Tensor], grad: Tensor) -> dict[str, float]:
    """Return the times of the forward pass without gradients, and of both passes."""
    with torch.no_grad():
        forward = milliseconds(lambda: call(*tokens))
    return {
        "forward_ms": forward,
        "forward_backward_ms": milliseconds(lambda: torch.autograd.grad(call(*tokens), tokens, grad)),
    }


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax attention of [B, N, H, D] tensors."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def rows() -> Iterator[dict]:
    """Return one row per shape and form."""
    for b, h, n, d in SHAPES:
        generator = torch.Generator("cuda").manual_seed(0)
        *tokens, grad = (torch.randn(b, n, h, d, generator=generator, device="cuda") for _ in range(4))
        tokens = [t.requires_grad_() for t in tokens]
        yield {"sizes": [b, h, n, d], "form": "softmax", **both(softmax, tokens, grad)}
        for k_tile in K_TILES:
            for impl in ("triton", "torch"):

                def call(q: Tensor, k: Tensor, v: Tensor, k_tile: int = k_tile, impl: str = impl) -> Tensor:
                    grid = (math.isqrt(n),) * 2  # noqa: B023
                    return hla_kernels.adaptive_multipole(
                        q, k, v, grid=grid, density=0.1, k_tile=k_tile, q_scale=d**-0.5, impl=impl  # noqa: B023
                    )  # fmt: skip

                yield {"sizes": [b, h, n, d], "form": impl, "k_tile": k_tile, **both(call, tokens, grad)}


def main(words: list[str]) -> None:
    """Measure all shapes and write the result file."""
    result = result_file(" ".join(["python docs/adaptive_float32.py", *words]), list(rows()))
    write_json(result, Path(words[0]) if words else FILE)


if __name__ == "__main__":
    main(sys.argv[1:])
