"""Settings of a classification run, one frozen dataclass per section; read and checked by `zoo.config`."""

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from zoo.config import Tree, one_of
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.mixers.help import check_mixer, mixers_help
from zoo.precision import PRECISIONS
from zoo.ranges import POSITIVE, SEED, check_ranges, check_shorter

if TYPE_CHECKING:
    from zoo.train.denoising.settings import DiffusionSettings

AnySettings: TypeAlias = "TrainSettings | DiffusionSettings"  # of a run of any kind

# Keys that may differ when an interrupted run resumes, since they do not change its result.
CHANGEABLE = (
    "run.resume",
    "run.folder",
    "run.keep_checkpoints",
    "run.checkpoint_steps",
    "run.checkpoint_epochs",
    "log",
    "data.workers",
)


@dataclass(frozen=True)
class MixerSettings:
    """Attention mixer of the model.

    mixer: attention mixer to convert to after loading, one of the names listed below; empty keeps the model's attention
    mixer_options: options of the mixer (`zoo list options MIXER`), such as {exponent: 4.0, depthwise: v}
    layers: blocks to convert: indices (from 0; -1 is the last) or a pattern of module names; empty converts all
    keep_softmax: blocks that keep softmax attention: indices such as [0, 5], a pattern, or `every:3` for the blocks 0,
      3, 6, ...
    """

    more_help = staticmethod(mixers_help)

    mixer: str = ""
    mixer_options: Tree = field(default_factory=dict)
    layers: list[int] | str = field(default_factory=list)
    keep_softmax: list[int] | str = field(default_factory=list)

    def __post_init__(self) -> None:
        check_mixer(self.mixer, self.mixer_options)


@dataclass(frozen=True)
class ModelSettings(MixerSettings):
    """Model, initial weights and attention mixer.

    name: timm model name, of a softmax model (vit_small_patch16_224) or of a registered model with a mixer
      (vit_mhla_small_patch16_224); empty takes name and kwargs from the checkpoint
    kwargs: keyword arguments of timm.create_model, such as {patch_size: 4, depth: 6}
    img_size: side of the square input in pixels; position embeddings of a checkpoint are resampled to it; none keeps
      the size of the checkpoint or the model
    checkpoint: initial weights, a .safetensors file or a run folder (its EMA weights, if there are any); empty for
      random weights
    pretrained: start from timm's published weights of this name
    reset_classifier: use every weight of the checkpoint except the classifier, so that the number of classes may differ
    """

    former = (("new_head", "reset_classifier"),)

    name: str = ""
    kwargs: Tree = field(default_factory=dict)
    img_size: int | None = None
    checkpoint: str = ""
    pretrained: bool = False
    reset_classifier: bool = False

    def __post_init__(self) -> None:
        check_ranges("model", self, img_size="[1, inf)")
        super().__post_init__()
        for key, value in self.kwargs.items():
            if str(key).endswith("_rate") and isinstance(value, int | float) and not 0 <= value < 1:
                raise ValueError(f"model.kwargs.{key} must be in [0, 1), got {value}")
        if self.kwargs.get("in_chans", 3) != 3:
            raise ValueError(f"model.kwargs.in_chans must be 3, the channels of images, got {self.kwargs['in_chans']}")


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer, gradient clipping and accumulation, EMA, and order warm-up.

    name: timm optimizer name
    lr: peak learning rate
    weight_decay: weight decay of matrices (vectors have none)
    betas: betas of Adam-like optimizers
    layer_decay: layer-wise learning-rate decay; none disables it
    mixer_lr_scale: learning-rate factor of the new parameters of mixers
    clip_grad_norm: maximum gradient norm; none disables clipping
    grad_accum_steps: gradient accumulation steps
    ema: decay of the EMA of the weights; 0 for no EMA
    ema_warmup: warm up the EMA decay from 0 (recommended for short runs)
    anneal: fraction of training during which layers of hla2, ahla and hla3 are blended with first-order linear
      attention; 0 for none
    ridge: weight of the first-order term in that blend, at half of the warm-up (lambda in A A + lambda A for ahla)
    """

    former = (("clip", "clip_grad_norm"), ("accumulate", "grad_accum_steps"), ("mixer_lr", "mixer_lr_scale"))

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    layer_decay: float | None = None
    mixer_lr_scale: float = 1.0
    clip_grad_norm: float | None = 1.0
    grad_accum_steps: int = 1
    ema: float = 0.0
    ema_warmup: bool = True
    anneal: float = 0.0
    ridge: float = 1.0

    def __post_init__(self) -> None:
        check_ranges("optim", self, **dict.fromkeys(("lr", "mixer_lr_scale", "clip_grad_norm", "ridge"), POSITIVE))
        check_ranges("optim", self, grad_accum_steps="[1, inf)", weight_decay="[0, inf)", layer_decay="(0, 1]")
        check_ranges("optim", self, **dict.fromkeys(("betas", "anneal", "ema"), "[0, 1)"))
        if len(self.betas) not in (2, 3):
            raise ValueError(f"optim.betas is two numbers (three for adan), got {self.betas}")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule, updated every step.

    name: timm schedule: cosine, constant, poly, tanh, step, or with timm 1.0.31 wsd (warm-up, stable, decay)
    epochs: number of epochs
    warmup_epochs: epochs of linear warm-up, included in `epochs`
    min_lr: final learning rate
    warmup_lr: initial learning rate of the warm-up
    decay_epochs: for step, epochs between two decays; for wsd, epochs of the final decay, or if below 1, its fraction
      of the run (none means 0.2)
    decay_rate: learning-rate factor of each decay (step)
    power: exponent of the decay, 1 for a linear decay (poly)
    """

    name: str = "cosine"
    epochs: int = 10
    warmup_epochs: float = 0.0
    min_lr: float = 1e-6
    warmup_lr: float = 1e-6
    decay_epochs: float | None = None
    decay_rate: float = 0.1
    power: float = 1.0

    def __post_init__(self) -> None:
        one_of("schedule.name", self.name, ("cosine", "constant", "poly", "tanh", "step", "wsd"))
        check_ranges("schedule", self, epochs="[1, inf)", warmup_epochs="[0, inf)")
        check_shorter("schedule", self, "warmup_epochs", "epochs")
        check_ranges("schedule", self, **dict.fromkeys(("decay_rate", "decay_epochs", "power"), POSITIVE))
        check_ranges("schedule", self, min_lr="[0, inf)", warmup_lr="[0, inf)")
        for key, users in (("decay_epochs", ("step", "wsd")), ("decay_rate", ("step",)), ("power", ("poly",))):
            if getattr(self, key) != type(self).__dataclass_fields__[key].default and self.name not in users:
                raise ValueError(f"schedule.{key} is for schedule.name={' or '.join(users)}, not {self.name}")
        if self.name == "step" and self.decay_epochs is None:
            raise ValueError("schedule.name=step needs schedule.decay_epochs, the epochs between two decays")


