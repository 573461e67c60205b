"""The embedding of patches as a product of matrices."""

import copy
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from zoo.models.timm.patches import PatchProduct, patches_as_products
from zoo.train.classification import ClassificationRun


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize(("kernel", "height", "width"), ((4, 16, 24), ((2, 3), 8, 9), (4, 17, 23)))
@pytest.mark.parametrize("bias", (True, False))
def test_a_product_is_the_convolution(layout, kernel, height, width, bias):
    """Values and gradients, of the images too."""
    model = nn.Module()
    model.patch_embed = nn.Conv2d(3, 5, kernel, stride=kernel, bias=bias, dtype=torch.float64)
    other = patches_as_products(copy.deepcopy(model))
    assert type(other.patch_embed) is PatchProduct and other.state_dict().keys() == model.state_dict().keys()
    images = torch.randn(2, 3, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    found = []
    for conv in (model.patch_embed, other.patch_embed):
        x = images.clone(memory_format=layout).requires_grad_()
        y = conv(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])
        found.append([y, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert found[1][0].is_contiguous(memory_format=torch.channels_last)  # tokens of patches are a view of it


def test_of_a_model():
    """The logits of a model of timm, converted, which keeps its names; nothing is done to other convolutions."""
    model = timm.create_model("vit_ahla_tiny_patch16_224", img_size=32, depth=1).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        before = model(images)
        assert patches_as_products(model) is model and type(model.patch_embed.proj) is PatchProduct
        torch.testing.assert_close(model(images), before, atol=1e-5, rtol=1e-4)
    stem = nn.Module()
    stem.patch_embed = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 2, stride=2, groups=2),
        nn.Conv2d(8, 8, 2, stride=2, dilation=2), nn.Conv2d(8, 8, 1),
    )  # fmt: skip
    assert all(type(conv) is nn.Conv2d for conv in patches_as_products(stem).patch_embed)
    assert patches_as_products(nn.Linear(2, 2)) is not None


def test_a_compiled_run_has_them():
    """With or without a teacher."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    setup = SimpleNamespace(objective=SimpleNamespace(teacher=None))
    ClassificationRun.compile_blocks(SimpleNamespace(model=model, setup=setup))
    assert type(model.patch_embed.proj) is PatchProduct
