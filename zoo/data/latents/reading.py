"""Data set of cached latents, read from memory-mapped shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from zoo.data.latents.manifest import NULL, open_tensors, read_manifest, shard_name
from zoo.data.plan import BatchPlan

LABELS = "class_labels"  # name of the model's argument


class DiffusionBatch(NamedTuple):
    """A batch of clean samples.

    x0: pixels or scaled latents, [B, C, H, W] or [B, C, T, H, W].  condition: inputs of the model by argument name,
    float32 or integers.  index: numbers of the samples [B].  bad: numbers of unreadable samples, which were replaced.
    """

    x0: Tensor
    condition: dict[str, Tensor]
    index: Tensor  # type: ignore[assignment]  # replaces tuple.index, which is not used
    bad: list[int]

    def unreadable(self) -> list[int]:
        """Return the numbers of the samples that could not be read."""
        return self.bad


class Latents:
    """Data set of the samples in a complete folder of latents.

    vae: expected VAE; empty accepts any.  hflip: probability of mirroring.  seed: seed of the mirroring.  null: inputs
    of the unconditional model, by argument name. Raises ValueError for latents of another VAE, and for hflip > 0
    without stored latents of mirrored images.
    """

    def __init__(self, folder: str, vae: str, hflip: float, seed: int, device: torch.device) -> None:
        self.manifest = manifest = read_manifest(folder)
        if vae and manifest.vae != vae:
            raise ValueError(f"the latents {folder} are of another VAE: {manifest.vae}, the run's is {vae}")
        if hflip and not manifest.flip:
            raise ValueError(f"{folder} holds no latents of mirrored images: set data.hflip=0 or extract them")
        self.hflip, self.seed, self.device = hflip, seed, device
        self.starts = np.cumsum([0, *manifest.shards])
        self.shards = [open_tensors(Path(folder) / shard_name(i)) for i in range(len(manifest.shards))]
        self.names = [k for k in self.shards[0].keys() if k not in ("latents", "flipped", "index")]  # noqa: SIM118
        self.null = {k: v.to(device) for k, v in load_file(Path(folder) / NULL).items()} if manifest.text else {}
        if manifest.classes:
            self.null = {LABELS: torch.tensor(len(manifest.classes), device=device)}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def channels(self, name: str) -> int:
        """Return the number of channels of the tensors called `name`; 0 if the folder has no such tensors."""
        return self.shards[0].get_slice(name).get_shape()[1] if name in self.names else 0

    def train(self, plan: BatchPlan, first: int, last: int) -> Iterator[DiffusionBatch]:
        """Yield the micro-batches of this process in the steps [first, last), randomly mirrored."""
        for numbers, mirrored in plan.mirrored(first, last, self.seed, self.hflip):
            yield self._read(numbers, mirrored)

    def evaluation(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[DiffusionBatch]:
        """Yield every sample of this process once, in order, not mirrored."""
        numbers = np.arange(rank, len(self), world)
        for start in range(0, len(numbers), batch_size):
            part = numbers[start : start + batch_size]
            yield self._read(part, np.zeros(len(part), bool))

    def _read(self, numbers: np.ndarray, mirrored: np.ndarray) -> DiffusionBatch:
        rows = [self._row(int(n), bool(m)) for n, m in zip(numbers, mirrored, strict=True)]
        read = {k: self._batch([row[k] for row in rows]) for k in ("latents", *self.names)}
        return DiffusionBatch(read.pop("latents"), read, torch.from_numpy(numbers), [])

    def _batch(self, parts: list[Tensor]) -> Tensor:
        """Stack tensors on the device; 16-bit floats become float32, for models that run without autocast."""
        whole = torch.stack(parts).to(self.device)
        return whole.float() if whole.is_floating_point() else whole

    def _row(self, number: int, mirrored: bool) -> dict[str, Tensor]:
        at = int(np.searchsorted(self.starts, number, side="right")) - 1
        shard, row = self.shards[at], number - int(self.starts[at])
        latents = shard.get_slice("flipped" if mirrored else "latents")[row]
        return {"latents": latents, **{k: shard.get_slice(k)[row] for k in self.names}}
