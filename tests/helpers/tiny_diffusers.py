"""Tiny models of diffusers with random weights, their inputs, and helpers of the tests."""

import copy
import functools
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from zoo.mixers import MIXERS
from zoo.models.diffusers.families import FAMILIES
from zoo.models.diffusers.family import Family

SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}


class Case(NamedTuple):
    """A family: the class of the model, its configuration, the function that makes its inputs."""

    model: str
    config: dict[str, Any]
    inputs: Any


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dit_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, size, size),
        "timestep": torch.arange(batch) * 100 + 7,
        "class_labels": torch.arange(batch) % 10,
    }


def text_inputs(channels: int = 4, size: int = 8, batch: int = 2) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, channels, size, size + 4),
        "encoder_hidden_states": noise(batch, 5, 24, seed=2),
        "timestep": torch.arange(batch) * 100 + 7,
    }


def pixart_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    mask = torch.ones(batch, 5)
    mask[0, 3:] = 0
    return {**text_inputs(4, size, batch), "encoder_attention_mask": mask, "added_cond_kwargs": {}}


def sd3_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    return {**text_inputs(4, size, batch), "pooled_projections": noise(batch, 20, seed=3)}


def wan_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    return {**text_inputs(4, size, batch), "hidden_states": noise(batch, 4, 3, size, size + 4)}


def wan_i2v_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    inputs = wan_inputs(size, batch)
    text = {"encoder_hidden_states": noise(batch, 512, 24, seed=2)}  # length that the host expects with an image
    return {**inputs, **text, "encoder_hidden_states_image": noise(batch, 7, 12, seed=3)}


def ltx_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    grid = {"num_frames": 3, "height": size // 2, "width": size // 2 + 2}
    mask = torch.ones(batch, 5)
    mask[0, 3:] = 0
    return {
        **text_inputs(4, size, batch),
        **grid,
        "hidden_states": noise(batch, grid["num_frames"] * grid["height"] * grid["width"], 4),
        "encoder_attention_mask": mask,
        "rope_interpolation_scale": (0.3, 32, 32),
    }


def flux_inputs(size: int = 8, batch: int = 2) -> dict[str, Any]:
    rows, columns = size // 2, size // 2 + 2
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
    return {
        **sd3_inputs(size, batch),
        "hidden_states": noise(batch, rows * columns, 4),
        "timestep": torch.linspace(0.1, 0.9, batch),
        "img_ids": ids.float(),
        "txt_ids": torch.zeros(5, 3),
    }


WAN = {**SIZES, "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 48}
LTX = {**SIZES, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 24}
MMDIT = {**SIZES, "in_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 20}
PIXART = {**SIZES, "out_channels": 8, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 24}
SANA = {
    **SIZES,
    "in_channels": 4,
    "out_channels": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 24,
    "sample_size": 8,
    "patch_size": 2,
}
SD3 = {**MMDIT, "sample_size": 8, "caption_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 12}

CASES = {
    "dit": Case(
        "DiTTransformer2DModel",
        {**SIZES, "out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
        dit_inputs,
    ),
    "pixart": Case("PixArtTransformer2DModel", {**PIXART, "norm_num_groups": 4}, pixart_inputs),
    "sana": Case("SanaTransformer2DModel", SANA, text_inputs),
    "sana-qk-norm": Case("SanaTransformer2DModel", {**SANA, "qk_norm": "rms_norm_across_heads"}, text_inputs),
    "wan": Case("WanTransformer3DModel", WAN, wan_inputs),
    "wan-i2v": Case("WanTransformer3DModel", {**WAN, "image_dim": 12, "added_kv_proj_dim": 32}, wan_i2v_inputs),
    "ltx": Case("LTXVideoTransformer3DModel", LTX, ltx_inputs),
    "sd3": Case("SD3Transformer2DModel", SD3, sd3_inputs),
    "sd35": Case("SD3Transformer2DModel", {**SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}, sd3_inputs),
    "flux": Case("FluxTransformer2DModel", {**MMDIT, "num_single_layers": 2, "axes_dims_rope": (4, 6, 6)}, flux_inputs),
}


def build(case: Case, seed: int = 0, **changes: Any) -> Any:
    """The model of a case with random weights everywhere, in evaluation mode."""
    torch.manual_seed(seed)
    model = getattr(diffusers, case.model)(**{**case.config, **changes})
    stir(model)
    return model.eval()


def stir(model: nn.Module) -> None:
    """Random values for what is initialised to constants: biases, norms, depthwise filters, gates."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim <= 1 or ".mixer." in name:
                p.add_(torch.randn_like(p), alpha=0.1)


def converted(name: str, mixer: str, seed: int = 0, config: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """The tiny model called `name` after `zoo.convert`, with stirred mixers."""
    model = build(CASES[name], seed, **(config or {}))
    zoo.convert(model, mixer, **arguments)
    stir(model)
    return model


@functools.cache
def _host(name: str) -> Any:
    return build(CASES[name])


def record(name: str) -> Family:
    """The family of the tiny model called `name`."""
    return next(f for f in FAMILIES if f.host.__name__ == CASES[name].model)


def blocks_for(name: str, mixer: str) -> dict[str, Any]:
    """Options of a mixer of blocks if the grid of the family is not the one of the tiny model, but a large one."""
    needed = getattr(MIXERS[mixer].defaults, "needs_blocks", False) and record(name).grid is not None
    return {"blocks": [1, 2, 2][-record(name).grid_dims :]} if needed else {}


def host(name: str) -> Any:
    """A copy of the unconverted tiny model called `name`."""
    return copy.deepcopy(_host(name))


def inputs(name: str, **sizes: int) -> dict[str, Any]:
    """The arguments of a forward pass of the tiny model called `name`."""
    return CASES[name].inputs(**sizes)


def run(model: Any, arguments: dict[str, Any]) -> Tensor:
    """The output of a forward pass."""
    return model(**arguments, return_dict=False)[0]


def sites(model: nn.Module) -> list[Any]:
    """The sites of a model, in order."""
    return [m for m in model.modules() if hasattr(m, "mixer_name")]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert equality up to rounding in float32."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def cast(arguments: dict, dtype: torch.dtype) -> dict:
    """The arguments of a forward pass with floating-point tensors in `dtype`."""
    floats = {k: v.to(dtype) for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {**arguments, **floats}


class Copies(TorchDispatchMode):
    """Names of the operators that return a float32 tensor of at least `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if func is torch.ops.hla_kernels.mhla.default:
            leaves = leaves[:1]  # the other is what is saved of moments, which are of blocks
        if any(x.dtype == torch.float32 and x.numel() >= self.numel for x in leaves):
            self.found.append(str(func))
        return out
