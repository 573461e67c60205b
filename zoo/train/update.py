"""From the loss to new weights: gradients, clipped; what is not finite is skipped, averaged, counted, saved."""

import contextlib
import itertools
import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zoo.errors import DamagedCheckpoint, TrainingFailed
from zoo.mixers import Mixer
from zoo.train.optim import new_parameters
from zoo.train.sharding import Average, gathered, spread_states

LAYOUTS = ("in one piece, not by DeepSpeed", "by DeepSpeed, in flat parts")


class Updater:
    """One optimiser step a call, without waiting for the device where the optimiser can skip a step by itself.

    A step whose gradient norm is not finite changes neither weights nor optimiser state. torch's fused Adam and AdamW
    read that from the device; other optimisers are told by the host, which waits for the norm. In fp16 accelerate's
    scaler decides the same and lowers its factor. The learning rate and the average of the weights go by steps,
    skipped ones included: in those the weights stayed as they were.

    wrapped: the model as accelerate prepared it.  norm: gradient norm of the last step that `settle` has read.
    counts: of those steps, how many were skipped, skipped in a row up to the last one, and clipped.
    """

    layout = "whole"  # of the optimiser's state in checkpoints, or "flat"

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        wrapped: Any,
        optimizer: Optimizer,
        ema: Average | None,
        clip: float | None,
        max_skipped: int,
    ) -> None:
        self.accelerator, self.model, self.wrapped = accelerator, model, wrapped
        self.optimizer, self.ema = optimizer, ema
        self.clip, self.max_skipped = clip, max_skipped
        self.inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.skips_on_device = getattr(self.inner, "_step_supports_amp_scaling", False)
        self.norm = math.nan
        self.counts = {"skipped": 0, "skipped_in_a_row": 0, "clipped": 0}
        self._unread: list[Tensor] = []
        mixers = [m for m in model.modules() if isinstance(m, Mixer)]
        self._projected = [m for m in mixers if type(m).project_ is not Mixer.project_]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of one part of a step, the last one or not."""
        # parts of weights want parts of gradients: whole ones would be kept from one part of the step to the next
        wait = not last and not self.accelerator.is_fsdp2
        with self.accelerator.no_sync(self.wrapped) if wait else contextlib.nullcontext():
            self.accelerator.backward(loss)

    def idle(self) -> list[str]:
        """The new parameters of mixers that have no gradient after the backward passes of a step."""
        return [name for name, p in new_parameters(self.model).items() if p.requires_grad and p.grad is None]

    def __call__(self, step: int) -> None:
        """The update of step `step`, counted from 1. Raises TrainingFailed as `settle` does."""
        self.advance(step)
        for mixer in self._projected:
            mixer.project_()
        if self.ema:
            self.ema.update(self.model, step=step)

    def advance(self, step: int) -> None:
        """Clip, then change the weights or not."""
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
            self.settle(step)
            if math.isfinite(self.norm):
                self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self, step: int) -> None:
        """Read the norms of the steps up to `step` and count them.

        Raises TrainingFailed when more than `max_skipped` steps in a row were skipped.
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
                    f"{at}; lower optim.lr or use another run.precision (run.max_skipped allows {self.max_skipped})"
                )

    @property
    def failing(self) -> bool:
        """Whether the last steps that were read were skipped: all but the one in which a gradient scaler finds that its
        factor has become too large."""
        return self.counts["skipped_in_a_row"] > int(self.accelerator.scaler is not None)

    def states(self, keep: bool) -> dict[str, Any]:
        """The state of the optimiser, whole (see `gathered`), and the parameters that it belongs to. Every process."""
        return {**gathered(self.optimizer.state_dict(), keep), "layout": self.layout, "parameters": self._described()}

    def load(self, states: dict[str, Any]) -> None:
        """Go on from weights that were loaded and this state of the optimiser.

        Raises DamagedCheckpoint for the state of other parameters; ValueError for one that DeepSpeed saved, or that it
        did not save where it goes on.
        """
        theirs, ours = states.get("parameters"), self._described()
        if theirs is not None and theirs != ours:
            raise DamagedCheckpoint(f"its state.pt is of another model: it {_difference(theirs, ours)}")
        if states.get("layout", self.layout) != self.layout:
            raise ValueError(f"the checkpoint was made {LAYOUTS[self.layout == 'whole']}; continue it as it was made")
        self._load({k: v for k, v in states.items() if k not in ("parameters", "layout")})

    def _described(self) -> list[list[Any]]:
        """[name, shape, type] of each trained parameter, in the order of the optimiser."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        return [[names[id(p)], list(p.shape), str(p.dtype)] for p in trained]

    def _load(self, states: dict[str, Any]) -> None:
        groups = self.inner.param_groups
        try:
            counts = [len(group["params"]) for group in states["param_groups"]]
            if counts != [len(group["params"]) for group in groups]:
                raise ValueError("the checkpoint was made by DeepSpeed, in flat parts; continue it as it was made")
            self._check_moments(states["state"])
            self.optimizer.load_state_dict(spread_states(states, self.optimizer))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint("the state of the optimiser in its state.pt is not one") from error

    def _check_moments(self, states: dict[int, dict[str, Any]]) -> None:
        """torch's fused optimisers trust the shapes of moments, and read beyond the end of those that are smaller."""
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for i, state in states.items() if self.skips_on_device else ():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameters[i].shape:
                    have, want = list(value.shape), list(parameters[i].shape)
                    raise DamagedCheckpoint(f"its state.pt has {name} of {have} for a parameter of {want}")


def _difference(theirs: list[Any], ours: list[Any]) -> str:
    """The first parameter in which two lists of `Updater._described` differ, in words."""
    for there, here in itertools.zip_longest(theirs, ours):
        if there != here:
            have, want = ("nothing" if x is None else f"{x[0]} of {x[1]}, {x[2]}," for x in (there, here))
            return f"has {have} where the model has {want.rstrip(',')}"
    return "is the same"
