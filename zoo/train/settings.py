"""The keys of a training configuration, one frozen dataclass a section. `zoo.config` reads, checks and documents
them."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from zoo.config import one_of
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.mixers.help import check_mixer, mixers_help
from zoo.precision import PRECISIONS
from zoo.ranges import POSITIVE, SEED, check_ranges

# What may change between the two halves of an interrupted run without changing its result.
CHANGEABLE = (
    "run.resume",
    "run.folder",
    "run.keep",
    "run.checkpoint_steps",
    "run.checkpoint_epochs",
    "log",
    "data.workers",
)


@dataclass(frozen=True)
class ModelSettings:
    """Which timm model, where its weights come from, and which mixer stands in its attention layers.

    name: timm model name, softmax (vit_small_patch16_224) or ours (vit_mhla_small_patch16_224); empty takes name and
      kwargs from the checkpoint
    kwargs: keywords of timm.create_model, such as {patch_size: 4, depth: 6}
    img_size: side of the square input in pixels (positions of a checkpoint are interpolated to it); none keeps that
      of the checkpoint or the model
    checkpoint: weights to start from, a .safetensors file or a run folder (the average of its weights, if it kept one);
      empty for random weights
    pretrained: start from the weights that timm publishes for this name
    new_head: take every weight of the checkpoint but the classifier, whose number of classes may then differ
    mixer: mixer put into the attention layers after loading, one of those listed below; empty leaves the layers as they
      are
    mixer_options: options of the mixer, listed below, such as {exponent: 4.0, depthwise: v}
    layers: blocks to convert: numbers (from 0; -1 is the last) or a pattern of module names; empty converts all
    keep_softmax: blocks that stay softmax: numbers, a pattern, or every:3 for the blocks 0, 3, 6, ...
    """

    more_help = staticmethod(mixers_help)

    name: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    img_size: int | None = None
    checkpoint: str = ""
    pretrained: bool = False
    new_head: bool = False
    mixer: str = ""
    mixer_options: dict[str, Any] = field(default_factory=dict)
    layers: list[int] | str = field(default_factory=list)
    keep_softmax: list[int] | str = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges("model", self, img_size="[1, inf)")
        check_mixer(self.mixer, self.mixer_options)
        for key, value in self.kwargs.items():
            if str(key).endswith("_rate") and isinstance(value, int | float) and not 0 <= value < 1:
                raise ValueError(f"model.kwargs.{key} must be in [0, 1), got {value}")
        if self.kwargs.get("in_chans", 3) != 3:
            raise ValueError(f"model.kwargs.in_chans must be 3, the channels of images, got {self.kwargs['in_chans']}")


@dataclass(frozen=True)
class OptimSettings:
    """The optimiser and what is done to gradients and weights around it.

    name: timm optimiser name
    lr: learning rate at the top of the schedule
    weight_decay: weight decay of matrices (vectors have none)
    betas: betas of Adam-like optimisers
    layer_decay: factor on the learning rate a layer, from the head down; none for one rate
    mixer_lr: factor on the learning rate of the new parameters of mixers
    attention_lr: factor on that of the inherited parameters of attention layers
    clip: largest gradient norm; none for no clipping
    accumulate: parts into which a process splits its share of a batch
    ema: decay of the moving average of the weights; 0 for none
    ema_warmup: let the decay grow from 0 to `ema`, needed by short runs
    anneal: part of the steps over which layers of hla2, ahla and hla3 go from first order to their own; 0 for none
    ridge: the lambda of ahla (A A + lambda A) halfway there; the same factor on A for hla2 and hla3
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    layer_decay: float | None = None
    mixer_lr: float = 1.0
    attention_lr: float = 1.0
    clip: float | None = 1.0
    accumulate: int = 1
    ema: float = 0.0
    ema_warmup: bool = True
    anneal: float = 0.0
    ridge: float = 1.0

    def __post_init__(self) -> None:
        check_ranges("optim", self, **dict.fromkeys(("lr", "mixer_lr", "attention_lr", "clip", "ridge"), POSITIVE))
        check_ranges("optim", self, accumulate="[1, inf)", weight_decay="[0, inf)", layer_decay="(0, 1]")
        check_ranges("optim", self, **dict.fromkeys(("betas", "anneal", "ema"), "[0, 1)"))
        if len(self.betas) not in (2, 3):
            raise ValueError(f"optim.betas is two numbers (three for adan), got {self.betas}")


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate over the run, updated every step.

    name: timm schedule: cosine, constant, poly, tanh, step, or with timm 1.0.31 wsd (warm up, stay, decay)
    epochs: passes over the training images
    warmup_epochs: passes with a linearly growing rate, part of `epochs`
    min_lr: learning rate at the end
    warmup_lr: learning rate at the start of the warm-up
    decay_epochs: passes between two decays (step); passes of the final decay, or below 1 its part of the run (wsd,
      where none is 0.2)
    decay_rate: factor on the rate at each decay (step)
    power: exponent of the decay, 1 for a straight line (poly)
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
        check_ranges("schedule", self, epochs="[1, inf)", warmup_epochs=f"[0, {self.epochs})")
        check_ranges("schedule", self, **dict.fromkeys(("decay_rate", "decay_epochs", "power"), POSITIVE))
        check_ranges("schedule", self, min_lr="[0, inf)", warmup_lr="[0, inf)")
        for key, users in (("decay_epochs", ("step", "wsd")), ("decay_rate", ("step",)), ("power", ("poly",))):
            if getattr(self, key) != type(self).__dataclass_fields__[key].default and self.name not in users:
                raise ValueError(f"schedule.{key} is for schedule.name={' or '.join(users)}, not {self.name}")
        if self.name == "step" and self.decay_epochs is None:
            raise ValueError("schedule.name=step needs schedule.decay_epochs, the passes between two decays")


