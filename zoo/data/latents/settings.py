"""Settings of an extraction of latents and prompt embeddings."""

from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.data.settings import WORKERS
from zoo.ranges import PIXELS, check_device, check_ranges

VIDEOS = ("videos", "moving_digits")  # data sources that yield clips


@dataclass(frozen=True)
class ReadingSettings:
    """Reading of images and clips from their source.

    image_key: column or file extension of the image (parquet, hf, webdataset)
    label_key: column or file extension of the class number (parquet, hf, webdataset)
    width: width of videos in pixels; none for squares
    frames: frames per clip (Wan: 4 n + 1)
    fps: frame rate at which videos are read, by repeating or dropping frames (Wan: 16); 0 for the rate of each video
    stride: keep every n-th frame
    step: frames from the start of one clip of a video to the start of the next; 0 for clips that do not overlap
    clips: number of clips of moving_digits for training; validation has a fifth as many
    workers: DataLoader workers per process; 0 reads in this process
    """

    source: str = ""
    image_key: str = "image"
    label_key: str = "label"
    width: int | None = None
    frames: int = 16
    fps: float = 0.0
    stride: int = 1
    step: int = 0
    clips: int = 1000
    workers: int = WORKERS

    def check(self, section: str) -> None:
        """Raise ValueError for values out of range, and for video options with a source of images."""
        check_ranges(section, self, **dict.fromkeys(("img_size", "width"), PIXELS))
        check_ranges(section, self, **dict.fromkeys(("frames", "stride", "clips"), "[1, inf)"))
        check_ranges(section, self, **dict.fromkeys(("workers", "step", "fps"), "[0, inf)"))
        if self.width is not None and self.source not in VIDEOS:
            raise ValueError(f"{section}.width is for videos; images are squares of img_size")
        if self.fps and self.source != "videos":
            raise ValueError(f"{section}.fps is for files of videos, not for the source {self.source!r}")


@dataclass(frozen=True)
class ImageSettings(ReadingSettings):
    """Images or videos to encode, with class numbers or captions.

    source: digits, folder, parquet, hf or webdataset (images, as in zoo train-classifier), videos (folder of mp4 files)
      or moving_digits
    where: folder, parquet file or pattern, hub name, or tar pattern; train or val for digits and moving_digits
    text_key: column or file extension of the caption (videos: column of metadata.csv); empty for class numbers
    img_size: side in pixels of the square to which images are resized and cropped, as in ADM and DiT; height of videos
    crop: crop of videos with another aspect ratio: center, or random (drawn from encode.seed and the number of the
      clip)
    """

    source: str = "folder"
    where: str = ""
    text_key: str = ""
    img_size: int = 256
    crop: str = "center"
    frames: int = 81

    def __post_init__(self) -> None:
        one_of("images.source", self.source, ("digits", "folder", "parquet", "hf", "webdataset", *VIDEOS))
        self.check("images")
        if self.text_key and self.source in ("digits", "folder", "moving_digits"):
            raise ValueError(f"images.text_key needs columns, which the source {self.source!r} has not")
        one_of("images.crop", self.crop, ("center", "random"))
        if self.crop == "random" and self.source != "videos":
            raise ValueError(f"images.crop=random is for files of videos, not for the source {self.source!r}")
        if self.source in ("digits", "moving_digits"):
            one_of("images.where", self.where, ("train", "val"))


@dataclass(frozen=True)
class EncodeSettings:
    """Encoders and output format.

    vae: folder or hub name of a VAE or of a pipeline with one
    text: folder or hub name of a pipeline (PixArt, Sana, SD3, Wan) whose text encoders encode the captions; an
      image-to-video pipeline (Wan I2V) also encodes the first frame of each clip
    max_length: tokens per caption, padded to this length (Wan: 512)
    truncate: truncate longer captions instead of raising an error
    posterior: mean, or sample (one deterministic draw per image)
    flip: also encode the mirrored images
    dtype: type of the stored tensors: float16, bfloat16 or float32
    batch_size: batch size
    shard: samples per file
    device: torch device; empty for the accelerator if there is one
    seed: seed of the posterior samples
    """

    vae: str = ""
    text: str = ""
    max_length: int = 300
    truncate: bool = False
    posterior: str = "sample"
    flip: bool = False
    dtype: str = "float16"
    batch_size: int = 32
    shard: int = 4096
    device: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("encode.posterior", self.posterior, ("mean", "sample"))
        one_of("encode.dtype", self.dtype, ("float16", "bfloat16", "float32"))
        check_ranges("encode", self, **dict.fromkeys(("batch_size", "shard", "max_length"), "[1, inf)"))
        check_ranges("encode", self, seed="[0, 8388607]")  # the number of an image is added to 2^40 times the seed
        check_device("encode.device", self.device)


@dataclass(frozen=True)
class ExtractSettings:
    """Settings of an extraction.

    out: folder for the latents
    """

    images: ImageSettings = field(default_factory=ImageSettings)
    encode: EncodeSettings = field(default_factory=EncodeSettings)
    out: str = ""
