"""Sites of timm models: attention modules whose softmax is replaced by a mixer.

A site is a subclass of the host's attention class that overrides only `forward`. A live module is converted by changing
its class: all weights are kept, and the only new parameters are in `site.mixer`. All q, k, v, o are [B, N, H, D] (k and
v with fewer heads under grouped-query attention); x is [B, N, C].
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models import register_notrace_module
from timm.models.eva import EvaAttention
from timm.models.fastvit import Attention as FastVitAttention
from timm.models.metaformer import Attention as MetaFormerAttention
from torch import Tensor, nn

from zoo.grid import Grid, integers
from zoo.mixers import Context, LayerSpec, Mixer
from zoo.mixers.context import Rotation
from zoo.models.checkpoint_tags import encode_tag, no_torchscript
from zoo.models.unsupported import refuse_proxy

# Mixins use attributes of the host class, which a type checker cannot see.
if TYPE_CHECKING:
    Host = Any
else:
    Host = object


class Site(Host):
    """Mixin of an attention module with a mixer.

    grid: grid of the patch tokens, set by the model (`zoo.models.timm.models`); None if the tokens have no layout.
    prefix: number of tokens before the patches.
    key_masks: whether masks of the host are key masks [B, 1, 1, N], added to the scores, with 0 for real tokens.
    """

    mixer: Mixer
    mixer_name: str
    mixer_options: dict[str, Any]
    grid: Grid | None
    prefix: int
    key_masks: bool = False

    def install(self, mixer: Mixer) -> None:
        """Install `mixer`. All of its options, including defaults, are saved with the model.

        Mixers other than softmax get a tag buffer, which identifies their checkpoints.
        """
        self.mixer_name, self.mixer, self.mixer_options = mixer.name, mixer, mixer.config.plain_options()
        if mixer.name != "softmax":
            mixer.register_buffer("tag", self._tag())

    def uninstall(self) -> None:
        """Remove the mixer and restore the class of the host."""
        del self.mixer
        for name in ("mixer_name", "mixer_options", "grid", "prefix", "key_masks"):
            self.__dict__.pop(name, None)
        self.__class__ = host_class(self, Site)  # type: ignore[assignment]

    def _tag(self) -> Tensor:
        return encode_tag(self.mixer.config).to(self.proj.weight.device)

    def reset_parameters(self) -> None:
        """Initialise the parameters of the host, then of the mixer, then the tag.

        timm's initialisation visits children first and resets every nn.Linear, the mixer's gate included; this runs
        after it.
        """
        if hasattr(super(), "reset_parameters"):
            super().reset_parameters()
        for module in self.mixer.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
        if self.mixer_name != "softmax":
            self.mixer.tag.copy_(self._tag())

    def with_cpe(self, x: Tensor, prefix: int, keys: Tensor | None = None) -> Tensor:
        """Add the convolution `cpe` of the mixer, if any, to the hidden states. keys: [B, N], True for real tokens."""
        if self.mixer.cpe is None:
            return x
        return self.mixer.with_cpe(x, Context(x=x, grid=self.grid, prefix=prefix, key_padding_mask=keys))

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        rotate: Callable[[Tensor], Tensor] | None = None,
        qkv: Tensor | None = None,
    ) -> Tensor:
        """Apply the host's q/k norms, the mixer, and the host's output norm, gate and projection -> [B, N, C].

        qkv: packed tensor of which q, k and v are views, if any.
        """
        plain = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        if not plain:  # in [B, H, N, D], so that gradients are summed in the same order as in the host
            q = self.q_norm(q.transpose(1, 2)).transpose(1, 2)
            k = self.k_norm(k.transpose(1, 2)).transpose(1, 2)
        keys = None
        if self.key_masks and mask is not None:
            keys, mask = mask[:, 0, 0] == 0, None
        ctx = Context(
            x=x, grid=self.grid, prefix=self.prefix, rotate=rotate, mask=mask, is_causal=is_causal,
            qkv=qkv if plain else None, key_padding_mask=keys,
        )  # fmt: skip
        o = self.mixer(q, k, v, ctx).flatten(2)
        o = self.norm(o)
        gate = getattr(self, "gate", None)
        if gate is not None:
            o = o * gate(x).sigmoid()
        return self.proj_drop(self.proj(o))

    __prepare_scriptable__ = no_torchscript


def host_class(module: nn.Module, mixin: type) -> type[nn.Module]:
    """Return the class of `module` before conversion, without `mixin`."""
    return next(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, mixin))


def rope_rotation(site: AttentionRope | EvaAttention, rope: Tensor | None, like: Tensor) -> Rotation | None:
    """Return the rotary embedding of timm as a `Rotation` [B, N, H, W] -> [B, N, H, W]; None without `rope`.

    Prefix tokens are not rotated. W is the head width D or a multiple of it (feature maps that widen), in groups of D
    channels. rope: broadcastable to [B, H, N, D]. The result has the dtype of `like`.
    """
    if rope is None:
        return None
    n_prefix, half, width = site.num_prefix_tokens, getattr(site, "rotate_half", False), site.head_dim

    def rotate(t: Tensor) -> Tensor:
        t = t.transpose(1, 2)  # [B, H, N, W], as `rope` requires
        groups = [apply_rot_embed_cat(group, rope, half=half) for group in t[:, :, n_prefix:].split(width, dim=-1)]
        rotated = groups[0] if len(groups) == 1 else torch.cat(groups, dim=-1)
        return torch.cat([t[:, :, :n_prefix], rotated], dim=2).type_as(like).transpose(1, 2)

    def tables() -> tuple[Tensor, Tensor]:
        sin, cos = (t[..., : width // 2] if half else t[..., ::2] for t in rope.chunk(2, -1))
        return _table(cos, n_prefix, 1), _table(sin, n_prefix, 0)

    return Rotation(rotate, tables, half)


def _table(t: Tensor, n_prefix: int, value: int) -> Tensor:
    """Convert a table broadcastable to [B, H, N, D / 2] to [N, D / 2] or [N, H, D / 2]; prefix tokens get `value`."""
    while t.ndim > 2 and t.shape[0] == 1:
        t = t[0]
    if t.ndim > 3:
        raise ValueError("this mixer needs the same rotary embedding for all samples of a batch")
    t = t.transpose(0, 1) if t.ndim == 3 else t
    return torch.cat([t.new_full((n_prefix, *t.shape[1:]), value), t])


def blocks_of(model: Any) -> dict[str, Any]:
    """Return the blocks of a timm model by name, in order: of all its stages, if it has stages."""
    stages = stages_of(model)
    if not stages:
        return {f"blocks.{i}": block for i, block in model.blocks.named_children()}
    return {f"{n}.blocks.{i}": block for n, stage in stages.items() for i, block in stage.blocks.named_children()}


def stages_of(model: Any) -> dict[str, Any]:
    """Return the stages of a hierarchical timm model by name, in order; empty for other models."""
    name = next((name for name in ("stages", "transformers") if hasattr(model, name)), None)
    return {f"{name}.{i}": stage for i, stage in getattr(model, name).named_children()} if name else {}


def attention_layers(model: Any) -> dict[str, nn.Module]:
    """Return the attention modules of a model's blocks that are or can be converted, by name, in order."""
    inside = ((f"{place}.{n}", m) for place, block in blocks_of(model).items() for n, m in block.named_modules())
    return {name: m for name, m in inside if type(m) in SITES or isinstance(m, Site)}


