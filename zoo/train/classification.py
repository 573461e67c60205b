"""Classification runs: training of an image model on labelled images."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from zoo.conversion.distill import AttentionDistillation, FeatureDistillation
from zoo.data import Batch, BatchPlan, Images, InputSpec, check_unreadable, open_images, open_sources
from zoo.data.plan import seed_everything
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.eval.accuracy import predict_all
from zoo.models.compiling import compile_block
from zoo.models.timm.model_files import (
    EMA_WEIGHTS,
    WEIGHTS,
    Recipe,
    header_of,
    load_model,
    read_recipe,
    save_weights,
    timm_classes,
)
from zoo.models.timm.patches import patches_as_products
from zoo.train.distributed import build_device, pad_batches, place, plan_batches
from zoo.train.dry_run import VALIDATED, DryRun
from zoo.train.loop import TrainingRun
from zoo.train.metrics_log import Row
from zoo.train.model import start_classifier
from zoo.train.settings import DistillSettings, ModelSettings, TrainSettings


class ClassificationRun(TrainingRun[Batch]):
    """A run of `TrainSettings`; see `TrainingRun`. Its result has top1 and top5 (percent) and loss (nats)."""

    settings: TrainSettings
    model_settings: ModelSettings
    metric = ("top1", "top-1 accuracy (%)")

    def set_up(self) -> None:
        settings = replace(self.settings, model=self.model_settings)
        self.setup = setup = set_up(settings, self.accelerator)
        self.model, self.plan, self.image_name = setup.model, setup.plan, setup.train_images.source.name
        self.header = header_of(setup.recipe)
        epoch, run = self.plan.steps_per_epoch, settings.run
        self.last_step = settings.schedule.epochs * epoch
        self.rates, self.rate_steps = settings.schedule, epoch
        checkpoints = [run.checkpoint_epochs * epoch, run.checkpoint_steps]
        self.every = {"eval": [run.eval_epochs * epoch], "samples": [], "checkpoint": checkpoints}

    def compile_blocks(self) -> None:
        """Compile block by block: one compilation serves all blocks, and later runs in this process too. The patch
        embedding runs as a linear layer."""
        for model in filter(None, (self.model, self.setup.objective.teacher)):
            patches_as_products(model)
            for block in getattr(model, "blocks", ()):
                compile_block(block)

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        return self.setup.train_images.train(self.plan, first, last)

    def loss(self, batch: Batch) -> Tensor:
        images, targets = batch.images, batch.labels
        if self.setup.mixup:
            images, targets = self.setup.mixup(images, targets)
        objective = self.setup.objective
        with self.autocast():
            with objective.record_outputs():
                logits = self.wrapped(images)
            losses = objective(logits, targets, images)
        total = losses.pop("total")
        for name, value in losses.items():
            self.metrics.add(name, value, len(images))
        return total

    def evaluate(self) -> Row:
        """Compute the accuracy (percent) and loss (nats) of the model, and of its EMA if there is one, on the
        validation images."""
        accelerator = self.accelerator
        row: Row = {}
        where = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        models = {"": self.model} if self.ema is None else {"": self.model, "ema_": self.ema.module}
        share = -(-self.setup.n_val // accelerator.num_processes)  # the largest number of images per process
        batches = self.setup.val_images.evaluation(self.plan.micro_batch_size, **where)
        batches = pad_batches(batches, -(-share // self.plan.micro_batch_size))
        with torch.compiler.set_stance("force_eager"):  # other batch sizes than in training: not worth compiling
            predictions = predict_all(models, batches, self.autocast)
        for prefix, found in predictions.items():
            sums = accelerator.reduce(found.sums().to(accelerator.device), "sum")
            values = found.from_sums(sums)
            check_unreadable(int(values["unreadable"]), int(values["images"] + values["unreadable"]))
            row |= {prefix + key: value for key, value in values.items()}
        return row

    def save(self) -> str:
        recipe = self.setup.recipe
        models = {WEIGHTS: self.model} | ({EMA_WEIGHTS: self.ema.module} if self.ema else {})
        for file, model in models.items():
            full = self.unsharded(model)
            if self.main:
                save_weights(full, recipe, self.folder / file, self.step)
        return recipe.describe()


class DryClassificationRun(DryRun, ClassificationRun):
    """A dry run of a classification run."""

    def set_up(self) -> None:
        ClassificationRun.set_up(self)
        self.setup.n_val = min(self.setup.n_val, VALIDATED)
        self.shorten()


@dataclass
class Setup:
    """Data, model and objective of a run, on one process."""

    model: nn.Module
    recipe: Recipe
    objective: "Classification"
    mixup: Mixup | None
    plan: BatchPlan
    train_images: Images
    val_images: Images
    n_val: int


def set_up(settings: TrainSettings, accelerator: Accelerator) -> Setup:
    """Open the data and build model and objective on the accelerator's device. Raises ValueError for settings that do
    not fit the data or the checkpoint."""
    device = accelerator.device
    train, val = open_sources(settings.data)
    n_classes = len(train.classes)
    plan = plan_batches(settings, accelerator, len(train))
    mixup = create_mixup(settings.augment, n_classes)
    if mixup and plan.micro_batch_size % 2:
        raise ValueError(f"mixup and cutmix need an even number of images per micro-batch, got {plan.micro_batch_size}")
    seed_everything(settings.run.seed)
    model, host, recipe = start_classifier(settings.model, n_classes)
    spec = InputSpec.of(model, recipe.img_size, settings.data)
    recipe = replace(recipe, input=asdict(spec), classes=list(train.classes))
    opened = (spec, settings.data, settings.augment, settings.run.seed, device)
    model, teacher = model.to(build_device(accelerator)), _teacher(settings, host, recipe)
    if teacher is not None:
        teacher = place(accelerator, teacher.eval().requires_grad_(False))
    return Setup(
        model=model,
        recipe=recipe,
        objective=Classification(settings.augment.label_smoothing, mixup is not None, settings.distill, teacher, model),
        mixup=mixup,
        plan=plan,
        train_images=open_images(train, *opened),
        val_images=open_images(val, *opened),
        n_val=len(val),
    )


def create_mixup(augment: AugmentSettings, num_classes: int) -> Mixup | None:
    """Create timm's mixup and cutmix; None if both are off. They use numpy's global generator and need an even number
    of images per batch."""
    if not (augment.mixup or augment.cutmix):
        return None
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_prob,
        label_smoothing=augment.label_smoothing,
        num_classes=num_classes,
    )


def _teacher(settings: TrainSettings, host: nn.Module, recipe: Recipe) -> nn.Module | None:
    name = settings.distill.teacher
    if name == "source":
        _check_source(settings, recipe.num_classes)
        return host
    if not name:
        return None
    model, its = load_model(name)
    inputs = [r.input and InputSpec.from_recipe(r.input, DataSettings()) for r in (its, recipe)]
    for what, theirs, ours in (("classes", its.num_classes, recipe.num_classes), ("input", *inputs)):
        if theirs and theirs != ours:
            raise ValueError(f"the teacher {name} does not fit the run: its {what} {theirs}, the run's {ours}")
    return model


def _check_source(settings: TrainSettings, n_classes: int) -> None:
    """Raise ValueError unless the model before conversion has trained weights, including its classifier."""
    model = settings.model
    found = read_recipe(model.checkpoint) if model.checkpoint else None
    reason = ""
    if not (model.checkpoint or model.pretrained):
        reason = "the run starts from random weights"
    elif found and found.mixer:
        reason = f"{model.checkpoint} is already converted and no longer holds the softmax model"
    elif model.reset_classifier or (model.pretrained and n_classes != timm_classes(model.name)):
        reason = "its classifier is new"
    if reason:
        raise ValueError(
            f"distill.teacher=source has no trained source: {reason}; name the teacher's run folder instead"
        )


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute the distillation loss T^2 KL(softmax(teacher / T) || softmax(student / T)), averaged over the batch.

    student, teacher: logits [B, K]. Returns a scalar, computed in float32. The factor T^2 keeps the scale of the
    gradient independent of T (Hinton et al., arXiv 1503.02531, section 2).
    """
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


