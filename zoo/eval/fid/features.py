"""Feature extraction on one or several processes, and the statistics of the features."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from zoo.eval.fid.extractors import Extractor, Features
from zoo.eval.fid.images import ImageSet, Numbered, refuse_mixed_sizes
from zoo.eval.fid.statistics import Moments, Statistics
from zoo.progress import progress

SUBSET_SEED = 0  # seed of the random subset of images whose features are kept


@dataclass
class Extracted:
    """Results of all processes: statistics, features [N, D] and logits [N, C], both in the order of the images."""

    statistics: Statistics
    features: Tensor
    logits: Tensor | None


def processes() -> PartialState:
    """Return the process state of accelerate. Without an accelerator it uses the CPU, also with several processes
    started by torchrun."""
    return PartialState(cpu=not torch.accelerator.is_available())


def rank_and_world() -> tuple[int, int]:
    """Return (index of this process, number of processes); (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@torch.no_grad()
def extract_features(
    images: ImageSet,
    extractor: Extractor,
    batch_size: int = 64,
    device: torch.device | str = "",
    keep: int | None = None,
    crop: str = "none",
) -> Extracted:
    """Compute the features of all images, in float32 without TF32, and their statistics, in float64.

    batch_size: images per batch.  device: empty for the CPU.  keep: number of randomly chosen images whose features and
    logits are returned; None for all.  crop: crop of the images, as text for the metadata. Raises ValueError for images
    of different sizes.
    """
    device = torch.device(device or "cpu")
    extractor = extractor.to(device)
    collected = _Collected(images.name, _subset(images.count, keep))
    total = None if images.count is None else -(-images.count // (batch_size * rank_and_world()[1]))
    batches = progress(images.batches(batch_size, *rank_and_world()), f"features of {images.name}", total)
    with exact_float32():
        for numbers, batch in batches:
            collected.add((numbers, batch), extractor(batch.to(device)))
    return collected.finish(extractor, crop)


def _subset(count: int | None, keep: int | None) -> Tensor | None:
    """Choose the numbers of the images whose features are returned; None for all."""
    if keep is None or count is None or keep >= count:
        return None
    return torch.from_numpy(np.sort(np.random.default_rng(SUBSET_SEED).choice(count, keep, replace=False)))


class _Collected:
    """Collector of the features of this process's images: moments over all images, and the features of chosen ones."""

    def __init__(self, name: str, wanted: Tensor | None) -> None:
        self.name, self.wanted = name, wanted
        self.size: list[int] = []
        self.moments: dict[str, Moments] = {}
        self.rows: dict[str, list[Tensor]] = {"numbers": [], "pool": [], "logits": []}

    def add(self, images: Numbered, found: Features) -> None:
        numbers, batch = images
        size = list(batch.shape[2:])
        if self.size and size != self.size:
            refuse_mixed_sizes(self.name, self.size, size)
        self.size = size
        for key in ("pool", "spatial"):
            if (value := getattr(found, key)) is not None:
                if key not in self.moments:
                    self.moments[key] = Moments(value.shape[1], value.device)
                self.moments[key].update(value)
        chosen = torch.ones(len(numbers), dtype=torch.bool) if self.wanted is None else torch.isin(numbers, self.wanted)
        self.rows["numbers"].append(numbers[chosen])
        for key in ("pool", "logits"):
            if (value := getattr(found, key)) is not None:
                self.rows[key].append(value.cpu()[chosen])

    def finish(self, extractor: Extractor, crop: str) -> Extracted:
        if not self.moments:
            raise ValueError(
                f"{self.name} holds no images for process {rank_and_world()[0]}: fewer batches than processes"
            )
        moments = {key: value.reduced().gaussian() for key, value in self.moments.items()}
        rows = {key: _gathered(torch.cat(parts)) for key, parts in self.rows.items() if parts}
        order = torch.argsort(rows["numbers"])
        statistics = Statistics(
            self.name, self.size, asdict(extractor.identity), moments["pool"], moments.get("spatial"), crop=crop
        )
        logits = rows["logits"][order] if "logits" in rows else None
        return Extracted(statistics, rows["pool"][order], logits)


def _gathered(rows: Tensor) -> Tensor:
    """Gather the rows [n, ...] of all processes, concatenated, on the CPU."""
    if not dist.is_initialized():
        return rows
    shares = [rows] * dist.get_world_size()
    dist.all_gather_object(shares, rows)
    return torch.cat(shares)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Context in which float32 products do not use TF32, since features of FID are defined in float32."""
    places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
