"""From images to statistics: run the extractor over the share of each process and put the shares together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from zoo.data.progress import progress
from zoo.eval.fid.extractors import Extractor, Features
from zoo.eval.fid.images import ImageSet, Numbered
from zoo.eval.fid.statistics import Moments, Statistics

SUBSET_SEED = 0


@dataclass
class Extracted:
    """All processes together: the statistics, and in the order of the images the features [N, D] and logits [N, C]."""

    statistics: Statistics
    features: Tensor
    logits: Tensor | None


def processes() -> PartialState:
    """accelerate's view of the processes of this run; also of several on CPUs, which it takes for one unless told."""
    return PartialState(cpu=not torch.accelerator.is_available())


def rank_and_world() -> tuple[int, int]:
    """(number of this process, number of processes); (0, 1) when torch.distributed is not in use."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@torch.no_grad()
def extract(
    images: ImageSet,
    extractor: Extractor,
    batch_size: int = 64,
    device: torch.device | str = "",
    keep: int | None = None,
    crop: str = "none",
) -> Extracted:
    """Features of every image, computed on `device` (empty: the CPU).

    keep: features and logits of so many random images are returned; None: of all.

    The features are float32 without TF32, their moments float64. Raises ValueError for images of different sizes.
    """
    device = torch.device(device or "cpu")
    extractor = extractor.to(device)
    collected = _Collected(images.name, _subset(images.count, keep))
    total = None if images.count is None else -(-images.count // (batch_size * rank_and_world()[1]))
    batches = progress(images.batches(batch_size, *rank_and_world()), f"features of {images.name}", total)
    with exact_float32():
        for numbers, batch in batches:
            collected.add((numbers, batch), extractor(batch.to(device)))
    return collected.finish(extractor, device, crop)


def _subset(count: int | None, keep: int | None) -> Tensor | None:
    """The numbers of the images whose features are kept; None for all."""
    if keep is None or count is None or keep >= count:
        return None
    return torch.from_numpy(np.sort(np.random.default_rng(SUBSET_SEED).choice(count, keep, replace=False)))


class _Collected:
    """The share of one process."""

    def __init__(self, name: str, wanted: Tensor | None) -> None:
        self.name, self.wanted = name, wanted
        self.size: list[int] = []
        self.moments: dict[str, Moments] = {}
        self.rows: dict[str, list[Tensor]] = {"numbers": [], "pool": [], "logits": []}

    def add(self, images: Numbered, found: Features) -> None:
        numbers, batch = images
        size = list(batch.shape[2:])
        if self.size and size != self.size:
            one, other = self.size, size
            raise ValueError(
                f"{self.name} holds images of several sizes ({one[1]} x {one[0]} and {other[1]} x {other[0]} pixels); "
                "give one with image_size"
            )
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

    def finish(self, extractor: Extractor, device: torch.device, crop: str) -> Extracted:
        if not self.moments:
            raise ValueError(
                f"{self.name} holds no images for process {rank_and_world()[0]}: fewer batches than processes"
            )
        moments = {key: value.reduced().gaussian() for key, value in self.moments.items()}
        rows = {key: gather_rows(torch.cat(parts), device) for key, parts in self.rows.items() if parts}
        order = torch.argsort(rows["numbers"])
        statistics = Statistics(
            self.name, self.size, asdict(extractor.identity), moments["pool"], moments.get("spatial"), crop=crop
        )
        logits = rows["logits"][order] if "logits" in rows else None
        return Extracted(statistics, rows["pool"][order], logits)


def gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """The rows [n, ...] of all processes, one after the other, on the CPU; `device` is where the processes talk."""
    if not dist.is_initialized():
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=device))
    longest = max(int(c) for c in counts)
    padded = rows.new_zeros(longest, *rows.shape[1:]).to(device)
    padded[: len(rows)] = rows.to(device)
    shares = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(shares, padded)
    return torch.cat([share[: int(n)].cpu() for share, n in zip(shares, counts, strict=True)])


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 inside: the features of the FID are float32."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
