"""Settings of labelled images and their augmentation: the sections `data` and `augment`."""

import os
import re
from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.ranges import POSITIVE, check_ranges

WORKERS = min(4, os.cpu_count() or 1)  # more workers than cores slow a small machine down
# the policy strings that timm supports: timm silently ignores unknown parts of a string
AUTO = re.compile(
    r"rand(-(m|n|inc|mmax)\d+|-(mstd|p)\d+(\.\d+)?|-t\w+)*|augmix(-[mwdb]\d+|-(mstd|a)\d+(\.\d+)?)*"
    r"|(original|originalr|v0|v0r|3a)(-mstd\d+(\.\d+)?)?"
)


@dataclass(frozen=True)
class DataSettings:
    """Labelled images.

    source: digits (1797 scans of 8 x 8 pixels from scikit-learn), folder (one sub-folder per class), parquet, hf (a
      data set of the Hugging Face hub or a local folder of one), webdataset (tar shards)
    train: training images: folder, parquet file or pattern, hub name, or tar pattern; empty for digits
    val: validation images, as for train. A hub name may be `name` (with the splits train and validation) or
      `name:split`; the data set is downloaded once into the cache of the datasets library, not streamed
    image_key: column or file extension of the image (parquet, hf, webdataset)
    label_key: column or file extension of the class number (parquet, hf, webdataset)
    num_classes: expected number of classes; other data raise an error; none accepts any number
    batch_size: global batch size per optimizer step
    workers: DataLoader workers per process; 0 reads in the training process
    cache: decode all images once per process and keep them as uint8 on the device, for small images (without
      color_jitter, auto_augment and random_erase)
    holdout: hold out the last n training images and validate on them (use this for model selection); 0 for none
    crop_pct: fraction of the resized image that the evaluation crop keeps; none for the model's own
    mean: mean per channel (of values in 0 to 1); none for the model's own
    std: standard deviation per channel; none for the model's own
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
                raise ValueError(f"data.{name} is three numbers, one per colour, got {getattr(self, name)}")


@dataclass(frozen=True)
class AugmentSettings:
    """Augmentation of the training images, by timm.

    crop: resized (random area and aspect), padded (random shift after padding) or none
    scale: smallest and largest area of the resized crop, as fractions of the image
    pad: pixels of padding of the padded crop
    hflip: probability of a horizontal flip
    color_jitter: strength of colour jitter
    auto_augment: timm policy such as rand-m9-mstd0.5-inc1; empty for none
    random_erase: probability of random erasing
    mixup: alpha of mixup, 0 for none
    cutmix: alpha of cutmix, 0 for none
    mix_prob: probability of mixing a batch
    label_smoothing: amount of label smoothing
    """

    former = (
        ("auto", "auto_augment"), ("erase", "random_erase"), ("jitter", "color_jitter"),
        ("smoothing", "label_smoothing"),
    )  # fmt: skip

    crop: str = "resized"
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    pad: int = 4
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str = ""
    random_erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        one_of("augment.crop", self.crop, ("resized", "padded", "none"))
        probabilities = ("hflip", "label_smoothing", "random_erase", "mix_prob")
        check_ranges("augment", self, **dict.fromkeys(probabilities, "[0, 1]"))
        check_ranges("augment", self, **dict.fromkeys(("color_jitter", "mixup", "cutmix"), "[0, inf)"))
        check_ranges("augment", self, scale="(0, 1]", pad="[0, 65536]")
        if len(self.scale) != 2 or self.scale[0] > self.scale[1]:
            raise ValueError(f"augment.scale is two numbers, smallest and largest area, got {self.scale}")
        if self.auto_augment and not AUTO.fullmatch(self.auto_augment):
            raise ValueError(
                f"augment.auto_augment={self.auto_augment!r} is no policy of timm; allowed: rand, augmix, original, "
                "originalr, v0, v0r or 3a with numbers, such as rand-m9-mstd0.5-inc1"
            )
