"""Cost model of attention layers at any number of tokens, from measured operator times.

The table `docs/results/kernels-h200.json`, shipped with the package, holds times at a few shapes. Linear operators cost
c per element of [B, N, H, D]; softmax and `taylor2` cost a + b N per element. Adaptive multipole
(`adaptive-kernels-h200.json`) costs a + b x per element, with x = (6 / k_tile + 2 density) N: the weight 6 of key tiles
fits the times best. The coefficients are fitted by relative least squares. Heads of 65 to 127 channels, which its
kernels pad to 128, have a larger a, from the times of 72 channels and 1,024 tokens, the only ones measured.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hla_kernels.softmax.adaptive.fused import FARS
from zoo.mixers import MIXERS, MixerConfig

FILE, ADAPTIVE = "kernels-h200.json", "adaptive-kernels-h200.json"
PLACES = (Path(__file__).parents[1], Path(__file__).parents[2] / "docs" / "results")
OPERATORS = {  # mixer -> operator in the table
    "la": "linear_attention", "ahla": "ahla", "hla2": "hla2", "hla3": "hla3", "poly": "polynomial",
    "inline": "linear_attention",
}  # fmt: skip
NS_PER_US = 1e3


class Prediction(NamedTuple):
    """Predicted forward times of one operator call in us; unknown values are None.

    break_even: number of tokens from which the mixer is at least as fast as softmax (1: always).
    """

    softmax_us: float
    mixer_us: float | None
    break_even: int | None


@cache
def measured_table(name: str = FILE) -> dict[str, Any]:
    """Read a measured table. Raises ValueError if the file is missing."""
    for place in PLACES:
        if (place / name).is_file():
            return json.loads((place / name).read_text())
    raise ValueError(f"there is no table of measured times, {name}: reinstall the package or run from a checkout")


def predict_times(mixer: str, options: dict[str, Any], batch: int, heads: int, tokens: int, width: int) -> Prediction:
    """Predict the times for q, k, v [batch, tokens, heads, width]; the mixer time is None without measurements."""
    softmax = quadratic_cost("softmax_attention")
    assert softmax is not None, "the table has no softmax rows"
    a, b = softmax
    size = batch * heads * tokens * width / NS_PER_US
    soft = size * (a + b * tokens)
    if mixer == "taylor2":
        own = None if options.get("width") else quadratic_cost("taylor2")
        return Prediction(soft, None if own is None else size * (own[0] + own[1] * tokens), None)
    if mixer == "multipole":
        given: Any = MixerConfig.parse(mixer, options).options
        if given.select == "near":
            return Prediction(soft, None, None)
        return _adaptive(given, size, soft, softmax, tokens, width)
    if mixer not in OPERATORS:
        return Prediction(soft, None, None)
    cost = linear_cost(mixer, bool(options.get("normalize", getattr(MIXERS[mixer].defaults, "normalize", False))))
    if cost is None:
        return Prediction(soft, None, None)
    return Prediction(soft, size * cost, max(1, math.ceil((cost - a) / b)))


def _adaptive(
    options: Any, size: float, soft: float, softmax: tuple[float, float], tokens: int, width: int
) -> Prediction:
    """Predict adaptive multipole; unknown for densities per layer, with a branch, and for far fields in torch."""
    if isinstance(options.density, tuple) or options.branch or options.far not in FARS:
        return Prediction(soft, None, None)
    if options.density == 1:
        return Prediction(soft, soft, 1)
    a, b = adaptive_cost(width)
    slope = b * multiplications(options.k_tile, options.density)
    gain = softmax[1] - slope
    break_even = max(1, math.ceil((a - softmax[0]) / gain)) if gain > 0 else None
    return Prediction(soft, size * (a + slope * tokens), break_even)


def multiplications(k_tile: int, density: float) -> float:
    """Return x / N of adaptive multipole."""
    return 6 / k_tile + 2 * density


@cache
def adaptive_cost(width: int) -> tuple[float, float]:
    """Fit (a, b) in ns of time = B H N D (a + b x) for heads of D = width channels."""
    x, cost = _adaptive_rows("rows")
    a, b = _fitted(x, cost)
    if 64 < width < 128:
        x, cost = _adaptive_rows("channels72")
        a = float(np.mean(np.array(cost) - b * np.array(x))) * 72 / width
    return a, b


def _adaptive_rows(key: str) -> tuple[list[float], list[float]]:
    """Return x and the forward time per element in ns of the rows under this key."""
    rows = measured_table(ADAPTIVE)[key]
    x = [multiplications(row["k_tile"], row["density"]) * row["sizes"][2] for row in rows]
    return x, [row["forward_us"] * NS_PER_US / math.prod(row["sizes"]) for row in rows]


@cache
def quadratic_cost(op: str) -> tuple[float, float] | None:
    """Fit (a, b) in ns of time = B H N D (a + b N), with the fastest implementation at each shape.

    None without rows in the table.
    """
    best: dict[tuple[int, ...], float] = {}
    for row in _rows(op):
        shape = tuple(row["shape"])
        best[shape] = min(row["us"], best.get(shape, float("inf")))
    if not best:
        return None
    return _fitted([shape[2] for shape in best], [us * NS_PER_US / math.prod(shape) for shape, us in best.items()])


def _fitted(x: list[float], cost: list[float]) -> tuple[float, float]:
    """Fit (a, b) of cost = a + b x by relative least squares."""
    weights = 1 / np.array(cost)  # relative errors
    design = np.stack([weights, np.array(x) * weights], 1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(weights), rcond=None)
    return max(float(a), 0.0), float(b)


@cache
def linear_cost(mixer: str, normalize: bool) -> float | None:
    """Return the median cost per element in ns over the measured shapes; None without rows in the table."""
    costs = [
        row["us"] * NS_PER_US / np.prod([float(s) for s in row["shape"]])
        for row in _rows(OPERATORS[mixer])
        if row["impl"] == "ours" and bool(row["options"].get("normalize")) == normalize
    ]
    return float(np.median(costs)) if costs else None


def _rows(op: str) -> list[dict[str, Any]]:
    return [row for row in measured_table()["rows"] if row["op"] == op and row["pass"] == "forward" and row.get("us")]


def table_provenance() -> str:
    """Return the hardware, date and torch version of the table."""
    table = measured_table()
    return f"{table['hardware']}, {table['date']}, torch {table['versions']['torch']}"
