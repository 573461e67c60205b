"""Flux: text-to-image with joint attention."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttention
from torch import Tensor

from zoo.grid import Grid
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.family import Family
from zoo.models.diffusers.joint import JointSite, split_text
from zoo.models.diffusers.models import HLADiffusionModel


class FluxSite(JointSite, FluxAttention):
    """Site in the double- and single-stream blocks of Flux; text tokens come first, all tokens are rotated.

    Double-stream blocks pass the text separately, with its own weights. Single-stream blocks pass all tokens in one
    tensor, whose first `prefix` tokens are text.
    """

    processors = ("FluxAttnProcessor",)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **arguments: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, N, C] and optionally text [B, M, C] -> the same shapes. Raises ValueError for an unsupported mask."""
        self.refuse(arguments)
        text_x = encoder_hidden_states
        x = self.with_cpe(hidden_states, self.prefix if text_x is None else 0)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
        tokens = self.norm_q(q), self.norm_k(k), v
        if text_x is None:
            text, image = split_text(tokens, self.prefix)
            x = x[:, self.prefix :]
            o, text_o = self.joint(image, text, x, text_first=True, rotary=image_rotary_emb, mask=attention_mask)
            return torch.cat([text_o, o], dim=1).flatten(2).to(q.dtype)
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        flat = self.to_added_qkv(text_x).chunk(3, dim=-1) if self.fused else [proj(text_x) for proj in added]
        text_q, text_k, text_v = (t.unflatten(-1, (-1, self.head_dim)) for t in flat)
        text = self.norm_added_q(text_q), self.norm_added_k(text_k), text_v
        outputs = self.joint(tokens, text, x, text_first=True, rotary=image_rotary_emb, mask=attention_mask)
        o, text_o = (t.to(q.dtype).contiguous() for t in outputs)  # as in the host, for the same bfloat16 rounding
        return self.output(o), self.to_add_out(text_o.flatten(2))

    @property
    def fused(self) -> bool:
        return self.fused_projections


class HLAFluxTransformer2DModel(HLADiffusionModel, FluxTransformer2DModel):
    """Flux with mixers. The token grid is computed from `img_ids` if a mixer needs it."""

    host = FluxTransformer2DModel
    given_grid: Grid | None = None

    def give_grid(self, rows: int, columns: int) -> None:
        """Set the token grid of all further calls, such as 64 x 64 for 1024 x 1024 pixels.

        Needed for `torch.compile(fullgraph=True)` and `torch.export`, which cannot read the values of `img_ids`.
        """
        self.given_grid = rows, columns

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        needed = any(isinstance(m, DiffusionSite) and m.needs_grid for m in self.modules())
        grid = (self.given_grid or grid_of_ids(arguments["img_ids"])) if needed else None
        return grid, arguments["encoder_hidden_states"].shape[1]


def grid_of_ids(ids: Tensor) -> Grid:
    """Return (H, W) of positions (image, row, column) [N, 3]. Raises ValueError unless they are one image in raster
    order."""
    ids = (ids[0] if ids.ndim == 3 else ids).detach().round().long().cpu()
    first, size = ids[0], ids[-1] - ids[0] + 1
    rows, columns = int(size[1]), int(size[2])
    raster = torch.cartesian_prod(torch.arange(1), torch.arange(max(rows, 0)), torch.arange(max(columns, 0)))
    if rows < 1 or len(ids) != rows * columns or not torch.equal(ids, first + raster):
        raise ValueError(
            "img_ids are not the raster of one image (several images have no common grid), but mixers with depthwise, "
            "causal or blocks need the token grid; convert without those options"
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
