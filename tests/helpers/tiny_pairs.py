"""A tiny softmax ViT and DiT with attention that is not uniform, and their conversions."""

import copy

import timm
import torch
from diffusers import DiTTransformer2DModel, SD3Transformer2DModel

from zoo.models.convert import swap


def spread(model):
    """Random one-dimensional parameters, and larger queries and keys, so that softmax is not a plain mean."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
            elif any(part in name for part in ("qkv", "to_q", "to_k", "to_v")):
                p.copy_(torch.randn_like(p) * 0.2)
    return model.eval()


def vit(**changes):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
    return spread(timm.create_model("vit_tiny_patch16_224", **{**sizes, **changes}))


def dit():
    torch.manual_seed(0)
    return spread(
        DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, patch_size=2,
            num_embeds_ada_norm=4, norm_num_groups=2,
        )
    )  # fmt: skip


def sd3():
    torch.manual_seed(0)
    return spread(
        SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
            pos_embed_max_size=8,
        )
    )  # fmt: skip


def inputs(kind, n=2, batch=4):
    """n batches for a model of this kind."""
    g = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    if kind == "vit":
        return [rand(batch, 3, 32, 32) for _ in range(n)]
    if kind == "dit":
        labels = torch.arange(batch) % 4
        return [
            {"hidden_states": rand(batch, 3, 8, 8), "timestep": torch.arange(batch) * 200, "class_labels": labels}
            for _ in range(n)
        ]
    return [
        {
            "hidden_states": rand(batch, 4, 8, 8), "timestep": torch.arange(batch) * 200,
            "encoder_hidden_states": rand(batch, 5, 16), "pooled_projections": rand(batch, 16),
        }
        for _ in range(n)
    ]  # fmt: skip


KINDS = {"vit": vit, "dit": dit, "sd3": sd3}


def pair(kind, mixer, **options):
    """(teacher, student, batches)."""
    teacher = KINDS[kind]()
    student = copy.deepcopy(teacher)
    swap(student, mixer, **{"gains": True, **options})
    return teacher, student.eval(), inputs(kind)
