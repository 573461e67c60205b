"""Training loop of all runs. Subclasses define model, batches, loss and evaluation.

All random draws of a step are seeded by (seed, step, process, micro-batch), so an interrupted run resumes bit for bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import Signals
from typing import Generic, TypeVar

import torch
from accelerate import DistributedType
from torch import Tensor, nn

from zoo import config
from zoo.conversion.order_warmup import OrderWarmup
from zoo.data import AnyBatch, BatchPlan, check_unreadable
from zoo.data.plan import seed_everything
from zoo.errors import DamagedCheckpoint, TrainingFailed
from zoo.eval.timer import Timer
from zoo.files import FolderLock, sweep
from zoo.io import write_json
from zoo.precision import autocast
from zoo.progress import progress
from zoo.train import distributed
from zoo.train.checkpoint import advice, choose_checkpoint, load_checkpoint, prune, save_checkpoint, set_aside, step_of
from zoo.train.deepspeed_update import ZeroUpdater
from zoo.train.distributed import Ema, all_finite, create_accelerator, full_state, meta_copy, place, prepare
from zoo.train.metrics_log import Metrics, Row, draw_curves, read_rows
from zoo.train.optim import create_optimizer, create_schedule
from zoo.train.run_folder import CHECKPOINTS, begin_folder, check_run_folder, with_stored_options
from zoo.train.settings import CHANGEABLE, AnySettings, MixerSettings, ScheduleSettings
from zoo.train.stop import Stop
from zoo.train.update import Updater

METRICS = "metrics.jsonl"
RESULT = "result.json"


B = TypeVar("B", bound=AnyBatch)


class TrainingRun(ABC, Generic[B]):
    """A training run. `train` carries out the remaining steps, writes the result to result.json and returns it.

    Attributes set by `set_up`, except `metric`, which belongs to the class:
      model: the trained model, on `build_device`
      plan: the batch sampler
      last_step: number of steps of the run
      rates, rate_steps: the learning-rate schedule, and the number of steps per epoch of the schedule
      every: intervals in steps (0: none) for each kind of work, "eval", "samples" and "checkpoint"
      metric: key of the main metric in rows of evaluations, and its title
      header: metadata of the weight files in checkpoints

    Raises ValueError for settings that contradict each other, the data or a checkpoint, and TrainingFailed (a
    ValueError) for non-finite weights or losses; then earlier checkpoints are kept and no result is written.
    """

    model: nn.Module
    plan: BatchPlan
    last_step: int
    rates: ScheduleSettings
    rate_steps: int
    every: dict[str, list[int]]
    metric: tuple[str, str]
    header: dict[str, str]
    image_name: Callable[[int], str] = "number {}".format  # of a training image, for messages

    def __init__(self, settings: AnySettings) -> None:
        self.settings = settings
        self.folder = Path(settings.run.folder)
        self.accelerator = create_accelerator(settings)
        self.main: bool = self.accelerator.is_main_process
        self.lock = FolderLock(self.folder) if self.main else None
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        settings, accelerator, optim = self.settings, self.accelerator, self.settings.optim
        if self.main:
            sweep(self.folder, earlier=True)
            check_run_folder(settings)
        accelerator.wait_for_everyone()
        checkpoint = choose_checkpoint(self.folder / CHECKPOINTS, settings.run.resume)
        self.model_settings: MixerSettings = with_stored_options(settings.model, checkpoint)
        self.set_up()
        self.form = meta_copy(self.model) if accelerator.is_fsdp2 else None
        self.ema = ema = Ema(self.model, decay=optim.ema, use_warmup=optim.ema_warmup) if optim.ema else None
        optimizer = create_optimizer(self.model, optim)
        self.schedule = create_schedule(optimizer, self.rates, self.rate_steps)
        self.wrapped, self.optimizer = prepare(accelerator, self.model, optimizer)
        if ema:
            place(accelerator, ema.module)
        if settings.run.compile:
            self.compile_blocks()
        updater = ZeroUpdater if accelerator.distributed_type == DistributedType.DEEPSPEED else Updater
        limits = optim.clip_grad_norm, settings.run.max_nonfinite_steps
        self.update = updater(accelerator, self.model, self.wrapped, self.optimizer, ema, *limits)
        self.metrics = Metrics(accelerator)
        self.step, self.seconds = 0, 0.0
        self.saved, self.bad = 0, set[int]()  # step of the newest checkpoint, numbers of unreadable images
        self.evaluated, self.trained = Row(), Row()  # the last evaluation and training row
        self.late = False  # whether a checkpoint was postponed because steps were skipped
        self.models = [self.model, *([ema.module] if ema else [])]
        self.anneal = OrderWarmup(self.models, optim.anneal, optim.ridge, self.last_step, accelerator.device)
        if checkpoint is not None:
            self._resume(checkpoint)
        self.anneal(self.step)
        if self.main:
            begin_folder(settings)
            self.begin()

    def close(self) -> None:
        """Release the lock of the run folder, as `train` does at its end."""
        if self.lock is not None:
            self.lock.release()

    # Defined by subclasses

    @abstractmethod
    def set_up(self) -> None:
        """Set the attributes listed above. Raises ValueError for settings that do not fit the data or a checkpoint."""

    def begin(self) -> None:
        """Write further files into the run folder when the run starts or resumes. Main process only."""

    @abstractmethod
    def batches(self, first: int, last: int) -> Iterator[B]:
        """Yield the micro-batches of this process in the steps [first, last)."""

    @abstractmethod
    def loss(self, batch: B) -> Tensor:
        """Compute the loss of one micro-batch, a scalar. Logs values by `metrics.add`."""

    @abstractmethod
    def evaluate(self) -> Row:
        """Compute metrics on the validation set, for a row of kind "eval". Every process."""

    @abstractmethod
    def save(self) -> str:
        """Write the final, `unsharded` weights in the main process. Returns a description of the model."""

    @abstractmethod
    def compile_blocks(self) -> None:
        """Compile the blocks of the model, and of the teacher if there is one, in place."""

    def log_samples(self) -> None:
        """Write samples of the model. Every process, since the weights may be sharded."""

    # The loop

    def train(self) -> Row:
        """Carry out the remaining steps. Returns the last evaluation with images_seen, seconds and counts.

        After SIGTERM or SIGINT the run finishes the step and the work due after it, writes a checkpoint, and raises
        SystemExit with status 143 or 130.
        """
        try:
            return self._train()
        finally:
            self.close()

    def _train(self) -> Row:
        settings = self.settings
        values = {k: str(v) for k, v in config.leaves(settings).items()}
        self.metrics.open(self.folder / METRICS, self.step, settings.log.project, values)
        try:
            with Stop(self.accelerator) as stop:
                self._run_steps(stop)
            self._check_end()
        except TrainingFailed as error:
            good = choose_checkpoint(self.folder / CHECKPOINTS, True)
            kept = f"the last checkpoint from before is {good}" if good else "there is no checkpoint from before"
            raise TrainingFailed(f"{error}; {kept}") from error
        return self._finish()

    def _run_steps(self, stop: Stop) -> None:
        """Carry out the remaining steps with evaluations, samples and checkpoints, until `stop` receives a signal."""
        batches = self.batches(self.step, self.last_step)
        timer = Timer(self.accelerator.device, self.step)
        pauses = {"eval": self.evaluate, "samples": self.log_samples, "checkpoint": self._checkpoint}
        steps = range(self.step, self.last_step)
        self.wrapped.train()
        bar = progress(steps, f"training {self.folder.name}", self.last_step, self.step, self._status)
        for _ in bar if self.main else steps:
            with stop.guard(self._stopped):
                self._train_step(batches)
            if self.step % self.settings.log.every == 0 or self.step == self.last_step:
                self.update.flush_norms(self.step)  # synchronizes, so that the timer includes all work of the device
                if self.update.failing:
                    self._check_weights()
                self.trained = self._training_row(*timer.interval(self.step))
                self.write(self.trained)
            for kind, work in pauses.items():
                if self._due(kind) or (kind == "checkpoint" and self.late):
                    self._do_untimed(kind, work, timer)
            if (number := stop.requested()) and self.step < self.last_step:
                if self.saved != self.step:
                    self._do_untimed("checkpoint", self._checkpoint, timer)
                raise self._stopped(number)

    def _train_step(self, batches: Iterator[B]) -> None:
        """Carry out one step: forward and backward passes over its micro-batches, then the update of the weights."""
        self.schedule.step_update(self.step)
        for number in range(self.plan.micro_batches):
            batch = next(batches)
            self._note_unreadable(batch)
            # seeded after the batch was read, since reading it in this process draws from the same generators
            seed_everything(self.settings.run.seed, self.step, self.accelerator.process_index, number)
            with self.update.micro_batch(last=number == self.plan.micro_batches - 1):
                self.update.backward(self.loss(batch) / self.plan.micro_batches)
        if self.step == 0 and (idle := self.update.params_without_grad()):
            raise TrainingFailed(f"these new parameters receive no gradient: {', '.join(idle)}")
        self.step += 1
        self.update(self.step)
        self.anneal(self.step)

    def _due(self, kind: str) -> bool:
        """Whether this kind of work is due after the current step. After the last step it is, unless it is off."""
        every = [n for n in self.every[kind] if n]
        return bool(every) and (self.step == self.last_step or any(self.step % n == 0 for n in every))

    def _do_untimed(self, kind: str, work: Callable[[], Row | None], timer: Timer) -> None:
        """Do work that does not count as training time, and write a row with its results and duration."""
        self.update.flush_norms(self.step)  # synchronizes, so that queued steps count as training time
        with timer.pause() as took:
            found = work() or {}
        if kind == "eval":
            self.evaluated = found
        self.seconds += took["seconds"]
        self.write({"kind": kind, **found, **took})

    def autocast(self) -> torch.autocast:
        """Return the autocast context of run.precision."""
        cache = not self.accelerator.is_fsdp2  # a cache would keep 16-bit copies of all unsharded weights
        return autocast(self.accelerator.device.type, self.settings.run.precision, cache)

    def unsharded(self, model: nn.Module) -> nn.Module:
        """Return `model`, or its EMA, with full weights in the main process, to be saved. Every process."""
        return model if self.form is None else distributed.unsharded_copy(model, self.form, self.main)

    # The state

    def _checkpoint(self) -> Row:
        """Write a checkpoint. If the last steps were skipped, postpone it until a step is not skipped, so that the
        checkpoints from before the failure are not pruned."""
        self.update.flush_norms(self.step)
        self._check_weights()
        self.late = self.update.failing
        if not self.late:
            self._save_checkpoint()
        return {"postponed": True} if self.late else {}

    def _save_checkpoint(self) -> None:
        meters = self.metrics.state_dict()
        self.accelerator.wait_for_everyone()
        weights = full_state(self.model.state_dict(), self.main)
        average = full_state(self.ema.module.state_dict(), self.main) if self.ema else None
        optimizer = self.update.state_dict(self.main)
        if self.main:
            scaler = self.accelerator.scaler
            where, keep = self.folder / CHECKPOINTS, self.settings.run.keep_checkpoints
            save_checkpoint(where, weights, average, self.header, keep=keep, state={
                "optimizer": optimizer,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "step": self.step,
                "seconds": self.seconds,
                "counts": self.update.counts,
                "meters": meters,
                "bad": sorted(self.bad),
                "settings": config.to_tree(self.settings),
            })  # fmt: skip
        self.saved = self.step

    def _resume(self, checkpoint: Path) -> None:
        try:
            self._load(checkpoint)
        except DamagedCheckpoint as error:
            raise ValueError(f"{error}; {advice(checkpoint)}") from error
        self.accelerator.wait_for_everyone()  # every process has read it
        aside = set_aside(checkpoint) if self.main else []
        if self.main:
            prune(checkpoint.parent, self.settings.run.keep_checkpoints)
        where = f", newer ones set aside as {', '.join(str(path) for path in aside)}" if aside else ""
        self.accelerator.print(f"continuing {self.folder} at step {self.step} of {self.last_step}{where}", flush=True)

    def _load(self, checkpoint: Path) -> None:
        if step_of(checkpoint) > self.last_step:
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is of a step beyond the last, {self.last_step}")
        state = load_checkpoint(checkpoint, self.models)
        if not all_finite(self.models, self.accelerator):
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is damaged: it holds weights that are not finite")
        try:
            self.update.load(state["optimizer"])
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is damaged: {error}") from error
        if "settings" in state:
            written = config.from_tree(type(self.settings), state["settings"])
            if changed := config.differences(written, self.settings, ignore=CHANGEABLE):
                what = f"a run with another configuration; they differ in {changed[0]}"
                raise DamagedCheckpoint(f"the checkpoint {checkpoint} is of {what}")
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step = self.saved = state["step"]
        self.seconds = state["seconds"]
        self.bad, self.update.counts = set(state["bad"]), state["counts"]
        self.metrics.load_state_dict(state["meters"])

    def _check_weights(self) -> None:
        if not all_finite(self.models, self.accelerator):
            at = f"the weights are not finite after step {self.step}"
            raise TrainingFailed(f"{at}: lower optim.lr or set optim.clip_grad_norm")

    def _check_end(self) -> None:
        """Raise TrainingFailed if the last steps were skipped, or if weights or the last evaluation are not finite."""
        if self.update.failing:
            n = self.update.counts["skipped_in_a_row"]
            raise TrainingFailed(f"the gradients of the last {n} steps were not finite, so that they were skipped")
        self._check_weights()
        for key, value in self.evaluated.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise TrainingFailed(f"{key} of the last evaluation is not finite")

    # Metrics

    def _note_unreadable(self, batch: AnyBatch) -> None:
        new = set(batch.unreadable()) - self.bad
        if new:
            self.bad |= new
            print(f"skipped unreadable images, {len(self.bad)} so far, such as {self.image_name(min(new))}", flush=True)
            check_unreadable(len(self.bad), self.plan.n_images)

    def _training_row(self, steps: int, seconds: float, memory: dict[str, float]) -> Row:
        self.seconds += seconds
        norm, counts = self.update.norm, self.update.counts
        return {
            "kind": "train",
            **self.metrics.averages(),
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": norm if math.isfinite(norm) else None,
            "clipped_part": counts["clipped"] / self.step,
            "skipped": counts["skipped"],
            "unreadable": len(self.bad),
            "images_per_second": steps * self.plan.batch_size / seconds,
            "seconds_per_step": seconds / steps,
            **memory,
        }

    def write(self, row: Row) -> None:
        """Write a row to metrics.jsonl and the trackers."""
        images = self.step * self.plan.batch_size
        where = {"step": self.step, "epoch": self.step / self.plan.steps_per_epoch, "images_seen": images}
        self.metrics.write({**where, **row})

    def _status(self) -> str:
        """Return the text of the progress bar: loss, speed and the last evaluation."""
        row, key = self.trained, self.metric[0]
        texts = [f"loss {row['loss']:.4g}", f"{row['images_per_second']:.0f} images/s"] if "loss" in row else []
        return ", ".join([*texts, *([f"{key} {self.evaluated[key]:.4g}"] if key in self.evaluated else [])])

    # The end

    def _stopped(self, number: int) -> SystemExit:
        """Print where the run will resume after a signal. Returns the exception that ends the process."""
        self.metrics.close()
        at = f"stopped by {Signals(number).name} at step {self.step} of {self.last_step}"
        newest = f"run.resume=true continues at step {self.saved}" if self.saved else "no checkpoint was written yet"
        self.accelerator.print(f"{at}: {newest}", flush=True)
        return SystemExit(128 + number)

    def _finish(self) -> Row:
        """Write the final weights, the curves and the result."""
        self.accelerator.wait_for_everyone()
        model = self.save()
        result: Row = {}
        if self.main:
            rows = read_rows(self.folder / METRICS)
            last = next((row for row in reversed(rows) if row.get("kind") == "eval"), None)
            if last is None:
                raise ValueError(f"{self.folder / METRICS} holds no evaluation any more: it was removed or damaged")
            result = {"model": model, **last, "seconds": round(self.seconds, 2)}
            if "peak_mib" in last:
                result["peak_mib"] = max(row["peak_mib"] for row in rows if "peak_mib" in row)
            result |= {**self.update.counts, "train_unreadable": len(self.bad)}
            write_json(result, self.folder / RESULT)
            draw_curves({self.folder.name: rows}, self.folder / "curves.png", *self.metric)
            self._print_summary(last)
        self.metrics.close()
        return result

    def _print_summary(self, last: Row) -> None:
        key, title = self.metric
        scores = [f"{name}{last[full]:.4g}" for name, full in (("", key), ("EMA ", f"ema_{key}")) if full in last]
        spent = f"{self.last_step} steps in {self.seconds:.0f} s"
        print(f"{title}: {', '.join(scores)} after {spent}; wrote {self.folder}", flush=True)
