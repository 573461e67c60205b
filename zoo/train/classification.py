"""A classification run: an image model on labelled images, on the training core."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler

from zoo.data import Batch, check_unreadable
from zoo.eval.accuracy import predict_all
from zoo.models.timm.model_files import EMA_WEIGHTS, WEIGHTS, header_of, save_weights
from zoo.models.timm.patches import patches_as_products
from zoo.train.loop import Run
from zoo.train.optim import create_schedule
from zoo.train.settings import TrainSettings
from zoo.train.setup import set_up
from zoo.train.sharding import in_step


class Trainer(Run):
    """One run of `TrainSettings`; see `Run`. Its result has top1 and top5 (percent) and loss (nats)."""

    settings: TrainSettings
    metric = ("top1", "top-1 accuracy (%)")

    def set_up(self) -> None:
        self.parts = parts = set_up(replace(self.settings, model=self.model_settings), self.accelerator)
        self.model, self.plan = parts.model, parts.plan
        self.last_step = self.settings.schedule.epochs * self.plan.steps_per_epoch
        self.header = header_of(parts.recipe)

    def create_schedule(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        return create_schedule(optimizer, self.settings.schedule, self.plan.steps_per_epoch)

    def compiled(self) -> Any:
        """Block by block: one compilation serves all blocks, also those of the next run of the process; patches by a
        product."""
        for model in filter(None, (self.model, self.parts.objective.teacher)):
            patches_as_products(model)
            for block in getattr(model, "blocks", ()):
                block.compile()
        return self.wrapped

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        return self.parts.train_images.train(self.plan, first, last)

    def loss(self, batch: Batch) -> torch.Tensor:
        images, targets = batch.images, batch.labels
        if self.parts.mixup:
            images, targets = self.parts.mixup(images, targets)
        objective = self.parts.objective
        with self.autocast():
            with objective.listen():
                logits = self.forward(images)
            losses = objective(logits, targets, images)
        total = losses.pop("total")
        for name, value in losses.items():
            self.note(name, value, len(images))
        return total

    def due(self, what: str) -> bool:
        if what == "samples":
            return False
        run, step = self.settings.run, self.step
        epochs = run.eval_epochs if what == "eval" else run.checkpoint_epochs
        by_steps = what == "checkpoint" and run.checkpoint_steps and step % run.checkpoint_steps == 0
        return step % (epochs * self.plan.steps_per_epoch) == 0 or step == self.last_step or bool(by_steps)

    def evaluate(self) -> dict[str, Any]:
        """The accuracy of the model, and of its average if there is one, on the validation images (percent, loss in
        nats)."""
        accelerator = self.accelerator
        row: dict[str, Any] = {}
        where = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        models = {"": self.model} if self.ema is None else {"": self.model, "ema_": self.ema.module}
        share = -(-self.parts.n_val // accelerator.num_processes)  # the largest
        batches = self.parts.val_images.evaluation(self.plan.part_size, **where)
        batches = in_step(batches, -(-share // self.plan.part_size))
        with torch.compiler.set_stance("force_eager"):  # once an epoch, of other sizes: not worth a compilation
            predictions = predict_all(models, batches, self.autocast)
        for prefix, found in predictions.items():
            sums = accelerator.reduce(found.sums().to(accelerator.device), "sum")
            values = found.from_sums(sums)
            check_unreadable(int(values["unreadable"]), int(values["images"] + values["unreadable"]))
            row |= {prefix + key: value for key, value in values.items()}
        return row

    def save(self) -> str:
        recipe = self.parts.recipe
        models = {WEIGHTS: self.model} | ({EMA_WEIGHTS: self.ema.module} if self.ema else {})
        for file, model in models.items():
            found = self.whole(model)
            if self.main:
                save_weights(found, recipe, self.folder / file, self.step)
        return recipe.describe()
