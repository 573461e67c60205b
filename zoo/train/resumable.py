"""Saving and restoring the state of a run, and the checks that it is fit for that."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import AverageMeter
from torch import nn

from zoo import config
from zoo.errors import DamagedCheckpoint, TrainingFailed
from zoo.train.checkpoint import load_checkpoint, prune, save_checkpoint, set_aside, step_of, way_out
from zoo.train.run_folder import CHECKPOINTS
from zoo.train.settings import CHANGEABLE
from zoo.train.sharding import Average, all_finite, gathered
from zoo.train.update import Updater


class Resumable:
    """The part of `Run` that saves its state, goes on from it, and checks that it is fit for that."""

    settings: Any
    folder: Path
    accelerator: Accelerator
    model: nn.Module
    ema: Average | None
    models: list[nn.Module]  # the model and its average
    header: dict[str, str]
    update: Updater
    meters: dict[str, AverageMeter]
    step: int
    last_step: int
    seconds: float
    saved: int  # the step of the newest checkpoint
    late: bool  # whether a checkpoint is due since steps that were skipped
    bad: set[int]
    evaluated: dict[str, Any]  # the last evaluation
    _totals: Callable[[], dict[str, tuple[float, int]]]

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def _checkpoint(self) -> dict[str, Any]:
        """Write a checkpoint, or after steps that were skipped postpone it until one is not, so that what lies before
        the damage is never pruned."""
        self.update.settle(self.step)
        self._check_weights()
        self.late = self.update.failing
        if not self.late:
            self._save_checkpoint()
        return {"postponed": True} if self.late else {}

    def _check_weights(self) -> None:
        if not self._finite():
            raise TrainingFailed(f"the weights are not finite after step {self.step}: lower optim.lr or set optim.clip")

    def _finite(self) -> bool:
        """Whether all weights are, those of the average too. Every process."""
        here = torch.tensor(float(all_finite(self.models)), device=self.accelerator.device)
        return float(self.accelerator.reduce(here, "mean")) == 1

    def _check_end(self) -> None:
        """Raise TrainingFailed for a run whose last steps were skipped, or whose weights or last evaluation are not
        finite."""
        if self.update.failing:
            n = self.update.counts["skipped_in_a_row"]
            raise TrainingFailed(f"the gradients of the last {n} steps were not finite, so that they were skipped")
        self._check_weights()
        for key, value in self.evaluated.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise TrainingFailed(f"{key} of the last evaluation is not finite")

    def _save_checkpoint(self) -> None:
        totals = self._totals()
        self.accelerator.wait_for_everyone()
        weights = gathered(self.model.state_dict(), self.main)
        average = gathered(self.ema.module.state_dict(), self.main) if self.ema else None
        optimizer = self.update.states(self.main)
        if self.main:
            scaler = self.accelerator.scaler
            state = {
                "optimizer": optimizer,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "step": self.step,
                "seconds": self.seconds,
                "counts": self.update.counts,
                "meters": {name: list(total) for name, total in totals.items()},
                "bad": sorted(self.bad),
                "settings": config.to_tree(self.settings),
            }
            where, keep = self.folder / CHECKPOINTS, self.settings.run.keep
            save_checkpoint(where, self.step, weights, average, self.header, state, keep)
        self.saved = self.step

    def _continue(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            return
        try:
            self._load(checkpoint)
        except DamagedCheckpoint as error:
            raise ValueError(f"{error}; {way_out(checkpoint)}") from error
        self.accelerator.wait_for_everyone()  # each process has read it
        aside = set_aside(checkpoint) if self.main else []
        if self.main:
            prune(checkpoint.parent, self.settings.run.keep)
        where = f", newer ones set aside as {', '.join(str(path) for path in aside)}" if aside else ""
        at = f"at step {self.step} of {self.last_step}{where}"
        self.accelerator.print(f"continuing {self.folder} {at}", flush=True)

    def _check_settings(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Raise DamagedCheckpoint for the checkpoint of a run with another configuration, put into this folder."""
        if "settings" not in state:  # of an earlier version
            return
        written = config.from_tree(type(self.settings), state["settings"])
        if changed := config.differences(written, self.settings, ignore=CHANGEABLE):
            raise DamagedCheckpoint(
                f"the checkpoint {checkpoint} is of a run with another configuration; they differ in {changed[0]}"
            )

    def _load(self, checkpoint: Path) -> None:
        if step_of(checkpoint) > self.last_step:
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is of a step beyond the last, {self.last_step}")
        state = load_checkpoint(checkpoint, self.models)
        if not self._finite():
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is damaged: it holds weights that are not finite")
        try:
            self.update.load(state["optimizer"])
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"the checkpoint {checkpoint} is damaged: {error}") from error
        self._check_settings(checkpoint, state)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.saved = self.step
        self.bad, self.update.counts = set(state["bad"]), state["counts"]
        for name, (total, count) in state["meters"].items():
            self.meters[name] = meter = AverageMeter()
            meter.sum, meter.count = torch.tensor(total, device=self.accelerator.device), count
