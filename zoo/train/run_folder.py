"""The folder of a run: which run it holds."""

from pathlib import Path
from typing import Any

from zoo import config
from zoo.train.checkpoint import choose_checkpoint, list_checkpoints
from zoo.train.settings import CHANGEABLE

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
MOST_NAMED = 10  # keys in a sentence


def check_folder(settings: Any) -> None:
    """Raise ValueError when `run.folder` holds a run and `run.resume` is not set, or one with another
    configuration, or no checkpoint of the step `run.resume`."""
    folder = Path(settings.run.folder)
    file = folder / CONFIG
    if not file.exists() and list_checkpoints(folder / CHECKPOINTS):
        raise ValueError(f"{folder} holds checkpoints but no {CONFIG}: choose another run.folder")
    if file.exists():
        _check_config(settings, file)
    choose_checkpoint(folder / CHECKPOINTS, settings.run.resume)


def _check_config(settings: Any, file: Path) -> None:
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
            f"on with these, start a run of its own: model.checkpoint={file.parent} and another run.folder"
        )


def _read_config(settings: Any, file: Path) -> Any:
    """The configuration of the run that the folder holds."""
    way_out = "put the configuration that the run was started with there, or choose another run.folder"
    if file.is_file() and not file.read_bytes().strip():
        raise ValueError(f"{file} is empty, as after a crash of the machine: {way_out}")
    try:
        return config.load(type(settings), file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {way_out} ({error})") from error


def begin_folder(settings: Any) -> None:
    """Write the configuration of a new run, once everything it names was found."""
    file = Path(settings.run.folder) / CONFIG
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        config.save(settings, file)
