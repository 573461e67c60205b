"""The keys of the configuration of a diffusion run, one frozen dataclass a section."""

from dataclasses import dataclass, field
from typing import Any

from zoo.config import one_of
from zoo.data.latents.settings import VIDEOS, check_rate
from zoo.data.settings import WORKERS
from zoo.diffusion.settings import ObjectiveSettings
from zoo.mixers.help import check_mixer, mixers_help
from zoo.models.diffusers.families import FAMILIES
from zoo.ranges import PIXELS, check_ranges
from zoo.train.settings import LogSettings, OptimSettings, RunBasics

KINDS = {f.name: f for f in FAMILIES if f.trained}


@dataclass(frozen=True)
class DenoiserSettings:
    """Which transformer of diffusers, where its weights come from, and which mixer stands in its self-attention.

    kind: dit (class labels), pixart, sana or sd3 (text), wan (videos; text, or a class as its only token), ltx (videos;
      text); only for a model from scratch, a checkpoint says what it is
    kwargs: arguments of the diffusers class, such as {num_layers: 8}; channels, size and classes come from the data;
      a checkpoint must agree with them
    checkpoint: run folder (the average of its weights, if it kept one), folder of a pipeline or of its transformer, or
      name on the hub; empty for random weights
    part: of a pipeline with two transformers (Wan 2.2 A14B) the one to train, on the times that it denoises:
      transformer (from noise on) or transformer_2 (to the data)
    mixer: mixer put into the self-attention after loading, one of those listed below; empty leaves it as it is
    mixer_options: options of the mixer, listed below, such as {depthwise: v}
    layers: blocks to convert: numbers (from 0; -1 is the last) or a pattern of module names; empty converts all
    keep_softmax: blocks that stay softmax: numbers, a pattern, or every:3 for the blocks 0, 3, 6, ...
    checkpointing: recompute each block in the backward pass, to save memory
    """

    more_help = staticmethod(mixers_help)

    kind: str = "dit"
    kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    part: str = "transformer"
    mixer: str = ""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | str = field(default_factory=list)
    keep_softmax: list[int] | str = field(default_factory=list)
    checkpointing: bool = False

    def __post_init__(self) -> None:
        one_of("model.kind", self.kind, tuple(KINDS))
        one_of("model.part", self.part, ("transformer", "transformer_2"))
        check_mixer(self.mixer, self.mixer_options)


@dataclass(frozen=True)
class DiffusionDataSettings:
    """What is generated: labelled images or videos as they are, or the latents of tools/extract_latents.py.

    source: digits, folder, parquet, hf, webdataset (pixels, see tools/train_vit.py), videos (a folder of mp4 files, in
      sub-folders by class), moving_digits, or latents
    train: training images or folder of latents; empty for digits and moving_digits
    val: the same for the validation loss
    image_key: column or file ending that holds the image (parquet, hf, webdataset)
    label_key: column or file ending that holds the class number (parquet, hf, webdataset)
    img_size: side of the square images in pixels, height of videos; none for latents, whose manifest says it
    width: width of videos; none for squares
    frames: frames of a clip of videos
    fps: frames a second at which videos are read, repeating or leaving out frames; 0 for their own
    stride: every so many frames of a video one is taken
    step: frames of a video between the starts of two clips; 0 for clips that do not overlap
    clips: number of training clips of moving_digits; a fifth as many for validation
    vae: VAE that the latents must come from; empty takes the one that the manifest names
    batch_size: images an optimiser step, over all processes and accumulated parts
    workers: loader processes a training process; 0 reads in the training process
    cache: decode all images once and keep them as uint8 on the device
    hflip: probability of a horizontal flip (of latents: only where flipped ones were stored)
    drop: probability that a sample is trained without its label or prompt, for classifier-free guidance
    val_images: how many validation images give the validation loss; 0 for all
    """

    source: str = "digits"
    train: str = ""
    val: str = ""
    image_key: str = "image"
    label_key: str = "label"
    img_size: int | None = None
    width: int | None = None
    frames: int = 16
    fps: float = 0.0
    stride: int = 1
    step: int = 0
    clips: int = 1000
    vae: str = ""
    batch_size: int = 128
    workers: int = WORKERS
    cache: bool = False
    hflip: float = 0.5
    drop: float = 0.1
    val_images: int = 0

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("digits", "folder", "parquet", "hf", "webdataset", *VIDEOS, "latents"))
        counts = ("batch_size", "frames", "stride", "clips")
        check_ranges("data", self, **dict.fromkeys(("img_size", "width"), PIXELS))
        check_ranges("data", self, **dict.fromkeys(counts, "[1, inf)"))
        check_ranges("data", self, **dict.fromkeys(("workers", "step", "val_images", "fps"), "[0, inf)"))
        check_ranges("data", self, hflip="[0, 1]", drop="[0, 1]")
        if self.width is not None and self.source not in VIDEOS:
            raise ValueError("data.width is for videos; images are squares of img_size")
        check_rate("data", self.fps, self.source)


