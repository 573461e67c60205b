"""A classification run: an image model on labelled images, on the training core; and tables of such runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler

from zoo import config
from zoo.data import Batch, check_unreadable
from zoo.eval.accuracy import predict_all
from zoo.eval.results import quality_row, result_file, write_json
from zoo.eval.settings import QualitySettings
from zoo.train.core import Run
from zoo.train.model import AVERAGE, WEIGHTS, header_of, save_weights
from zoo.train.optim import create_schedule
from zoo.train.settings import TrainSettings
from zoo.train.setup import set_up


class Trainer(Run):
    """One run of `TrainSettings`; see `Run`. Its result has top1 and top5 (percent) and loss (nats)."""

    settings: TrainSettings
    metric = ("top1", "top-1 accuracy (%)")

    def set_up(self) -> None:
        self.parts = parts = set_up(self.settings, self.accelerator)
        self.model, self.plan = parts.model, parts.plan
        self.last_step = self.settings.schedule.epochs * self.plan.steps_per_epoch
        self.header = header_of(parts.recipe)

    def create_schedule(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        return create_schedule(optimizer, self.settings.schedule, self.plan.steps_per_epoch)

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        return self.parts.train_images.train(self.plan, first, last)

    def loss(self, batch: Batch) -> torch.Tensor:
        images, targets = batch.images, batch.labels
        if self.parts.mixup:
            images, targets = self.parts.mixup(images, targets)
        objective = self.parts.objective
        with self.accelerator.autocast():
            with objective.listen():
                logits = self.forward(images)
            losses = objective(logits, targets, images)
        total = losses.pop("total")
        for name, value in losses.items():
            self.note(name, value, len(images))
        return total

    def due(self, what: str) -> bool:
        run, step = self.settings.run, self.step
        epochs = run.eval_epochs if what == "eval" else run.checkpoint_epochs
        by_steps = what == "checkpoint" and run.checkpoint_steps and step % run.checkpoint_steps == 0
        return step % (epochs * self.plan.steps_per_epoch) == 0 or step == self.last_step or bool(by_steps)

    def evaluate(self) -> dict[str, Any]:
        """The accuracy of the model, and of its average if there is one, on the validation images (percent, loss in
        nats)."""
        accelerator = self.accelerator
        row: dict[str, Any] = {"kind": "eval"}
        where = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        models = {"": self.model} if self.ema is None else {"": self.model, "ema_": self.ema.module}
        batches = self.parts.val_images.evaluation(self.plan.part_size, **where)
        for prefix, found in predict_all(models, batches, accelerator.autocast).items():
            sums = accelerator.reduce(found.sums().to(accelerator.device), "sum")
            values = found.from_sums(sums)
            check_unreadable(int(values["unreadable"]), int(values["images"] + values["unreadable"]))
            row |= {prefix + key: value for key, value in values.items()}
        return row

    def save(self) -> str:
        recipe = self.parts.recipe
        save_weights(self.model, recipe, self.folder / WEIGHTS)
        if self.ema:
            save_weights(self.ema.module, recipe, self.folder / AVERAGE)
        return recipe.describe()


def train_table(settings: QualitySettings, file: str, changes: list[str], command: str) -> dict[str, Any]:
    """The same run for several mixers and seeds, from scratch and, if asked, converted from the softmax run of its
    seed: what is missing is run, and the file of rows written after each.

    file: configuration of the runs.  changes: words for every run. Conversions start from the softmax run in
    `settings.out`, which must be there. Raises ValueError.
    """
    data, rows = settings.data or Path(file).stem, list[dict[str, Any]]()

    def run(file: str, source: str, mixer: str, seed: int, *more: str) -> None:
        folder = f"{settings.out}/{source}_{mixer}_{seed}"
        words = [f"run.folder={folder}", "run.resume=true", f"run.seed={seed}", *changes, *more]
        words.insert(0, f"model.mixer={'' if mixer == 'softmax' else mixer}")
        result = Trainer(config.load(TrainSettings, file, words)).train()
        if result:
            budget, took = f"{result['epoch']:.0f} epochs", result["seconds"]
            options = config.load(TrainSettings, Path(folder) / "config.yaml").model.mixer_options
            rows.append(quality_row(Path(file).stem, data, mixer, options, source, seed, result["top1"], budget, took))
            write_json(result_file(command, rows), Path(settings.json))

    for seed in settings.seeds:
        for mixer in settings.mixers:
            run(file, "scratch", mixer, seed)
        for mixer in settings.mixers if settings.finetune else []:
            kind = "control" if mixer == "softmax" else "converted"
            run(settings.finetune, kind, mixer, seed, f"model.checkpoint={settings.out}/scratch_softmax_{seed}")
    return result_file(command, rows)
