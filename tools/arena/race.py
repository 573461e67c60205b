"""Training and scores of the arena: every mixer on every task, for several seeds."""

import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arena.model import Network
from arena.tasks import IGNORED, TASKS, Task
from benchmarks import rows
from zoo.data.progress import progress
from zoo.errors import unknown_name
from zoo.mixers.options import MixerConfig
from zoo.ranges import check_device, check_ranges

KEY = ("task", "size", "mixer", "layers", "dim", "steps", "batch_size", "samples", "lr", "seed")
ARMS = [
    "softmax", "la", "la feature_map=elu1", "ahla", "hla2", "hla3", "taylor2", "strassen", "multilinear", "resolvent",
    "mesa", "gdn scan=both", "flare", "efficient",
]  # fmt: skip
HELD_OUT = 10**6  # seed of the test examples
WARMUP = 0.1  # fraction of the steps


@dataclass(frozen=True)
class ArenaSettings:
    """Tasks, mixers and training; rows are merged into the file.

    tasks: recall, memorise, compress, copy, compose, match, carry, charges, darcy, darcy_points
    mixers: mixers with options, such as "la feature_map=elu1"; those that need a grid skip sets of points
    seeds: seeds of weights and training examples
    size: size of the task (pairs, symbols, digits, points, or cells per side); 0 for its default
    layers: number of blocks; 0 for the default of the task
    dim: width
    heads: number of heads
    steps: training steps
    batch_size: examples per step
    samples: number of different training examples; 0 draws new ones in each step
    test: number of test examples
    lr: peak learning rate
    workers: processes that train at the same time; with device empty they take the GPUs in turn. Several processes
      per GPU slow each other, so that speeds are comparable with workers=1 only
    device: torch device; empty takes the accelerator if there is one
    json: result file to add to
    picture: PNG to draw from the whole file
    """

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    mixers: list[str] = field(default_factory=lambda: list(ARMS))
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    size: int = 0
    layers: int = 0
    dim: int = 128
    heads: int = 4
    steps: int = 5000
    batch_size: int = 64
    samples: int = 0
    test: int = 1024
    lr: float = 1e-3
    workers: int = 1
    device: str = ""
    json: str = "runs/arena/arena.json"
    picture: str = "runs/arena/arena.png"

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                raise unknown_name("task", name, TASKS)
        check_ranges("", self, size="[0, inf)", layers="[0, inf)", dim="[1, inf)", heads="[1, inf)", steps="[1, inf)")
        check_ranges(
            "", self, batch_size="[1, inf)", samples="[0, inf)", test="[1, inf)", lr="(0, inf)", workers="[1, inf)"
        )
        check_device("device", self.device)


def run(settings: ArenaSettings, command: str) -> dict[str, Any]:
    """Train and score the selection and return the whole file. Raises ValueError for unknown mixers and options."""
    arms = {words: rows.arm(words) for words in settings.mixers}
    for name, options in arms.values():
        MixerConfig.parse(name, options)
    file = Path(settings.json)
    content = rows.start(file, command, {})
    done = {rows.key_of(row, KEY) for row in content["rows"]}
    jobs: list[Job] = []
    for name, words, seed in itertools.product(settings.tasks, settings.mixers, settings.seeds):
        place, (mixer, options) = about(settings, name, words, seed), arms[words]
        points = TASKS[name].grid(place["size"]) is None
        if rows.key_of(place, KEY) not in done and not (
            points and MixerConfig.parse(mixer, options).options.needs_grid
        ):
            jobs.append((settings, place, mixer, options, len(jobs)))
    for row in results(jobs, settings.workers):
        keys = "reason" if "reason" in row else "score"
        print(" ".join(f"{key}={row[key]}" for key in ("task", "mixer", "seed", keys)))
        rows.add(content, row, KEY, file)
    return content


Job = tuple[ArenaSettings, dict[str, Any], str, dict[str, Any], int]


