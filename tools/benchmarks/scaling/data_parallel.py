"""Training step of a classifier or a denoiser on several GPUs, with DDP or FSDP2.

accelerate as the training commands configure it: float32 weights under bfloat16 autocast, fused AdamW, blocks compiled
after the model is wrapped. The samples are on the device: no loader is measured.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import loss_of
from zoo.diffusion.loading import compile_blocks
from zoo.models.compiling import compile_block
from zoo.models.convert import swap
from zoo.models.timm.patches import patches_as_products
from zoo.train import distributed
from zoo.train.settings import RunSettings, TrainSettings

BACKENDS = ("ddp", "fsdp2")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


class DataModel(NamedTuple):
    """Model of a given side (pixels or latents), full and tiny, and the samples per GPU and step."""

    build: Callable[[int, bool], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    sides: tuple[int, int]
    samples: int
    tokens: Callable[[int], int]


def _vit(side: int, tiny: bool) -> nn.Module:
    sizes: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2} if tiny else {}
    return timm.create_model("vit_small_patch16_224", img_size=side, **sizes)


def _images(batch: int, side: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return {"x": images, "target": torch.randint(1000, (batch,), generator=generator)}


def _dit(side: int, tiny: bool) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    small: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
    model = DiTTransformer2DModel(**(small if tiny else {"num_layers": 28}), sample_size=side, out_channels=8)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0  # of labels, which would differ between GPUs
    return model


def _latents(batch: int, side: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    noisy, target = (torch.randn(batch, c, side, side, generator=generator) for c in (4, 8))
    classes, timestep = (torch.randint(1000, (batch,), generator=generator) for _ in range(2))
    return {"hidden_states": noisy, "timestep": timestep, "class_labels": classes, "target": target}


DATA_MODELS: dict[str, DataModel] = {
    "vit_small": DataModel(_vit, _images, (224, 32), 512, lambda side: (side // 16) ** 2 + 1),
    "dit_xl2": DataModel(_dit, _latents, (32, 8), 64, lambda side: (side // 2) ** 2),
}


def data_step(head: dict[str, Any], mixer: str, tiny: bool) -> tuple[Callable[[], Tensor], int]:
    """Return a training step of a converted model, and its number of tokens. head: the first columns of its row."""
    family = DATA_MODELS[head["model"]]
    side = family.sides[tiny]
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        model = family.build(side, tiny).train()
    if mixer != "softmax":
        swap(model, mixer)
    return _train(model, family.inputs(head["samples"], side), head, tiny), family.tokens(side)


def _compile(model: Any) -> None:
    """Compile blocks as the training commands do."""
    if not hasattr(model, "blocks"):
        compile_blocks(model)
        return
    patches_as_products(model)
    for block in model.blocks:
        compile_block(block)


def _train(model: Any, batch: dict[str, Tensor], head: dict[str, Any], tiny: bool) -> Callable[[], Tensor]:
    """Return a training step on this GPU's part of the batch, whose result is the loss of all parts."""
    device, n = torch.device("cpu" if tiny else "cuda"), head["gpus"]
    accelerator = _accelerator(head["method"], tiny) if n > 1 else None
    model = model.to(device if accelerator is None else distributed.build_device(accelerator))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    plain = model
    if accelerator is not None:
        model, optimizer = distributed.prepare(accelerator, model, optimizer)
        batch = {name: x.chunk(n)[dist.get_rank()] for name, x in batch.items()}
    if head["compiled"]:
        _compile(plain)
    inputs = {name: x.to(device) for name, x in batch.items()}
    target = inputs.pop("target")

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=n == 1 and not tiny):  # accelerate enables its own
            out = model(**inputs)
        loss = loss_of(out, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        if n > 1:
            dist.all_reduce(total)
        return total / n

    return step


def _accelerator(backend: str, tiny: bool) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name, value in FSDP2.items():
        os.environ.pop(name, None)
        if backend == "fsdp2":
            os.environ[name] = value
    run = RunSettings(precision="fp32" if tiny else "bf16")
    accelerator = distributed.create_accelerator(TrainSettings(run=run))
    if accelerator.is_fsdp2 != (backend == "fsdp2"):
        raise ValueError("accelerate shards weights on GPUs only")
    return accelerator