class Classification(nn.Module):
    """Losses of a classification run.

    Called with logits [B, K], targets [B] (class numbers) or [B, K] (probabilities) and images [B, 3, H, W]. Returns
    scalar losses by name; "total" is minimized. Without a teacher it is the cross entropy (CE). With a teacher it is
    (1 - alpha) CE + alpha T^2 KL(teacher || student), plus the losses of `AttentionDistillation` and
    `FeatureDistillation`, weighted by `distill.attention` and `distill.features`. The teacher gets the same images.

    mixed: whether the targets are probabilities, made by mixup or cutmix.
    """

    def __init__(
        self, smoothing: float, mixed: bool, distill: DistillSettings, teacher: nn.Module | None, student: nn.Module
    ) -> None:
        super().__init__()
        self.criterion = SoftTargetCrossEntropy() if mixed else LabelSmoothingCrossEntropy(smoothing)
        self.distill = distill
        self.teacher = teacher
        self.matches: dict[str, AttentionDistillation | FeatureDistillation] = {}
        for name, match in (("attention", AttentionDistillation), ("features", FeatureDistillation)):
            if teacher is not None and getattr(distill, name):
                self.matches[name] = match(student, teacher)

    @contextmanager
    def record_outputs(self, which: str = "student") -> Iterator[None]:
        """Context of the forward pass of the student (or teacher), which records the tensors that the distillation
        losses compare."""
        with ExitStack() as stack:
            for match in self.matches.values():
                stack.enter_context(match.record_outputs(which))
            yield

    def forward(self, logits: Tensor, targets: Tensor, images: Tensor) -> dict[str, Tensor]:
        cross_entropy = self.criterion(logits.float(), targets)
        if self.teacher is None:
            return {"total": cross_entropy, "loss": cross_entropy}
        with torch.no_grad(), self.record_outputs("teacher"):
            wanted = self.teacher(images)
        distance = distillation_loss(logits, wanted, self.distill.temperature)
        alpha = self.distill.alpha
        found = {"total": (1 - alpha) * cross_entropy + alpha * distance, "loss": cross_entropy}
        for name, match in self.matches.items():
            found[name] = match.loss()
            found["total"] = found["total"] + getattr(self.distill, name) * found[name]
        return found
