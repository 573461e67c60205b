"""Settings of a sampling run."""

from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.precision import PRECISIONS
from zoo.ranges import SEED, check_device, check_ranges


@dataclass(frozen=True)
class SampleOptions:
    """Model and sampling options.

    model: folder (or hub name) of a diffusers pipeline or of a transformer, converted or not
    base: for a transformer: pipeline with its VAE and text encoders, and the scheduler if the transformer has none;
      empty for models of pixels
    transformer_2: low-noise transformer of a two-expert pipeline (Wan 2.2 A14B); empty for the pipeline's own
    count: number of images
    batch_size: batch size per process; images do not depend on it
    seed: image i is generated with seed + i
    scheduler: class name of diffusers, such as DDPMScheduler; empty for the model's own
    scheduler_options: changes of its configuration, such as {variance_type: learned_range}
    steps: sampling steps
    guidance: scale s in u + s (c - u); 1 for none; none for the default of the pipeline, 1 for classes
    guidance_channels: number of channels that are guided (3 of 4 in DiT's own scripts); none for all
    labels: random, balanced, or a list of classes that is repeated
    prompts: text file with one prompt per line, for text-conditional pipelines
    images: folder of first frames, for image-to-video pipelines
    size: height and width in pixels; none for the model's
    width: width of videos; none for squares
    frames: frames of videos; none for the model's
    precision: fp32, bf16 or fp16
    compile: compile the blocks of the transformer; images change by rounding errors
    device: torch device; empty for the accelerator if there is one
    """

    former = (("model_2", "transformer_2"),)

    model: str = ""
    base: str = ""
    transformer_2: str = ""
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

    out: SAMPLES.npz (ADM's layout) or a folder for PNG files; for videos a folder for mp4 files
    """

    sample: SampleOptions = field(default_factory=SampleOptions)
    out: str = ""
