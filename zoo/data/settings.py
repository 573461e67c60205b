"""The keys of the `data` and `augment` sections of a configuration."""

import os
import re
from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.ranges import POSITIVE, check_ranges

WORKERS = min(4, os.cpu_count() or 1)  # more than the cores of a small machine only slow it down
# what timm makes of augment.auto; it passes over the parts of the word that it does not know
AUTO = re.compile(
    r"rand(-(m|n|inc|mmax)\d+|-(mstd|p)\d+(\.\d+)?|-t\w+)*|augmix(-[mwdb]\d+|-(mstd|a)\d+(\.\d+)?)*"
    r"|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?"
)


@dataclass(frozen=True)
class DataSettings:
    """The labelled images.

    source: digits (1797 real scans of 8 x 8 pixels that come with scikit-learn), folder (one sub-folder a class),
      parquet,
      hf (a data set of the Hugging Face hub or a local folder of one), webdataset (tar shards)
    train: training images: folder, parquet file or pattern, hub name, or tar pattern; empty for digits
    val: validation images, likewise. hf: `name` or `name:split`, by default the splits train and validation; it is
      downloaded once into the cache of the datasets library, not streamed
    image_key: column or file ending that holds the image (parquet, hf, webdataset)
    label_key: column or file ending that holds the class number (parquet, hf, webdataset)
    num_classes: expected number of classes, an error if the data has another; none takes it from the data
    batch_size: images an optimiser step, over all processes and accumulated parts
    workers: loader processes a training process; 0 reads in the training process
    cache: decode everything once a process and keep it as uint8 on the device, for small images (no jitter, auto,
      erase)
    holdout: last images of the training set that are not trained on, but take the place of `val`: for choices, which
      must not be made on the validation images; 0 for none
    crop_pct: part of the resized image that the evaluation crop keeps; none takes that of the model
    mean: mean of each channel (of values in 0 to 1) that is subtracted; none takes that of the model
    std: number that each channel is divided by; none takes that of the model
    """

    source: str = "digits"
    train: str = ""
    val: str = ""
    image_key: str = "image"
    label_key: str = "label"
    num_classes: int | None = None
    batch_size: int = 128
    workers: int = WORKERS
    cache: bool = False
    holdout: int = 0
    crop_pct: float | None = None
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("digits", "folder", "parquet", "hf", "webdataset"))
        check_ranges("data", self, batch_size="[1, inf)", num_classes="[1, inf)", workers="[0, inf)")
        check_ranges("data", self, holdout="[0, inf)", crop_pct="[0.01, 1]", mean="(-inf, inf)", std=POSITIVE)
        for name in ("mean", "std"):
            if getattr(self, name) is not None and len(getattr(self, name)) != 3:
                raise ValueError(f"data.{name} is three numbers, one a colour, got {getattr(self, name)}")


@dataclass(frozen=True)
class AugmentSettings:
    """Random changes of the training images, all by timm.

    crop: resized (random area and aspect), padded (random shift after padding) or none
    scale: smallest and largest area of the resized crop, as parts of the image
    pad: pixels of padding of the padded crop
    hflip: probability of a horizontal flip
    jitter: strength of the colour jitter
    auto: timm policy such as rand-m9-mstd0.5-inc1; empty for none
    erase: probability of random erasing
    mixup: alpha of mixup, 0 for none
    cutmix: alpha of cutmix, 0 for none
    mix_prob: probability that a batch is mixed
    smoothing: label smoothing
    """

    crop: str = "resized"
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    pad: int = 4
    hflip: float = 0.5
    jitter: float = 0.0
    auto: str = ""
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        one_of("augment.crop", self.crop, ("resized", "padded", "none"))
        check_ranges("augment", self, **dict.fromkeys(("hflip", "smoothing", "erase", "mix_prob"), "[0, 1]"))
        check_ranges("augment", self, **dict.fromkeys(("jitter", "mixup", "cutmix"), "[0, inf)"))
        check_ranges("augment", self, scale="(0, 1]", pad="[0, 65536]")
        if len(self.scale) != 2 or self.scale[0] > self.scale[1]:
            raise ValueError(f"augment.scale is two numbers, smallest and largest area, got {self.scale}")
        if self.auto and not AUTO.fullmatch(self.auto):
            raise ValueError(
                f"augment.auto={self.auto!r} is no policy of timm; allowed: rand, augmix, original, originalr, v0, v0r "
                "or 3a with numbers, such as rand-m9-mstd0.5-inc1"
            )
