"""Token dependence: the fraction of a mixer's output that differs between tokens.

A mixer with nearly uniform weights returns little more than the mean value; a fraction below the rounding of bfloat16
is lost. This happens to products of positive weights: `ahla`, `hla2` and `hla3` with feature maps of low contrast.
"""

import warnings

import torch
from torch import Tensor, nn

from zoo.conversion.hooks import Inputs, forward, record_mixer_calls
from zoo.models.checkpoint_tags import sites_of
from zoo.precision import evaluating

BFLOAT16_EPS = 2.0**-8  # relative rounding error


def token_share(o: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute |o - token mean of o| / |o| per head, averaged over samples: o [B, N, H, D] -> [H], between 0 and 1.

    mask: [B, N], True for real tokens; None for all tokens. The result is 0 if o is 0.
    """
    o = o.to(torch.promote_types(o.dtype, torch.float32))
    valid = torch.ones_like(o[..., :1, :1]) if mask is None else mask[:, :, None, None].to(o.dtype)
    mean = (o * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    norms = [(t * valid).square().sum((1, 3)).sqrt() for t in (o - mean, o)]
    return (norms[0] / norms[1].clamp(min=torch.finfo(o.dtype).tiny)).mean(0)


@torch.no_grad()
def token_shares(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Compute `token_share` of every layer of a converted model in one forward pass: layer name -> [H].

    Norm, gains, gate and convolutions of the mixers are included, as are softmax layers.
    """
    with evaluating(model), record_mixer_calls(dict(sites_of(model))) as calls:
        forward(model, inputs)
    return {name: token_share(call.output, call.arguments[3].key_padding_mask) for name, call in calls.items()}


def warn_of_mean_pooling(shares: dict[str, Tensor], mixers: dict[str, str]) -> None:
    """Warn if the token share of a layer, averaged over heads, is below the rounding error of bfloat16.

    shares: result of `token_shares`. mixers: layer name -> mixer.
    """
    low = {name: float(share.mean()) for name, share in shares.items() if float(share.mean()) < BFLOAT16_EPS}
    if low:
        layer = min(low, key=low.__getitem__)
        warnings.warn(
            f"{len(low)} of {len(shares)} layers nearly average all tokens: in {layer} only {100 * low[layer]:.2g} % "
            f"of the output of {mixers[layer]!r} depends on the token, less than the rounding error of bfloat16 "
            f"({100 * BFLOAT16_EPS:.1g} %); choose feature_map='power', or a mixer of first order: 'la', 'mhla'",
            stacklevel=2,
        )
