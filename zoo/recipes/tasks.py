"""Recipe tasks: what a recipe does differently for image models and for diffusion transformers."""

import functools
import itertools
import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import timm
import torch
from torch import nn

from zoo.config import Tree, from_tree, load, merge, to_tree
from zoo.conversion.hooks import Inputs, converted_layers
from zoo.data import InputSpec
from zoo.data.plan import seed_everything
from zoo.data.settings import DataSettings
from zoo.eval.compare import compare
from zoo.eval.settings import EvalOptions, EvalSettings
from zoo.files import is_missing_run
from zoo.models.convert import swap
from zoo.models.timm.model_files import (
    WEIGHTS,
    holds_weights,
    load_model,
    read_recipe,
    save_weights,
    with_resolved_options,
)
from zoo.precision import autocast
from zoo.recipes.settings import RecipeSettings
from zoo.train.classification import ClassificationRun, set_up
from zoo.train.distributed import create_accelerator
from zoo.train.layerwise import ImageTransfer
from zoo.train.metrics_log import Row
from zoo.train.model import start_classifier
from zoo.train.settings import ModelSettings, TrainSettings

if TYPE_CHECKING:
    from zoo.train.denoising.run import DiffusionRun

KeptBlocks = list[int] | str  # see RecipeSettings.keep_softmax
_SOFTMAX: Tree = {"mixer": "", "mixer_options": {}, "layers": [], "keep_softmax": []}  # of an unchanged model


class ConversionTask(ABC):
    """Base class of recipes for one kind of models: their data, files, runs and evaluation.

    metric: title of the metric. Raises ValueError for a source or a configuration of another kind.
    """

    metric: str
    length: tuple[str, str]  # section and key of the number of epochs or steps

    def __init__(self, recipe: RecipeSettings) -> None:
        self.recipe = recipe
        if not recipe.finetune:
            raise ValueError("missing required option finetune=CONFIG.yaml, the fine-tuning")
        tree = to_tree(load(self.schema(), recipe.finetune, recipe.changes))
        tree["model"] |= _SOFTMAX  # the recipe sets these keys
        self.tree: Tree = merge(tree, {"run": {"resume": True}})

    @abstractmethod
    def schema(self) -> type:
        """Return the settings class of a fine-tuning."""

    @abstractmethod
    def inputs(self) -> list[Inputs]:
        """Return batches of inputs for calibration, from the training set."""

    @abstractmethod
    def save(self, model: nn.Module, keep: KeptBlocks, folder: Path) -> None:
        """Write a converted model as a folder from which a run can start. keep: blocks that keep softmax."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module:
        """Load a model written by `save` or a run."""

    @abstractmethod
    def starting_from(self, folder: Path, keep: KeptBlocks) -> Tree:
        """Return the settings, as a tree, of a run that starts from the converted model in `folder`."""

    @abstractmethod
    def run(self, tree: Tree, transfer: bool = False) -> Row:
        """Start or resume a fine-tuning, or with `transfer` a layer-wise distillation."""

    @abstractmethod
    def evaluate(self, folders: dict[str, Path]) -> dict[str, Row]:
        """Evaluate the models in folders: a row by model name, whose "value" is the metric."""

    def source(self) -> nn.Module:
        """Return the softmax model."""
        return self.load(Path(self.recipe.source))

    def convert(self, keep: KeptBlocks) -> nn.Module:
        """Convert the source, with softmax attention in the blocks `keep`."""
        model = self.source()
        swap(model, self.recipe.mixer, keep_softmax=keep or None, **self.options())
        return model

    def budget(self) -> int:
        """Return the length of the fine-tuning, in epochs or steps."""
        section, key = self.length
        return int(self.tree[section][key])

    def with_length(self, n: int) -> Tree:
        """Return the settings, as a tree, of a run of n epochs or steps, with the warm-up scaled accordingly."""
        section, key = self.length
        warm = f"warmup_{key}"
        share = self.tree[section][warm] * n / self.budget()
        return {section: {key: n, warm: type(self.tree[section][warm])(share)}}

    def settings(self, *trees: Tree) -> Tree:
        """Return the settings of the fine-tuning, as a tree, overridden by `trees` in order."""
        return functools.reduce(merge, trees, self.tree)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the runs."""
        return autocast(_device().type, self.tree["run"]["precision"])

    def random_attention(self, model: nn.Module) -> None:
        """Re-initialise every nn.Linear of the converted attention layers, with the seed of the runs."""
        seed_everything(self.tree["run"]["seed"])
        for layer in converted_layers(model).values():
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    nn.init.trunc_normal_(part.weight, std=0.02)
                    if part.bias is not None:
                        nn.init.zeros_(part.bias)

    def options(self) -> Tree:
        """Return the options of the mixer, with gains, which calibration needs."""
        return {"gains": True, **self.recipe.mixer_options}


