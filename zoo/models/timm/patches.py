"""Patch embedding as a matrix product instead of a convolution."""

import torch.nn.functional as F
from torch import Tensor, nn


class PatchProduct(nn.Conv2d):
    """Convolution with stride equal to its kernel size, computed as one matrix product.

    Parameters and, up to rounding, results are the same. `patches_as_products` changes the class of a live module.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, F, H // p, W // p] in channels-last memory format."""
        (p, r), (height, width) = self.kernel_size, x.shape[-2:]
        if height % p or width % r:  # like a convolution, drop incomplete patches
            x = x[..., : height // p * p, : width // r * r]
        patches = x.unflatten(3, (-1, r)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def patches_as_products(model: nn.Module) -> nn.Module:
    """Turn the patch convolutions in `model.patch_embed` (timm) into `PatchProduct`, in place; return the model.

    Other models are unchanged.
    """
    for module in getattr(model, "patch_embed", nn.Module()).modules():
        if type(module) is nn.Conv2d and _is_patch_embedding(module):
            module.__class__ = PatchProduct
    return model


def _is_patch_embedding(conv: nn.Conv2d) -> bool:
    """Whether the windows have several pixels, do not overlap and cover the image, in one group."""
    tiles = conv.stride == conv.kernel_size != (1, 1) and conv.padding == (0, 0)
    return tiles and conv.groups == 1 and conv.dilation == (1, 1)
