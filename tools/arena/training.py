"""Training and score of one network of the arena.

On CUDA the steps are replayed from a CUDA graph: launched one by one, kernels this small leave the GPU idle.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arena.model import Network
from arena.tasks import IGNORED, Task
from zoo.progress import progress

HELD_OUT = 10**6  # seed of the test examples
WARMUP = 0.1  # fraction of the steps
WEIGHT_DECAY = 0.1
UNCAPTURED = 20  # first steps, in which kernels are compiled; they are not timed
DRAWN = 8  # batches that are drawn at the same time
Examples = tuple[Tensor, Tensor]


def train(model: Network, task: Task, place: dict[str, Any]) -> dict[str, Any]:
    """Train a network. place: `size`, `steps`, `batch_size`, `samples`, `lr` and `seed` of the row.

    Returns targets per second, and whether the steps were replayed from a graph.
    """
    device = next(model.parameters()).device
    peak, steps, timed = place["lr"], place["steps"], 0
    rate = torch.tensor(peak, device=device)
    fixed: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "fused": True, "capturable": device.type == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **fixed)
    source = batches(task, place, torch.Generator(device).manual_seed(place["seed"] + 1))
    inputs, targets = (x.clone() for x in next(source))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(inputs)
        optimizer.zero_grad()
        loss_of(out, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    run, graph, watch = step, False, time.perf_counter()
    wait(device)
    with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # graphs need a side stream
        for i in progress(range(steps), "{task} {mixer} {seed}".format(**place)):
            if i == min(UNCAPTURED, steps - 1):
                run, graph = captured(step, device)
                wait(device)
                watch, timed = time.perf_counter(), steps - i
            rate.fill_(peak * learning_rate(i / steps))
            for buffer, new in zip((inputs, targets), next(source), strict=True):
                buffer.copy_(new)
            run()
    wait(device)
    return {"per_second": timed * targets.numel() / (time.perf_counter() - watch), "graph": graph}


def captured(step: Callable[[], None], device: torch.device) -> tuple[Callable[[], None], bool]:
    """Return the replay of a CUDA graph of the step, and True; the step itself and False if it cannot be captured."""
    if device.type != "cuda":
        return step, False
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    before, graph = random.clone_state(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
    except RuntimeError as error:
        torch.cuda.synchronize()
        random.graphsafe_set_state(before)  # a failed capture leaves it in capture mode
        print(f"not captured: {error}".splitlines()[0])
        return step, False
    return graph.replay, True


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def learning_rate(done: float) -> float:
    """Return the fraction of the peak learning rate after a fraction of the steps: linear warm-up, cosine decay."""
    if done < WARMUP:
        return done / WARMUP + 1e-3
    return 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def batches(task: Task, place: dict[str, Any], g: torch.Generator) -> Iterator[Examples]:
    """Yield batches of new examples, or of random ones of a pool of `samples`."""
    size, batch = place["size"], place["batch_size"]
    pool = examples(task, place["samples"], size, g) if place["samples"] else None
    while True:
        if pool is None:
            drawn = (task.lessons or task.draw)(DRAWN * batch, size, g)
        else:
            chosen = torch.randint(len(pool[0]), (DRAWN * batch,), generator=g, device=g.device)
            drawn = pool[0][chosen], pool[1][chosen]
        yield from zip(*(x.split(batch) for x in drawn), strict=True)


def examples(task: Task, count: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` examples, 64 at a time."""
    parts = [task.draw(min(64, count - i), size, g) for i in range(0, count, 64)]
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes [B, N], or the mean relative L2 error of numbers [B, N]."""
    if targets.dtype == torch.long:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return ((out - targets).norm(dim=1) / targets.norm(dim=1)).mean()


@torch.no_grad()
def score_of(model: Network, task: Task, test: tuple[Tensor, Tensor], batch: int) -> float:
    """Return the accuracy in percent of the scored tokens, or the mean relative L2 error.

    Raises ValueError if the training diverged: for outputs that are not finite.
    """
    model.eval()
    inputs, targets = test
    on = inputs.is_cuda and task.symbols
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=on):  # numbers need float32
        outs = torch.cat([model(part) for part in inputs.split(batch)])
    if not bool(outs.isfinite().all()):
        raise ValueError("the training diverged: outputs are not finite")
    if task.outputs is None:
        return round(float(loss_of(outs, targets)), 5)
    scored = targets != IGNORED
    return round(100 * float((outs.argmax(-1) == targets)[scored].double().mean()), 2)


def constant_score(task: Task, size: int, test: tuple[Tensor, Tensor]) -> float:
    """Return the score of the best answer that does not depend on the input: a class, or the mean of the targets.

    On a grid, the mean is taken for each cell.
    """
    targets = test[1]
    if task.outputs is None:
        mean = targets.mean(0) if task.grid(size) is not None else targets.mean()
        return round(float(loss_of(mean.expand_as(targets), targets)), 5)
    scored = targets[targets != IGNORED]
    return round(100 * float(scored.bincount().max()) / len(scored), 2)
