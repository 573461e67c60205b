"""Option `cpe` in every host: a depthwise convolution of the hidden states before attention.

The reference is the same model without it, with a hook that adds the convolution before each attention layer.
"""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F

import zoo
from tests.helpers.tiny_diffusers import CASES, blocks_for, build, close, converted, inputs, run, sites
from zoo.mixers import Context, build_mixer


def by_hand(part, x, grid, prefix):
    patches = x[:, prefix:].transpose(1, 2).unflatten(2, grid)
    conv = F.conv2d if len(grid) == 2 else F.conv3d
    local = conv(patches, part.weight, part.bias, padding=part.weight.shape[-1] // 2, groups=x.shape[-1])
    return x + F.pad(local.flatten(2).transpose(1, 2), (0, 0, prefix, 0))


def with_hooks(model):
    """A copy whose mixers have no `cpe` and whose attention layers get the moved tokens."""
    plain = copy.deepcopy(model)
    for site in sites(plain):
        part, site.mixer.cpe = site.mixer.cpe, None

        def before(site, args, kwargs, part=part):
            apart = kwargs.get("encoder_hidden_states") is not None  # Flux: text in a separate tensor
            prefix = 0 if apart else site.prefix
            if args:
                return (by_hand(part, args[0], site.grid, prefix), *args[1:]), kwargs
            moved = by_hand(part, kwargs["hidden_states"], site.grid, prefix)
            return args, {**kwargs, "hidden_states": moved}

        site.register_forward_pre_hook(before, with_kwargs=True)
    return plain


@pytest.mark.parametrize("name", CASES)
def test_diffusers(name):
    model = converted(name, "la", cpe=3)
    for size in ({}, {"size": 12}):
        close(run(model, inputs(name, **size)), run(with_hooks(model), inputs(name, **size)))
    run(model, inputs(name)).square().mean().backward()
    assert all(site.mixer.cpe.weight.grad.abs().sum() > 0 for site in sites(model))


@pytest.mark.parametrize("mixer", ["softmax", "mhla"])
@pytest.mark.parametrize("name", ["dit", "wan"])
def test_nothing_changes_at_first(name, mixer):
    model, plain, blocks = build(CASES[name]), build(CASES[name]), blocks_for(name, mixer)
    zoo.convert(model, mixer, cpe=3, **blocks)
    zoo.convert(plain, mixer, **blocks)
    assert torch.equal(run(model, inputs(name)), run(plain, inputs(name)))


TIMM = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch16_rope_224",
    "eva02_tiny_patch14_224",
)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    size = 56 if "14" in name else 64
    model = timm.create_model(name, img_size=size, embed_dim=48, num_heads=2, depth=2, num_classes=5).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    zoo.convert(model, "la")
    plain = model(x)
    zoo.convert(model, "la", cpe=3)
    assert torch.equal(model(x), plain)
    for site in sites(model):
        torch.nn.init.normal_(site.mixer.cpe.weight)
        torch.nn.init.normal_(site.mixer.cpe.bias)
    torch.testing.assert_close(model(x), with_hooks(model)(x))
    assert not torch.allclose(model(x), plain)


def test_padding_is_like_beyond_the_border():
    mixer = build_mixer("la", 6, 2, 3, cpe=5, dtype=torch.float64)
    torch.nn.init.normal_(mixer.cpe.weight)
    x = torch.randn(2, 1 + 12, 6, dtype=torch.float64)
    real = torch.arange(13).expand(2, 13) < 9  # the last of three rows is padding
    found = mixer.with_cpe(x, Context(x=x, grid=(3, 4), prefix=1, key_padding_mask=real))[:, :9]
    torch.testing.assert_close(found, by_hand(mixer.cpe, x[:, :9], (2, 4), 1))


def test_refused():
    with pytest.raises(ValueError, match="cpe must be an odd kernel size"):
        build_mixer("la", 6, 2, 3, cpe=2)
    x = torch.randn(2, 12, 6)
    with pytest.raises(ValueError, match="depthwise, lepe or cpe needs a token grid"):
        build_mixer("softmax", 6, 2, 3, cpe=3).with_cpe(x, Context(x=x))
