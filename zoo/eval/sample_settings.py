"""Settings of a sampling run."""

from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.diffusion.density import check_steps
from zoo.precision import PRECISIONS
from zoo.ranges import SEED, check_device, check_ranges


@dataclass(frozen=True)
class SampleOptions:
    """Model and sampling options.

    model: folder (or hub name) of a diffusers pipeline or of a transformer, converted or not
    base: pipeline with the other components of a transformer: VAE, text encoders, and the scheduler if the transformer
      has none; empty for a pipeline and for models that generate pixels
    transformer_2: low-noise transformer of a two-expert pipeline (Wan 2.2 A14B); empty for the pipeline's own
    count: number of images or videos
    batch_size: batch size per process; images do not depend on it
    seed: image i is generated with seed + i
    scheduler: class name of diffusers, such as DDPMScheduler; empty for the model's own
    scheduler_options: changes of the scheduler's configuration, such as {variance_type: learned_range}
    steps: sampling steps
    guidance: scale s of classifier-free guidance, u + s (c - u); 1 disables it; none for the default of the pipeline,
      or 1 for class-conditional models
    guidance_channels: number of channels that are guided (3 of 4 in DiT's own scripts); none for all
    labels: random, balanced, or a list of classes that is repeated
    prompts: text file with one prompt per line, for text-conditional pipelines
    images: folder of first frames, for image-to-video pipelines
    size: height and width in pixels; none for the model's own
    width: width of videos in pixels; none for squares
    frames: frames per video; none for the model's own
    stream: generate videos of a frame-causal model (mixer option causal=frame) in pieces of the training length; the
      attention layers need no more memory for more frames, but all latents are decoded together
    density: pairs [first step, density] for layers of adaptive multipole, 0 for their own density: [[0, 1.0], [2, 0]]
      computes the first two steps exactly; empty for their own in all steps
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
    stream: bool = False
    density: list[list[float]] = field(default_factory=list)
    precision: str = "fp32"
    compile: bool = False
    device: str = ""

    def __post_init__(self) -> None:
        one_of("sample.precision", self.precision, PRECISIONS)
        if isinstance(self.labels, str):
            one_of("sample.labels", self.labels, ("random", "balanced"))
        elif not self.labels:
            raise ValueError("sample.labels is an empty list; say random, balanced or which classes")
        if self.stream and self.compile:
            raise ValueError("sample.stream does not go with sample.compile: states are Python objects of the layers")
        counts = ("count", "batch_size", "steps", "guidance_channels", "size", "width", "frames")
        check_ranges("sample", self, **dict.fromkeys(counts, "[1, inf)"))
        check_ranges("sample", self, seed=SEED, guidance="[0, inf)")
        if isinstance(self.labels, list):
            check_ranges("sample", self, labels="[0, inf)")
        if self.density:
            check_steps(self.density)
        check_device("sample.device", self.device)


@dataclass(frozen=True)
class SampleSettings:
    """Settings of a sampling run.

    out: SAMPLES.npz (in ADM's layout) or a folder for PNG files; for videos a folder for mp4 files
    """

    sample: SampleOptions = field(default_factory=SampleOptions)
    out: str = ""
