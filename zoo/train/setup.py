"""What a classification run needs before its first step: data, model, objective, in this order."""

from dataclasses import asdict, dataclass, replace

from accelerate import Accelerator
from timm.data import Mixup
from torch import nn

from zoo.data import BatchPlan, Images, InputSpec, open_images, open_sources
from zoo.data.samples import seed_everything
from zoo.data.settings import DataSettings
from zoo.models.timm.model_files import Recipe, load_model, read_recipe, timm_classes
from zoo.train.losses import Classification, create_mixup
from zoo.train.model import start
from zoo.train.processes import place_of, placed
from zoo.train.settings import TrainSettings


@dataclass
class Setup:
    """The parts of a run on one process."""

    model: nn.Module
    recipe: Recipe
    objective: Classification
    mixup: Mixup | None
    plan: BatchPlan
    train_images: Images
    val_images: Images
    n_val: int


def set_up(settings: TrainSettings, accelerator: Accelerator) -> Setup:
    """Open the data and build model and objective on the accelerator's device. Raises ValueError for what does not
    fit."""
    device = accelerator.device
    train, val = open_sources(settings.data)
    n_classes = len(train.classes)
    plan = BatchPlan(
        n_images=len(train),
        batch_size=settings.data.batch_size,
        seed=settings.run.seed,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        parts=settings.optim.accumulate,
    )
    mixup = create_mixup(settings.augment, n_classes)
    if mixup and plan.part_size % 2:
        raise ValueError(f"mixup and cutmix need an even number of images a part, got {plan.part_size}")
    seed_everything(settings.run.seed)
    model, host, recipe = start(settings.model, n_classes)
    spec = InputSpec.of(model, recipe.img_size, settings.data)
    recipe = replace(recipe, input=asdict(spec), classes=list(train.classes))
    opened = (spec, settings.data, settings.augment, settings.run.seed, device)
    model, teacher = model.to(place_of(accelerator)), _teacher(settings, host, recipe)
    if teacher is not None:
        teacher = placed(accelerator, teacher.eval().requires_grad_(False))
    return Setup(
        model=model,
        recipe=recipe,
        objective=Classification(settings.augment.smoothing, mixup is not None, settings.distill, teacher, model),
        mixup=mixup,
        plan=plan,
        train_images=open_images(train, *opened),
        val_images=open_images(val, *opened),
        n_val=len(val),
    )


def _teacher(settings: TrainSettings, host: nn.Module, recipe: Recipe) -> nn.Module | None:
    name = settings.distill.teacher
    if name == "source":
        _check_source(settings, recipe.num_classes)
        return host
    if not name:
        return None
    model, its = load_model(name)
    for what, theirs, ours in (
        ("classes", its.num_classes, recipe.num_classes),
        (
            "input",
            its.input and InputSpec.from_recipe(its.input, DataSettings()),
            InputSpec.from_recipe(recipe.input, DataSettings()),
        ),
    ):
        if theirs and theirs != ours:
            raise ValueError(f"the teacher {name} does not fit the run: its {what} {theirs}, the run's {ours}")
    return model


def _check_source(settings: TrainSettings, n_classes: int) -> None:
    """The source can teach only if it has trained weights, classifier included."""
    model = settings.model
    found = read_recipe(model.checkpoint) if model.checkpoint else None
    reason = ""
    if not (model.checkpoint or model.pretrained):
        reason = "the run starts from random weights"
    elif found and found.mixer:
        reason = f"{model.checkpoint} is already converted and no longer holds the softmax model"
    elif model.new_head or (model.pretrained and n_classes != timm_classes(model.name)):
        reason = "its classifier is new"
    if reason:
        raise ValueError(
            f"distill.teacher=source has no trained source: {reason}; name the teacher's run folder instead"
        )
