"""What a conversion would do to a model, before it is done: every attention layer, its tokens, and predicted times."""

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zoo.conversion.cost_model import predict_times
from zoo.conversion.dependence import token_shares
from zoo.conversion.hooks import Inputs, first, forward
from zoo.models.convert import backbone_of, swap
from zoo.models.layer_selection import Keep, Layers, choose, plain_layers


@dataclass(frozen=True)
class LayerInspection:
    """One attention layer: what it is, what it would become (or why it stays), its predicted times for one forward
    pass with the inputs of the inspection, in us, and which share of the mixer's output would depend on the token
    (`zoo.conversion.dependence`). None where nothing is known."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def inspect(
    model: Any, inputs: Inputs, mixer: str, *, layers: Layers = None, keep_softmax: Keep = None, **options: Any
) -> list[LayerInspection]:
    """Run `model` once on `inputs` and say of every attention layer what `zoo.convert` with these arguments would do.

    Nothing is changed: token shares are measured on a converted copy. Raises ValueError for what `zoo.convert` refuses
    about families, names and patterns.
    """
    backbone = backbone_of(model)
    backbone.submodels(model)
    chosen, kept = choose(
        backbone.blocks(model), mixer, plain_layers(layers, "layers"), plain_layers(keep_softmax, "keep_softmax")
    )
    found, left = backbone.layers(model), backbone.skipped_layers(model)
    copied = copy.deepcopy(model)
    swap(copied, mixer, layers=layers, keep_softmax=keep_softmax, **options)
    shares = token_shares(copied, inputs)
    sizes = _sizes(model, [*found, *left], inputs)
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
    for name, why in left.items():
        kind = type(model.get_submodule(name)).__name__
        tokens = sizes.get(name, (None, None))[1]
        rows.append(LayerInspection(name, kind, tokens, None, None, "softmax", "softmax", why, None, None, None))
    return rows


def _sizes(model: Any, names: list[str], inputs: Inputs) -> dict[str, tuple[int, int]]:
    """(batch, tokens) of each layer in one forward pass, of joint attention the image tokens."""
    found: dict[str, tuple[int, int]] = {}
    handles = []

    def note(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            out = first(output)
            found[name] = (out.shape[0], out.shape[1])

        return hook

    training = model.training
    try:
        for name in names:
            handles.append(model.get_submodule(name).register_forward_hook(note(name)))
        forward(model.eval(), inputs)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found