class ImageTask(ConversionTask):
    """timm models on labelled images; the metric is top-1 accuracy in percent."""

    metric, length = "top-1 accuracy (%)", ("schedule", "epochs")

    def schema(self) -> type:
        return TrainSettings

    def inputs(self) -> list[Inputs]:
        tree = self.settings({"model": _host(self.recipe.source), "distill": {"teacher": ""}, "augment": _PLAIN})
        settings = from_tree(TrainSettings, tree)
        parts = set_up(settings, create_accelerator(settings))
        n, size = self.recipe.inputs, self.recipe.batch
        batches = itertools.islice(parts.train_images.evaluation(size), -(-n // size))
        return [batch.images[: n - i * size] for i, batch in enumerate(batches)]

    def save(self, model: nn.Module, keep: KeptBlocks, folder: Path) -> None:
        recipe = read_recipe(self.recipe.source)
        assert recipe is not None
        recipe = replace(recipe, mixer=self.recipe.mixer, mixer_options=self.options(), keep_softmax=keep)
        save_weights(model, with_resolved_options(model, recipe), folder / WEIGHTS)

    def load(self, folder: Path) -> nn.Module:
        return load_model(folder)[0].to(_device())

    def starting_from(self, folder: Path, keep: KeptBlocks) -> Tree:
        options = {"mixer": self.recipe.mixer, "mixer_options": self.options(), "keep_softmax": keep}
        model = {**_host(str(folder)), **options}
        return {"model": model, "distill": {"teacher": self.recipe.source}}

    def run(self, tree: Tree, transfer: bool = False) -> Row:
        return (ImageTransfer if transfer else ClassificationRun)(from_tree(TrainSettings, tree)).train()

    def evaluate(self, folders: dict[str, Path]) -> dict[str, Row]:
        files = {n: str(f) for n, f in folders.items()}
        data = from_tree(TrainSettings, self.tree).data
        rows, _, _ = compare(EvalSettings(data, EvalOptions(list(files.values()))))
        return {n: {"value": row["top1"], **row} for n, row in zip(files, rows, strict=True)}


def _device() -> torch.device:
    """Return the device of the runs: the accelerator if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


_PLAIN = {"mixup": 0.0, "cutmix": 0.0}


def _host(folder: str) -> Tree:
    """Return the settings, as a tree, of the unchanged model in a run folder."""
    return {"name": "", "kwargs": {}, "img_size": None, "checkpoint": folder, "pretrained": False, **_SOFTMAX}


class DiffusionTask(ConversionTask):
    """Diffusion transformers of diffusers; the metric is the validation loss, with fixed times and noise."""

    metric, length = "validation loss", ("schedule", "steps")

    def schema(self) -> type:
        from zoo.train.denoising.settings import DiffusionSettings

        return DiffusionSettings

    def load(self, folder: Path) -> nn.Module:
        from zoo.diffusion.loading import load_transformer

        return load_transformer(folder).to(_device())

    def _opened(self, folder: str) -> "DiffusionRun":
        """Create a run with the model in `folder`, to use its data, objective and validation. It is not started."""
        from zoo.train.denoising.run import DiffusionRun

        with tempfile.TemporaryDirectory() as temporary:
            own = {"run": {"folder": f"{temporary}/run", "resume": False}, "optim": {"ema": 0.0}}
            tree = self.settings(_denoiser(folder), {"distill": {"teacher": ""}}, own)
            return DiffusionRun(from_tree(self.schema(), tree))

    def inputs(self) -> list[Inputs]:
        run = self._opened(self.recipe.source)
        seed_everything(self.tree["run"]["seed"])
        found: list[Inputs] = []
        n, size = self.recipe.inputs, run.plan.micro_batch_size
        for i, batch in enumerate(itertools.islice(run.batches(0, run.plan.steps_per_epoch), -(-n // size))):
            (x, t, condition, spec), _ = run.draw(batch)
            first = slice(n - i * size)
            more = {k: v[first] for k, v in condition.items()}
            found.append({"hidden_states": x[first], "timestep": t[first] * spec.time_factor, **more, **spec.extra})
        return found

    def save(self, model: nn.Module, keep: KeptBlocks, folder: Path) -> None:
        from zoo.diffusion.loading import TRANSFORMER
        from zoo.diffusion.objectives import create_objective
        from zoo.train.denoising.model import save_transformer

        objective = create_objective(from_tree(self.schema(), self.tree).objective)
        save_transformer(model, folder / TRANSFORMER, objective.scheduler())

    def starting_from(self, folder: Path, keep: KeptBlocks) -> Tree:
        return {**_denoiser(str(folder)), "distill": {"teacher": self.recipe.source}}

    def run(self, tree: Tree, transfer: bool = False) -> Row:
        from zoo.train.denoising.layerwise import DiffusionTransfer
        from zoo.train.denoising.run import DiffusionRun

        return (DiffusionTransfer if transfer else DiffusionRun)(from_tree(self.schema(), tree)).train()

    def evaluate(self, folders: dict[str, Path]) -> dict[str, Row]:
        run, found = self._opened(self.recipe.source), {}
        for name, folder in folders.items():
            run.model = self.load(folder)
            row = run.evaluate()
            found[name] = {"value": row["val_loss"], "images": row["val_images"]}
        return found


def _denoiser(folder: str) -> Tree:
    return {"model": {"kwargs": {}, "checkpoint": folder, **_SOFTMAX}}


def open_task(recipe: RecipeSettings) -> ConversionTask:
    """Create the task for the source of a recipe. Raises ValueError for a source that is missing, damaged or converted
    already."""
    if not recipe.source:
        raise ValueError("missing required option source=RUN_FOLDER of the softmax model")
    if timm.is_model(recipe.source.split(".")[0]) and not Path(recipe.source).exists():
        recipe = replace(recipe, source=str(_published(recipe)))
    path = Path(recipe.source)
    if is_missing_run(path):
        raise ValueError(f"there is no run {recipe.source}: train the source first, or give another one as source=")
    if not path.exists() and "/" not in recipe.source:  # a hub name is OWNER/NAME
        raise ValueError(f"the source {recipe.source} is neither a folder nor a model of timm or of the hub")
    if path.suffix != ".safetensors" and not holds_weights(path):
        return DiffusionTask(recipe)
    found = read_recipe(path)
    if found is None:
        raise ValueError(f"{recipe.source} does not say how to build its model: it was not written by these tools")
    if found.mixer:
        raise ValueError(f"{recipe.source} is converted already: {found.describe()}")
    return ImageTask(recipe)


def _published(recipe: RecipeSettings) -> Path:
    """Save the published timm weights of the source as a folder from which a run can start. Returns the folder."""
    folder = Path(recipe.out) / "source"
    if not (folder / WEIGHTS).is_file():
        model, _, found = start_classifier(ModelSettings(name=recipe.source, pretrained=True))
        spec = InputSpec.of(model, found.img_size, DataSettings())
        save_weights(model, replace(found, input=asdict(spec)), folder / WEIGHTS)
    return folder
