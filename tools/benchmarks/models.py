"""Model tables: inference and training steps of whole models, softmax against linear mixers.

Batch sizes, bfloat16 weights for inference and fused AdamW for training are the same for all mixers. Training weights
are float32 under bfloat16 autocast, or bfloat16 (then the residual stream and AdamW's moments are, too). With
torch.compile, each block is compiled (blocks share one compilation), and for a ViT the layers around the blocks;
inductor autotunes. Patches of a ViT are embedded by a matrix product (`zoo.models.timm.patches`). Weights and inputs
are random. Batches keep an H200 busy for longer than the host needs to launch a step.
"""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import zoo
from benchmarks import rows
from benchmarks.operators import need_gpu
from benchmarks.profile import shares
from zoo.config import one_of
from zoo.io import package_versions
from zoo.models.convert import swap
from zoo.models.timm.patches import patches_as_products

MODES = ("infer", "train")
MIXERS = ("softmax", "ahla", "hla2")
WEIGHTS = ("float32", "bfloat16")
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
VIDEO_MIXERS = ("softmax", "ahla every:3", "ahla", "mhla every:3", "mhla", "la")
SECONDS, WARM_UP, LEAST_STEPS = 1.0, 3, 4
COMPILE: dict[str, Any] = {"dynamic": False, "options": {"max_autotune_pointwise": True}}
WAN_FRAMES, WAN_WIDTH = 21, {480: 832, 720: 1280}  # latent frames (of 81), width in pixels by height


