"""Optimizer step with DeepSpeed, ZeRO 1 or 2.

Weights are kept in full; ZeRO 1 shards the optimizer state over the processes, ZeRO 2 the gradients too. DeepSpeed's
engine runs the backward pass, clips gradients, skips steps with non-finite gradients, and updates the weights.
"""

import contextlib
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor, nn

from zoo.train.optim import new_parameters
from zoo.train.update import Described, State, Updater


class ZeroUpdater(Updater):
    """`Updater` for a model that accelerate has wrapped in DeepSpeed's engine."""

    layout = "flat"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engine: Any = self.wrapped
        self.flat: torch.optim.Optimizer = self.inner.optimizer  # torch's optimizer of this process's flat shards
        self.with_grad = set[str]()  # names noted by hooks, since the engine frees gradients early
        trained = {name: p for name, p in new_parameters(self.model).items() if p.requires_grad}
        self.handles = [p.register_hook(lambda _, name=name: self.with_grad.add(name)) for name, p in trained.items()]
        self.trained = list(trained)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def params_without_grad(self) -> list[str]:
        for handle in self.handles:
            handle.remove()
        return [name for name in self.trained if name not in self.with_grad]

    def __call__(self, step: int) -> None:
        super().__call__(step)
        if self._projected:
            self.engine.optimizer.refresh_fp32_params()

    def optimizer_step(self, step: int) -> None:
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        self._unread.append(torch.as_tensor(norm, dtype=torch.float32, device=self.accelerator.device).detach())

    def state_dict(self, keep: bool) -> State:
        """Return the optimizer state, with the flat shards of all processes concatenated. Every process."""
        states = self.flat.state_dict()
        full: dict[int, State] = {}
        for i, p in enumerate(self._shards()):
            state = {k: gather(v) if v.shape == p.shape else v for k, v in states["state"].get(i, {}).items()}
            full[i] = {k: v.cpu() if keep else v.new_empty(0) for k, v in state.items()}
        return {**states, "state": full, "layout": self.layout, "parameters": self._described()}

    def _described(self) -> Described:
        named = self.model.named_parameters()  # not the engine's, which are flattened
        return [[name, list(p.shape), str(p.dtype)] for name, p in named if p.requires_grad]

    def _load(self, states: State) -> None:
        """Load an optimizer state. Raises ValueError if DeepSpeed saved it with another number of processes."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        shards, own = self._shards(), dict[int, State]()
        for i, state in states["state"].items():
            n = len(shards[i]) if i < len(shards) else 0
            if any(v.ndim and v.shape != (n * world,) for v in state.values()):
                raise ValueError(
                    "the checkpoint was not made by DeepSpeed in as many processes; continue it as it was made"
                )
            own[i] = {k: v[rank * n : (rank + 1) * n] if v.ndim else v for k, v in state.items()}
        self.flat.load_state_dict({**states, "state": own})
        self.engine.optimizer.refresh_fp32_params()  # copies the weights, which are loaded already

    def _shards(self) -> list[nn.Parameter]:
        return [p for group in self.flat.param_groups for p in group["params"]]
