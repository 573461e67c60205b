"""The training loop: one run from its settings to its result, from scratch or from a checkpoint by the same path."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import AverageMeter, ModelEmaV3

from zoo.config import leaves
from zoo.data import Batch, check_unreadable
from zoo.data.progress import progress
from zoo.data.samples import seed_everything
from zoo.eval.accuracy import predict_all
from zoo.train.checkpoint import load_checkpoint, save_checkpoint
from zoo.train.curves import draw_curves
from zoo.train.model import WEIGHTS, save_weights
from zoo.train.optim import create_optimizer, create_schedule, new_parameters
from zoo.train.record import Record, read_rows, replacing
from zoo.train.settings import TrainSettings
from zoo.train.setup import begin_folder, check_folder, last_checkpoint, set_up
from zoo.train.update import Updater

METRICS = "metrics.jsonl"
EMA_FILE = "model_ema.safetensors"
RESULT = "result.json"


class Trainer:
    """One run. `train` carries it out, or what is left of it, and returns its result, also written to result.json.

    Raises ValueError for settings that contradict themselves, the data or a checkpoint; RuntimeError when training
    fails.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.folder = Path(settings.run.folder)
        self.accelerator = accelerator = _accelerator(settings)
        if accelerator.is_main_process:
            check_folder(settings)
        accelerator.wait_for_everyone()
        self.parts = parts = set_up(settings, accelerator)
        self.model, self.plan = parts.model, parts.plan
        optim = settings.optim
        self.ema = ema = ModelEmaV3(self.model, decay=optim.ema, use_warmup=optim.ema_warmup) if optim.ema else None
        optimizer = create_optimizer(self.model, optim)
        self.schedule = create_schedule(optimizer, settings.schedule, self.plan.steps_per_epoch)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.forward = torch.compile(self.wrapped) if settings.run.compile else self.wrapped
        self.update = Updater(accelerator, self.model, self.optimizer, ema, optim.clip, settings.run.max_skipped)
        self.meter = AverageMeter()  # of the loss, since the last line of the record
        self.last_step = settings.schedule.epochs * self.plan.steps_per_epoch
        self.step, self.seconds = 0, 0.0
        self.bad: set[int] = set()
        self._continue(last_checkpoint(settings))
        if accelerator.is_main_process:
            begin_folder(settings)

    def train(self) -> dict[str, Any]:
        """Carry out the steps that are left. Returns top1 and top5 (percent), loss (nats), images_seen, seconds and
        more."""
        settings, main = self.settings, self.accelerator.is_main_process
        self.record = Record(self.folder / METRICS, self.step) if main else None
        if settings.log.trackers:
            self.accelerator.init_trackers(
                settings.log.project, config={k: str(v) for k, v in leaves(settings).items()}
            )
        batches = self.parts.train_images.train(self.plan, self.step, self.last_step)
        clock = _Clock(self.step)
        steps = range(self.step, self.last_step)
        self.wrapped.train()
        for _ in progress(steps, f"training {self.folder.name}", self.last_step, self.step) if main else steps:
            self._train_step(batches)
            if self.step % settings.log.every == 0 or self.step == self.last_step:
                self.update.settle(self.step)  # waits for the device, so that the clock stops after the work
                self._write(self._training_row(clock.images_per_second(self.step, self.plan.batch_size)))
                self.meter.reset()
                self.seconds += clock.restart(self.step)
            if self._due(settings.run.eval_epochs):
                self._write(self.evaluate())
                self.seconds += clock.restart(self.step)
            every = settings.run.checkpoint_steps
            if self._due(settings.run.checkpoint_epochs) or (every and self.step % every == 0):
                self._save()
        return self._finish()

    def _train_step(self, batches: Iterator[Batch]) -> None:
        """Forward and backward over the parts of one step, then the update."""
        self.schedule.step_update(self.step)
        for part in range(self.plan.parts):
            batch = next(batches)
            self._note_unreadable(batch)
            # after the batch was read: reading in this process draws from the same generators
            seed_everything(self.settings.run.seed, self.step, self.accelerator.process_index, part)
            last = part == self.plan.parts - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                self.accelerator.backward(self._loss(batch) / self.plan.parts)
        if self.step == 0:
            self._check_gradients()
        self.step += 1
        self.update(self.step)

    def _loss(self, batch: Batch) -> torch.Tensor:
        images, targets = batch.images, batch.labels
        if self.parts.mixup:
            images, targets = self.parts.mixup(images, targets)
        with self.accelerator.autocast():
            loss, cross_entropy = self.parts.objective(self.forward(images), targets, images)
        self.meter.update(cross_entropy.detach(), len(images))
        return loss

    def _check_gradients(self) -> None:
        idle = [name for name, p in new_parameters(self.model).items() if p.requires_grad and p.grad is None]
        if idle:
            raise RuntimeError(f"these new parameters receive no gradient: {', '.join(idle)}")

    def _note_unreadable(self, batch: Batch) -> None:
        new = set(batch.unreadable()) - self.bad
        if new:
            self.bad |= new
            print(
                f"skipped {len(new)} unreadable images, such as number {min(new)}; {len(self.bad)} so far", flush=True
            )
            check_unreadable(len(self.bad), self.plan.n_images)

    def _due(self, epochs: int) -> bool:
        """Whether the step just done ends an epoch whose number is a multiple of `epochs`, or the run."""
        return self.step % (epochs * self.plan.steps_per_epoch) == 0 or self.step == self.last_step

    def _training_row(self, speed: float) -> dict[str, Any]:
        norm, counts = self.update.norm, self.update.counts
        return {
            "kind": "train",
            "loss": self._loss_sum() / self.meter.count,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": norm if math.isfinite(norm) else None,
            "clipped_part": counts["clipped"] / self.step,
            "skipped": counts["skipped"],
            "unreadable": len(self.bad),
            "images_per_second": speed,
        }

    def _loss_sum(self) -> float:
        """The sum that the meter holds, the mean over processes."""
        total = torch.as_tensor(self.meter.sum, device=self.accelerator.device, dtype=torch.float32)
        return float(self.accelerator.reduce(total, "mean"))

    def _write(self, row: dict[str, Any]) -> None:
        images = self.step * self.plan.batch_size
        row = {"step": self.step, "epoch": self.step / self.plan.steps_per_epoch, "images_seen": images, **row}
        if self.record is None:
            return
        self.record.write(row)
        if self.settings.log.trackers:
            numbers = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=self.step)

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

    def _save(self) -> None:
        self.update.settle(self.step)
        loss_sum = self._loss_sum()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "step": self.step,
                "seconds": self.seconds,
                "counts": self.update.counts,
                "loss": [loss_sum, self.meter.count],
                "bad": sorted(self.bad),
            }
            ema = self.ema.module if self.ema else None
            where, keep = self.folder / "checkpoints", self.settings.run.keep
            save_checkpoint(where, self.step, self.model, ema, self.parts.recipe, state, keep)

    def _continue(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            return
        state = load_checkpoint(checkpoint, self.model, self.ema.module if self.ema else None)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.bad, self.update.counts = set(state["bad"]), state["counts"]
        total, self.meter.count = state["loss"]
        self.meter.sum = torch.tensor(total, device=self.accelerator.device)
        self.accelerator.print(f"continuing {self.folder} at step {self.step} of {self.last_step}", flush=True)

    def _finish(self) -> dict[str, Any]:
        """Write the final weights, the curves and the result."""
        self.accelerator.wait_for_everyone()
        result: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            save_weights(self.model, self.parts.recipe, self.folder / WEIGHTS)
            if self.ema:
                save_weights(self.ema.module, self.parts.recipe, self.folder / EMA_FILE)
            rows = read_rows(self.folder / METRICS)
            last = next(row for row in reversed(rows) if row["kind"] == "eval")
            result = {"model": self.parts.recipe.describe(), **last, "seconds": round(self.seconds, 2)}
            result |= {**self.update.counts, "train_unreadable": len(self.bad)}
            with replacing(self.folder / RESULT) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n")
            draw_curves({self.folder.name: rows}, self.folder / "curves.png")
        self.accelerator.end_training()
        return result


def _accelerator(settings: TrainSettings) -> Accelerator:
    on_cpu = not torch.accelerator.is_available()
    if on_cpu and settings.run.precision == "fp16":  # accelerate would train in float32 without a word
        raise ValueError("run.precision=fp16 needs a GPU, and there is none here; use bf16 or fp32")
    return Accelerator(
        mixed_precision={"fp32": "no"}.get(settings.run.precision, settings.run.precision),
        log_with=settings.log.trackers or None,
        project_dir=Path(settings.run.folder),
        cpu=on_cpu,  # accelerate starts several CPU processes only when told so
    )


class _Clock:
    """Time since the last restart."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def images_per_second(self, step: int, batch_size: int) -> float:
        return (step - self.step) * batch_size / (time.perf_counter() - self.began)

    def restart(self, step: int) -> float:
        """Seconds since the last restart."""
        now = time.perf_counter()
        passed = now - getattr(self, "began", now)
        self.began, self.step = now, step
        return passed
