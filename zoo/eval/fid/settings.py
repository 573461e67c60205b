"""Settings of a FID evaluation."""

from dataclasses import dataclass, field

from zoo.data.settings import WORKERS
from zoo.ranges import check_device, check_ranges


@dataclass(frozen=True)
class FidOptions:
    """Images, reference and feature extractor.

    samples: images to score: a folder, an .npz file (arr_0, uint8 [N, H, W, 3]) or a .parquet file; empty to compute
      only the statistics of the reference
    reference: images likewise, digits (the validation images of scikit-learn's digits), or statistics (a .safetensors
      file of fid.save, an .npz file of ADM)
    extractor: inception, a timm name (FD-DINOv2: vit_large_patch14_dinov2.lvd142m), or the run folder of a classifier
    weights: weights file of the extractor; required for inception, otherwise empty for timm's weights
    save: .safetensors file for the statistics of the reference; empty for none
    image_size: side in pixels to which images of folders and parquet files are cropped and resized, as ADM does; none
      keeps their size
    image_key: image column of parquet files
    batch_size: batch size
    workers: DataLoader workers
    device: torch device; empty for the accelerator if there is one (command line) or the CPU (library)
    """

    samples: str = ""
    reference: str = ""
    extractor: str = "inception"
    weights: str = ""
    save: str = ""
    image_size: int | None = None
    image_key: str = "image"
    batch_size: int = 64
    workers: int = WORKERS
    device: str = ""

    def __post_init__(self) -> None:
        check_ranges("fid", self, batch_size="[1, inf)", image_size="[1, inf)", workers="[0, inf)")
        check_device("fid.device", self.device)
        if self.save and not self.save.endswith(".safetensors"):
            raise ValueError(f"fid.save must name a .safetensors file, got {self.save!r}")


@dataclass(frozen=True)
class FidSettings:
    """Settings of a FID evaluation.

    out: JSON file for the scores and metadata; empty for SAMPLES.fid.json next to the samples
    """

    fid: FidOptions = field(default_factory=FidOptions)
    out: str = ""
