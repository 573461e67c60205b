"""The keys of a score."""

from dataclasses import dataclass, field, replace

from zoo.data.settings import WORKERS
from zoo.ranges import check_device, check_ranges


@dataclass(frozen=True)
class FidOptions:
    """Which images are compared, in which features.

    samples: the images to score: a folder, an .npz (arr_0, uint8 [N, H, W, 3]) or a .parquet file; empty for only
      the statistics of the reference
    reference: what they are compared with: images likewise, digits (the embedded ones that are not trained on), or
      statistics (.safetensors of fid.save, .npz of ADM)
    extractor: inception, a timm name (FD-DINOv2: vit_large_patch14_dinov2.lvd142m), or a run folder of train_vit.py
    weights: file with the weights of the extractor; needed for inception, else empty takes timm's
    save: file (.safetensors) for the statistics of the reference; empty for none
    image_size: cut and resize images of folders and parquet files to this many pixels, as ADM does; none leaves them
    image_key: column of the images in parquet files
    reference_features: so many reference images (a fixed random choice) are used for KID, precision and recall
    batch_size: images at once
    workers: loader processes
    device: torch device; empty takes the accelerator if there is one (the tool) or the CPU (the library)
    """

    samples: str = ""
    reference: str = ""
    extractor: str = "inception"
    weights: str = ""
    save: str = ""
    image_size: int | None = None
    image_key: str = "image"
    reference_features: int = 10_000
    batch_size: int = 64
    workers: int = WORKERS
    device: str = ""

    def __post_init__(self) -> None:
        check_ranges("fid", self, **dict.fromkeys(("batch_size", "reference_features", "image_size"), "[1, inf)"))
        check_ranges("fid", self, workers="[0, inf)")
        check_device("fid.device", self.device)
        if self.save and not self.save.endswith(".safetensors"):
            raise ValueError(f"fid.save must name a .safetensors file, got {self.save!r}")


@dataclass(frozen=True)
class FidSettings:
    """A score. See the section.

    out: the JSON card; empty writes it beside the samples as SAMPLES.fid.json
    """

    fid: FidOptions = field(default_factory=FidOptions)
    out: str = ""


def with_device(options: FidOptions, device: object) -> FidOptions:
    """`options` with `device` filled in where it is empty."""
    return replace(options, device=options.device or str(device))
