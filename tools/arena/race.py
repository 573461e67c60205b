"""Training and scores of the arena: every mixer on every task, for several seeds."""

import itertools
import json
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
from zoo.mixers import MIXERS
from zoo.mixers.delta import DeltaMixer
from zoo.mixers.options import MixerConfig
from zoo.ranges import check_device, check_ranges

KEY = ("task", "size", "mixer", "causal", "layers", "dim", "steps", "batch_size", "samples", "lr", "seed")
ARMS = [
    "softmax", "la", "la feature_map=elu1", "ahla", "hla2", "hla3", "taylor2", "strassen", "multilinear", "resolvent",
    "mesa", "gdn", "flare", "efficient",
]  # fmt: skip
HELD_OUT = 10**6  # seed of the test examples
WARMUP = 0.1  # fraction of the steps
WEIGHT_DECAY = 0.1
UNTIMED = 20  # first steps, in which kernels are compiled


@dataclass(frozen=True)
class ArenaSettings:
    """Tasks, mixers and training; rows are merged into the file.

    tasks: recall, memorise, compress, copy, compose, match, carry, charges, burgers, darcy, darcy_points
    mixers: mixers with options, such as "la feature_map=elu1"; those that need a grid skip sets of points
    seeds: seeds of weights and training examples
    lrs: peak learning rates; the table takes the best one of each mixer and task
    causal: every token reads itself and earlier ones only. Delta-rule mixers scan in one direction instead of both
    size: size of the task (pairs, symbols, digits, points, or cells per side); 0 for its default
    layers: number of blocks; 0 for the default of the task
    dim: width
    heads: number of heads
    steps: training steps; 0 for the default of the task
    batch_size: examples per step; 0 for the default of the task
    samples: number of different training examples; 0 for the default of the task
    test: number of test examples
    workers: processes that train at the same time; with device empty they take the GPUs in turn. Several processes
      per GPU slow each other, so that speeds are comparable with workers=1 only
    device: torch device; empty takes the accelerator if there is one
    json: result file to add to
    picture: PNG to draw from the whole file
    merge: result files to join into `json`, instead of training
    """

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    mixers: list[str] = field(default_factory=lambda: list(ARMS))
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    lrs: list[float] = field(default_factory=lambda: [3e-3])
    causal: bool = False
    size: int = 0
    layers: int = 0
    dim: int = 128
    heads: int = 4
    steps: int = 0
    batch_size: int = 0
    samples: int = 0
    test: int = 1024
    workers: int = 1
    device: str = ""
    json: str = "runs/arena/arena.json"
    picture: str = "runs/arena/arena.png"
    merge: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                raise unknown_name("task", name, TASKS)
            if self.causal and not TASKS[name].causal:
                raise ValueError(f"the task {name} has no causal form; those with one are {', '.join(CAUSAL_TASKS)}")
        natural = dict.fromkeys(("size", "layers", "steps", "batch_size", "samples"), "[0, inf)")
        check_ranges("", self, **natural, dim="[1, inf)", heads="[1, inf)", test="[1, inf)")
        check_ranges("", self, lrs="(0, inf)", workers="[1, inf)")
        check_device("device", self.device)


CAUSAL_TASKS = [name for name, task in TASKS.items() if task.causal]


def run(settings: ArenaSettings, command: str) -> dict[str, Any]:
    """Train and score the selection, or join files, and return the whole file.

    Raises ValueError for unknown mixers and options, and for mixers without a causal form if `causal` is set.
    """
    file = Path(settings.json)
    if settings.merge:
        content = merged([Path(one) for one in settings.merge])
        rows.write_atomic(content, file)
        return content
    arms = {words: configured(words, settings.causal) for words in settings.mixers}
    content = rows.start(file, command, {})
    done = {rows.key_of(row, KEY) for row in content["rows"]}
    jobs: list[Job] = []
    for name, words, lr, seed in itertools.product(settings.tasks, settings.mixers, settings.lrs, settings.seeds):
        place = about(settings, name) | {"mixer": words, "causal": settings.causal, "lr": lr, "seed": seed}
        points = TASKS[name].grid(place["size"]) is None
        if rows.key_of(place, KEY) not in done and not (points and arms[words].options.needs_grid):
            jobs.append((settings, place, arms[words], len(jobs)))
    for row in results(jobs, settings.workers):
        keys = "reason" if "reason" in row else "score"
        print(" ".join(f"{key}={row[key]}" for key in ("task", "mixer", "causal", "lr", "seed", keys)))
        rows.add(content, row, KEY, file)
    return content


Job = tuple[ArenaSettings, dict[str, Any], MixerConfig, int]


