"""Preview of a conversion: every attention layer with its tokens and predicted times."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from zoo.conversion.cost_model import predict_times
from zoo.conversion.dependence import token_shares
from zoo.conversion.hooks import Inputs, forward, record_modules
from zoo.models.convert import backbone_of, swap
from zoo.models.layer_selection import Keep, Layers, choose, plain_layers
from zoo.precision import evaluating


@dataclass(frozen=True)
class LayerInspection:
    """Preview of the conversion of one attention layer. Unknown values are None.

    kind: class of the layer. before, after: mixers. reason: why the layer is not converted, "" if it is.
    softmax_us, mixer_us: predicted times of one forward pass in us. break_even: number of tokens from which the mixer
    is at least as fast. token_share: fraction of the output that depends on the token (`zoo.conversion.dependence`).
    """

    layer: str
    kind: str
    tokens: int | None
    heads: int | None
    width: int | None
    before: str
    after: str
    reason: str
    softmax_us: float | None
    mixer_us: float | None
    break_even: int | None
    token_share: float | None = None


@torch.no_grad()
def inspect(
    model: nn.Module, inputs: Inputs, mixer: str, *, layers: Layers = None, keep_softmax: Keep = None, **options
) -> list[LayerInspection]:
    """Run `model` once on `inputs` and preview `zoo.convert` with these arguments for every attention layer.

    The model is not changed: token shares are measured on a converted copy. Raises ValueError like `zoo.convert`.
    """
    backbone = backbone_of(model)
    backbone.submodels(model)
    chosen, kept = choose(
        backbone.blocks(model), mixer, plain_layers(layers, "layers"), plain_layers(keep_softmax, "keep_softmax")
    )
    found, skipped = backbone.layers(model), backbone.skipped_layers(model)
    converted = copy.deepcopy(model)
    swap(converted, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    shares = token_shares(converted, inputs)
    sizes = _sizes(model, [*found, *skipped], inputs)
    rows = []
    for name, attn in found.items():
        layer = backbone.layer_spec(model, attn)
        heads, width = layer.num_heads, layer.head_dim
        batch, tokens = sizes.get(name, (None, None))
        before = backbone.current_mixer(model, attn)
        after = chosen.get(name, before)
        why = "" if name in chosen else "kept by keep_softmax" if name in kept else "not selected by layers"
        times: tuple[float | None, float | None, int | None] = (None, None, None)
        if batch is not None and tokens is not None:
            times = predict_times(after, options, batch, heads, tokens, width)
        host = next(c for c in type(attn).__mro__ if not c.__module__.startswith("zoo."))
        share = float(shares[name].mean()) if name in chosen and name in shares else None
        rows.append(LayerInspection(name, host.__name__, tokens, heads, width, before, after, why, *times, share))
    for name, why in skipped.items():
        kind = type(model.get_submodule(name)).__name__
        tokens = sizes.get(name, (None, None))[1]
        rows.append(LayerInspection(name, kind, tokens, None, None, "softmax", "softmax", why, None, None, None))
    return rows


def _sizes(model: nn.Module, names: list[str], inputs: Inputs) -> dict[str, tuple[int, int]]:
    """Return (batch, tokens) of each layer in one forward pass; in joint attention, the image tokens."""
    with evaluating(model), record_modules({name: model.get_submodule(name) for name in names}) as calls:
        forward(model, inputs)
    shapes = {name: call.output.shape for name, call in calls.items()}  # [B, N, C], or [B, C, H, W] in FastViT
    return {name: (shape[0], shape[1] if len(shape) == 3 else shape[2:].numel()) for name, shape in shapes.items()}
