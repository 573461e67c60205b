"""Conversion of a timm model on disk, without training."""

from dataclasses import asdict, replace
from pathlib import Path

from zoo.data import InputSpec
from zoo.data.settings import DataSettings
from zoo.io import write_json
from zoo.models.convert import Report, swap
from zoo.models.timm.model_files import WEIGHTS, save_weights, with_resolved_options
from zoo.train.model import plan, start_classifier
from zoo.train.settings import ModelSettings


def from_timm(settings: ModelSettings, out: Path) -> Report:
    """Convert the model of `settings`, and write model.safetensors and report.json into `out`. Raises ValueError for a
    model that is converted already or cannot be converted."""
    recipe, found = plan(settings)
    if found and found.mixer:
        raise ValueError(f"{settings.checkpoint} is already converted: {found.describe()}")
    softmax = replace(settings, mixer="", mixer_options={})  # it is converted below
    _, model, _ = start_classifier(softmax)
    chosen = {"layers": recipe.layers or None, "keep_softmax": recipe.keep_softmax or None}
    report = swap(model, recipe.mixer, **chosen, **recipe.mixer_options)
    recipe = with_resolved_options(model, recipe)
    wanted = found.input if found else asdict(InputSpec.of(model, recipe.img_size, DataSettings()))
    save_weights(model, replace(recipe, input=wanted, classes=found.classes if found else []), out / WEIGHTS)
    write_json(report.to_dict(), out / "report.json")
    return report