def block_indices(layers: Iterable[str]) -> dict[str, int]:
    """Return the block index of each attention layer of a model: 3 for "blocks.3.attn".

    In models with stages, blocks with attention are numbered consecutively over all stages.
    """
    found: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for name in layers:
        first, second, *_ = parts = name.split(".")
        found[name] = int(second) if first == "blocks" else numbers.setdefault(".".join(parts[:4]), len(numbers))
    return found


def kv_heads(attn: Any) -> int:
    """Return the number of key/value heads, smaller than the number of query heads under grouped-query attention."""
    return getattr(attn, "num_kv_heads", attn.num_heads)


def layer_spec(attn: Any, grid: Grid | None, prefix: int) -> LayerSpec:
    """Return the specification of a timm attention module, whose tokens are `prefix` tokens and then a grid."""
    first, weight = attn.qkv if attn.qkv is not None else attn.q_proj, attn.proj.weight
    return LayerSpec(
        first.in_features, attn.num_heads, attn.head_dim, kv_heads(attn), grid=grid, prefix=prefix,
        attn_drop=attn.attn_drop.p, fused=attn.fused_attn, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip


def split_heads(t: Tensor, num_heads: int) -> Tensor:
    """View [B, N, H D] as [B, N, H, D]."""
    return t.unflatten(-1, (num_heads, -1))


@register_notrace_module
class AttentionSite(Site, Attention):
    """Site in `timm.layers.Attention`: ViT, DeiT, FlexiViT, DINOv2, hybrids, ViTamin."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] -> [B, N, C]. attn_mask: as in timm, True where a query attends to a key, or a float added to the
        scores. Raises ValueError for a mask or causality that the mixer does not support."""
        refuse_proxy(x)
        x = self.with_cpe(x, self.prefix)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(2)
        return self.mix(q, k, v, x, attn_mask, is_causal, qkv=qkv)


class RotarySite(Site):
    """Site in a host with a rotary embedding; q, k, v fused or separate, with or without grouped queries."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """[B, N, C] -> [B, N, C]. attn_mask: as in timm, True where a query attends to a key, or a float added to the
        scores. Raises ValueError for a mask or causality that the mixer does not support."""
        refuse_proxy(x)
        x = self.with_cpe(x, self.prefix)
        qkv = None
        if self.qkv is not None:
            qkv = self._packed(x).unflatten(-1, (3, self.num_heads, -1))
            q, k, v = qkv.unbind(2)
        else:
            q = split_heads(self.q_proj(x), self.num_heads)
            k, v = (split_heads(proj(x), kv_heads(self)) for proj in (self.k_proj, self.v_proj))
        return self.mix(q, k, v, x, attn_mask, is_causal, rope_rotation(self, rope, v), qkv)

    def _packed(self, x: Tensor) -> Tensor:
        return self.qkv(x)


@register_notrace_module
class AttentionRopeSite(RotarySite, AttentionRope):
    """Site in `timm.layers.AttentionRope`: RoPE ViTs."""


@register_notrace_module
class EvaAttentionSite(RotarySite, EvaAttention):
    """Site in `timm.models.eva.EvaAttention`: EVA, EVA-02, DINOv3; only q and v have a bias."""

    def _packed(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if not self.qkv_bias_separate:
            return F.linear(x, self.qkv.weight, bias)
        qkv = self.qkv(x)
        qkv += bias  # in place, so that autocast keeps the dtype of the host
        return qkv


class PlainSite(Site):
    """Site in attention without norms, masks and class tokens, as in the late stages of hierarchical models."""

    def mixed(self, x: Tensor, grid: Grid | None) -> Tensor:
        """Mix the tokens x [B, N, C] of a grid -> [B, N, C]."""
        if self.mixer.cpe is not None:
            x = self.mixer.with_cpe(x, Context(x=x, grid=grid))
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        o = self.mixer(*qkv.unbind(2), Context(x=x, grid=grid, qkv=qkv)).flatten(2)
        return self.proj_drop(self.proj(o))


@register_notrace_module
class MetaFormerAttentionSite(PlainSite, MetaFormerAttention):
    """Site in `timm.models.metaformer.Attention`: CAFormer, VLT."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]. The stage sets the grid."""
        refuse_proxy(x)
        return self.mixed(x, self.grid)


@register_notrace_module
class FastVitAttentionSite(PlainSite, FastVitAttention):
    """Site in `timm.models.fastvit.Attention`: FastViT, MobileCLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        refuse_proxy(x)
        return self.mixed(x.flatten(2).mT, integers(x.shape[2:])).mT.reshape(x.shape)


SITES: dict[type[nn.Module], type[nn.Module]] = {
    Attention: AttentionSite,
    AttentionRope: AttentionRopeSite,
    EvaAttention: EvaAttentionSite,
    MetaFormerAttention: MetaFormerAttentionSite,
    FastVitAttention: FastVitAttentionSite,
}
