"""Mean and covariance of features, accumulated in float64 and stored in safetensors files."""

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.config import Tree
from zoo.files import replacing

STATISTICS_FORMAT = "hla_zoo_statistics"


@dataclass
class Gaussian:
    """Mean [D] and unbiased covariance [D, D] of n samples (None if unknown), float64."""

    mean: Tensor
    covariance: Tensor
    n: int | None


class Moments:
    """Running count, mean [D] and scatter matrix sum (x - mean)(x - mean)' [D, D] of features, in float64.

    Batches are merged as in Chan, Golub and LeVeque (1983), which is stable for features with a large mean.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        self.n = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    def update(self, features: Tensor) -> None:
        """Add a batch [B, D]."""
        x = features.to(self.mean.device, torch.float64)
        total = self.n + len(x)
        shift = x.mean(0) - self.mean
        x = x - x.mean(0)
        self.scatter += x.T @ x + (self.n * len(x) / total) * torch.outer(shift, shift)
        self.mean += (len(x) / total) * shift
        self.n = total

    def reduced(self) -> "Moments":
        """Return the moments of the features of all processes, the same in each; `self` without torch.distributed."""
        if not dist.is_initialized():
            return self
        whole = Moments(len(self.mean), self.mean.device)
        first = torch.cat([self.mean.new_tensor([self.n]), self.n * self.mean])
        dist.all_reduce(first)
        whole.n, whole.mean = int(first[0]), first[1:] / first[0]
        shift = self.mean - whole.mean
        whole.scatter = self.scatter + self.n * torch.outer(shift, shift)
        dist.all_reduce(whole.scatter)
        return whole

    def gaussian(self) -> Gaussian:
        """Compute mean and covariance. Raises ValueError for fewer than two samples and for features that are not
        finite."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least two images, got {self.n}")
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.scatter).all()):
            raise ValueError("the extractor returned features that are infinite or not a number")
        return Gaussian(self.mean.cpu(), (self.scatter / (self.n - 1)).cpu(), self.n)


@dataclass
class Statistics:
    """Feature statistics of a set of images.

    images: source of the images.  image_size: [height, width] in pixels, empty if unknown.  extractor: fields of
    `ExtractorIdentity`, empty if unknown.  pool: moments of the pooled features.  spatial: moments of the spatial
    features.  features: pooled features float32 [K, D] of a subset of the images, for KID, precision and recall.
    crop: crop of the images, as text.  file: the statistics file, empty if they were computed.
    """

    images: str
    image_size: list[int]
    extractor: Tree
    pool: Gaussian
    spatial: Gaussian | None = None
    features: Tensor | None = None
    crop: str = "none"
    file: str = ""
    warnings: list[str] = field(default_factory=list)

    def save(self, file: str | Path) -> None:
        """Write a safetensors file with the metadata in its header."""
        tensors = {"mu": self.pool.mean, "sigma": self.pool.covariance}
        if self.spatial:
            tensors |= {"mu_s": self.spatial.mean, "sigma_s": self.spatial.covariance}
        if self.features is not None:
            tensors["features"] = self.features
        about = {
            "images": self.images,
            "image_size": self.image_size,
            "extractor": self.extractor,
            "n": self.pool.n,
            "crop": self.crop,
        }
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(file)) as temporary:
            header = {STATISTICS_FORMAT: json.dumps(about)}
            save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata=header)


def load_statistics(file: str | Path) -> Statistics:
    """Load a .safetensors file of `Statistics.save`, or an .npz file with mu and sigma (ADM).

    An .npz file has no metadata, so that `extractor` is empty. Raises ValueError for other files.
    """
    return _from_npz(str(file)) if str(file).endswith(".npz") else _from_safetensors(str(file))


def _from_safetensors(file: str) -> Statistics:
    if not Path(file).is_file():
        raise ValueError(f"there is no statistics file {file}")
    try:
        with safe_open(file, framework="pt") as opened:
            header = (opened.metadata() or {}).get(STATISTICS_FORMAT)
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  not a dict
    except SafetensorError as error:
        raise ValueError(f"the statistics {file} are truncated or damaged: {error}") from error
    if header is None:
        raise ValueError(f"{file} holds no statistics of images: make them with fid.save")
    about = json.loads(header)
    n = about.pop("n")
    spatial = Gaussian(tensors["mu_s"], tensors["sigma_s"], n) if "mu_s" in tensors else None
    pool = Gaussian(tensors["mu"], tensors["sigma"], n)
    return Statistics(**about, pool=pool, spatial=spatial, features=tensors.get("features"), file=file)


def _from_npz(file: str) -> Statistics:
    with np.load(file, allow_pickle=False) as arrays:
        given = {k: arrays[k] for k in ("mu", "sigma", "mu_s", "sigma_s") if k in arrays}
    if wrong := [k for k, array in given.items() if array.dtype.kind not in "fiu" or not np.isfinite(array).all()]:
        raise ValueError(f"the array {wrong[0]} of {file} must hold finite numbers")
    found = {k: torch.from_numpy(array).double() for k, array in given.items()}
    for mean, covariance in (("mu", "sigma"), ("mu_s", "sigma_s")):
        shapes = [list(found[k].shape) for k in (mean, covariance) if k in found]
        if shapes and (len(shapes) < 2 or shapes[1] != shapes[0] * 2):
            raise ValueError(f"{file} must hold {mean} [D] and {covariance} [D, D], got {shapes}")
    spatial = Gaussian(found["mu_s"], found["sigma_s"], None) if "mu_s" in found else None
    return Statistics(file, [], {}, Gaussian(found["mu"], found["sigma"], None), spatial, file=file)


def holds_statistics(where: object) -> bool:
    """Whether `where` is a statistics file: a .safetensors file, or an .npz file with the array mu."""
    if not isinstance(where, str | Path):
        return False
    if not str(where).endswith(".npz"):
        return str(where).endswith(".safetensors")
    return "mu" in array_names(where)


def array_names(file: str | Path) -> list[str]:
    """Return the names of the arrays in an .npz file. Raises ValueError if it cannot be read."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return list(arrays.files)
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is not a readable .npz file: {error}") from error
