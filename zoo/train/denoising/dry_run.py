"""Diffusion runs from the command line, and dry runs, which do every part of a run once."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor

from zoo import config
from zoo.config import Tree
from zoo.diffusion.objectives import ALL
from zoo.eval.fid.scores import frechet_distance
from zoo.eval.fid.statistics import Moments
from zoo.train.denoising.model import times_of
from zoo.train.denoising.run import DiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.distributed import destroy_process_group
from zoo.train.metrics_log import Row

IMAGES, VIDEOS = 16, 2  # numbers of images or videos that a dry run generates and scores


class DryRun(DiffusionRun):
    """A run that decodes only the clips that one step and its evaluation need."""

    @property
    def most_clips(self) -> int:  # type: ignore[override]
        return max(self.settings.data.batch_size, IMAGES)


def run_command(words: list[str], text: str | None, usage: str) -> Row:
    """Carry out a command line: print the help (made of `text` and `usage`), or do a run or a dry run (`--dry-run`).

    Prints the result (validation losses) as JSON and returns it. Raises ValueError for invalid settings.
    """
    if config.print_help_if_asked(words, text, usage, DiffusionSettings):
        return {}
    settings = config.from_command_line(DiffusionSettings, [word for word in words if word != "--dry-run"])
    result = dry_run(settings) if "--dry-run" in words else DiffusionRun(settings).train()
    destroy_process_group()
    if result:
        print(json.dumps(result), flush=True)
    return result


def dry_run(settings: DiffusionSettings) -> Row:
    """Train, validate, sample, save, resume and score once, in the folder `run.folder`-dry-run, which is emptied first.

    Returns the result of the run with `frechet_of_pixels`, the Frechet distance between the mean colours of a few
    generated and validation images, which only shows that scoring works.
    """
    folder = Path(f"{settings.run.folder}-dry-run")
    state = PartialState(cpu=not torch.accelerator.is_available())
    if state.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
    state.wait_for_everyone()
    sample, whole = settings.sample, times_of(settings.model) == ALL
    changes: Tree = {
        "run": replace(settings.run, folder=str(folder), eval_steps=1, checkpoint_steps=1, resume=False),
        "schedule": replace(settings.schedule, steps=1, warmup_steps=0),
        "sample": replace(sample, every=int(whole), count=min(sample.count, 4), steps=2),
        "data": replace(settings.data, val_images=IMAGES, cache=False),  # no image is decoded that is not read
    }
    once = replace(settings, **changes)
    DryRun(once).train()
    again = DryRun(replace(once, run=replace(once.run, resume=True)))
    result = again.train()
    distance = _distance(again)  # on every process, since the weights may be sharded
    return {**result, "frechet_of_pixels": distance} if result else {}


def _distance(run: DiffusionRun) -> float:
    real: list[Tensor] = []
    count = VIDEOS if len(run.samples.shape) == 4 else IMAGES
    for batch in run.samples.evaluation(1, 0, 1):
        real.append(_colours(run.samples.to_images(batch.x0)))
        if len(real) == count:
            break
    moments = [Moments(12), Moments(12)]
    for features in real:
        moments[0].update(features)
    moments[1].update(_colours(run.generate(count)))
    return frechet_distance(moments[0].gaussian(), moments[1].gaussian())


def _colours(images: Tensor) -> Tensor:
    """Mean colours of the four quarters of uint8 images [B, 3, H, W], or of the first frames of clips [B, 3, T, H, W]:
    [B, 12] in [0, 1]."""
    images = images[:, :, 0] if images.ndim == 5 else images
    return F.adaptive_avg_pool2d(images.cpu().float() / 255, 2).flatten(1)
