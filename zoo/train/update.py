"""Optimizer step: backward pass, gradient clipping, skipping of non-finite steps, EMA update."""

import contextlib
import itertools
import math
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zoo.errors import DamagedCheckpoint, TrainingFailed
from zoo.mixers import Mixer
from zoo.train.distributed import Ema, full_state, shard_optimizer_state
from zoo.train.optim import new_parameters

LAYOUTS = ("in one piece, not by DeepSpeed", "by DeepSpeed, in flat parts")
State = dict[str, Any]  # state dict of an optimizer
Described = list[list[object]]  # [name, shape, dtype] per trained parameter


class Counts(TypedDict):
    """Numbers of steps: skipped in total, skipped in a row up to the last step, and clipped."""

    skipped: int
    skipped_in_a_row: int
    clipped: int


class Updater:
    """Runs one optimizer step per call.

    A step with a non-finite gradient norm changes neither weights nor optimizer state. torch's fused Adam and AdamW
    skip it on the device, so that the host does not synchronize; other optimizers make the host wait for the norm. In
    fp16, the gradient scaler of accelerate skips it and lowers its scale. Learning rate and EMA advance on skipped
    steps too.

    wrapped: the model as prepared by accelerate.  clip: maximum gradient norm; None disables clipping.
    max_skipped: maximum number of consecutive skipped steps.  norm: gradient norm of the last step that `flush_norms`
    has read.  counts: numbers of skipped and clipped steps, among the steps that `flush_norms` has read.
    """

    layout = "whole"  # layout of the optimizer state in checkpoints: "whole", or "flat" with DeepSpeed

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: Optimizer,
        ema: Ema | None,
        clip: float | None,
        max_skipped: int,
    ) -> None:
        self.accelerator, self.model, self.wrapped = accelerator, model, wrapped
        self.optimizer, self.ema = optimizer, ema
        self.clip, self.max_skipped = clip, max_skipped
        self.inner: Any = getattr(optimizer, "optimizer", optimizer)  # without the wrapper of accelerate
        self.skips_on_device = getattr(self.inner, "_step_supports_amp_scaling", False)
        self.norm = math.nan
        self.counts = Counts(skipped=0, skipped_in_a_row=0, clipped=0)
        self._unread: list[Tensor] = []  # gradient norms that are still on the device
        mixers = [m for m in model.modules() if isinstance(m, Mixer)]
        self._projected = [m for m in mixers if type(m).project_ is not Mixer.project_]

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of the forward and backward pass of one micro-batch: DDP, which reads in the forward pass whether it
        will all-reduce gradients, does so only for the last one of a step."""
        # FSDP2: always reduce-scatter; `no_sync` would keep unsharded gradients between micro-batches
        wait = not last and not self.accelerator.is_fsdp2
        return self.accelerator.no_sync(self.wrapped) if wait else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
        self.accelerator.backward(loss)

    def params_without_grad(self) -> list[str]:
        """Return the new parameters of mixers that have no gradient after the backward passes of a step."""
        return [name for name, p in new_parameters(self.model).items() if p.requires_grad and p.grad is None]

    def __call__(self, step: int) -> None:
        """Update the weights and the EMA. Steps are counted from 1. Raises TrainingFailed as `flush_norms`."""
        self.optimizer_step(step)
        for mixer in self._projected:
            mixer.project_()
        if self.ema:
            self.ema.update(self.model, step=step)

    def optimizer_step(self, step: int) -> None:
        """Clip the gradients, and update the weights or skip the step."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip or math.inf).detach()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._unread.append(norm)
        if self.accelerator.scaler is not None:
            self.optimizer.step()
        elif self.skips_on_device:
            self.inner.found_inf = (~torch.isfinite(norm)).float()
            self.inner.grad_scale = None
            self.optimizer.step()
        else:
            self.flush_norms(step)
            if math.isfinite(self.norm):
                self.optimizer.step()
        self.optimizer.zero_grad()

    def flush_norms(self, step: int) -> None:
        """Read the gradient norms of the steps up to `step` and count them.

        Raises TrainingFailed if more than `max_skipped` steps in a row were skipped.
        """
        if not self._unread:
            return
        norms = torch.stack(self._unread).tolist()
        self._unread.clear()
        for at, norm in enumerate(norms, start=step - len(norms) + 1):
            finite = math.isfinite(norm)
            self.norm = norm
            self.counts["clipped"] += int(self.clip is not None and finite and norm > self.clip)
            self.counts["skipped"] += int(not finite)
            self.counts["skipped_in_a_row"] = 0 if finite else self.counts["skipped_in_a_row"] + 1
            if self.counts["skipped_in_a_row"] > self.max_skipped:
                raise TrainingFailed(
                    f"the gradients of {self.counts['skipped_in_a_row']} steps in a row were not finite, last at step "
                    f"{at}; lower optim.lr or use another run.precision (run.max_nonfinite_steps allows "
                    f"{self.max_skipped})"
                )

    @property
    def failing(self) -> bool:
        """Whether the last steps were skipped. With a gradient scaler a single skipped step does not count, since it
        serves to lower the scale."""
        return self.counts["skipped_in_a_row"] > int(self.accelerator.scaler is not None)

    def state_dict(self, keep: bool) -> State:
        """Return the full optimizer state, with a description of its parameters. Every process. keep: see
        `full_state`."""
        return {**full_state(self.optimizer.state_dict(), keep), "layout": self.layout, "parameters": self._described()}

    def load(self, states: State) -> None:
        """Load an optimizer state. The weights must be loaded already.

        Raises DamagedCheckpoint for a state of other parameters, and ValueError if only one of this run and the run
        that saved the state uses DeepSpeed.
        """
        theirs, ours = states.get("parameters"), self._described()
        if theirs is not None and theirs != ours:
            raise DamagedCheckpoint(f"its state.pt is of another model: it {_difference(theirs, ours)}")
        if states.get("layout", self.layout) != self.layout:
            raise ValueError(f"the checkpoint was made {LAYOUTS[self.layout == 'whole']}; continue it as it was made")
        self._load({k: v for k, v in states.items() if k not in ("parameters", "layout")})

    def _described(self) -> Described:
        """Return the trained parameters in the order of the optimizer."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        return [[names[id(p)], list(p.shape), str(p.dtype)] for p in trained]

    def _load(self, states: State) -> None:
        groups = self.inner.param_groups
        try:
            counts = [len(group["params"]) for group in states["param_groups"]]
            if counts != [len(group["params"]) for group in groups]:
                raise ValueError("the checkpoint was made by DeepSpeed, in flat parts; continue it as it was made")
            self._check_moments(states["state"])
            self.optimizer.load_state_dict(shard_optimizer_state(states, self.optimizer))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint("the optimizer state in its state.pt is damaged") from error

    def _check_moments(self, states: dict[int, State]) -> None:
        """Raise DamagedCheckpoint for moments of a wrong shape, past whose end torch's fused optimizers would read."""
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for i, state in states.items() if self.skips_on_device else ():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameters[i].shape:
                    have, want = list(value.shape), list(parameters[i].shape)
                    raise DamagedCheckpoint(f"its state.pt has {name} of {have} for a parameter of {want}")


def _difference(theirs: Described, ours: Described) -> str:
    """Describe the first parameter in which two lists differ, as text."""
    for there, here in itertools.zip_longest(theirs, ours):
        if there != here:
            have, want = ("nothing" if x is None else f"{x[0]} of {x[1]}, {x[2]}," for x in (there, here))
            return f"has {have} where the model has {want.rstrip(',')}"
    return "is the same"