def configured(words: str, causal: bool) -> MixerConfig:
    """Parse a mixer and its options, and choose its two-sided or causal form.

    Delta-rule mixers get no convolution of their own: the network has one. Raises ValueError if there is no such form.
    """
    name, given = rows.arm(words)
    forms: dict[str, Any] = {}
    if issubclass(MIXERS.get(name, object), DeltaMixer):
        forms = {"depthwise": "", "scan": "raster" if causal else "both"}
    elif causal and name != "softmax":
        forms = {"causal": True}
    return MixerConfig.parse(name, forms | given)


def merged(files: list[Path]) -> dict[str, Any]:
    """Join result files of the same machine and versions. Raises ValueError for others and for missing files."""
    try:
        contents = [json.loads(file.read_text()) for file in files]
    except (OSError, ValueError) as error:
        raise ValueError(f"merge needs result files of the arena: {error}") from error
    first = contents[0]
    for file, content in zip(files, contents, strict=True):
        for key in ("hardware", "versions"):
            if content[key] != first[key]:
                raise ValueError(f"{file} and {files[0]} cannot be merged: their {key} differ")
    commands = rows.common_command([command for content in contents for command in content["command"].split("; ")])
    good, failed = ([row for content in contents for row in content[key]] for key in ("rows", "failed"))
    good = rows.merge_rows([], good, KEY)
    done = {rows.key_of(row, KEY) for row in good}
    failed = [row for row in rows.merge_rows([], failed, KEY) if rows.key_of(row, KEY) not in done]
    date = max(content["date"] for content in contents)
    return first | {"command": commands, "date": date, "rows": in_order(good), "failed": failed}


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows by task, form, mixer, learning rate and seed."""
    places = {name: i for i, name in enumerate(TASKS)} | {name: i for i, name in enumerate(MIXERS)}

    def place(row: dict[str, Any]) -> tuple:
        name = row["mixer"].partition(" ")[0]
        return places[row["task"]], row["size"], not row["causal"], places[name], row["mixer"], row["lr"], row["seed"]

    return sorted(found, key=place)


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
    settings, place, config, number = job
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(f"cuda:{number % torch.cuda.device_count()}" if name == "cuda" else name)
    try:
        return place | trained(settings, place, config, device)
    except (RuntimeError, ValueError) as error:
        return place | {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def about(settings: ArenaSettings, name: str) -> dict[str, Any]:
    """Return task and sizes of a row, with the defaults of the task."""
    chosen = ("size", "layers", "steps", "batch_size", "samples")
    sizes = {key: getattr(settings, key) or getattr(TASKS[name], key) for key in chosen}
    return {"task": name, **sizes, "dim": settings.dim}


def trained(
    settings: ArenaSettings, place: dict[str, Any], config: MixerConfig, device: torch.device
) -> dict[str, Any]:
    """Train one network. score: accuracy in percent, or relative L2 error, on the test examples after the last step."""
    task, size, steps, batch = TASKS[place["task"]], place["size"], place["steps"], place["batch_size"]
    torch.manual_seed(place["seed"])
    options = config.plain_options()
    sizes = (settings.dim, settings.heads, place["layers"])
    model = Network(task, size, config.name, options, *sizes, causal=place["causal"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=place["lr"], weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step / steps))
    g = torch.Generator(device).manual_seed(place["seed"] + 1)
    pool = examples(task, place["samples"], size, g) if place["samples"] else None
    begun = watch = time.perf_counter()
    timed = 0
    for step in progress(range(steps), "{task} {mixer} {seed}".format(**place)):
        if step == min(UNTIMED, steps - 1):
            wait(device)
            watch, timed = time.perf_counter(), steps - step
        inputs, targets = batch_of(task, pool, batch, size, g)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(inputs)
        optimizer.zero_grad()
        loss_of(out, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    wait(device)
    speed = timed * targets.numel() / (time.perf_counter() - watch)
    test = examples(task, settings.test, size, torch.Generator(device).manual_seed(HELD_OUT))
    return {
        "score": score_of(model, task, test, batch), "constant": constant_score(task, size, test),
        "measure": "accuracy" if task.outputs else "relative L2", "tokens": targets.shape[1],
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_second": round(speed),
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        return (task.lessons or task.draw)(batch, size, g)
    chosen = torch.randint(len(pool[0]), (batch,), generator=g, device=g.device)
    return pool[0][chosen], pool[1][chosen]


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes [B, N], or the mean relative L2 error of numbers [B, N]."""
    if targets.dtype == torch.long:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return ((out - targets).norm(dim=1) / targets.norm(dim=1)).mean()


@torch.no_grad()
def score_of(model: Network, task: Task, test: tuple[Tensor, Tensor], batch: int) -> float:
    """Return the accuracy in percent of the scored tokens, or the mean relative L2 error, in float32."""
    model.eval()
    inputs, targets = test
    outs = torch.cat([model(part) for part in inputs.split(batch)])
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
