"""Run folders: the configuration of the run, and the mixer options stored in its checkpoints."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open

from zoo import config
from zoo.files import RUN_CONFIG as CONFIG
from zoo.mixers import MIXERS
from zoo.models.checkpoint_tags import decode_tag
from zoo.models.stored_options import restored_options
from zoo.models.timm.backbone import USUAL_SIZE
from zoo.models.timm.model_files import (
    WEIGHTS,
    has_stages_of_any_size,
    holds_diffusers_model,
    holds_weights,
    read_recipe,
)
from zoo.train.checkpoint import choose_checkpoint, list_checkpoints
from zoo.train.settings import CHANGEABLE, AnySettings, MixerSettings, ModelSettings

CHECKPOINTS = "checkpoints"
MOST_NAMED = 10  # maximum number of keys in an error message
M = TypeVar("M", bound=MixerSettings)
S = TypeVar("S", bound=AnySettings)


def check_run_folder(settings: AnySettings) -> None:
    """Raise ValueError if `run.folder` holds a run and `run.resume` is not set, a run with another configuration, a
    model but no checkpoint, or no checkpoint of the step `run.resume`."""
    folder = Path(settings.run.folder)
    file = folder / CONFIG
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    if not file.exists() and checkpoints:
        raise ValueError(f"{folder} holds checkpoints but no {CONFIG}: choose another run.folder")
    if file.exists():
        _check_config(settings, file)
    if not checkpoints and (holds_weights(folder) or holds_diffusers_model(folder)):
        raise ValueError(
            f"{folder} holds a model and no checkpoint to resume from: its weights would be lost; choose another "
            "run.folder"
        )
    choose_checkpoint(folder / CHECKPOINTS, settings.run.resume)


def _check_config(settings: AnySettings, file: Path) -> None:
    if settings.run.resume is False:
        raise ValueError(
            f"{file.parent} already holds a run; set run.resume=true to continue it or choose another run.folder"
        )
    changed = config.differences(_read_config(settings, file), settings, ignore=CHANGEABLE)
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        names = ", ".join(changed[:MOST_NAMED])
        raise ValueError(
            f"{file.parent} holds a run with another configuration; they differ in {names}{more}. To train its model "
            f"on with these, start another run: model.checkpoint={file.parent} and another run.folder"
        )


def _read_config(settings: S, file: Path) -> S:
    """Read the configuration of a run. Raises ValueError if the file is missing, empty or damaged."""
    advice = "put the configuration that the run was started with there, or choose another run.folder"
    if file.is_file() and not file.read_bytes().strip():
        raise ValueError(f"{file} is empty, as after a crash of the machine: {advice}")
    try:
        return config.load(type(settings), file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {advice} ({error})") from error


def begin_folder(settings: AnySettings) -> None:
    """Create the folder of a new run and write its configuration. Called last, so that a wrong configuration leaves no
    file behind."""
    file = Path(settings.run.folder) / CONFIG
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        config.save(settings, file)


def with_stored_options(model: M, checkpoint: Path | None) -> M:
    """Complete the model settings with the mixer options stored in a checkpoint, since defaults may have changed since
    the run began. A checkpoint that cannot be read changes nothing here; loading it raises an error later."""
    if checkpoint is None:
        return model
    model = _with_stored_size(model, checkpoint / WEIGHTS)
    if model.mixer not in MIXERS:
        return model
    try:
        with safe_open(checkpoint / WEIGHTS, "pt") as opened:
            tags = [decode_tag(opened.get_tensor(key)) for key in opened.keys() if key.endswith(".mixer.tag")]  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        return model
    tags = [tag for tag in tags if tag["mixer"] == model.mixer]
    if not tags:
        return model
    defaults = MIXERS[model.mixer].defaults
    stored = {field.name: tags[0][field.name] for field in fields(defaults) if field.name in tags[0]}
    for key, value in stored.items():
        if any(tag.get(key) != value for tag in tags):  # blocks, which are chosen for the grid of each stage
            stored[key] = getattr(defaults, key)
    options = {**restored_options(model.mixer, stored), **model.mixer_options}
    return replace(model, mixer_options=options)


def _with_stored_size(model: M, weights: Path) -> M:
    """Complete the keywords of a model with stages with the image size for which its blocks were chosen, which earlier
    checkpoints do not store."""
    if not isinstance(model, ModelSettings):
        return model
    try:
        recipe = read_recipe(weights)
    except ValueError:
        return model
    if recipe is None or not has_stages_of_any_size(recipe):
        return model
    return replace(model, kwargs={"img_size": recipe.kwargs.get("img_size", USUAL_SIZE), **model.kwargs})
