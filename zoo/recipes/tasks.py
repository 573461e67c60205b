"""What the stages need to know about image models and about diffusion transformers: data, files, runs, evaluation."""

import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from zoo.config import Tree, from_tree, load, merge, to_tree
from zoo.conversion.hooks import Inputs, converted_layers
from zoo.data import InputSpec
from zoo.data.samples import seed_everything
from zoo.data.settings import DataSettings
from zoo.eval.compare import compare
from zoo.eval.settings import EvalOptions, EvalSettings
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
from zoo.train.classification import Trainer
from zoo.train.layerwise import ImageTransfer, ImageTransferSettings
from zoo.train.model import start
from zoo.train.processes import create_accelerator
from zoo.train.settings import ModelSettings, TrainSettings
from zoo.train.setup import set_up


class Kind(ABC):
    """One kind of models. metric: what an evaluation measures.  higher: whether more of it is better.

    Raises ValueError for a source or a configuration of another kind.
    """

    metric: str
    higher: bool
    length: tuple[str, str]  # section and key of the length of a run

    def __init__(self, recipe: RecipeSettings) -> None:
        self.recipe = recipe
        if not recipe.finetune:
            raise ValueError("say how to fine-tune: finetune=CONFIG.yaml")
        tree = to_tree(load(self.schema(), recipe.finetune, recipe.changes))
        tree["model"] |= {"mixer": "", "mixer_options": {}, "layers": [], "keep_softmax": []}  # the recipe says them
        self.tree: Tree = merge(tree, {"run": {"resume": True}})

    @abstractmethod
    def schema(self) -> type:
        """The settings of a fine-tuning."""

    @abstractmethod
    def inputs(self) -> list[Inputs]:
        """Inputs for calibration, from the training set."""

    @abstractmethod
    def save(self, model: Any, keep: Any, folder: Path) -> None:
        """Write a converted model so that runs start from it."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """A model that `save` or a run wrote."""

    @abstractmethod
    def continued(self, folder: Path, keep: Any) -> Tree:
        """Settings with which a run starts from the converted model in `folder`."""

    @abstractmethod
    def run(self, tree: Tree) -> dict[str, Any]:
        """Fine-tune, or go on with it."""

    @abstractmethod
    def transfer(self, tree: Tree) -> dict[str, Any]:
        """Carry out a transfer, or what is left of it."""

    @abstractmethod
    def evaluate(self, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
        """A row for each model, with "value", in `metric`."""

    def source(self) -> Any:
        """The softmax model."""
        return self.load(Path(self.recipe.source))

    def convert(self, keep: Any) -> Any:
        """The source, converted, with the blocks `keep` (numbers, a word, nothing) left softmax."""
        model = self.source()
        swap(model, self.recipe.mixer, keep_softmax=keep or None, **self.options())
        return model

    def budget(self) -> int:
        """The length of the fine-tuning: epochs or steps."""
        section, key = self.length
        return int(self.tree[section][key])

    def of_length(self, n: int) -> Tree:
        """Settings of a run of n epochs or steps, with the warm-up shortened alike."""
        section, key = self.length
        warm = f"warmup_{key}"
        share = self.tree[section][warm] * n / self.budget()
        return {section: {key: n, warm: type(self.tree[section][warm])(share)}}

    def settings(self, *trees: Tree) -> Tree:
        """The settings of a run: those of the fine-tuning, changed by `trees`."""
        found = self.tree
        for tree in trees:
            found = merge(found, tree)
        return found

    def autocast(self) -> torch.autocast:
        """The context of the precision of the runs."""
        return autocast(_device().type, self.tree["run"]["precision"])

    def random_attention(self, model: Any) -> None:
        """New random weights for the converted attention layers, from the seed of the runs."""
        seed_everything(self.tree["run"]["seed"])
        for layer in converted_layers(model).values():
            for part in layer.modules():
                if isinstance(part, nn.Linear):
                    nn.init.trunc_normal_(part.weight, std=0.02)
                    if part.bias is not None:
                        nn.init.zeros_(part.bias)

    def options(self) -> dict[str, Any]:
        """The options of the mixer, with gains."""
        return {"gains": True, **self.recipe.mixer_options}


class Images(Kind):
    """timm models on labelled images; the metric is top-1 accuracy in percent."""

    metric, higher, length = "top-1 accuracy (%)", True, ("schedule", "epochs")

    def schema(self) -> type:
        return TrainSettings

    def inputs(self) -> list[Inputs]:
        tree = self.settings({"model": _host(self.recipe.source), "distill": {"teacher": ""}, "augment": _PLAIN})
        settings = from_tree(TrainSettings, tree)
        parts = set_up(settings, create_accelerator(settings))
        found: list[Inputs] = []
        left = self.recipe.inputs
        for batch in parts.train_images.evaluation(self.recipe.batch):
            found.append(batch.images[:left])
            left -= len(batch.images)
            if left <= 0:
                break
        return found

    def save(self, model: Any, keep: Any, folder: Path) -> None:
        recipe = read_recipe(self.recipe.source)
        assert recipe is not None
        recipe = replace(recipe, mixer=self.recipe.mixer, mixer_options=self.options(), keep_softmax=keep)
        save_weights(model, with_resolved_options(model, recipe), folder / WEIGHTS)

    def load(self, folder: Path) -> Any:
        return load_model(folder)[0].to(_device())

    def continued(self, folder: Path, keep: Any) -> Tree:
        options = {"mixer": self.recipe.mixer, "mixer_options": self.options(), "keep_softmax": keep}
        model = {**_host(str(folder)), **options}
        return {"model": model, "distill": {"teacher": self.recipe.source}}

    def run(self, tree: Tree) -> dict[str, Any]:
        return Trainer(from_tree(TrainSettings, tree)).train()

    def transfer(self, tree: Tree) -> dict[str, Any]:
        return ImageTransfer(from_tree(ImageTransferSettings, tree)).train()

    def evaluate(self, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
        files = {n: str(f) for n, f in folders.items()}
        data = from_tree(TrainSettings, self.tree).data
        rows, _, _ = compare(EvalSettings(data, EvalOptions(list(files.values()))))
        return {n: {"value": row["top1"], **row} for n, row in zip(files, rows, strict=True)}


def _device() -> torch.device:
    """Where the runs are, and so their batches: the accelerator, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


