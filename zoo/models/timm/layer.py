"""Attention layer with a mixer, for networks of your own."""

import inspect
from typing import Any

from timm.layers import Attention as TimmAttention
from timm.models import register_notrace_module
from torch import Tensor

from zoo.errors import unknown_name
from zoo.grid import Grid
from zoo.mixers import MIXERS, build_mixer
from zoo.models.checkpoint_tags import match_checkpoint
from zoo.models.timm.attention import AttentionSite, host_arguments

ARGUMENTS = tuple(inspect.signature(TimmAttention).parameters)


@register_notrace_module
class Attention(AttentionSite):
    """Self-attention [B, N, C] -> [B, N, C] with a mixer in the place of softmax.

        attention = zoo.Attention(192, num_heads=3, mixer="mhla", grid=(14, 14), prefix=1, qkv_bias=True)
        y = attention(x)  # x [B, 1 + 14 * 14, 192]

    This is the layer that `zoo.convert` makes of `timm.layers.Attention`: same arguments, same parameters (`qkv`,
    `proj`, norms), so that its weights load. The parameters of the mixer are under `mixer.`.

    mixer: a name in `zoo.MIXERS`.
    grid: (H, W) of the patch tokens in raster order; None when they have no layout. Needed by `mhla`, `mhla2` and
        `multipole`, which choose their blocks for it, and by the options `depthwise`, `lepe` and `cpe`. For an input of
        another size set `attention.grid` before the call.
    prefix: number of tokens before the patches (class and register tokens).
    options: further arguments of `timm.layers.Attention` (`qkv_bias`, `qk_norm`, `proj_drop`, ...) and options of the
        mixer (`zoo.mixers.MixerOptions`).

    Networks that take a class, such as timm's `VisionTransformer(attn_layer=...)`, get a subclass that sets mixer and
    grid in its `__init__`. Raises ValueError for an unknown mixer or option, for sizes that do not fit, for a mixer
    without the grid that it needs, and for an attention mask that the mixer cannot honour.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mixer: str = "la",
        grid: Grid | None = None,
        prefix: int = 0,
        **options,
    ) -> None:
        if mixer not in MIXERS:
            raise unknown_name("mixer", mixer, MIXERS)
        host = {key: value for key, value in options.items() if key in ARGUMENTS}
        if host.get("attn_head_dim") is None and dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        super().__init__(dim, num_heads, **host)
        own = {key: value for key, value in options.items() if key not in ARGUMENTS}
        layout: dict[str, Any] = {}
        if getattr(MIXERS[mixer], "needs_layout", False):
            if grid is None:
                raise ValueError(f"the mixer {mixer!r} needs the grid of the patch tokens, such as grid=(14, 14)")
            layout = {"grid": tuple(grid), "prefix": prefix}
        self.grid, self.prefix = None if grid is None else tuple(grid), prefix
        self.install(mixer, build_mixer(mixer, **host_arguments(self, mixer), **layout, **own))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
