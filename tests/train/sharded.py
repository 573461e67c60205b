"""Runs in several CPU processes, one after the other, under DDP or FSDP2, then every family of diffusers.

The folder given as the argument holds jobs.yaml, a list of `Job`s as mappings.

On CPUs accelerate knows only DDP: what its configuration for FSDP2 would set is set here.
"""

import copy
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, recursively_apply

from tests.curves import drawn_once
from tests.helpers.runs import tiny
from zoo.config import from_tree
from zoo.train.classification import ClassificationRun
from zoo.train.denoising.model import without_label_dropout
from zoo.train.denoising.run import DiffusionRun, DryDiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.distributed import create_accelerator, destroy_process_group, place
from zoo.train.dry_run import dry_run
from zoo.train.settings import TrainSettings

KINDS = {"image": (ClassificationRun, TrainSettings), "diffusion": (DiffusionRun, DiffusionSettings)}
INIT = Accelerator.__init__


@dataclass
class Job:
    """A run of `tree`; it may be broken off before a step, by an exception or by killing the processes, or have losses
    that are no numbers in one process."""

    kind: str
    tree: dict[str, Any]
    by: str = "fsdp2"  # or ddp, zero1, zero2
    stop: int | None = None
    killed: bool = False
    poison: list[int] = field(default_factory=list)  # steps
    rehearsed: bool = False
    double: bool = False  # the model and its inputs in float64


def with_zero(stage: int):
    def init(self, *arguments, **keywords):
        INIT(self, *arguments, **keywords)
        self.deepspeed_engine_wrapped, plugin = None, DeepSpeedPlugin(zero_stage=stage)
        _configure("DEEPSPEED", deepspeed_plugins=plugin)
        plugin.select(_from_accelerator_state=True)

    return init


def _configure(kind: str, **more) -> None:
    AcceleratorState._shared_state.update(more)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType[kind]


def with_fsdp2(self, *arguments, **keywords):
    INIT(self, *arguments, **keywords)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if self.mixed_precision != "no":
        plugin.set_mixed_precision(self.mixed_precision)
    _configure("FSDP", fsdp_plugin=plugin)


BY = {"ddp": INIT, "fsdp2": with_fsdp2, "zero1": with_zero(1), "zero2": with_zero(2)}


def carry_out(job: Job) -> None:
    kind, schema = KINDS[job.kind]

    class Disturbed(kind):
        def set_up(self):
            super().set_up()
            if job.double:
                self.model.double().register_forward_pre_hook(in_double, with_kwargs=True)

        def _train_step(self, batches):
            if self.step == job.stop:
                if job.killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt
            self.exchanges = 0
            super()._train_step(batches)
            assert job.by != "ddp" or self.exchanges == 1, "micro-batches before the last of a step exchange nothing"

        def loss(self, batch):
            self.exchanges += getattr(self.wrapped, "require_backward_grad_sync", 0)  # which DDP reads before it runs
            bad = self.step in job.poison and self.accelerator.process_index == 1
            return super().loss(batch) * (float("nan") if bad else 1.0)

    settings = from_tree(schema, job.tree)
    if job.rehearsed:
        dry_run(settings, DryDiffusionRun)
        return
    run = Disturbed(settings)
    try:
        run.train()
    except KeyboardInterrupt:
        assert run.step == job.stop


def in_double(model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.is_floating_point() else x

    return recursively_apply(cast, arguments), recursively_apply(cast, keywords)


def compare_families(folder: Path) -> None:
    """The largest differences of output and gradients of each family, whole and in parts, into families.json."""
    from tests.helpers import tiny_diffusers

    accelerator, found = create_accelerator(tiny(folder)), {}
    for name in tiny_diffusers.CASES:
        model, inputs = tiny_diffusers.converted(name, "ahla", config={"num_layers": 2}), tiny_diffusers.inputs(name)
        without_label_dropout(model)
        model.train().enable_gradient_checkpointing()
        models = [copy.deepcopy(model), place(accelerator, model)]
        outputs = [m(**inputs, return_dict=False)[0] for m in models]
        for output in outputs:
            output.square().mean().backward()
        pairs = [(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True)]
        differences = [(p - q.full_tensor()).abs().max() for p, q in pairs if p is not None]
        found[name] = [float((outputs[0] - outputs[1]).abs().max()), float(torch.stack(differences).max())]
    if accelerator.is_main_process:
        (folder / "families.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with drawn_once():
        for tree in yaml.safe_load((folder / "jobs.yaml").read_text()):
            job = Job(**tree)
            AcceleratorState._reset_state()
            if PartialState._shared_state:
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
            Accelerator.__init__ = BY[job.by]
            carry_out(job)
    Accelerator.__init__ = with_fsdp2
    compare_families(folder)
    destroy_process_group()