@dataclass(frozen=True)
class TeacherSettings:
    """Learning from a teacher beside the data. Each weight multiplies a loss that is added to that of the data.

    teacher: source (the model before its mixers were changed), or what model.checkpoint may be; empty for none
    output: weight of the squared distance to the teacher's noise or velocity
    variance: the same for its variance (ddpm)
    attention: weight of the squared distance between attention outputs, block by block, over their power
    """

    teacher: str = ""
    output: float = 0.5
    variance: float = 0.05
    attention: float = 0.0

    def __post_init__(self) -> None:
        check_ranges("distill", self, **dict.fromkeys(("output", "variance", "attention"), "[0, inf)"))


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (peft) instead of all weights; the new parameters of mixers are trained in full.

    rank: rank of the adapters; 0 trains every weight
    alpha: scale of the adapters, times 1 / rank
    targets: endings of the names of the linear layers that get one
    """

    rank: int = 0
    alpha: int = 16
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])

    def __post_init__(self) -> None:
        check_ranges("lora", self, rank="[0, inf)", alpha="[1, inf)")


@dataclass(frozen=True)
class StepSettings:
    """The learning rate over the run, updated every step.

    name: timm schedule: cosine, constant, tanh
    steps: optimiser steps of the run
    warmup_steps: steps with a linearly growing rate, part of `steps`
    min_lr: learning rate at the end
    warmup_lr: learning rate at the start of the warm-up
    """

    name: str = "constant"
    steps: int = 1000
    warmup_steps: int = 0
    min_lr: float = 0.0
    warmup_lr: float = 1e-6

    def __post_init__(self) -> None:
        one_of("schedule.name", self.name, ("cosine", "constant", "tanh"))
        check_ranges("schedule", self, steps="[1, inf)", warmup_steps=f"[0, {self.steps})")
        check_ranges("schedule", self, min_lr="[0, inf)", warmup_lr="[0, inf)")


@dataclass(frozen=True)
class SampleSettings:
    """The grid of samples, from the average of the weights if there is one, with fixed noise and labels.

    every: steps between two grids (the end of the run always has one); 0 for none
    count: images in the grid
    steps: steps of the sampler
    guidance: scale s of classifier-free guidance, u + s (c - u); 1 for none
    """

    every: int = 0
    count: int = 40
    steps: int = 50
    guidance: float = 1.5

    def __post_init__(self) -> None:
        check_ranges("sample", self, every="[0, inf)", count="[1, inf)", steps="[1, inf)", guidance="[0, inf)")


@dataclass(frozen=True)
class StepRunSettings(RunBasics):
    """A run by steps.

    eval_steps: steps between two validation losses (the last step always has one)
    checkpoint_steps: steps between two checkpoints (the last step always has one)
    """

    folder: str = "runs/diffusion"
    eval_steps: int = 1000
    checkpoint_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("run", self, eval_steps="[1, inf)", checkpoint_steps="[1, inf)")


@dataclass(frozen=True)
class DiffusionSettings:
    """A diffusion run. See the sections."""

    model: DenoiserSettings = field(default_factory=DenoiserSettings)
    data: DiffusionDataSettings = field(default_factory=DiffusionDataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    distill: TeacherSettings = field(default_factory=TeacherSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: StepSettings = field(default_factory=StepSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    run: StepRunSettings = field(default_factory=StepRunSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if self.optim.layer_decay:
            raise ValueError("optim.layer_decay is for image classifiers: diffusion runs have one rate")
        if self.run.compile and self.distill.teacher and self.distill.attention:
            raise ValueError("distill.attention reads inside the blocks, which run.compile closes; leave one out")
