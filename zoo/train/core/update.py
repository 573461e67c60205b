"""From the loss to new weights: gradients, clipped; what is not finite is skipped, averaged, counted, saved."""

import contextlib
import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zoo.train.core.sharding import Average, gathered, spread_states
from zoo.train.optim import new_parameters


class Updater:
    """One optimiser step a call, without waiting for the device where the optimiser can skip a step by itself.

    A step whose gradient norm is not finite changes neither weights nor optimiser state. torch's fused Adam and AdamW
    read that from the device; other optimisers are told by the host, which waits for the norm. In fp16 accelerate's
    scaler decides the same and lowers its factor. The learning rate and the average of the weights go by steps,
    skipped ones included: in those the weights stayed as they were.

    wrapped: the model as accelerate prepared it.  norm: gradient norm of the last step that `settle` has read.
    counts: of those steps, how many were skipped, skipped in a row up to the last one, and clipped.
    """

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
        self._projected: list[Any] = [m for m in model.modules() if hasattr(m, "project_")]

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
        """The update of step `step`, counted from 1. Raises RuntimeError as `settle` does."""
        self.advance(step)
        for module in self._projected:  # onto the values that its weights may have
            module.project_()
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

        Raises RuntimeError when more than `max_skipped` steps in a row were skipped.
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
                raise RuntimeError(
                    f"the gradients of {self.counts['skipped_in_a_row']} steps in a row were not finite, last at step "
                    f"{at}; lower optim.lr or use another run.precision (run.max_skipped allows {self.max_skipped})"
                )

    def states(self, keep: bool) -> dict[str, Any]:
        """The state of the optimiser, whole; see `gathered`. Every process."""
        return gathered(self.optimizer.state_dict(), keep)

    def load(self, states: dict[str, Any]) -> None:
        """Go on from weights that were loaded and this state of the optimiser. Raises ValueError for one that DeepSpeed
        saved."""
        groups = states["param_groups"], self.inner.param_groups
        theirs, ours = ([len(group["params"]) for group in found] for found in groups)
        if theirs != ours:
            raise ValueError("the checkpoint was made by DeepSpeed, in flat parts; continue it as it was made")
        self.optimizer.load_state_dict(spread_states(states, self.optimizer))
