"""Token grids of all layers when a model is resized, copied, checkpointed or replicated."""

import copy
import io

import pytest
import torch
from timm.utils import ModelEmaV3

import zoo
from tests.helpers.tiny_models import GRID_OPTIONS, GRIDS, gradients, grids, image, padded, sites, stir, tiny
from zoo.grid import split_tokens

NAME = "vit_ahla_tiny_patch16_224"


def make(name=NAME, dtype=torch.float64, **changes):
    return tiny(name, mixer_options=GRID_OPTIONS, **changes).to(dtype)


def test_fixed_models_know_their_grid():
    assert grids(make()) == {(4, 4)}
    assert grids(make(img_size=(32, 96))) == {(2, 6)}
    assert grids(make("vit_ahla_small_patch14_reg4_dinov2", img_size=56)) == {(4, 4)}
    assert {s.prefix for s in sites(make("vit_ahla_small_patch14_reg4_dinov2", img_size=56))} == {5}


@pytest.mark.parametrize("name", [NAME, "flexivit_ahla_small", "deit_ahla_tiny_distilled_patch16_224"])
def test_set_input_size(name):
    model = make(name)
    model.set_input_size((96, 32), (16, 16))
    assert grids(model) == {(6, 2)}
    assert model(image(height=96, width=32).double()).isfinite().all()


def test_set_input_size_of_a_rotary_model():
    model = tiny("vit_small_patch16_rope_224").double()
    zoo.convert(model, "ahla", **GRID_OPTIONS)
    model.set_input_size((96, 32))
    assert grids(model) == {(6, 2)} and model(image(height=96, width=32).double()).isfinite().all()


