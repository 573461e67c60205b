"""Models that are not converted, and the reasons."""


from timm.models import is_model
from torch import nn
from torch.fx import Proxy

from zoo.mixers import MIXERS

LATE = "it pools queries between stages, and the tokens of its global stages are not in raster order"
WINDOWED = "its attention is limited to windows of at most a few hundred tokens, for which linear cost gains nothing"
POOLED = (
    "its attention pools keys or queries, so queries and keys are not the same tokens (where the last stage does not, "
    "it has 49 tokens at 224 pixels)"
)
ALREADY_LINEAR = "its attention is already linear in the number of tokens"
BIASED = "it adds a learned position bias to the attention matrix, which a linear mixer never forms"
BIASED_WINDOWS = f"{BIASED}; in MaxViT, attention is also limited to windows"
CONVOLVED = (
    "its global attention computes q, k, v and the output by convolutions, and only linear projections are converted; "
    "take a caformer_* or pit_* model"
)
SPECIAL = "its attention has another form (talking heads, outlook, gated position, nested or crossed scales)"

REFUSED: dict[str, str] = {
    **dict.fromkeys(["swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "davit", "gcvit"], WINDOWED),
    **dict.fromkeys(["nest", "hieradet_sam2", "efficientvit_msra", "tiny_vit"], WINDOWED),
    **dict.fromkeys(["hiera"], LATE),
    **dict.fromkeys(["maxxvit"], BIASED_WINDOWS),
    **dict.fromkeys(["mvitv2", "pvt_v2", "twins", "nextvit"], POOLED),
    **dict.fromkeys(["xcit", "coat", "edgenext", "efficientvit_mit", "lowformer", "swiftformer"], ALREADY_LINEAR),
    **dict.fromkeys(["beit", "levit", "efficientformer", "efficientformer_v2"], BIASED),
    **dict.fromkeys(["vision_transformer_relpos", "vision_transformer_sam"], BIASED),
    **dict.fromkeys(["visformer"], CONVOLVED),
    **dict.fromkeys(["cait", "volo", "convit", "tnt", "crossvit"], SPECIAL),
}
WIDTHS = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1152: "so400m", 1280: "huge", 1536: "giant"}
SUPPORTED = (
    "VisionTransformer (vit_*, deit*, deit3_*, flexivit_*, hybrids, vitamin_*), Eva (eva02_*, dinov3, vit_*_rope_*), "
    "NaFlexVit (naflexvit_*), MetaFormer (caformer_*), FastVit (fastvit_sa*, fastvit_mci*) and PiT (pit_*) of timm, "
    "transformers of diffusers"
)


def check_is_module(value: object) -> None:
    """Raise ValueError unless `value` is an nn.Module."""
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"convert takes a model, an nn.Module such as timm.create_model makes, got {type(value).__name__} "
            f"{str(value)[:60]!r}"
        )


def refuse_family(model: nn.Module, known: tuple[type, ...]) -> None:
    """Raise ValueError for a model whose class is not in `known`, with its family and the reason."""
    kind = type(model)
    inner = next((n for n, m in model.named_modules() if n and (isinstance(m, known) or _of_diffusers(m))), None)
    if inner is not None:
        raise ValueError(f"convert the model itself, not the {kind.__name__} around it: pass its submodule {inner!r}")
    library, family = kind.__module__.partition(".")[0], kind.__module__.rpartition(".")[2]
    if library in ("transformers", "torchvision"):
        raise ValueError(
            f"cannot convert {kind.__name__} of {library}: only models of timm and diffusers are converted. "
            f"{twin(model)}"
        )
    reason = REFUSED.get(family, "it is not a known vision transformer with global attention")
    raise ValueError(f"cannot convert {kind.__name__} of the family {family!r}: {reason}. Supported: {SUPPORTED}.")


def twin(model: nn.Module) -> str:
    """Suggest the timm model of the same architecture as a `model` of transformers or torchvision."""
    config = getattr(model, "config", model)
    config = getattr(config, "vision_config", config)
    width = getattr(config, "hidden_size", None) or getattr(config, "hidden_dim", 0)
    patch, image = getattr(config, "patch_size", ""), getattr(config, "image_size", "")
    kind = type(model).__name__.lower()
    endings = {"dinov2withregisters": "_reg4_dinov2", "dinov2": "_dinov2", "siglip": f"_siglip_{image}"}
    ending = next((text for start, text in endings.items() if kind.startswith(start)), f"_{image}")
    name = f"vit_{WIDTHS.get(width or 0)}_patch{patch}{ending}"
    if not is_model(name):
        return "Take a timm model of the same architecture (timm.list_models())."
    return f"Take the timm model of the same architecture: timm.create_model({name!r}, pretrained=True)."


def _of_diffusers(model: nn.Module) -> bool:
    return any(b.__name__ == "ModelMixin" and b.__module__.startswith("diffusers.") for b in type(model).__mro__)


def refuse_dropout(rate: float, mixer: str) -> None:
    """Raise ValueError if attention dropout is used with a mixer that forms no attention matrix."""
    if rate > 0 and not MIXERS[mixer].forms_matrix:
        raise ValueError(
            f"attn_drop_rate={rate} drops entries of the attention matrix, which the mixer {mixer!r} never forms; use "
            "proj_drop_rate or drop_path_rate"
        )


def refuse_rotary(mixer: str, rotary: bool) -> None:
    """Raise ValueError if a model with a rotary embedding gets a mixer that does not support it."""
    if rotary and not MIXERS[mixer].takes_rotations:
        others = ", ".join(name for name, kind in MIXERS.items() if kind.takes_rotations)
        raise ValueError(f"the mixer {mixer!r} cannot honour the rotary embedding of this model; use one of {others}")


def refuse_proxy(x: object) -> None:
    """Raise ValueError if torch.fx traces into an attention layer, which must stay one node of the graph."""
    if isinstance(x, Proxy):
        raise ValueError(
            "torch.fx cannot trace into a converted attention layer: use timm.models.create_feature_extractor, which "
            "keeps it as one node"
        )


def refuse_block(model: nn.Module, layer: str, block: nn.Module) -> None:
    """Raise ValueError for a block of an unknown class."""
    raise ValueError(
        f"cannot convert {type(model).__name__} with blocks of type {type(block).__name__} ({layer}): there is no "
        "attention module to swap (Attention, AttentionRope or EvaAttention of timm)"
    )
