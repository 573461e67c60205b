"""Fidelity table: trained softmax classifiers with adaptive multipole attention, without training."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks import rows
from hla_kernels.softmax.adaptive.call import FARS, SELECTS
from zoo.data import LoadedImages
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.eval.compare import Candidate, open_candidate, open_validation
from zoo.io import markdown_table
from zoo.models.convert import swap
from zoo.models.timm.attention import Site
from zoo.plotting import COLORS, plain_axes, pyplot, save_figure
from zoo.ranges import check_device, check_ranges

OPTIONS = ("select", "far", "q_tile", "k_tile", "density")
KEY = ("model", "seed", "tokens", *OPTIONS)
LINES = {"first": "-", "variance": "--", "mean": ":", "none": "-."}
FORMS = {("mean", "first"): "PISA's form", ("mean", "none"): "SLA's and VSA's form"}  # by select and far


@dataclass(frozen=True)
class FidelitySettings:
    """Softmax classifiers, options and images; rows are merged into the file.

    models: run folders or .safetensors files of softmax classifiers with a token grid
    selects: error, mass, mean, near (tokens within a distance, with the radius closest to the density, and degree 0)
    fars: first, variance, mean, none
    q_tiles: tokens per query tile
    k_tiles: tokens per key tile
    densities: fractions of exact key tiles
    images: number of validation images, evenly spaced; 0 for all
    batch_size: images per batch
    device: torch device; empty takes the accelerator if there is one
    json: result file to add to
    picture: PNG to draw from the whole file
    """

    data: DataSettings = field(default_factory=DataSettings)
    models: list[str] = field(default_factory=list)
    selects: list[str] = field(default_factory=lambda: list(SELECTS))
    fars: list[str] = field(default_factory=lambda: list(FARS))
    q_tiles: list[int] = field(default_factory=lambda: [64])
    k_tiles: list[int] = field(default_factory=lambda: [4, 16, 64])
    densities: list[float] = field(default_factory=lambda: [1 / 32, 1 / 16, 1 / 8, 1 / 4])
    images: int = 2000
    batch_size: int = 100
    device: str = ""
    json: str = "runs/fidelity/fidelity.json"
    picture: str = "runs/fidelity/fidelity.png"

    def __post_init__(self) -> None:
        rows.check_names(self, selects=SELECTS, fars=FARS)
        check_ranges("", self, images="[0, inf)", batch_size="[1, inf)", densities="(0, 1]")
        check_device("device", self.device)


def run(settings: FidelitySettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError for models that are not softmax."""
    if not settings.models:
        raise ValueError("name what to measure: models=[RUN_FOLDER, ...]")
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    candidates = [open_candidate(name, settings.data) for name in settings.models]
    for candidate in candidates:
        if any(isinstance(m, Site) and m.mixer_name != "softmax" for m in candidate.model.modules()):
            raise ValueError(f"{candidate.name} is converted already; name the softmax model that it came from")
    file = Path(settings.json)
    content = rows.start(file, command, {})
    for candidate in candidates:
        for row in measured(candidate, settings, device):
            print(" ".join(f"{key}={value}" for key, value in row.items()))
            rows.add(content, row, KEY, file)
    return content


def measured(candidate: Candidate, settings: FidelitySettings, device: torch.device) -> Iterator[dict[str, Any]]:
    """Return one row per combination of options.

    kl: mean KL(softmax || changed) of class probabilities in nats. same: fraction of images with the same top class.
    top1, softmax_top1: accuracies in percent. seconds: duration.
    """
    model: Any = candidate.model.to(device).eval()
    images, labels = load_images(candidate, settings, device)
    wanted = logits(model, images)
    about = {"model": model.pretrained_cfg.get("architecture", ""), "seed": seed_of(Path(candidate.name))}
    right = {"softmax_top1": percent(wanted.argmax(-1) == labels), "images": len(labels)}
    for shown, options in options_of(settings, model.patch_embed.grid_size):
        swap(model, "multipole", **options)
        start = time.perf_counter()
        found = logits(model, images)
        kl = F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)
        same = (found.argmax(-1) == wanted.argmax(-1)).float().mean()
        yield {
            **about, "tokens": tokens_of(model), **shown, "kl": round(float(kl), 5), "same": round(float(same), 4),
            "top1": percent(found.argmax(-1) == labels), **right, "seconds": round(time.perf_counter() - start, 2),
        }  # fmt: skip