@pytest.mark.parametrize("size", [(64, 64), (32, 96), (80, 48)])
@pytest.mark.parametrize("name", [NAME, "deit3_ahla_small_patch16_224", "vit_ahla_little_patch16_reg4_gap_256"])
def test_dynamic_sizes_equal_a_model_of_that_size(name, size):
    dynamic = make(name, dynamic_img_size=True)
    fixed = make(name)
    fixed.set_input_size(size)
    x = image(height=size[0], width=size[1]).double()
    assert torch.allclose(dynamic(x), fixed(x), atol=1e-12)
    assert grids(dynamic) == {(size[0] // 16, size[1] // 16)}
    found = dynamic.forward_intermediates(x, intermediates_only=True)[-1]
    assert found.shape == (2, 32, size[0] // 16, size[1] // 16)


def test_a_rotary_model_with_dynamic_sizes():
    model = tiny("vit_small_patch16_rope_224", dynamic_img_size=True).double()
    zoo.convert(model, "ahla", **GRID_OPTIONS)
    stir(model)
    small, wide = model(image().double()), model(image(height=32, width=96).double())
    assert grids(model) == {(2, 6)} and small.shape == wide.shape
    assert torch.equal(model(image().double()), small)


def test_depthwise_sees_the_grid_and_leaves_prefix_tokens_alone():
    model = make("vit_la_small_patch14_reg4_dinov2", img_size=(28, 84))
    part = sites(model)[0].mixer.depthwise["v"]
    v = torch.randn(2, 5 + 12, 2, 16, dtype=torch.float64)
    found = part(v, (2, 6), prefix=5)
    assert torch.equal(found[:, :5], v[:, :5])
    patches = v[:, 5:].reshape(2, 2, 6, 32).permute(0, 3, 1, 2)
    wanted = patches + torch.nn.functional.conv2d(patches, part.weight, part.bias, padding=1, groups=32)
    assert torch.allclose(split_tokens(found, (2, 6), 5)[1].reshape(2, 12, 32), wanted.flatten(2).transpose(1, 2))
    turned = part(v, (6, 2), prefix=5)
    assert not torch.allclose(turned, found)


def test_another_number_of_tokens_is_one_sentence():
    model = make()
    with pytest.raises(ValueError, match="grid 4 x 4 with 1 prefix and 0 suffix tokens needs 17 tokens, got 20"):
        model.blocks(torch.randn(2, 20, 32, dtype=torch.float64))


@pytest.mark.parametrize("name", [NAME, "vit_hla2_tiny_patch16_224"])
@pytest.mark.parametrize("scan", ["forward", "both"])
def test_a_causal_site_checks_its_grid(name, scan):
    model = tiny(name, mixer_options={"causal": True, "scan": scan})
    site, x = sites(model)[0], torch.randn(2, 17, 32)
    assert site(x).isfinite().all()
    site.grid = (4, 5)
    with pytest.raises(ValueError, match="grid 4 x 5 with 1 prefix and 0 suffix tokens needs 21 tokens, got 17"):
        site(x)
    site.grid = None
    with pytest.raises(ValueError, match="needs a token grid, but these tokens have none"):
        site(x)
    rotary = tiny("vit_small_patch16_rope_224")
    zoo.convert(rotary, "la", causal=True)
    with pytest.raises(ValueError, match="needs 17 tokens, got 20"):
        sites(rotary)[0](torch.randn(2, 20, 32))


def two_resolutions(model, checkpointing: bool):
    """Gradients of one backward pass through a wide and a tall image with the same number of tokens."""
    model.zero_grad()
    model.set_grad_checkpointing(checkpointing)
    wide, tall = image(height=32, width=128).double(), image(height=128, width=32).double()
    (model(wide).square().sum() + model(tall).square().sum()).backward()
    return gradients(model)


@pytest.mark.parametrize("name", [NAME, "deit_ahla_tiny_distilled_patch16_224", "rope", "parallel"])
def test_two_resolutions_in_one_backward_with_checkpointing(name):
    hosts = {"rope": "vit_small_patch16_rope_mixed_224", "parallel": "vit_small_patch16_18x2_224"}
    if name in hosts:
        model = tiny(hosts[name], dynamic_img_size=True).double()
        zoo.convert(model, "hla2", **GRID_OPTIONS)
        stir(model)
    else:
        model = make(name, dynamic_img_size=True)
    plain, checkpointed = two_resolutions(model, False), two_resolutions(model, True)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[k], checkpointed[k]) for k in plain)
    assert plain["blocks.0.mlp.fc1.weight" if name != "parallel" else "pos_embed"].abs().sum() > 0


def test_checkpointing_of_the_host_survives_conversion():
    model = tiny("vit_tiny_patch16_224")
    model.set_grad_checkpointing()
    zoo.convert(model, "ahla")
    assert all(block.checkpointing for block in model.blocks) and not model.grad_checkpointing
    model.set_grad_checkpointing(False)
    assert not any(block.checkpointing for block in model.blocks)


def test_copies_have_their_own_grid():
    model = make(dynamic_img_size=True)
    copied, ema = copy.deepcopy(model), ModelEmaV3(model).module
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, wide = image().double(), image(height=32, width=96).double()
    wanted = model(x)
    model(wide)
    for other in (copied, ema, loaded):
        assert grids(other) == {(4, 4)} and torch.equal(other(x), wanted)
    assert grids(model) == {(2, 6)}


def replica_of(module):
    """What torch.nn.DataParallel makes of a module for each device: shallow copies that share parameters."""
    twin = module._replicate_for_data_parallel()
    twin._parameters = dict(module._parameters)
    twin._modules = {name: replica_of(child) for name, child in module._modules.items() if child is not None}
    return twin


def test_replicas_do_not_race():
    model = make(dynamic_img_size=True)
    replica = replica_of(model)
    replica(image(height=32, width=96).double())
    assert grids(replica) == {(2, 6)} and grids(model) == {(4, 4)}


@pytest.mark.parametrize("options", [{"depthwise": "v"}, {"causal": True}])
def test_patch_dropout_is_refused_where_the_layout_matters(options):
    with pytest.raises(ValueError, match="patch_drop_rate > 0 trains on random patches without a layout"):
        tiny(NAME, patch_drop_rate=0.5, mixer_options=options)
    rotary = tiny("vit_small_patch16_rope_224", patch_drop_rate=0.5)
    with pytest.raises(ValueError, match="patch_drop_rate > 0"):
        zoo.convert(rotary, "ahla", **options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_patch_dropout_with_a_global_mixer(dynamic):
    model = tiny(NAME, patch_drop_rate=0.5, dynamic_img_size=dynamic).train()
    assert model(image()).isfinite().all() and grids(model) == {None}
    rotary = tiny("vit_small_patch16_rope_224", patch_drop_rate=0.5)
    zoo.convert(rotary, "ahla")
    assert rotary.train()(image()).isfinite().all()


NAFLEX = "naflexvit_base_patch16_gap"


def naflex(mixer="ahla", seed=0, checkpointing=False, **changes):
    model = tiny(NAFLEX, seed, img_size=None, **changes).double()
    zoo.convert(model, mixer)
    model.set_grad_checkpointing(checkpointing)
    return model


@pytest.mark.parametrize(
    ("mixer", "changes"),
    [("ahla", {}), ("poly", {"reg_tokens": 2}), ("hla2", {"rope_type": "axial"}), ("la", {"rope_type": "mixed"})],
)
def test_padded_samples_are_computed_alone(mixer, changes):
    """Each sample of a padded batch is what it is without padding, and so is its gradient."""
    model, batch = naflex(mixer, **changes), padded()
    y = model(batch)
    for i, (h, w) in enumerate(GRIDS):
        alone = {key: x[i : i + 1, : h * w] for key, x in batch.items()}
        assert torch.allclose(model(alone)[0], y[i], atol=1e-10)
    y.square().sum().backward()
    expected, alone = gradients(model), naflex(mixer, **changes)
    for i, (h, w) in enumerate(GRIDS):
        alone({key: x[i : i + 1, : h * w] for key, x in batch.items()}).square().sum().backward()
    for name, found in gradients(alone).items():
        assert torch.allclose(found, expected[name], atol=1e-8), name


def test_padded_batches_with_softmax_and_checkpointing():
    """All softmax: the host bit for bit. Some softmax layers: as alone. Checkpointed: the same gradients."""
    host, batch = tiny(NAFLEX, img_size=None).double(), padded()
    assert torch.equal(naflex("softmax")(batch), host(batch))
    mixed = tiny(NAFLEX, img_size=None).double()
    zoo.convert(mixed, "ahla", keep_softmax=[0])
    assert torch.allclose(mixed({k: x[:1, :12] for k, x in batch.items()})[0], mixed(batch)[0], atol=1e-10)
    zoo.convert(mixed, "softmax", layers=[1])
    assert torch.equal(mixed(batch), host(batch))
    plain, saved = naflex(), naflex(checkpointing=True)
    for model in (plain, saved):
        model(batch).square().sum().backward()
    for name, g in gradients(plain).items():
        assert torch.equal(g, gradients(saved)[name]), name


def test_naflex_grids():
    """Images of one size have a grid, padded batches none; a mask of one's own is refused."""
    model = tiny(NAFLEX, img_size=None).double()
    zoo.convert(model, "ahla", **GRID_OPTIONS)
    assert model(image(height=96, width=32).double()).isfinite().all() and grids(model) == {(6, 2)}
    with pytest.raises(ValueError, match="needs a token grid, but these tokens have none"):
        model(padded())
    with pytest.raises(ValueError, match="mark the padding with patch_valid"):
        naflex()({**padded(), "attn_mask": torch.zeros(3, 1, 14, 14, dtype=torch.float64)})
    assert tiny("naflexvit_mhla_base_patch16_gap", img_size=None)(image()).isfinite().all()
