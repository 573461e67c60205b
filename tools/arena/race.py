"""Training and scores of the arena: every mixer on every task, for several seeds."""

import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arena.model import Network
from arena.tasks import TASKS
from arena.training import HELD_OUT, constant_score, examples, score_of, train
from benchmarks import rows
from zoo.mixers import MIXERS
from zoo.mixers.delta import DeltaMixer
from zoo.mixers.options import MixerConfig
from zoo.ranges import check_device, check_ranges

SIZES = ("size", "layers", "dim", "steps", "batch_size", "samples")  # settings whose default depends on the task
KEY = ("task", "mixer", "causal", "lr", "seed", *SIZES)
ARMS = [
    "softmax", "la", "la feature_map=elu1", "ahla", "hla2", "hla3", "taylor2", "strassen", "multilinear", "resolvent",
    "mesa", "gdn", "flare", "efficient",
]  # fmt: skip


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
    dim: width; 0 for the default of the task
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
    dim: int = 0
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
        rows.check_names(self, tasks=TASKS)
        for name in self.tasks:
            if self.causal and not TASKS[name].causal:
                raise ValueError(f"the task {name} has no causal form; those with one are {', '.join(CAUSAL_TASKS)}")
        natural = dict.fromkeys(SIZES, "[0, inf)")
        check_ranges("", self, **natural, heads="[1, inf)", test="[1, inf)")
        check_ranges("", self, lrs="(0, inf)", workers="[1, inf)")
        check_device("device", self.device)


CAUSAL_TASKS = [name for name, task in TASKS.items() if task.causal]


def run(settings: ArenaSettings, command: str) -> dict[str, Any]:
    """Train and score the selection, or join files, and return the whole file.

    Raises ValueError for unknown mixers and options, for mixers without a causal form if `causal` is set, and if all
    mixers need a grid that no task has.
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
    skipped = False
    for seed, name, words, lr in itertools.product(settings.seeds, settings.tasks, settings.mixers, settings.lrs):
        place = about(settings, name) | {"mixer": words, "causal": settings.causal, "lr": lr, "seed": seed}
        if TASKS[name].grid(place["size"]) is None and arms[words].options.needs_grid:
            skipped = True
        elif rows.key_of(place, KEY) not in done:
            jobs.append((settings, place, arms[words], len(jobs)))
    if skipped and not jobs and not content["rows"]:
        raise ValueError("nothing to train: the mixers need a grid of tokens, and the tasks are sets of points")
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
    """Join result files; rows of a machine that the first file does not name get `hardware`.

    Raises ValueError for missing files.
    """
    try:
        contents = [json.loads(file.read_text()) for file in files]
    except (OSError, ValueError) as error:
        raise ValueError(f"merge needs result files of the arena: {error}") from error
    first = contents[0]
    for content in contents:
        machine = machine_of(content)
        if machine != machine_of(first):
            content["rows"] = [{**row, "hardware": row.get("hardware", machine)} for row in content["rows"]]
    commands = rows.common_command([command for content in contents for command in content["command"].split("; ")])
    good, failed = ([row for content in contents for row in content[key]] for key in ("rows", "failed"))
    good = rows.merge_rows([], good, KEY)
    done = {rows.key_of(row, KEY) for row in good}
    failed = [row for row in rows.merge_rows([], failed, KEY) if rows.key_of(row, KEY) not in done]
    date = max(content["date"] for content in contents)
    return first | {"command": commands, "date": date, "rows": in_order(good), "failed": failed}


def machine_of(content: dict[str, Any]) -> str:
    """Name the hardware and the version of torch of a result file."""
    return f"{content['hardware']}, torch {content['versions']['torch']}"


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
    return {"task": name} | {key: getattr(settings, key) or getattr(TASKS[name], key) for key in SIZES}


def trained(
    settings: ArenaSettings, place: dict[str, Any], config: MixerConfig, device: torch.device
) -> dict[str, Any]:
    """Train one network. score: accuracy in percent, or relative L2 error, on the test examples after the last step."""
    begun, task, size = time.perf_counter(), TASKS[place["task"]], place["size"]
    torch.manual_seed(place["seed"])
    sizes = (place["dim"], settings.heads, place["layers"])
    model = Network(task, size, config.name, config.plain_options(), *sizes, causal=place["causal"]).to(device)
    found = train(model, task, place)
    test = examples(task, settings.test, size, torch.Generator(device).manual_seed(HELD_OUT))
    return {
        "score": score_of(model, task, test, place["batch_size"]), "constant": constant_score(task, size, test),
        "measure": "accuracy" if task.outputs else "relative L2", "tokens": test[1].shape[1],
        "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_second": round(found["per_second"]),
        "graph": found["graph"], "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