def options_of(settings: FidelitySettings, grid: tuple[int, ...]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (keys of a row, options of the mixer) of all combinations."""
    for select, density in itertools.product(settings.selects, settings.densities):
        if select == "near":
            found = {near_part(grid, r): r for r in range(max(grid))}
            part = min(found, key=lambda part: abs(part - density))
            shown = dict(zip(OPTIONS, ("near", "mean", 1, 1, round(part, 5)), strict=True))
            yield shown, {"select": "near", "radius": found[part], "degree": 0}
            continue
        for values in itertools.product(settings.fars, settings.q_tiles, settings.k_tiles):
            options = dict(zip(OPTIONS, (select, *values, density), strict=True))
            yield options, options


def near_part(grid: tuple[int, ...], radius: int) -> float:
    """Return the mean fraction of tokens that lie within a radius."""
    near = [[min(n, i + radius + 1) - max(0, i - radius) for i in range(n)] for n in grid]
    return math.prod(sum(axis) / len(axis) ** 2 for axis in near)


def load_images(
    candidate: Candidate, settings: FidelitySettings, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return (batches of images, labels) on the device, evenly spaced in the validation set."""
    source = open_validation(settings.data, candidate.classes)
    loaded = LoadedImages(source, candidate.spec, AugmentSettings(), 0, torch.device("cpu"), settings.data.workers)
    batches = list(loaded.evaluation(settings.batch_size))
    images, labels = (torch.cat([getattr(batch, key) for batch in batches]) for key in ("images", "labels"))
    n = min(settings.images or len(labels), len(labels))
    kept = torch.linspace(0, len(labels) - 1, n).round().long()
    return images[kept].to(device).split(settings.batch_size), labels[kept].to(device)


@torch.no_grad()
def logits(model: nn.Module, images: tuple[Tensor, ...]) -> Tensor:
    """Compute logits [N, K] of all batches in float64."""
    return torch.cat([model(batch).double() for batch in images])


def tokens_of(model: nn.Module) -> int:
    """Return the number of grid tokens in the last call."""
    return next(math.prod(m.grid) for m in model.modules() if isinstance(m, Site) and m.grid is not None)


def seed_of(folder: Path) -> int | None:
    """Return the seed of a run folder, None for other files."""
    file = folder / "config.yaml"
    return yaml.safe_load(file.read_text())["run"]["seed"] if file.is_file() else None


def percent(right: Tensor) -> float:
    """Return the percentage of true values."""
    return round(100 * float(right.float().mean()), 2)


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the divergence over the density, one panel per number of tokens and key tile, averaged over seeds."""
    panels: dict[tuple[int, int], dict[tuple[str, str], dict[float, list[float]]]] = {}
    places = list(dict.fromkeys((row["tokens"], row["k_tile"]) for row in result["rows"] if row["select"] != "near"))
    for row in result["rows"]:
        own = (row["tokens"], row["k_tile"])
        for place in [own] if row["select"] != "near" else [p for p in places if p[0] == row["tokens"]] or [own]:
            lines = panels.setdefault(place, {})
            lines.setdefault((row["select"], row["far"]), {}).setdefault(row["density"], []).append(row["kl"])
    figure, axes = pyplot().subplots(1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False)
    for one, ((tokens, k_tile), lines) in zip(axes[0], sorted(panels.items()), strict=True):
        for (select, far), points in lines.items():
            x, y = zip(*sorted((density, sum(kl) / len(kl)) for density, kl in points.items()), strict=True)
            color = COLORS[1 + SELECTS.index(select)]
            one.plot(x, y, LINES[far], color=color, marker="o", markersize=3, label=f"{select}, {far}")
        one.set(xscale="log", yscale="log", xlabel="density", title=f"{tokens} tokens, key tiles of {k_tile}")
        ticks = {x for (select, _), points in lines.items() for x in points if select != "near"}
        one.set_xticks(sorted(ticks or {x for points in lines.values() for x in points}), minor=False)
        one.xaxis.set_major_formatter(lambda x, _: f"1/{1 / x:g}")
        one.minorticks_off()
        plain_axes(one)
    axes[0][0].set_ylabel("KL to softmax (nats)")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, file, dpi=130)


def text(result: dict[str, Any]) -> str:
    """Return the rows as Markdown, sorted by divergence within each density; published methods are named, whose own
    tiles have 64 tokens."""
    head = ["model", "seed", "tokens", "density", "select", "far", "q_tile", "k_tile", "kl", "same", "top1"]
    head += ["softmax_top1"]
    order = sorted(result["rows"], key=lambda r: (r["model"], r["tokens"], r["density"], r["kl"]))
    lines = [[f"{r[key]:.4g}" if isinstance(r[key], float) else str(r[key]) for key in head] for r in order]
    forms = [FORMS.get((r["select"], r["far"]), "") for r in order]
    return "\n".join(markdown_table([*head, "form"], [[*x, form] for x, form in zip(lines, forms, strict=True)]))