_PLAIN = {"mixup": 0.0, "cutmix": 0.0}


def _host(folder: str) -> Tree:
    """Settings of a model that is taken from a run folder as it is."""
    return {
        "name": "", "kwargs": {}, "img_size": None, "checkpoint": folder, "pretrained": False, "mixer": "",
        "mixer_options": {}, "layers": [], "keep_softmax": [],
    }  # fmt: skip


class Diffusion(Kind):
    """Diffusion transformers of diffusers; the metric is the validation loss, at fixed times and noise."""

    metric, higher, length = "validation loss", False, ("schedule", "steps")

    def schema(self) -> type:
        from zoo.train.denoising.settings import DiffusionSettings

        return DiffusionSettings

    def load(self, folder: Path) -> Any:
        from zoo.train.denoising.model import load_transformer

        return load_transformer(folder).to(_device())

    def _opened(self, folder: str) -> Any:
        """A run, not begun, of the model in `folder`: it knows data, objective and validation."""
        from zoo.train.denoising.run import DiffusionRun

        with tempfile.TemporaryDirectory() as temporary:
            own = {"run": {"folder": f"{temporary}/run", "resume": False}, "optim": {"ema": 0.0}}
            tree = self.settings(_denoiser(folder), {"distill": {"teacher": ""}}, own)
            return DiffusionRun(from_tree(self.schema(), tree))

    def inputs(self) -> list[Inputs]:
        run = self._opened(self.recipe.source)
        seed_everything(self.tree["run"]["seed"])
        found: list[Inputs] = []
        left = self.recipe.inputs
        for batch in run.batches(0, run.plan.steps_per_epoch):
            (x, t, condition, manner), _ = run.draw(batch)
            n = min(len(x), left)
            more = {k: v[:n] for k, v in condition.items()}
            found.append({"hidden_states": x[:n], "timestep": t[:n] * manner.time_factor, **more, **manner.extra})
            left -= n
            if left <= 0:
                break
        return found

    def save(self, model: Any, keep: Any, folder: Path) -> None:
        from zoo.diffusion.objectives import create_objective
        from zoo.train.denoising.model import PART, save_transformer

        objective = create_objective(from_tree(self.schema(), self.tree).objective)
        save_transformer(model, folder / PART, objective.scheduler())

    def continued(self, folder: Path, keep: Any) -> Tree:
        return {**_denoiser(str(folder)), "distill": {"teacher": self.recipe.source}}

    def run(self, tree: Tree) -> dict[str, Any]:
        from zoo.train.denoising.run import DiffusionRun

        return DiffusionRun(from_tree(self.schema(), tree)).train()

    def transfer(self, tree: Tree) -> dict[str, Any]:
        from zoo.train.denoising.layerwise import DiffusionTransfer, DiffusionTransferSettings

        return DiffusionTransfer(from_tree(DiffusionTransferSettings, tree)).train()

    def evaluate(self, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
        run, found = self._opened(self.recipe.source), {}
        for name, folder in folders.items():
            run.model = self.load(folder)
            row = run.evaluate()
            found[name] = {"value": row["val_loss"], "images": row["val_images"]}
        return found


def _denoiser(folder: str) -> Tree:
    model = {"kwargs": {}, "checkpoint": folder, "mixer": "", "mixer_options": {}, "layers": [], "keep_softmax": []}
    return {"model": model}


def kind_of(recipe: RecipeSettings) -> Kind:
    """The kind of the source of a recipe. Raises ValueError for a source that is missing, damaged or converted."""
    if not recipe.source:
        raise ValueError("say what to convert: source=RUN_FOLDER of the softmax model")
    if timm.is_model(recipe.source.split(".")[0]) and not Path(recipe.source).exists():
        recipe = replace(recipe, source=str(_published(recipe)))
    path = Path(recipe.source)
    if not path.exists() and "/" not in recipe.source:  # names on the hub have an owner
        raise ValueError(f"the source {recipe.source} is neither a folder nor a model of timm or of the hub")
    if path.suffix != ".safetensors" and not holds_weights(path):
        return Diffusion(recipe)
    found = read_recipe(path)
    if found is None:
        raise ValueError(f"{recipe.source} does not say how to build its model: it was not written by these tools")
    if found.mixer:
        raise ValueError(f"{recipe.source} is converted already: {found.describe()}")
    return Images(recipe)


def _published(recipe: RecipeSettings) -> Path:
    """The weights that timm publishes for the source of a recipe, as a folder that runs start from."""
    folder = Path(recipe.out) / "source"
    if not (folder / WEIGHTS).is_file():
        model, _, found = start(ModelSettings(name=recipe.source, pretrained=True))
        spec = InputSpec.of(model, found.img_size, DataSettings())
        save_weights(model, replace(found, input=asdict(spec)), folder / WEIGHTS)
    return folder
