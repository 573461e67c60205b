"""Attention layer with a mixer, for your own networks."""

import inspect

from timm.layers import Attention as TimmAttention
from timm.models import register_notrace_module
from torch import Tensor

from zoo.grid import Grid
from zoo.mixers import MixerConfig
from zoo.models.checkpoint_tags import match_checkpoint
from zoo.models.timm.attention import AttentionSite, layer_spec
from zoo.models.unsupported import refuse_dropout

ARGUMENTS = tuple(inspect.signature(TimmAttention).parameters)


@register_notrace_module
class Attention(AttentionSite):
    """Self-attention layer [B, N, C] -> [B, N, C] with a mixer instead of softmax.

        attention = zoo.Attention(192, num_heads=3, mixer="mhla", grid=(14, 14), prefix=1, qkv_bias=True)
        y = attention(x)  # x [B, 1 + 14 * 14, 192]

    It has the arguments and parameters (`qkv`, `proj`, norms) of `timm.layers.Attention`, so that its weights can be
    loaded. Parameters of the mixer have names with `mixer.`.

    mixer: name in `zoo.MIXERS`.
    grid: (H, W) or (T, H, W) of the patch tokens in raster order; None if they have no layout. Required by `mhla`,
        `mhla2` and `multipole`, which choose their blocks for it, and by the options `depthwise`, `lepe` and `cpe`. For
        inputs of another size, set `attention.grid` before the call.
    prefix: number of tokens before the patches (class and register tokens).
    layer_index: number of the layer in its network, from 0; mixers that scan the grid change direction with it.
    options: further arguments of `timm.layers.Attention` (`qkv_bias`, `qk_norm`, `proj_drop`, ...) and options of the
        mixer (`zoo.mixers.MixerOptions`).

    For networks that take a class, such as timm's `VisionTransformer(attn_layer=...)`, write a subclass that sets mixer
    and grid in its `__init__`. Raises ValueError for an unknown mixer or option, sizes that do not match, a missing
    grid, and an attention mask that the mixer does not support.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        mixer: str = "la",
        grid: Grid | None = None,
        prefix: int = 0,
        layer_index: int = 0,
        **options,
    ) -> None:
        if isinstance(grid, int):
            raise ValueError(f"grid is a tuple such as ({grid}, {grid}), got {grid}")
        dims = {} if grid is None else {"grid_dims": len(grid)}
        given = {**dims, **{k: v for k, v in options.items() if k not in ARGUMENTS}}
        config = MixerConfig.parse(mixer, given, (*ARGUMENTS, "grid", "prefix", "layer_index"))
        host = {key: value for key, value in options.items() if key in ARGUMENTS}
        if host.get("attn_head_dim") is None and dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        super().__init__(dim, num_heads, **host)
        if config.options.needs_grid and grid is None:
            raise ValueError(f"the mixer {mixer!r} needs the grid of the patch tokens, such as grid=(14, 14)")
        refuse_dropout(self.attn_drop.p, mixer)
        self.grid, self.prefix = None if grid is None else tuple(grid), prefix
        self.install(config.build(layer_spec(self, self.grid, prefix)._replace(layer_index=layer_index)))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
