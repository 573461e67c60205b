"""The keys of the `data` and `augment` sections of a configuration."""

from dataclasses import dataclass, field

from zoo.config import one_of, positive


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
    workers: int = 4
    cache: bool = False
    holdout: int = 0
    crop_pct: float | None = None
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("digits", "folder", "parquet", "hf", "webdataset"))
        positive(data__batch_size=self.batch_size)
        for name in ("mean", "std"):
            if getattr(self, name) is not None and len(getattr(self, name)) != 3:
                raise ValueError(f"data.{name} is three numbers, one a colour, got {getattr(self, name)}")
        if self.holdout < 0:
            raise ValueError(f"data.holdout must be 0 or more, got {self.holdout}")
        if self.workers < 0:
            raise ValueError(f"data.workers must be 0 or more, got {self.workers}")


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
        for name in ("hflip", "smoothing", "erase", "mix_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} must be in [0, 1], got {getattr(self, name)}")
        if len(self.scale) != 2:
            raise ValueError(f"augment.scale is two numbers, smallest and largest area, got {self.scale}")
