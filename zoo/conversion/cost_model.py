"""Predicted time of attention layers at any number of tokens, from the measured tables of the operators.

The tables (`docs/results/kernels-h200.json`, shipped with the package) hold times at a few shapes. A linear operator
costs the same for each token, head and channel; softmax costs that much more for each further token: time over
B H N D is a + b N, and so does `taylor2`. Both are fitted to the rows of the smallest relative error; nothing else is
known about the device.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo.mixers import MIXERS

FILE = "kernels-h200.json"
PLACES = (Path(__file__).parents[1] / FILE, Path(__file__).parents[2] / "docs" / "results" / FILE)
OPERATORS = {  # mixer -> operator of the table
    "la": "linear_attention", "ahla": "ahla", "hla2": "hla2", "hla3": "hla3", "poly": "polynomial",
    "inline": "linear_attention",
}  # fmt: skip
NANO = 1e3  # ns in a us


class Prediction(NamedTuple):
    """Times of one attention operator call in us, forward, and the number of tokens from which the mixer is no slower
    (1: always; None: unknown)."""

    softmax_us: float
    mixer_us: float | None
    break_even: int | None

    @property
    def times_faster(self) -> float | None:
        return None if self.mixer_us is None else self.softmax_us / self.mixer_us


@cache
def measured_table() -> dict[str, Any]:
    """The measured table. Raises ValueError when it is not there."""
    for place in PLACES:
        if place.is_file():
            return json.loads(place.read_text())
    raise ValueError(f"there is no table of measured times, {FILE}: reinstall the package or run from a checkout")


def predict_times(mixer: str, options: dict[str, Any], batch: int, heads: int, tokens: int, width: int) -> Prediction:
    """For q, k, v [batch, tokens, heads, width]; a mixer without measured rows has no time."""
    softmax = quadratic_cost("softmax_attention")
    assert softmax is not None, "the table has no rows of softmax"
    a, b = softmax
    size = batch * heads * tokens * width / NANO
    soft = size * (a + b * tokens)
    if mixer == "taylor2":
        own = None if options.get("width") else quadratic_cost("taylor2")
        return Prediction(soft, None if own is None else size * (own[0] + own[1] * tokens), None)
    if mixer not in OPERATORS:
        return Prediction(soft, None, None)
    kind: Any = MIXERS[mixer]
    cost = linear_cost(mixer, options.get("normalize", kind.defaults.normalize))
    if cost is None:
        return Prediction(soft, None, None)
    return Prediction(soft, size * cost, max(1, math.ceil((cost - a) / b)))


@cache
def quadratic_cost(op: str) -> tuple[float, float] | None:
    """(a, b) in ns: time = B H N D (a + b N), of the fastest implementation at each shape. None: the table has no
    rows."""
    best: dict[tuple[int, ...], float] = {}
    for row in _rows(op):
        shape = tuple(row["shape"])
        best[shape] = min(row["us"], best.get(shape, float("inf")))
    if not best:
        return None
    each = np.array([[shape[2], us * NANO / np.prod([float(s) for s in shape])] for shape, us in best.items()])
    tokens, cost = each.T
    weights = 1 / cost  # relative errors
    design = np.stack([weights, tokens * weights], 1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones_like(cost), rcond=None)
    return max(float(a), 0.0), float(b)


@cache
def linear_cost(mixer: str, normalize: bool) -> float | None:
    """ns for each token, head and channel: the median over the measured shapes. None: the table has no such rows."""
    found = [
        row["us"] * NANO / np.prod([float(s) for s in row["shape"]])
        for row in _rows(OPERATORS[mixer])
        if row["impl"] == "ours" and bool(row["options"].get("normalize")) == normalize
    ]
    return float(np.median(found)) if found else None


def _rows(op: str) -> list[dict[str, Any]]:
    return [row for row in measured_table()["rows"] if row["op"] == op and row["pass"] == "forward" and row.get("us")]


def table_provenance() -> str:
    """Hardware and date of the table."""
    found = measured_table()
    return f"{found['hardware']}, {found['date']}, torch {found['versions']['torch']}"
