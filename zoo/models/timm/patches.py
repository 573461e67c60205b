"""The embedding of patches as a product of matrices, instead of a convolution whose windows lie side by side."""

import torch.nn.functional as F
from torch import Tensor, nn


class PatchProduct(nn.Conv2d):
    """A convolution whose windows lie side by side, as one product: the same parameters and, but for rounding, the same
    results. A live convolution becomes one by a change of class (`patches_as_products`)."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, F, H // p, W // p], laid out channels last."""
        (p, r), (height, width) = self.kernel_size, x.shape[-2:]
        if height % p or width % r:  # a convolution leaves out what does not fill a window
            x = x[..., : height // p * p, : width // r * r]
        patches = x.unflatten(3, (-1, r)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def patches_as_products(model: nn.Module) -> nn.Module:
    """Turn the convolutions in `model.patch_embed` (timm) that cut an image into patches into `PatchProduct`, in place;
    other models stay as they are. Returns the model."""
    for module in getattr(model, "patch_embed", nn.Module()).modules():
        if type(module) is nn.Conv2d and _cuts(module):
            module.__class__ = PatchProduct
    return model


def _cuts(conv: nn.Conv2d) -> bool:
    """Whether windows of several pixels lie side by side, and each is multiplied whole."""
    apart = conv.stride == conv.kernel_size != (1, 1) and conv.padding == (0, 0)
    return apart and conv.groups == 1 and conv.dilation == (1, 1)
