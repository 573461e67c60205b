"""Measures of effective attention per layer and head (rank, entropy, token share), and maps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from zoo.config import Tree
from zoo.conversion.dependence import token_share
from zoo.data import Source
from zoo.data.transforms import eval_transform
from zoo.eval.attention import LayerAttention, attentions
from zoo.eval.attention.plots import Maps, draw_maps, draw_profile
from zoo.eval.compare import Candidate, open_candidates
from zoo.eval.results import write_results
from zoo.eval.settings import EvalSettings
from zoo.ranges import check_ranges

MEASURES = ("rank", "effective_rank", "entropy", "token_share")
ProbeRow = Tree  # a row of attention.csv (one head) or of maps.csv (one token of a map)


@dataclass(frozen=True)
class AttentionOptions:
    """Attention measures and maps.

    images: number of images over which the measures are averaged; the maps show the first one
    layers: layers to measure; empty for all
    queries: query tokens of the maps, each [row, column] on the token grid; empty for the centre and a corner
    """

    images: int = 4
    layers: list[int] = field(default_factory=list)
    queries: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges("attention", self, images="[1, inf)")


@dataclass(frozen=True)
class ProbeSettings(EvalSettings):
    """Settings of measures and maps of attention.

    out: folder for attention.csv, attention.png, maps.csv and maps_<n>.png
    """

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    out: str = "runs/attention"


def measures(found: LayerAttention) -> dict[str, Tensor]:
    """Compute measures [H] of each head, by name, from the attention matrix W [H, N, N] and the output [N, H, D].

    rank: number of singular values above N times float32's epsilon times the largest one.
    effective_rank: exp of the entropy of the normalized singular values (Roy and Vetterli, The effective rank, 2007,
      Definition 1).
    entropy: mean entropy in nats of the normalized rows of |W|; log N for uniform attention.
    token_share: fraction of the output that differs between tokens (see `zoo.conversion.dependence`).
    """
    w = found.weights.double()
    values = torch.linalg.svdvals(w)
    tolerance = w.shape[-1] * torch.finfo(torch.float32).eps * values[:, :1]
    rows = w.abs() / w.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    parts = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    return {
        "rank": (values > tolerance).sum(-1).double(),
        "effective_rank": torch.special.entr(parts).sum(-1).exp(),
        "entropy": torch.special.entr(rows).sum(-1).mean(-1),
        "token_share": token_share(found.output[None]).double(),
    }


def probe(settings: ProbeSettings) -> list[ProbeRow]:
    """Measure and plot the attention of models, and write the files of `ProbeSettings.out`.

    Returns the rows of attention.csv: model, layer, mixer, head, number of tokens, measures. Raises ValueError for
    models that cannot be evaluated and for queries outside of the token grid.
    """
    if not settings.eval.models:
        raise ValueError("missing required option eval.models=[RUN_FOLDER_OR_TIMM_NAME, ...]")
    candidates, source = open_candidates(settings)
    out, rows, cells = Path(settings.out), list[ProbeRow](), list[ProbeRow]()
    out.mkdir(parents=True, exist_ok=True)
    for number, candidate in enumerate(candidates):
        found, maps = _probe_model(candidate, source, settings)
        rows += found
        cells += [{"model": candidate.name, **cell} for one in maps for cell in _cells(one)]
        draw_maps(maps, candidate.name, out / f"maps_{number}.png")
    draw_profile(rows, out / "attention.png")
    write_results(rows, out / "attention.csv")
    write_results(cells, out / "maps.csv")
    return rows


def _probe_model(candidate: Candidate, source: Source, settings: ProbeSettings) -> tuple[list[ProbeRow], list[Maps]]:
    options, totals, rows, maps = settings.attention, dict[tuple, Tensor](), dict[tuple, ProbeRow](), list[Maps]()
    device = torch.device(settings.eval.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, n = candidate.model.to(device).eval(), min(options.images, len(source))
    for index in range(n):
        picture = source.read(index)[0]
        image = eval_transform(candidate.spec)(picture).to(device)
        for found in attentions(model, lambda image=image: model(image[None]), options.layers or None):  # type: ignore[misc]
            for name, value in measures(found).items():
                key = (found.layer, name)
                totals[key] = totals.get(key, torch.zeros_like(value)) + value / n
            rows[(found.layer,)] = {"mixer": found.mixer, "tokens": found.weights.shape[-1]}
            if index == 0 and found.grid is not None:
                maps.append(_maps(found, options.queries, picture))
    out = []
    for (layer,), row in rows.items():
        for head in range(len(totals[layer, MEASURES[0]])):
            numbers = {name: float(f"{float(totals[layer, name][head]):.4g}") for name in MEASURES}
            out.append({"model": candidate.name, "layer": layer, "head": head, **row, **numbers})
    return out, maps


def _maps(found: LayerAttention, queries: list[list[int]], picture: Image.Image) -> Maps:
    """Compute the attention map of each query token on the token grid, averaged over heads."""
    grid = found.grid
    assert grid is not None
    places = [_place(query, grid) for query in queries or [[grid[0] // 2, grid[1] // 2], [0, 0]]]
    mean = found.weights.mean(0)[found.prefix :, found.prefix :].cpu()
    rows = {place: mean[place[0] * grid[1] + place[1]].reshape(grid).numpy() for place in places}
    return Maps(found.layer, found.mixer, picture, rows)


def _cells(maps: Maps) -> Iterator[ProbeRow]:
    """Yield one row per pair of query token and grid token, with the attention weight."""
    for query, weights in maps.rows.items():
        for (row, column), weight in np.ndenumerate(weights):
            where = {"query_row": query[0], "query_column": query[1], "row": row, "column": column}
            yield {"layer": maps.layer, **where, "weight": float(f"{weight:.6g}")}


def _place(query: list[int], grid: tuple[int, ...]) -> tuple[int, int]:
    if len(query) != 2:
        raise ValueError(f"attention.queries are pairs [row, column], such as [[7, 7]], got {query!r}")
    row, column = query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"attention.queries: {query!r} is outside of the token grid {grid[0]} x {grid[1]}")
    return row, column


def table(rows: list[ProbeRow]) -> str:
    """Format the rows as a text table, averaged over heads."""
    head = f"{'rank':>8} {'effective':>9} {'entropy':>8} {'token share':>11}"
    lines = [f"{'model':40} {'layer':>5} {'mixer':10} {'tokens':>6} {head}"]
    layers: dict[tuple, list[ProbeRow]] = {}
    for row in rows:
        layers.setdefault((row["model"], row["layer"]), []).append(row)
    for (model, layer), heads in layers.items():
        rank, effective, entropy, share = (sum(row[name] for row in heads) / len(heads) for name in MEASURES)
        lines.append(
            f"{model[-40:]:40} {layer:5} {heads[0]['mixer']:10} {heads[0]['tokens']:6} {rank:8.1f} {effective:9.1f} "
            f"{entropy:8.3f} {100 * share:9.3f} %"
        )
    return "\n".join(lines)

