"""Softmax as a mixer reproduces outputs and gradients of every supported family bit for bit."""

import copy

import pytest
import timm
import torch

import zoo
from tests.helpers.tiny_models import NEW_IN_TIMM, image, tiny

# name -> what is particular about it
FAMILIES = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "vit_little_patch16_reg4_gap_256": {},
    "flexivit_small": {},
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "vit_base_patch16_clip_224": {},
    "vit_base_patch16_siglip_224": {},
    "aimv2_large_patch14_224": {"img_size": 56},
    "vit_intern300m_patch14_448": {"img_size": 56},
    "vit_small_patch16_18x2_224": {},
    "vit_base_patch16_rpn_224": {},
    "vit_tiny_r_s16_p8_224": {"embed_dim": 192, "num_heads": 3},
    "vitamin_small_224": {"embed_dim": 384, "num_heads": 6},
    "eva02_tiny_patch14_224": {"img_size": 56},
    "eva02_base_patch14_224": {"img_size": 56},
    "eva_giant_patch14_224": {"img_size": 56},
    "eva02_enormous_patch14_clip_224": {"img_size": 56},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_medium_patch16_rope_reg1_gap_256": {},
    "vit_small_patch16_dinov3": {},
    "vit_small_patch16_dinov3_qkvb": {},
    "vit_pe_core_tiny_patch16_384": {},
}
if timm.is_model(NEW_IN_TIMM):
    FAMILIES[NEW_IN_TIMM] = {"num_kv_heads": 1}


def converted(name: str, **changes):
    host = tiny(name, **changes)
    model = copy.deepcopy(host)
    report = zoo.convert(model, "softmax")
    assert report.swapped and report.added == 0
    return host, model


def assert_same(host, model, x):
    torch.manual_seed(3)
    wanted = host(x)
    torch.manual_seed(3)
    found = model(x)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), host.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("name", FAMILIES)
def test_bit_equal_to_the_host(name):
    host, model = converted(name, **FAMILIES[name])
    assert list(model.state_dict()) == list(host.state_dict())
    size = FAMILIES[name].get("img_size", 64)
    assert_same(host.eval(), model.eval(), image(height=size, width=size))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_dinov3"])
def test_bit_equal_without_fused_attention(name):
    host = tiny(name)
    for block in host.blocks:
        block.attn.fused_attn = False
    model = copy.deepcopy(host)
    zoo.convert(model, "softmax")
    assert_same(host.eval(), model.eval(), image())


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"scale_attn_norm": True, "init_values": 0.1}])
def test_host_norms_are_used(changes):
    assert_same(*converted("vit_tiny_patch16_224", **changes), image())


def test_dropout_draws_the_same_numbers():
    rates = {
        "attn_drop_rate": 0.3,
        "proj_drop_rate": 0.2,
        "drop_path_rate": 0.2,
        "drop_rate": 0.1,
        "patch_drop_rate": 0.25,
    }
    host, model = converted("vit_tiny_patch16_224", **rates)
    assert_same(host.train(), model.train(), image())


@pytest.mark.parametrize("kind", ["bool", "additive", "causal"])
@pytest.mark.parametrize("fused", [True, False])
def test_masks_reach_softmax(kind, fused):
    host = tiny("vit_tiny_patch16_224").eval()
    for block in host.blocks:
        block.attn.fused_attn = fused
    model = copy.deepcopy(host)
    zoo.convert(model, "softmax")
    keep = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.3
    keep |= torch.eye(17, dtype=torch.bool)
    call = {"bool": {"attn_mask": keep}, "additive": {"attn_mask": keep.float()}, "causal": {"is_causal": True}}[kind]
    x = image()
    assert torch.equal(model.forward_features(x, **call), host.forward_features(x, **call))


def test_autocast_is_that_of_the_host():
    for name in ("vit_tiny_patch16_224", "eva_giant_patch14_224", "vit_small_patch16_rope_224"):
        size = 56 if "patch14" in name else 64
        host, model = converted(name, img_size=size)
        x = image(height=size, width=size)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), host(x)), name


def test_softmax_with_weights_of_its_own_is_saved(tmp_path):
    """The convolution of a softmax mixer is a conversion."""
    model = tiny("vit_tiny_patch16_224")
    zoo.convert(model, "softmax", lepe=3)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    zoo.save(model, tmp_path)
    assert torch.equal(zoo.load(tmp_path).eval()(image()), model.eval()(image()))
