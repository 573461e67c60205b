"""Scaling table: context parallelism of a video transformer and data-parallel training.

Context parallelism: Wan2.1-1.3B with random bfloat16 weights and 81 frames; one denoising step without guidance, and
one training step with gradient checkpointing, the sum of the gradients over the GPUs and fused AdamW. Softmax uses ring
attention and Ulysses of diffusers with cuDNN. Data parallelism: see `data_parallel`.

Bytes are counted from the calls of collectives: in a ring a GPU sends 2 (n - 1) / n of a tensor that is all-reduced,
(n - 1) / n of one that is gathered, scattered or exchanged. Products of float32 use TF32, in which the sums of 16-bit
tokens are exact.
"""

import gc
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from benchmarks import rows
from benchmarks.operators import need_gpu
from benchmarks.profile import Traffic
from benchmarks.scaling.data_parallel import BACKENDS, DATA_MODELS, data_step
from zoo.config import one_of
from zoo.diffusion.loading import compile_blocks
from zoo.io import package_versions
from zoo.models.convert import swap
from zoo.ranges import check_ranges

METHODS = ("softmax ring", "softmax ulysses", "la", "ahla", "mhla")
MODES = ("infer", "train")
SIZES = {480: (21, 60, 104), 720: (21, 90, 160)}  # latent frames, height and width, of 81 frames
TINY = {480: (2, 4, 6), 720: (2, 6, 8)}
Step = Callable[[], Tensor]
KEY = ("model", "tokens", "mode", "method", "gpus", "samples", "compiled")
WARM_UP = 6  # steps before the timed ones; DDP arranges its buckets after the first


@dataclass(frozen=True)
class ScalingSettings:
    """Numbers of GPUs and what to measure on them; rows are merged into the file.

    gpus: numbers of GPUs; efficiency is relative to one GPU
    methods: ways to share the tokens of a video: softmax ring, softmax ulysses, or the name of a mixer
    sizes: height of the video, 480 or 720 (32,760 and 75,600 tokens)
    modes: infer, train; training uses the first of `sizes` ([720]: training at 720p)
    layers: number of blocks of Wan2.1-1.3B (published: 30); times are about proportional to it
    models: models trained with data parallelism: vit_small (224 pixels), dit_xl2 (256 pixels)
    mixer: mixer of these models
    backends: ddp, fsdp2
    samples: samples per GPU and step of these models; 0 for 512 (vit_small) and 64 (dit_xl2)
    compiled: whether the blocks are compiled, as by run.compile in training
    steps: number of timed steps, after six others
    tiny: use models of a few thousand weights, on CPU processes if there are no GPUs, to check an installation
    json: result file to add to
    picture: PNG to draw from the whole file
    """

    gpus: list[int] = field(default_factory=lambda: [1, 2])
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    sizes: list[int] = field(default_factory=lambda: list(SIZES))
    modes: list[str] = field(default_factory=lambda: list(MODES))
    layers: int = 30
    models: list[str] = field(default_factory=lambda: list(DATA_MODELS))
    mixer: str = "la"
    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    samples: int = 0
    compiled: list[bool] = field(default_factory=lambda: [True])
    steps: int = 4
    tiny: bool = False
    json: str = "docs/results/scaling-h100.json"
    picture: str = "docs/pictures/scaling-h100.png"

    def __post_init__(self) -> None:
        methods = (*METHODS[:2], *zoo.MIXERS)
        rows.check_names(self, methods=methods, modes=MODES, models=DATA_MODELS, backends=BACKENDS)
        one_of("mixer", self.mixer, tuple(zoo.MIXERS))
        if wrong := set(self.sizes) - SIZES.keys():
            raise ValueError(f"sizes must be among {sorted(SIZES)}, got {min(wrong)}")
        check_ranges("", self, gpus="[1, inf)", layers="[1, inf)", samples="[0, inf)", steps="[1, inf)")


