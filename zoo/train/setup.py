"""What a run needs before its first step: its folder, data, model, objective, in this order."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from timm.data import Mixup
from torch import nn

from zoo import config
from zoo.data import BatchPlan, Images, InputSpec, open_images, open_sources
from zoo.data.samples import seed_everything
from zoo.train.checkpoint import list_checkpoints
from zoo.train.losses import Classification, create_mixup
from zoo.train.model import Recipe, load_model, start
from zoo.train.settings import CHANGEABLE, TrainSettings


def prepare_folder(settings: TrainSettings) -> None:
    """Write the configuration of a new run into `run.folder`.

    Raises ValueError when the folder holds a run and `run.resume` is not set, or one with another configuration.
    """
    folder = Path(settings.run.folder)
    file = folder / "config.yaml"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.save(settings, file)
        return
    if not settings.run.resume:
        raise ValueError(
            f"{folder} already holds a run; set run.resume=true to continue it or choose another run.folder"
        )
    changed = config.differences(config.load(TrainSettings, file), settings, ignore=CHANGEABLE)
    if changed:
        raise ValueError(f"{folder} holds a run with another configuration; they differ in {', '.join(changed)}")


def last_checkpoint(settings: TrainSettings) -> Path | None:
    """The newest checkpoint to continue from, or None for a run that begins."""
    found = list_checkpoints(Path(settings.run.folder) / "checkpoints")
    return found[-1] if found else None


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
    return Setup(
        model=model.to(device),
        recipe=recipe,
        objective=Classification(
            settings.augment.smoothing, mixup is not None, settings.distill, _teacher(settings, host)
        ).to(device),
        mixup=mixup,
        plan=plan,
        train_images=open_images(train, *opened),
        val_images=open_images(val, *opened),
    )


def _teacher(settings: TrainSettings, host: nn.Module) -> nn.Module | None:
    name = settings.distill.teacher
    if not name:
        return None
    return host if name == "source" else load_model(name)[0]