@dataclass(frozen=True)
class DistillSettings:
    """Learning from the class probabilities of a teacher: (1 - alpha) CE + alpha T^2 KL(teacher || student).

    teacher: source (the model before its mixers were changed), a .safetensors file or a run folder; empty for none
    alpha: weight of the teacher in the loss, 0 to 1
    temperature: T, the softening of both distributions
    attention: weight of the squared distance between attention outputs, layer by layer, over their power; 0 for none
    features: weight of the same between what the two classifiers get; 0 for none
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
    """Where and how any run happens.

    folder: where everything is written
    seed: seed of weights, order, augmentation and noise
    resume: continue from the newest checkpoint of the folder, if it has one; or from that of a step, such as 2000,
      setting newer ones aside under another name
    precision: fp32, bf16 or fp16
    compile: compile the model with torch.compile, block by block; a timm model embeds patches by a product of matrices
    keep: how many checkpoints stay
    max_skipped: steps in a row whose gradients may be non-finite (they are skipped) before the run stops
    """

    folder: str = "runs/train"
    seed: int = 0
    resume: bool | int = False
    precision: str = "fp32"
    compile: bool = False
    keep: int = 2
    max_skipped: int = 25

    def __post_init__(self) -> None:
        one_of("run.precision", self.precision, PRECISIONS)
        check_ranges("run", self, seed=SEED, resume="[0, inf)", keep="[1, inf)", max_skipped="[0, inf)")
        if not self.folder:
            raise ValueError("run.folder is empty: name the folder for the results")


@dataclass(frozen=True)
class RunSettings(RunBasics):
    """A run by epochs.

    eval_epochs: epochs between two evaluations (the last epoch is always evaluated)
    checkpoint_epochs: epochs between two checkpoints
    checkpoint_steps: steps between two checkpoints as well; 0 for none
    """

    eval_epochs: int = 1
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges("run", self, eval_epochs="[1, inf)", checkpoint_epochs="[1, inf)", checkpoint_steps="[0, inf)")


@dataclass(frozen=True)
class LogSettings:
    """What is written while the run goes on; metrics.jsonl always is.

    every: steps between two lines
    trackers: further places, tensorboard and wandb
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
    """A training run. See the sections."""

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