def run(settings: ScalingSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError for more GPUs than there are."""
    if not settings.tiny:
        need_gpu("scaling")
        if max(settings.gpus) > torch.cuda.device_count():
            raise ValueError(f"gpus={max(settings.gpus)}, but this machine has {torch.cuda.device_count()}")
    several = sorted(n for n in set(settings.gpus) if n > 1) or [1]
    for n in several:  # one GPU is measured by the first process of the first group: processes start slowly
        own = [1, n] if 1 in settings.gpus and n == several[0] else [n]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_process, (n, port, replace(settings, gpus=sorted(set(own))), command), nprocs=n)
    return rows.start(Path(settings.json), command, package_versions("triton", "diffusers", "accelerate"))


def _process(rank: int, world: int, port: int, settings: ScalingSettings, command: str) -> None:
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in names.items()}
    cuda = not settings.tiny
    if cuda:
        torch.cuda.set_device(rank)
    else:
        known: Any = torch  # diffusers asks for the kind of device and their number
        known._C._get_accelerator, known.accelerator.device_count = lambda: torch.device("cpu"), lambda: world
    dist.init_process_group("nccl" if cuda else "gloo")
    file = Path(settings.json)
    content = rows.start(file, command, package_versions("triton", "diffusers", "accelerate"))
    torch.set_float32_matmul_precision("high")
    for n in settings.gpus:
        if rank < n:
            for row in _measure(settings, n):
                if rank == 0:
                    rows.add(content, row, KEY, file)
                    print(" ".join(f"{name}={value}" for name, value in row.items()))
        dist.barrier()
    dist.destroy_process_group()


def _measure(settings: ScalingSettings, n: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of n GPUs; a failure is a row with its reason."""
    methods = settings.methods if n > 1 else dict.fromkeys(alone(method) for method in settings.methods)
    for compiled, method in itertools.product(settings.compiled, methods):
        head = {"model": "wan_1.3b", "method": method, "gpus": n, "compiled": compiled}
        yield from _context_rows(settings, n, head)
        _free()
    for model in settings.models:
        for compiled, backend in itertools.product(settings.compiled, settings.backends if n > 1 else ["one GPU"]):
            samples = n * (settings.samples or (4 if settings.tiny else DATA_MODELS[model].samples))
            head = {"model": model, "method": backend, "gpus": n, "samples": samples, "compiled": compiled}
            yield _tried(partial(_data_row, settings), head)
            _free()


def alone(method: str) -> str:
    """Return the row of one GPU that a method is compared with."""
    return "one GPU" if method in BACKENDS else method.partition(" ")[0]


def _tried(measure: Callable[[dict[str, Any]], dict[str, Any]], head: dict[str, Any]) -> dict[str, Any]:
    try:
        return head | measure(head)
    except Exception as error:
        return head | rows.reason(error)


def _free() -> None:
    gc.collect()  # models are in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Context parallelism


def _context_rows(settings: ScalingSettings, n: int, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield denoising steps of all sizes, then a training step, of one model."""
    model = _wan(settings, head["method"])
    if n > 1:
        model.enable_parallelism(config=_config(head["method"], n))
    if head["compiled"]:
        compile_blocks(model)
    for mode in settings.modes:
        for size in settings.sizes if mode == "infer" else settings.sizes[:1]:
            latent = (TINY if settings.tiny else SIZES)[size]
            step: Step = (_denoise if mode == "infer" else _train_wan)(model, latent, n)
            case = {"tokens": math.prod(latent) // 4, "mode": mode, "layers": settings.layers}
            yield _tried(partial(speed, step, settings), head | case)


def _wan(settings: ScalingSettings, method: str) -> Any:
    from diffusers import WanTransformer3DModel

    sizes: dict[str, Any] = {"num_attention_heads": 12, "ffn_dim": 8960}
    if settings.tiny:
        sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 32, "text_dim": 4096, "freq_dim": 16}
    torch.manual_seed(0)
    with torch.device("cpu" if settings.tiny else "cuda"):
        model: Any = WanTransformer3DModel(**sizes, num_layers=settings.layers)
    name = alone(method)
    if name == "softmax":
        model.set_attention_backend("native" if settings.tiny else "_native_cudnn")
    else:
        blocks = {"blocks": [2, 1, 1] if settings.tiny else [3, 5, 10]} if name == "mhla" else {}  # as in `video`
        swap(model, name, **blocks)
    model.enable_gradient_checkpointing()
    return model.bfloat16()


def _config(method: str, n: int) -> Any:
    from diffusers import ContextParallelConfig

    return ContextParallelConfig(ring_degree=n) if method == "softmax ring" else ContextParallelConfig(ulysses_degree=n)


def _wan_inputs(model: nn.Module, latent: tuple[int, int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {"hidden_states": (1, 16, *latent), "encoder_hidden_states": (1, 512, 4096)}
    p = next(model.parameters())
    inputs = {name: torch.randn(*shape, generator=generator).to(p) for name, shape in made.items()}
    return inputs | {"timestep": torch.tensor([500], device=p.device)}


def _denoise(model: nn.Module, latent: tuple[int, int, int], n: int) -> Step:
    """Return a denoising step, whose result is the mean square of the output."""
    inputs = _wan_inputs(model, latent)
    model.eval()

    @torch.no_grad()
    def step() -> Tensor:
        return model(**inputs, return_dict=False)[0].float().square().mean()

    return step


def _train_wan(model: nn.Module, latent: tuple[int, int, int], n: int) -> Step:
    """Return a training step, whose result is the loss. Each GPU has the gradients of its tokens, which are added."""
    inputs = _wan_inputs(model, latent)
    target = torch.zeros_like(inputs["hidden_states"])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = F.mse_loss(model(**inputs, return_dict=False)[0].float(), target.float())
        loss.backward()
        if n > 1:
            _add_gradients([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _add_gradients(grads: list[Tensor]) -> None:
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(total.view_as(g))


# Data parallelism


def _data_row(settings: ScalingSettings, head: dict[str, Any]) -> dict[str, Any]:
    """Return a training step of a model."""
    step, tokens = data_step(head, settings.mixer, settings.tiny)
    found = speed(step, settings, head)
    rate = round(head["samples"] / found["ms"] * 1e3, 1)
    return {"tokens": tokens, "mode": "train", "mixer": settings.mixer, "per_second": rate} | found


# Measurement


def speed(step: Step, settings: ScalingSettings, head: dict[str, Any]) -> dict[str, Any]:
    """Return the time per step, the bytes that a GPU sends per step, its peak memory, and the results of three steps.

    step: returns the same number on all GPUs.
    """
    cuda, n = not settings.tiny, head["gpus"]
    results, traffic = [step(), step()], Traffic(n)
    eager = n > 1 or "samples" not in head  # the batch of several GPUs may fit on one only if compiled
    with torch.compiler.set_stance("force_eager" if eager else "default"), traffic:
        results.append(step())
    for _ in range(WARM_UP - len(results)):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = _seconds(step, settings.steps, n)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0
    worst = torch.tensor([seconds, peak, traffic.bytes], device=results[0].device, dtype=torch.float64)
    if n > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {
        "ms": round(worst[0].item() * 1e3, 3),
        "sent_mib": round(worst[2].item() / 2**20, 6),
        "peak_mib": round(worst[1].item()),
        "results": [float(f"{x:.9g}") for x in (float(r) for r in results)],
    }


def _seconds(step: Step, steps: int, n: int) -> float:
    """Return the time of a step, in seconds."""

    def together() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if n > 1:
            dist.barrier()

    together()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    together()
    return (time.perf_counter() - start) / steps
