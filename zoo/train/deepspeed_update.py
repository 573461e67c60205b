"""DeepSpeed through accelerate, ZeRO 1 and 2: every process holds all weights, and a part of the gradients and of the
optimiser's state. Its engine goes backward, clips, skips steps whose gradients are not finite, and updates."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from torch import Tensor, nn

from zoo.train.optim import new_parameters
from zoo.train.update import Updater


def configure(settings: Any, accelerator: Accelerator) -> None:
    """Let the run's settings decide what DeepSpeed's configuration says too. Raises ValueError for what does not go
    together."""
    plugin = accelerator.state.deepspeed_plugin
    found = plugin.deepspeed_config
    stage = found.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2) or plugin.hf_ds_config.is_offload():
        what = "offloading" if stage in (1, 2) else f"ZeRO {stage}"
        raise ValueError(
            f"accelerate is configured for DeepSpeed with {what}; allowed are ZeRO 1 and 2 without offloading, or FSDP "
            "with fsdp_version: 2, which shares out the weights too"
        )
    if settings.run.precision == "fp16" or settings.run.compile:
        what = "run.compile" if settings.run.compile else "run.precision=fp16"
        raise ValueError(f"{what} does not go with DeepSpeed: leave it out, or use FSDP2")
    # As under DDP: float32 weights and sums of gradients; autocast, which the engine decides, says what is bf16.
    found |= {"fp16": {"enabled": False}, "bf16": {"enabled": False}}
    autocast = {"dtype": "bfloat16", "lower_precision_safe_modules": []}
    found["torch_autocast"] = {"enabled": settings.run.precision == "bf16", **autocast}
    found["gradient_clipping"] = settings.optim.clip or 0.0
    found["gradient_accumulation_steps"] = 1  # the run says which part is the last
    parts = accelerator.num_processes * settings.optim.accumulate
    found["train_micro_batch_size_per_gpu"] = settings.data.batch_size // parts


class ZeroUpdater(Updater):
    """The same by DeepSpeed's engine, which is what accelerate makes of the model."""

    layout = "flat"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.flat: Any = self.inner.optimizer  # torch's, on this process's part of each group in one row
        self.heard = set[str]()  # the engine takes gradients away when they are there
        trained = {name: p for name, p in new_parameters(self.model).items() if p.requires_grad}
        self.listening = [p.register_hook(self._hearing(name)) for name, p in trained.items()]
        self.trained = list(trained)

    def _hearing(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.heard.add(name)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.wrapped.set_gradient_accumulation_boundary(last)
        self.wrapped.backward(loss)

    def idle(self) -> list[str]:
        for handle in self.listening:
            handle.remove()
        return [name for name in self.trained if name not in self.heard]

    def __call__(self, step: int) -> None:
        super().__call__(step)
        if self._projected:
            self.wrapped.optimizer.refresh_fp32_params()

    def advance(self, step: int) -> None:
        self.wrapped.step()
        norm = self.wrapped.get_global_grad_norm()
        self._unread.append(torch.as_tensor(norm, dtype=torch.float32, device=self.accelerator.device).detach())

    def states(self, keep: bool) -> dict[str, Any]:
        """The parts of all processes behind each other."""
        states = self.flat.state_dict()
        found: dict[int, dict[str, Any]] = {}
        for i, p in enumerate(self._parts()):
            whole = {k: gather(v) if v.shape == p.shape else v for k, v in states["state"].get(i, {}).items()}
            found[i] = {k: v.cpu() if keep else v.new_empty(0) for k, v in whole.items()}
        return {**states, "state": found, "layout": self.layout, "parameters": self._described()}

    def _described(self) -> list[list[Any]]:
        named = self.model.named_parameters()  # the engine holds them in flat parts
        return [[name, list(p.shape), str(p.dtype)] for name, p in named if p.requires_grad]

    def _load(self, states: dict[str, Any]) -> None:
        """Raises ValueError for a state that was not saved by DeepSpeed in as many processes."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        parts, found = self._parts(), dict[int, dict[str, Any]]()
        for i, state in states["state"].items():
            n = len(parts[i]) if i < len(parts) else 0
            if any(v.ndim and v.shape != (n * world,) for v in state.values()):
                raise ValueError(
                    "the checkpoint was not made by DeepSpeed in as many processes; continue it as it was made"
                )
            found[i] = {k: v[rank * n : (rank + 1) * n] if v.ndim else v for k, v in state.items()}
        self.flat.load_state_dict({**states, "state": found})
        self.wrapped.optimizer.refresh_fp32_params()  # from the weights that were loaded

    def _parts(self) -> list[nn.Parameter]:
        return [p for group in self.flat.param_groups for p in group["params"]]
