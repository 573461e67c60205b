"""Settings of a diffusion run, one frozen dataclass per section."""

from dataclasses import dataclass, field

from zoo.config import Tree, one_of
from zoo.data.latents.settings import VIDEOS, ReadingSettings
from zoo.diffusion.settings import ObjectiveSettings
from zoo.models.diffusers.families import FAMILIES
from zoo.ranges import check_ranges, check_shorter
from zoo.train.settings import LogSettings, MixerSettings, OptimSettings, RunBasics

KINDS = {f.name: f for f in FAMILIES if f.trained}


@dataclass(frozen=True)
class DenoiserSettings(MixerSettings):
    """Diffusion transformer, initial weights and attention mixer.

    kind: kind of a model from scratch (a checkpoint determines its own kind): dit (class labels), pixart, sana or sd3
      (text), wan (videos; text, or a class as its only token), ltx (videos; text)
    kwargs: arguments of the diffusers class, such as {num_layers: 8}; channels, size and classes come from the data;
      a checkpoint must agree with them
    checkpoint: run folder (its EMA weights, if there are any), folder of a pipeline or of its transformer, or name on
      the Hugging Face hub; empty for random weights
    subfolder: which transformer of a two-expert pipeline (Wan 2.2 A14B) to train, transformer (high noise) or
      transformer_2 (low noise)
    gradient_checkpointing: recompute each block in the backward pass to save memory
    """

    former = (("checkpointing", "gradient_checkpointing"), ("part", "subfolder"))

    kind: str = "dit"
    kwargs: Tree = field(default_factory=dict)
    checkpoint: str = ""
    subfolder: str = "transformer"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.kind", self.kind, tuple(KINDS))
        one_of("model.subfolder", self.subfolder, ("transformer", "transformer_2"))


@dataclass(frozen=True)
class DiffusionDataSettings(ReadingSettings):
    """Training and validation data: labelled images or videos, or the latents of `zoo extract-latents`.

    source: digits, folder, parquet, hf, webdataset (pixels, as in `zoo train-classifier`), videos (a folder of mp4
      files, in sub-folders by class), moving_digits, or latents
    train: training images or folder of latents; empty for digits and moving_digits
    val: validation images or folder of latents
    img_size: side of the square images in pixels, height of videos; none for latents, whose manifest contains it
    vae: VAE that the latents must come from; empty for the VAE named in the manifest
    batch_size: global batch size per optimizer step
    cache: decode all images once and keep them as uint8 on the device
    hflip: probability of a horizontal flip (latents: only if they were extracted with encode.flip=true)
    cond_dropout: probability of training a sample without its label or prompt, for classifier-free guidance
    val_images: number of validation images; 0 for all
    """

    former = (("drop", "cond_dropout"),)

    source: str = "digits"
    train: str = ""
    val: str = ""
    img_size: int | None = None
    vae: str = ""
    batch_size: int = 128
    cache: bool = False
    hflip: float = 0.5
    cond_dropout: float = 0.1
    val_images: int = 0

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("digits", "folder", "parquet", "hf", "webdataset", *VIDEOS, "latents"))
        self.check("data")
        check_ranges("data", self, batch_size="[1, inf)", val_images="[0, inf)")
        check_ranges("data", self, hflip="[0, 1]", cond_dropout="[0, 1]")


@dataclass(frozen=True)
class TeacherSettings:
    """Knowledge distillation. The weighted losses are added to the training loss.

    teacher: source (the model before conversion), or anything that model.checkpoint accepts; empty for none
    output: weight of the MSE to the teacher's noise or velocity
    variance: weight of the MSE to the teacher's variance (ddpm)
    attention: weight of the per-layer relative MSE between student and teacher attention outputs
    """

    teacher: str = ""
    output: float = 0.5
    variance: float = 0.05
    attention: float = 0.0

    def __post_init__(self) -> None:
        check_ranges("distill", self, **dict.fromkeys(("output", "variance", "attention"), "[0, inf)"))


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (LoRA, by peft), trained instead of all weights. New parameters of mixers are trained in full.

    rank: rank of the adapters; 0 trains every weight
    alpha: scale of the adapters, times 1 / rank
    targets: name suffixes of the linear layers that get an adapter
    """

    rank: int = 0
    alpha: int = 16
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])

    def __post_init__(self) -> None:
        check_ranges("lora", self, rank="[0, inf)", alpha="[1, inf)")


@dataclass(frozen=True)
class StepSettings:
    """Learning-rate schedule, updated every step.

    name: timm schedule: cosine, constant, tanh
    steps: number of optimizer steps
    warmup_steps: steps of linear warm-up, included in `steps`
    min_lr: final learning rate
    warmup_lr: initial learning rate of the warm-up
    """

    name: str = "constant"
    steps: int = 1000
    warmup_steps: int = 0
    min_lr: float = 0.0
    warmup_lr: float = 1e-6

    def __post_init__(self) -> None:
        one_of("schedule.name", self.name, ("cosine", "constant", "tanh"))
        check_ranges("schedule", self, steps="[1, inf)", warmup_steps="[0, inf)")
        check_shorter("schedule", self, "warmup_steps", "steps")
        check_ranges("schedule", self, min_lr="[0, inf)", warmup_lr="[0, inf)")


@dataclass(frozen=True)
class PreviewSettings:
    """Grids of samples during training, from the EMA weights if there are any, with fixed noise and labels.

    every: steps between two grids (there is always one at the end); 0 for none
    count: images per grid
    steps: sampling steps
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
    """Settings of a run whose length is given in steps.

    eval_steps: steps between two validations (there is always one at the end)
    checkpoint_steps: steps between two checkpoints (there is always one at the end)
    """

    folder: str = "runs/diffusion"
    eval_steps: int = 1000
    checkpoint_steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("run", self, eval_steps="[1, inf)", checkpoint_steps="[1, inf)")


@dataclass(frozen=True)
class DiffusionSettings:
    """Settings of a diffusion run."""

    model: DenoiserSettings = field(default_factory=DenoiserSettings)
    data: DiffusionDataSettings = field(default_factory=DiffusionDataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    distill: TeacherSettings = field(default_factory=TeacherSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: StepSettings = field(default_factory=StepSettings)
    sample: PreviewSettings = field(default_factory=PreviewSettings)
    run: StepRunSettings = field(default_factory=StepRunSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if self.optim.layer_decay:
            raise ValueError("optim.layer_decay is for image classifiers: diffusion runs use one rate")
        if self.run.compile and self.distill.teacher and self.distill.attention:
            raise ValueError("distill.attention reads inside the blocks, which run.compile closes; leave one out")