@dataclass(frozen=True)
class DistillSettings:
    """Knowledge distillation: (1 - alpha) CE + alpha T^2 KL(teacher || student).

    teacher: source (the model before conversion), a .safetensors file or a run folder; empty for none
    alpha: weight of the distillation term, 0 to 1
    temperature: T, softmax temperature of both distributions
    attention: weight of the per-layer relative MSE between student and teacher attention outputs; 0 for none
    features: weight of the relative MSE between the final features (classifier inputs); 0 for none
    """

    teacher: str = ""
    alpha: float = 0.5
    temperature: float = 1.0
    attention: float = 0.0
    features: float = 0.0

    def __post_init__(self) -> None:
        check_ranges("distill", self, temperature=POSITIVE, alpha="[0, 1]", attention="[0, inf)", features="[0, inf)")


@dataclass(frozen=True)
class RunBasics:
    """Settings of every run.

    folder: output folder
    seed: seed of weights, sample order, augmentation and noise
    resume: true continues from the newest checkpoint of the folder, if there is one; a number such as 2000 continues
      from the checkpoint of that step and renames newer ones
    precision: fp32, bf16 or fp16
    compile: compile each block with torch.compile (timm models: the patch embedding runs as a linear layer)
    keep_checkpoints: number of checkpoints to keep
    max_nonfinite_steps: stop after more than this many consecutive steps with non-finite gradients (such steps are
      skipped)
    """

    former = (("keep", "keep_checkpoints"), ("max_skipped", "max_nonfinite_steps"))

    folder: str = "runs/train"
    seed: int = 0
    resume: bool | int = False
    precision: str = "fp32"
    compile: bool = False
    keep_checkpoints: int = 2
    max_nonfinite_steps: int = 25

    def __post_init__(self) -> None:
        one_of("run.precision", self.precision, PRECISIONS)
        check_ranges("run", self, seed=SEED, keep_checkpoints="[1, inf)")
        check_ranges("run", self, resume="[0, inf)", max_nonfinite_steps="[0, inf)")
        if not self.folder:
            raise ValueError("run.folder is empty: name the folder for the results")


@dataclass(frozen=True)
class RunSettings(RunBasics):
    """Settings of a run whose length is given in epochs.

    eval_epochs: epochs between two evaluations (the last epoch is always evaluated)
    checkpoint_epochs: epochs between two checkpoints
    checkpoint_steps: also write a checkpoint every n steps; 0 for none
    """

    eval_epochs: int = 1
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("run", self, eval_epochs="[1, inf)", checkpoint_epochs="[1, inf)", checkpoint_steps="[0, inf)")


@dataclass(frozen=True)
class LogSettings:
    """Logging; metrics.jsonl is always written.

    every: steps between two training rows
    trackers: experiment trackers to log to as well, tensorboard and wandb
    project: project name for trackers
    """

    every: int = 50
    trackers: list[str] = field(default_factory=list)
    project: str = "hla-zoo"

    def __post_init__(self) -> None:
        check_ranges("log", self, every="[1, inf)")
        for tracker in self.trackers:
            one_of("log.trackers", tracker, ("tensorboard", "wandb"))
            if importlib.util.find_spec(tracker) is None:
                raise ValueError(f"log.trackers names {tracker}, which is not installed: pip install {tracker}")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a classification run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    run: RunSettings = field(default_factory=RunSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if self.run.compile and self.distill.teacher and self.distill.attention:
            raise ValueError("distill.attention reads inside the blocks, which run.compile closes; leave one out")