def results(jobs: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    """Yield rows as they are measured, by `workers` processes."""
    if workers == 1:
        yield from map(row_of, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(row_of, job) for job in jobs]):
            yield done.result()


def row_of(job: Job) -> dict[str, Any]:
    """Train one network; a failure gives a row with its `reason`."""
    settings, place, mixer, options, number = job
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(f"cuda:{number % torch.cuda.device_count()}" if name == "cuda" else name)
    try:
        return place | trained(settings, place, mixer, options, device)
    except (RuntimeError, ValueError) as error:
        return place | {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def about(settings: ArenaSettings, name: str, words: str, seed: int) -> dict[str, Any]:
    """Return the keys of a row."""
    task = TASKS[name]
    shared = {key: getattr(settings, key) for key in ("dim", "steps", "batch_size", "samples", "lr")}
    size, layers = settings.size or task.size, settings.layers or task.layers
    return {"task": name, "size": size, "mixer": words, "layers": layers, **shared, "seed": seed}


def trained(
    settings: ArenaSettings, place: dict[str, Any], mixer: str, options: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Train one network. score: accuracy in percent, or relative L2 error, on the test examples after the last step."""
    task, size = TASKS[place["task"]], place["size"]
    torch.manual_seed(place["seed"])
    model = Network(task, size, mixer, options, settings.dim, settings.heads, place["layers"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step / settings.steps))
    g = torch.Generator(device).manual_seed(place["seed"] + 1)
    pool = examples(task, settings.samples, size, g) if settings.samples else None
    begun = time.perf_counter()
    tokens = 0
    for _ in progress(range(settings.steps), "{task} {mixer} {seed}".format(**place)):
        inputs, targets = batch_of(task, pool, settings.batch_size, size, g)
        tokens += targets.numel()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(inputs)
        optimizer.zero_grad()
        loss_of(out, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    score = score_of(model, task, settings, size, device)  # waits for the device
    seconds = time.perf_counter() - begun
    parameters = sum(p.numel() for p in model.parameters())
    measure = "accuracy" if task.outputs else "relative L2"
    return {
        "score": score, "measure": measure, "parameters": parameters, "tokens": targets.shape[1],
        "tokens_per_second": round(tokens / seconds), "seconds": round(seconds, 1),
    }  # fmt: skip


def learning_rate(done: float) -> float:
    """Return the fraction of the peak learning rate after a fraction of the steps: linear warm-up, cosine decay."""
    if done < WARMUP:
        return done / WARMUP + 1e-3
    return 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def examples(task: Task, count: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` examples, 64 at a time."""
    parts = [task.draw(min(64, count - i), size, g) for i in range(0, count, 64)]
    inputs, targets = zip(*parts, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def batch_of(
    task: Task, pool: tuple[Tensor, Tensor] | None, batch: int, size: int, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return new examples, or random ones of the pool."""
    if pool is None:
        return task.draw(batch, size, g)
    chosen = torch.randint(len(pool[0]), (batch,), generator=g, device=g.device)
    return pool[0][chosen], pool[1][chosen]


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes [B, N], or the mean relative L2 error of numbers [B, N]."""
    if targets.dtype == torch.long:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return ((out - targets).norm(dim=1) / targets.norm(dim=1)).mean()


@torch.no_grad()
def score_of(model: Network, task: Task, settings: ArenaSettings, size: int, device: torch.device) -> float:
    """Return the accuracy in percent of the scored tokens, or the mean relative L2 error, in float32."""
    model.eval()
    inputs, targets = examples(task, settings.test, size, torch.Generator(device).manual_seed(HELD_OUT))
    outs = torch.cat([model(part) for part in inputs.split(settings.batch_size)])
    if task.outputs is None:
        return round(float(loss_of(outs, targets)), 5)
    scored = targets != IGNORED
    return round(100 * float((outs.argmax(-1) == targets)[scored].double().mean()), 2)
