"""Training commands and their dry runs.

A dry run does every part of a run once, in a separate folder: one step, validation, samples, a checkpoint and a
resume. On a CPU the step takes a few images only, so that it ends in seconds. On a GPU it takes a full batch, which
shows whether it fits into memory. Blocks are not compiled.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from zoo import config
from zoo.train.distributed import destroy_process_group
from zoo.train.loop import TrainingRun
from zoo.train.metrics_log import Row
from zoo.train.settings import AnySettings

VALIDATED = 2  # validation samples of a dry run
MICRO_BATCH = 2  # maximum samples per micro-batch on a CPU; mixup needs an even number
MICRO_BATCHES = 2  # maximum micro-batches per step on a CPU


class DryRun(TrainingRun[Any]):
    """Mixin for a `TrainingRun` of one step with a small batch."""

    @classmethod
    def shortened(cls, settings: Any) -> Any:
        """Return the settings of a dry run of a run with `settings`."""
        return replace(settings, data=replace(settings.data, cache=False, workers=0))  # decodes only what it reads

    def shorten(self) -> None:
        """Reduce the run to one step, with a small batch on a CPU. Called at the end of `set_up`."""
        self.last_step, self.every = 1, {kind: [int(any(n))] for kind, n in self.every.items()}
        self.full_batch_size = self.plan.batch_size
        if self.on_cpu():
            size = min(self.plan.micro_batch_size, MICRO_BATCH)
            number = min(self.plan.micro_batches, MICRO_BATCHES)
            self.plan = replace(self.plan, batch_size=size * number * self.plan.world, micro_batches=number)

    def on_cpu(self) -> bool:
        """Whether the run takes a small batch."""
        return self.accelerator.device.type == "cpu"

    def most_images(self) -> int:
        """Upper bound of the batch size."""
        small = MICRO_BATCH * MICRO_BATCHES * self.accelerator.num_processes
        return small if self.on_cpu() else self.settings.data.batch_size

    def compile_blocks(self) -> None:
        """Compile nothing."""

    def describe(self) -> str:
        """Describe what was tried."""
        size, full = self.plan.batch_size, self.full_batch_size
        batch = f"a batch of {size}" if size == full else f"a batch of {size} (the run has {full})"
        compiled = ", without run.compile" if self.settings.run.compile else ""
        samples = "samples, " if self.every["samples"] != [0] else ""
        done = f"one step with {batch}{compiled}, validation on {VALIDATED}, {samples}a checkpoint and a resume"
        return f"dry run in {self.folder}: {done} succeeded"


def dry_run(settings: AnySettings, kind: type[DryRun]) -> Row:
    """Train, validate, save and resume once, in the folder `run.folder`-dry-run, which is emptied first. Returns the
    result."""
    folder = Path(f"{settings.run.folder}-dry-run")
    state = PartialState(cpu=not torch.accelerator.is_available())
    if state.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
    state.wait_for_everyone()
    once = kind.shortened(settings)
    first, second = (replace(once.run, folder=str(folder), resume=resume) for resume in (False, True))
    result = kind(replace(once, run=first)).train()
    resumed = kind(replace(once, run=second))
    resumed.close()
    state.print(resumed.describe(), flush=True)
    return result


def run_command(
    words: list[str], text: str | None, usage: str, schema: type, kinds: tuple[type[TrainingRun[Any]], type[DryRun]]
) -> Row:
    """Carry out a command line: print the help (made of `text` and `usage`), or do a run or a dry run (`--dry-run`).

    schema: dataclass of the settings.  kinds: class of a run and of a dry run. Prints the result as JSON and returns
    it. Raises ValueError for invalid settings.
    """
    if config.print_help_if_asked(words, text, usage, schema):
        return {}
    settings: Any = config.from_command_line(schema, [word for word in words if word != "--dry-run"])
    full, dry = kinds
    result = dry_run(settings, dry) if "--dry-run" in words else full(settings).train()
    destroy_process_group()
    if result:
        print(json.dumps(result), flush=True)
    return result
