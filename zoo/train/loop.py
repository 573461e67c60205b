"""The training core: what every run does, whatever it trains. A kind of run says what its model, batches and loss are.

From scratch and from a checkpoint are one path, and so are one process and several (accelerate). Everything that a step
draws is a function of (seed, step, process, part), so that an interrupted run continues bit for bit.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from accelerate import DistributedType
from timm.scheduler.scheduler import Scheduler
from timm.utils import AverageMeter
from torch import Tensor, nn

from zoo.config import leaves
from zoo.conversion.order_warmup import OrderWarmup
from zoo.data import BatchPlan, check_unreadable
from zoo.data.progress import progress
from zoo.data.samples import seed_everything
from zoo.errors import TrainingFailed
from zoo.files import FolderLock, replacing, sweep
from zoo.precision import autocast
from zoo.timer import Clock
from zoo.train.checkpoint import choose_checkpoint
from zoo.train.deepspeed_update import ZeroUpdater
from zoo.train.metrics_log import Record, draw_curves, read_rows
from zoo.train.optim import create_optimizer
from zoo.train.processes import create_accelerator, placed, prepare
from zoo.train.resumable import Resumable
from zoo.train.run_folder import CHECKPOINTS, as_begun, begin_folder, check_folder
from zoo.train.sharding import Average, blank, whole
from zoo.train.stop import Stop
from zoo.train.update import Updater

METRICS = "metrics.jsonl"
RESULT = "result.json"


class Run(Resumable, ABC):
    """One run. `train` carries it out, or what is left of it, and returns its result, also written to result.json.

    settings: with the sections model, optim, run and log.  model_settings: the first, with the options that the mixers
    of a resumed run have.  model: what is trained, on the device, also its attributes after `accelerator.prepare`.
    plan: which samples each step sees.  last_step: number of steps.  metric: the key of the evaluation that the curves
    show, and what it is.

    Raises ValueError for settings that contradict themselves, the data or a checkpoint; TrainingFailed, which is one
    too, when weights or losses do not stay finite: the checkpoints of before are kept, and nothing else is written.
    """

    model: nn.Module
    plan: BatchPlan
    last_step: int
    metric: tuple[str, str]
    header: dict[str, str]  # of the weights in checkpoints

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.folder = Path(settings.run.folder)
        self.accelerator = create_accelerator(settings)
        self.lock = FolderLock(self.folder) if self.main else None
        try:
            self._prepare()
        except BaseException:
            self._release()
            raise

    def _prepare(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        if self.main:
            sweep(self.folder, earlier=True)
            check_folder(settings)
        accelerator.wait_for_everyone()
        checkpoint = choose_checkpoint(self.folder / CHECKPOINTS, settings.run.resume)
        self.model_settings = as_begun(settings.model, checkpoint)
        self.set_up()
        optim = settings.optim
        self.form = blank(self.model) if accelerator.is_fsdp2 else None
        self.ema = ema = Average(self.model, decay=optim.ema, use_warmup=optim.ema_warmup) if optim.ema else None
        optimizer = create_optimizer(self.model, optim)
        self.schedule = self.create_schedule(optimizer)
        self.wrapped, self.optimizer = prepare(accelerator, self.model, optimizer)
        if ema:
            placed(accelerator, ema.module)
        self.forward = self.compiled() if settings.run.compile else self.wrapped
        updater = ZeroUpdater if accelerator.distributed_type == DistributedType.DEEPSPEED else Updater
        limits = optim.clip, settings.run.max_skipped
        self.update = updater(accelerator, self.model, self.wrapped, self.optimizer, ema, *limits)
        self.meters: dict[str, AverageMeter] = {}  # of the losses, since the last line of the record
        self.step, self.seconds = 0, 0.0
        self.saved = 0  # the step of the newest checkpoint
        self.bad: set[int] = set()
        self.evaluated: dict[str, Any] = {}  # the last evaluation
        self.trained: dict[str, Any] = {}  # the last training row
        self.late = False  # whether a checkpoint is due since steps that were skipped
        self.models = [self.model, *([ema.module] if ema else [])]
        self.anneal = OrderWarmup(self.models, optim.anneal, optim.ridge, self.last_step, accelerator.device)
        self._continue(checkpoint)
        self.anneal(self.step)
        if self.main:
            begin_folder(settings)
            self.begin()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    # What a kind of run says

    @abstractmethod
    def set_up(self) -> None:
        """Set model (at `place_of` the accelerator), plan, last_step, metric and header. Raises ValueError for what
        does not fit."""

    def begin(self) -> None:
        """Write into the folder of a run that begins or continues, on the main process."""

    @abstractmethod
    def create_schedule(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        """The learning rate, in steps."""

    @abstractmethod
    def batches(self, first: int, last: int) -> Iterator[Any]:
        """The parts of the steps [first, last) for this process; each can tell which of its samples are unreadable."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of one part, a scalar; `note` the numbers that the record shall show."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """The row of an evaluation, kind "eval"."""

    @abstractmethod
    def due(self, what: str) -> bool:
        """Whether the step just done is followed by an "eval", by "samples" or by a "checkpoint". The last one is, by
        the first and the third."""

    @abstractmethod
    def save(self) -> str:
        """Write the final weights (`whole`) on the main process, each file or folder complete or not at all; returns
        what the model is."""

    def show(self) -> None:
        """Show what the run can do by now; on every process, since they may share the weights."""

    def compiled(self) -> Any:
        """The model for training, compiled."""
        return torch.compile(self.wrapped)

    # What every run does

    def train(self) -> dict[str, Any]:
        """Carry out the steps that are left. Returns the last evaluation with images_seen, seconds and more.

        After SIGTERM or SIGINT it finishes the step and what is due then, writes a checkpoint and raises SystemExit
        with the status 143 or 130.
        """
        try:
            return self._train()
        finally:
            self._release()

    def _train(self) -> dict[str, Any]:
        settings = self.settings
        self.record = Record(self.folder / METRICS, self.step) if self.main else None
        if settings.log.trackers:
            self.accelerator.init_trackers(
                settings.log.project, config={k: str(v) for k, v in leaves(settings).items()}
            )
        try:
            with Stop(self.accelerator) as stop:
                self._carry_out(stop)
            self._check_end()
        except TrainingFailed as error:
            good = choose_checkpoint(self.folder / CHECKPOINTS, True)
            kept = f"the last checkpoint from before is {good}" if good else "there is no checkpoint from before"
            raise TrainingFailed(f"{error}; {kept}") from error
        return self._finish()

    def _carry_out(self, stop: Stop) -> None:
        """The steps that are left, and what is due beside them, until `stop` asks for an end."""
        settings = self.settings
        batches = self.batches(self.step, self.last_step)
        clock = Clock(self.accelerator.device, self.step)
        beside = {"eval": self.evaluate, "samples": self.show, "checkpoint": self._checkpoint}
        steps = range(self.step, self.last_step)
        self.wrapped.train()
        bar = progress(steps, f"training {self.folder.name}", self.last_step, self.step, self._status)
        for _ in bar if self.main else steps:
            with stop.explained(self._stopped):
                self._train_step(batches)
            if self.step % settings.log.every == 0 or self.step == self.last_step:
                self.update.settle(self.step)  # waits for the device, so that the clock stops after the work
                if self.update.failing:
                    self._check_weights()
                self.trained = self._training_row(*clock.lap(self.step))
                self.write(self.trained)
                self.meters.clear()
            for kind, work in beside.items():
                if self.due(kind) or (kind == "checkpoint" and self.late):
                    self._do_beside(kind, work, clock)
            if (number := stop.asked()) and self.step < self.last_step:
                if self.saved != self.step:
                    self._do_beside("checkpoint", self._checkpoint, clock)
                raise self._stopped(number)

    def _status(self) -> str:
        """Loss, speed and the last evaluation, for the progress bar."""
        row, key = self.trained, self.metric[0]
        texts = [f"loss {row['loss']:.4g}", f"{row['images_per_second']:.0f} images/s"] if "loss" in row else []
        return ", ".join([*texts, *([f"{key} {self.evaluated[key]:.4g}"] if key in self.evaluated else [])])

    def _print_summary(self, last: dict[str, Any]) -> None:
        """Print the last evaluation and where the run was written."""
        key, title = self.metric
        scores = [f"{name}{last[full]:.4g}" for name, full in (("", key), ("EMA ", f"ema_{key}")) if full in last]
        spent = f"{self.last_step} steps in {self.seconds:.0f} s"
        print(f"{title}: {', '.join(scores)} after {spent}; wrote {self.folder}", flush=True)

    def _stopped(self, number: int) -> SystemExit:
        """The end of a run after a signal, once a line has said where it goes on."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        at = f"stopped by {Signals(number).name} at step {self.step} of {self.last_step}"
        newest = f"run.resume=true continues at step {self.saved}" if self.saved else "no checkpoint was written yet"
        self.accelerator.print(f"{at}: {newest}", flush=True)
        return SystemExit(128 + number)

    def _do_beside(self, kind: str, work: Callable[[], dict[str, Any] | None], clock: Clock) -> None:
        """Work of this kind, and the row of what it found and took."""
        self.update.settle(self.step)  # steps that the device has not done yet are training
        with clock.beside() as took:
            found = work()
        if kind == "eval":
            self.evaluated = found or {}
        self.seconds += took["seconds"]
        self.write({"kind": kind, **(found or {}), **took})

    def _train_step(self, batches: Iterator[Any]) -> None:
        """Forward and backward over the parts of one step, then the update."""
        self.schedule.step_update(self.step)
        for part in range(self.plan.parts):
            batch = next(batches)
            self._note_unreadable(batch)
            # after the batch was read: reading in this process draws from the same generators
            seed_everything(self.settings.run.seed, self.step, self.accelerator.process_index, part)
            last = part == self.plan.parts - 1
            self.update.backward(self.loss(batch) / self.plan.parts, last)
        if self.step == 0 and (idle := self.update.idle()):
            raise TrainingFailed(f"these new parameters receive no gradient: {', '.join(idle)}")
        self.step += 1
        self.update(self.step)
        self.anneal(self.step)

    def autocast(self) -> torch.autocast:
        """The context in which models compute, of run.precision."""
        keep = not self.accelerator.is_fsdp2  # the weights of all blocks in 16 bits, until the context ends
        return autocast(self.accelerator.device.type, self.settings.run.precision, keep)

    def whole(self, model: nn.Module) -> nn.Module:
        """The model, or its average, with all weights, for the main process to save. Every process."""
        return model if self.form is None else whole(model, self.form, self.main)

    def note(self, name: str, value: Tensor, n: int) -> None:
        """Let the mean `value` of n samples flow into the record of the losses."""
        self.meters.setdefault(name, AverageMeter()).update(value.detach(), n)

    def _note_unreadable(self, batch: Any) -> None:
        new = set(batch.unreadable()) - self.bad
        if new:
            self.bad |= new
            print(
                f"skipped {len(new)} unreadable images, such as number {min(new)}; {len(self.bad)} so far", flush=True
            )
            check_unreadable(len(self.bad), self.plan.n_images)

    def _training_row(self, steps: int, seconds: float, memory: dict[str, float]) -> dict[str, Any]:
        self.seconds += seconds
        norm, counts = self.update.norm, self.update.counts
        return {
            "kind": "train",
            **{name: total / count for name, (total, count) in self._totals().items()},
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": norm if math.isfinite(norm) else None,
            "clipped_part": counts["clipped"] / self.step,
            "skipped": counts["skipped"],
            "unreadable": len(self.bad),
            "images_per_second": steps * self.plan.batch_size / seconds,
            "seconds_per_step": seconds / steps,
            **memory,
        }

    def _totals(self) -> dict[str, tuple[float, int]]:
        """(sum, the mean over processes; number of samples) of each meter."""
        out = {}
        for name, meter in self.meters.items():
            total = torch.as_tensor(meter.sum, device=self.accelerator.device, dtype=torch.float32)
            out[name] = float(self.accelerator.reduce(total, "mean")), meter.count
        return out

    def write(self, row: dict[str, Any]) -> None:
        """Add a row to the record and the trackers."""
        images = self.step * self.plan.batch_size
        row = {"step": self.step, "epoch": self.step / self.plan.steps_per_epoch, "images_seen": images, **row}
        if self.record is None:
            return
        self.record.write(row)
        if self.settings.log.trackers:
            numbers = {f"{row['kind']}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=self.step)

    def _finish(self) -> dict[str, Any]:
        """Write the final weights, the curves and the result."""
        self.accelerator.wait_for_everyone()
        result: dict[str, Any] = {}
        about = self.save()
        if self.main:
            rows = read_rows(self.folder / METRICS)
            last = next((row for row in reversed(rows) if row.get("kind") == "eval"), None)
            if last is None:
                raise ValueError(f"{self.folder / METRICS} holds no evaluation any more: it was removed or damaged")
            result = {"model": about, **last, "seconds": round(self.seconds, 2)}
            if "peak_mib" in last:
                result["peak_mib"] = max(row["peak_mib"] for row in rows if "peak_mib" in row)
            result |= {**self.update.counts, "train_unreadable": len(self.bad)}
            with replacing(self.folder / RESULT) as temporary:
                temporary.write_text(json.dumps(result, indent=1) + "\n")
            draw_curves({self.folder.name: rows}, self.folder / "curves.png", *self.metric)
            self._print_summary(last)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return result
