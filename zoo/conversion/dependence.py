"""Token dependence: how much of what a mixer returns differs between tokens, measured on real inputs.

A mixer whose weights are nearly the same for every query returns the mean value and little else; below the rounding of
bfloat16 it has lost the tokens. Products of positive weights do that: `ahla`, `hla2` and `hla3` with maps of little
contrast.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from zoo.conversion.hooks import Inputs, forward, record_mixer_calls

BFLOAT16 = 2.0**-8  # relative size of a rounding step


def token_share(o: Tensor, mask: Tensor | None = None) -> Tensor:
    """|o - mean over tokens of o| / |o| of each head, averaged over samples: o [B, N, H, D] -> [H], between 0 and 1.

    mask: [B, N], True for the tokens that count; None for all of them. Zero where the output is.
    """
    o = o.to(torch.promote_types(o.dtype, torch.float32))
    live = torch.ones_like(o[..., :1, :1]) if mask is None else mask[:, :, None, None].to(o.dtype)
    mean = (o * live).sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp(min=1)
    norms = [(t * live).square().sum((1, 3)).sqrt() for t in (o - mean, o)]
    return (norms[0] / norms[1].clamp(min=torch.finfo(o.dtype).tiny)).mean(0)


@torch.no_grad()
def token_shares(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """`token_share` of every site of a converted model in one forward pass: layer name -> [H].

    The norm, gains, gate and local convolutions of a mixer count; softmax sites are included.
    """
    sites = {name: m for name, m in model.named_modules() if hasattr(m, "mixer_name")}
    training = model.training
    with record_mixer_calls(sites) as found:
        forward(model.eval(), inputs)
    model.train(training)
    return {name: token_share(call.output, call.arguments[3].key_padding_mask) for name, call in found.items()}


def warn_of_mean_pooling(shares: dict[str, Tensor], mixers: dict[str, str]) -> None:
    """Warn in one sentence when a layer's share, averaged over heads, is below the rounding of bfloat16.

    shares: of `token_shares`.  mixers: layer name -> name of its mixer.
    """
    low = {name: float(share.mean()) for name, share in shares.items() if float(share.mean()) < BFLOAT16}
    if low:
        layer = min(low, key=low.__getitem__)
        warnings.warn(
            f"{len(low)} of {len(shares)} layers nearly average all tokens: in {layer} only {100 * low[layer]:.2g} % "
            f"of the output of {mixers[layer]!r} depends on the token, less than bfloat16 can hold "
            f"({100 * BFLOAT16:.1g} %); choose feature_map='power', or a mixer of first order: 'la', 'mhla'",
            stacklevel=2,
        )