class Family(NamedTuple):
    """Model of the table.

    build: (mixer, pixels) -> model on the current device. blocks: name of its list of blocks. batch: samples per step
    by pixels. around: names of the layers before and after the blocks.
    """

    build: Callable[[str, int], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    blocks: str
    tokens: Callable[[int], int]
    batch: dict[int, int]
    around: tuple[str, ...] = ()


def _vit(mixer: str, size: int) -> nn.Module:
    return patches_as_products(_converted(timm.create_model("vit_small_patch16_224", img_size=size), mixer))


def _vit_inputs(batch: int, size: int) -> dict[str, Tensor]:
    images = torch.randn(batch, 3, size, size, device="cuda")
    return {"x": images, "target": torch.randint(10, (batch,), device="cuda")}


def _converted(model: Any, mixer: str, **blocks: Any) -> nn.Module:
    name, options = rows.arm(mixer)
    if name != "softmax":
        swap(model, name, **{**(blocks if name == "mhla" else {}), **options})
    return model


def _dit(mixer: str, size: int) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return _converted(DiTTransformer2DModel(num_layers=28, sample_size=size // 8, out_channels=8), mixer)


def _dit_inputs(batch: int, size: int) -> dict[str, Tensor]:
    latent = size // 8
    return {
        "hidden_states": torch.randn(batch, 4, latent, latent, device="cuda"),
        "timestep": torch.randint(1000, (batch,), device="cuda"),
        "class_labels": torch.randint(1000, (batch,), device="cuda"),
        "target": torch.randn(batch, 8, latent, latent, device="cuda"),
    }


def _pixart(mixer: str, size: int) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    sizes: dict[str, Any] = {"sample_size": size // 8, "caption_channels": 4096, "use_additional_conditions": False}
    return _converted(PixArtTransformer2DModel(**sizes), mixer)


def _pixart_inputs(batch: int, size: int) -> dict[str, Tensor]:
    inputs = _dit_inputs(batch, size)
    del inputs["class_labels"]
    return inputs | {"encoder_hidden_states": torch.randn(batch, 300, 4096, device="cuda")}


def _experiment_vit(patch: int) -> Callable[[str, int], nn.Module]:
    """Build the model of configs/experiments/imagenette1024.yaml (patch 4) or imagenette4096.yaml (patch 2)."""

    def build(mixer: str, size: int) -> nn.Module:
        sizes: dict[str, Any] = {"patch_size": patch, "embed_dim": 192, "depth": 6, "num_heads": 3, "num_classes": 10}
        vit = timm.create_model("vit_tiny_patch16_224", img_size=size, class_token=False, global_pool="avg", **sizes)
        return patches_as_products(_converted(vit, mixer))

    return build


def _pixel_dit(patch: int) -> Callable[[str, int], nn.Module]:
    """Build the model of configs/experiments/dit_cifar256.yaml (patch 2) or dit_cifar1024.yaml (patch 1)."""

    def build(mixer: str, size: int) -> nn.Module:
        from diffusers import DiTTransformer2DModel

        sizes: dict[str, Any] = {"num_layers": 8, "num_attention_heads": 4, "attention_head_dim": 64}
        own = {"patch_size": patch, "sample_size": size, "in_channels": 3, "out_channels": 3, "num_embeds_ada_norm": 10}
        return _converted(DiTTransformer2DModel(**sizes, **own), mixer)

    return build


def _pixel_inputs(batch: int, size: int) -> dict[str, Tensor]:
    images = torch.randn(batch, 3, size, size, device="cuda")
    classes = torch.randint(10, (batch,), device="cuda")
    timestep = torch.randint(1000, (batch,), device="cuda")
    return {"hidden_states": images, "timestep": timestep, "class_labels": classes, "target": torch.randn_like(images)}


def _wan(mixer: str, size: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    sizes: dict[str, Any] = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # Wan2.1-T2V-1.3B
    model: Any = _converted(WanTransformer3DModel(**sizes), mixer, blocks=[3, 5, 10])  # as released with MHLA
    model.enable_gradient_checkpointing()
    return model


def _wan_inputs(batch: int, size: int) -> dict[str, Tensor]:
    video = batch, 16, WAN_FRAMES, size // 8, WAN_WIDTH[size] // 8
    return {
        "hidden_states": torch.randn(*video, device="cuda"),
        "timestep": torch.randint(1000, (batch,), device="cuda"),
        "encoder_hidden_states": torch.randn(batch, 512, 4096, device="cuda"),
        "target": torch.randn(*video, device="cuda"),
    }


VIT_AROUND = "patch_embed", "_pos_embed", "norm", "forward_head"
MODELS = {
    "vit_small": Family(
        _vit, _vit_inputs, "blocks", lambda size: (size // 16) ** 2 + 1, {224: 1024, 512: 256, 1024: 64}, VIT_AROUND
    ),
    "vit_width192_patch4": Family(
        _experiment_vit(4), _vit_inputs, "blocks", lambda size: (size // 4) ** 2, {128: 256}, VIT_AROUND
    ),
    "vit_width192_patch2": Family(
        _experiment_vit(2), _vit_inputs, "blocks", lambda size: (size // 2) ** 2, {128: 64}, VIT_AROUND
    ),
    "pixel_dit_patch2": Family(
        _pixel_dit(2), _pixel_inputs, "transformer_blocks", lambda size: (size // 2) ** 2, {32: 1024}
    ),
    "pixel_dit_patch1": Family(_pixel_dit(1), _pixel_inputs, "transformer_blocks", lambda size: size**2, {32: 256}),
    "dit_xl2": Family(
        _dit, _dit_inputs, "transformer_blocks", lambda size: (size // 16) ** 2, {256: 128, 512: 32, 1024: 8}
    ),
    "pixart_sigma": Family(_pixart, _pixart_inputs, "transformer_blocks", lambda size: (size // 16) ** 2, {2048: 1}),
    "wan_1.3b": Family(
        _wan, _wan_inputs, "blocks", lambda size: WAN_FRAMES * (size // 16) * (WAN_WIDTH[size] // 16), {480: 1, 720: 1}
    ),
}


@dataclass(frozen=True)
class ModelSettings:
    """Selection of the model table; rows are merged into the file.

    models: vit_small (timm, patch 16); diffusers models with latents of 1/8 and patch 2: dit_xl2, pixart_sigma and
      wan_1.3b (81 frames of 480 x 832 or 720 x 1280, trained with gradient checkpointing); models of
      configs/experiments: vit_width192_patch4, vit_width192_patch2, pixel_dit_patch2, pixel_dit_patch1
    sizes: pixels per side; empty for all (ViT 224, 512, 1024; DiT 256, 512, 1024; PixArt 2048; Wan 480, 720)
    modes: infer, train
    weights: training weights: float32 (under bfloat16 autocast) or bfloat16 (timm's --model-dtype); inference uses
      bfloat16
    mixers: softmax, and mixers with their options, such as "multipole density=0.0625 k_tile=32"; "ahla every:3" keeps
      softmax in every third block
    compiled: without and with torch.compile
    json: result file to add to
    picture: PNG to draw from the whole file
    """

    models: list[str] = field(default_factory=lambda: ["vit_small", "dit_xl2"])
    sizes: list[int] = field(default_factory=list)
    modes: list[str] = field(default_factory=lambda: list(MODES))
    weights: list[str] = field(default_factory=lambda: list(WEIGHTS))
    mixers: list[str] = field(default_factory=lambda: list(MIXERS))
    compiled: list[bool] = field(default_factory=lambda: [False, True])
    json: str = "docs/results/models-h200.json"
    picture: str = "docs/pictures/models-h200.png"

    def __post_init__(self) -> None:
        rows.check_names(self, models=MODELS, modes=MODES, weights=WEIGHTS)
        for words in self.mixers:
            one_of("mixer", rows.arm(words)[0], tuple(zoo.MIXERS))
        known = {size for family in MODELS.values() for size in family.batch}
        if wrong := set(self.sizes) - known:
            raise ValueError(f"sizes must be among {sorted(known)}, got {min(wrong)}")


@dataclass(frozen=True)
class VideoSettings(ModelSettings):
    """Selection of the table of large models, by default Wan2.1-1.3B; keys as in `models`."""

    models: list[str] = field(default_factory=lambda: ["wan_1.3b", "dit_xl2", "pixart_sigma"])
    sizes: list[int] = field(default_factory=lambda: [480, 1024, 2048])
    modes: list[str] = field(default_factory=lambda: ["infer"])
    weights: list[str] = field(default_factory=lambda: ["float32"])
    mixers: list[str] = field(default_factory=lambda: list(VIDEO_MIXERS))
    compiled: list[bool] = field(default_factory=lambda: [True])
    json: str = "docs/results/video-h200.json"
    picture: str = "docs/pictures/video-h200.png"


class Setup(NamedTuple):
    """Row to measure."""

    model: str
    size: int
    mode: str
    weights: str
    mixer: str
    compiled: bool


def setups(settings: ModelSettings) -> list[Setup]:
    """Return all rows of the selection."""
    return [
        Setup(model, size, mode, weights, mixer, compiled)
        for model in settings.models
        for size in MODELS[model].batch
        if not settings.sizes or size in settings.sizes
        for mode in settings.modes
        for weights in (settings.weights if mode == "train" else ["bfloat16"])
        for mixer in settings.mixers
        for compiled in settings.compiled
    ]


def run(settings: ModelSettings, command: str) -> dict[str, Any]:
    """Measure the selection and return the whole file. Raises ValueError without a GPU."""
    need_gpu("models")
    file, todo = Path(settings.json), setups(settings)
    content = rows.start(file, command, package_versions("triton", "diffusers"))
    backends: dict[tuple, dict[str, Any]] = {}
    torch.backends.cudnn.benchmark = True  # as in timm's scripts
    shares(lambda: torch.ones(8, device="cuda").add_(1))  # warm up the profiler
    for setup in tqdm(todo, desc="models", mininterval=5):
        head = {**setup._asdict(), "tokens": MODELS[setup.model].tokens(setup.size)}
        try:
            row = head | measure(setup, backends)
        except Exception as error:  # a failure is a result; continue with the others
            row = head | rows.reason(error)
            print(f"not timed: {' '.join(map(str, setup))}: {row['reason']}")
        rows.add(content, row, rows.MODEL_KEY, file)
    return content


def measure(setup: Setup, known: dict[tuple, dict[str, Any]]) -> dict[str, Any]:
    """Return time, memory and shares of a row; softmax uses the faster of cuDNN and flash, `known` if already found."""
    torch._dynamo.reset()
    gc.collect()  # free the previous model, which is in reference cycles
    torch.cuda.empty_cache()
    batch, extra = MODELS[setup.model].batch[setup.size], {}
    if setup.mixer == "softmax":
        case = setup[:4]
        if case not in known:
            known[case] = faster_backend(setup._replace(compiled=False), batch)
        extra = known[case]
    step = make_step(setup)
    with sdpa_kernel(BACKENDS[extra["backend"]]) if extra else contextlib.nullcontext():
        found = speed(step, batch)
        device_ms, parts = shares(step)
    where = {"device_ms": round(device_ms, 3), "shares": {name: round(share, 4) for name, share in parts.items()}}
    return found | where | extra


def faster_backend(setup: Setup, batch: int) -> dict[str, Any]:
    """Return the faster SDPA backend, and the step time in ms of each without compilation."""
    step, found = make_step(setup), {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            found[name] = speed(step, batch)["ms"]
    return {"backend": min(found, key=lambda name: found[name]), "backends_ms": found}


def make_step(setup: Setup) -> Callable[[], None]:
    """Return a function that runs one step of a new model."""
    family = MODELS[setup.model]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = family.build(setup.mixer, setup.size)
    batch = family.inputs(family.batch[setup.size], setup.size)
    target = batch.pop("target")
    if setup.compiled:
        compile_parts(model, family)
    if setup.weights == "bfloat16":
        model.bfloat16()
        batch = {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch.items()}
    if setup.mode == "infer":
        return _inference(model, batch)
    return _training(model, batch, target, autocast=setup.weights == "float32")


def compile_parts(model: nn.Module, family: Family) -> None:
    """Compile each block and the layers around the blocks."""
    around = {name: getattr(model, name) for name in family.around}
    for part in (*getattr(model, family.blocks), *around.values()):
        if isinstance(part, nn.Module):
            part.compile(**COMPILE)
    for name, part in around.items():
        if not isinstance(part, nn.Module):
            setattr(model, name, torch.compile(part, **COMPILE))


def _inference(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(**batch)

    return step


def loss_of(out: Any, target: Tensor) -> Tensor:
    """Return the squared error of a denoiser's sample, or the cross-entropy of logits, in float32."""
    out = (out if isinstance(out, Tensor) else out.sample).float()
    return F.mse_loss(out, target) if target.is_floating_point() else F.cross_entropy(out, target)


def _training(model: nn.Module, batch: dict[str, Tensor], target: Tensor, autocast: bool) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = model(**batch)
            loss = loss_of(out, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speed(step: Callable[[], None], batch: int) -> dict[str, Any]:
    """Return samples per second, step time in ms (wall clock over many steps), and peak memory in MiB.

    Memory includes weights and optimizer.
    """
    step()
    once = _elapsed(step, 1)
    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    n = max(LEAST_STEPS, min(100, int(SECONDS * 1e3 / once)))
    total = _elapsed(step, n)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {
        "batch": batch,
        "per_second": round(batch * n / total * 1e3, 1),
        "ms": round(total / n, 3),
        "peak_mib": round(peak),
    }


def _elapsed(step: Callable[[], None], n: int) -> float:
    """Return the milliseconds of n consecutive steps."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(n):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
