"""The keys of a sampling run."""

from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.precision import PRECISIONS
from zoo.ranges import SEED, check_device, check_ranges


@dataclass(frozen=True)
class SampleOptions:
    """Which model makes which images, and how.

    model: folder (or hub name) of a diffusers pipeline or of a bare transformer, converted or not
    base: for a bare transformer: the pipeline with its VAE, text encoders, and scheduler if the transformer holds none;
      empty for models of pixels
    model_2: transformer for the times near the data, of a pipeline with two (Wan 2.2 A14B); empty takes that of the
      pipeline
    count: number of images
    batch_size: images at once in a process; no image depends on it
    seed: image i is made with the seed + i
    scheduler: class name of diffusers, such as DDPMScheduler; empty takes that of the model
    scheduler_options: changes of its configuration, such as {variance_type: learned_range}
    steps: denoising steps
    guidance: scale s in u + s (c - u); 1 for none; none takes the default of the pipeline, 1 for classes
    guidance_channels: only the first channels are guided (DiT's own scripts: 3 of its 4); none for all
    labels: random, balanced, or a list of classes that is repeated
    prompts: text file with one prompt a line, for pipelines from text
    images: folder of first frames, for pipelines from image to video
    size: pixels, height and width; none takes those of the model
    width: width of videos; none for squares
    frames: frames of videos; none takes those of the model
    precision: fp32, bf16 or fp16
    compile: compile the blocks of the transformer; images change by rounding
    device: torch device; empty takes the accelerator if there is one
    """

    model: str = ""
    base: str = ""
    model_2: str = ""
    count: int = 50_000
    batch_size: int = 50
    seed: int = 0
    scheduler: str = ""
    scheduler_options: dict = field(default_factory=dict)
    steps: int = 50
    guidance: float | None = None
    guidance_channels: int | None = None
    labels: list[int] | str = "random"
    prompts: str = ""
    images: str | None = None
    size: int | None = None
    width: int | None = None
    frames: int | None = None
    precision: str = "fp32"
    compile: bool = False
    device: str = ""

    def __post_init__(self) -> None:
        one_of("sample.precision", self.precision, PRECISIONS)
        if isinstance(self.labels, str):
            one_of("sample.labels", self.labels, ("random", "balanced"))
        elif not self.labels:
            raise ValueError("sample.labels is an empty list; say random, balanced or which classes")
        counts = ("count", "batch_size", "steps", "guidance_channels", "size", "width", "frames")
        check_ranges("sample", self, **dict.fromkeys(counts, "[1, inf)"))
        check_ranges("sample", self, seed=SEED, guidance="[0, inf)")
        if isinstance(self.labels, list):
            check_ranges("sample", self, labels="[0, inf)")
        check_device("sample.device", self.device)


@dataclass(frozen=True)
class SampleSettings:
    """A sampling run. See the section.

    out: SAMPLES.npz (layout of ADM) or a folder for PNG files; of videos a folder for mp4 files
    """

    sample: SampleOptions = field(default_factory=SampleOptions)
    out: str = ""
