"""Flux: images from text, by joint attention."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor

from zoo.grid import Grid
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.family import Family
from zoo.models.diffusers.joint import JointSite
from zoo.models.diffusers.models import HLADiffusionModel


class FluxSite(JointSite, FluxAttention):
    """Site in both kinds of blocks of Flux: text tokens first, rotary embedding on all tokens.

    Blocks of the first kind pass the text apart, with weights of its own. Those of the second kind pass all tokens in
    one tensor, the first `prefix` of which are text.
    """

    processors = ("FluxAttnProcessor",)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: Any,
    ) -> Any:
        """[B, N, C] (and text [B, M, C]) -> the same. Raises ValueError for a mask that the mixer cannot honour."""
        self.refuse(arguments)
        text_x = encoder_hidden_states
        x = self.with_cpe(hidden_states, self.prefix if text_x is None else 0)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
        tokens = self.norm_q(q), self.norm_k(k), v
        if text_x is None:
            n = self.prefix
            text, image = tuple(t[:, :n] for t in tokens), tuple(t[:, n:] for t in tokens)
            o, text_o = self.joint(image, text, x[:, n:], text_first=True, rotary=image_rotary_emb, mask=attention_mask)
            return torch.cat([text_o, o], dim=1).flatten(2).to(q.dtype)
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        flat = self.to_added_qkv(text_x).chunk(3, dim=-1) if self.fused else [proj(text_x) for proj in added]
        text_q, text_k, text_v = (t.unflatten(-1, (-1, self.head_dim)) for t in flat)
        text = self.norm_added_q(text_q), self.norm_added_k(text_k), text_v
        both = self.joint(tokens, text, x, text_first=True, rotary=image_rotary_emb, mask=attention_mask)
        o, text_o = (t.to(q.dtype).contiguous() for t in both)  # as the host, or bfloat16 products round differently
        return self.output(o), self.to_add_out(text_o.flatten(2))

    @property
    def fused(self) -> bool:
        return self.fused_projections


class HLAFluxTransformer2DModel(HLADiffusionModel, FluxTransformer2DModel):
    """Flux: images from text, by joint attention. The grid is read off `img_ids`, only when a mixer needs it."""

    host = FluxTransformer2DModel
    given_grid: Grid | None = None

    def give_grid(self, rows: int, columns: int) -> None:
        """Say on which grid the image tokens of all further calls lie (1024 x 1024 pixels: 64 x 64), which `img_ids`
        are then not asked for: values that a graph of `torch.compile(fullgraph=True)` or `torch.export` cannot read."""
        self.given_grid = rows, columns

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        needed = any(isinstance(m, DiffusionSite) and m.needs_grid for m in self.modules())
        grid = (self.given_grid or grid_of_ids(arguments["img_ids"])) if needed else None
        return grid, arguments["encoder_hidden_states"].shape[1]


def grid_of_ids(ids: Tensor) -> Grid:
    """(H, W) of the positions (image, row, column) [N, 3] of one image in raster order; ValueError for others."""
    ids = (ids[0] if ids.ndim == 3 else ids).detach().round().long().cpu()
    first, size = ids[0], ids[-1] - ids[0] + 1
    rows, columns = int(size[1]), int(size[2])
    raster = torch.cartesian_prod(torch.arange(1), torch.arange(max(rows, 0)), torch.arange(max(columns, 0)))
    if rows < 1 or len(ids) != rows * columns or not torch.equal(ids, first + raster):
        raise ValueError(
            "img_ids are not the raster of one image (several images have no common grid), but a mixer with depthwise "
            "or causal, or of blocks, needs the token grid; convert without those options"
        )
    return rows, columns


FLUX = Family(
    name="flux",
    converted=HLAFluxTransformer2DModel,
    sites={"transformer_blocks.*.attn": FluxSite, "single_transformer_blocks.*.attn": FluxSite},
    rotary=True,
    grid=(64, 64),  # 1024 x 1024 pixels
    trained=False,
    pipelines=("FluxPipeline",),
    latent_patch=2,
)
