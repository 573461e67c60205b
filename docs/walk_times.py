"""Times of causal operators without gradients: one launch per stage against one walk through all stages.

    python docs/walk_times.py [json]

bfloat16 on the current CUDA device, each in a CUDA graph; writes runs/causal-walk.json. `taken`: whether `plan.walks`
chooses the walk. Rows of other versions: docs/results/causal-walk-h200.json.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from hla_kernels.hla.stages import operator
from zoo.io import result_file, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))  # where the benchmarks are

from benchmarks.timing import measure

FILE = Path("runs/causal-walk.json")
CALLS = (  # [B, H, N, D], operator, decay
    ((8, 16, 4096, 64), "ahla", False), ((8, 16, 4096, 64), "ahla", True), ((8, 16, 4096, 64), "hla2", False),
    ((8, 16, 4096, 64), "hla2", True), ((8, 16, 4096, 64), "hla3", False), ((8, 16, 4096, 64), "hla3", True),
    ((8, 16, 2048, 128), "ahla", False), ((8, 16, 2048, 128), "ahla", True), ((16, 12, 1024, 64), "hla3", False),
    ((16, 16, 1024, 64), "hla3", True), ((2, 12, 8192, 64), "hla3", False),
)  # fmt: skip


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Return the time of a call in a CUDA graph."""
    call()  # compiles
    return round(measure([call]).us / 1e3, 4)


def row(sizes: tuple[int, int, int, int], op: str, decay: bool) -> dict:
    """Return both times of a call, and the relative L2 distance of both outputs."""
    b, h, n, d = sizes
    q, k, v = (torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gamma = torch.linspace(0.99, 0.9999, h, device="cuda").view(1, h, 1, 1, 1) if decay else None
    plain = (gamma, None, op, None, False, None, 0, 1e-6, False, False)

    def call() -> Tensor:
        return operator.causal_stages.function(q, k, v, *plain)[0]

    found: dict = {"sizes": list(sizes), "op": op, "call": "decay" if decay else "plain", "version": "this"}
    outputs = []
    for name, walks in (("stages_ms", False), ("walk_ms", True)):
        with patch.object(operator, "walks", lambda *_, walks=walks: walks):
            found[name] = milliseconds(call)
            outputs.append(call().double())
    difference = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    taken = operator.walks(op, q.dtype, (b * h, n, d, d), decay, False, 0, False)
    return found | {"difference": round(difference, 5), "taken": taken}


def main(words: list[str]) -> None:
    """Measure all calls and write the result file."""
    rows = [row(*call) for call in CALLS]
    write_json(result_file(" ".join(["python docs/walk_times.py", *words]), rows), Path(words[0]) if words else FILE)


if __name__ == "__main__":
    main(sys.argv[1:])
