"""What timm's own tests/test_models.py checks, for our names."""

import pytest
import timm
import timm.optim
import torch
from timm.layers import get_notrace_functions, get_notrace_modules
from timm.models import create_feature_extractor
from torch import nn
from torchvision.models import feature_extraction
from torchvision.models.feature_extraction import NodePathTracer

import zoo
from tests.helpers.mixers import options_of
from tests.helpers.tiny_models import MIXERS, gradients, image, tiny, without_values
from zoo.models import hla_name

BASES = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_384",
    "vit_small_patch14_reg4_dinov2",
    "vit_little_patch16_reg4_gap_256",
    "flexivit_small",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
]
# every base with one mixer, every mixer with one base
NAMES = [hla_name(b, "ahla") for b in BASES] + [hla_name(BASES[0], m) for m in MIXERS if m != "ahla"]
by_name = pytest.mark.parametrize("name", NAMES)


@by_name
def test_forward(name):
    model = tiny(name, patch_size=16).eval()
    y = model(image())
    assert y.shape == (2, 5) and y.isfinite().all()
    model.set_grad_checkpointing()
    assert torch.equal(model(image()), y)


@by_name
def test_backward_reaches_every_parameter(name):
    mixer = next(m for m in MIXERS if f"_{m}_" in name)
    options = options_of(mixer, depthwise="v", gate=True)
    model = tiny(name, patch_size=16, mixer_options=options).train()
    n_params = len(list(model.parameters()))
    y = model(image())
    y.mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert not missing and n_params == len(gradients(model)) and y.isfinite().all()


@by_name
def test_default_cfg_and_classifier(name):
    model = without_values(name)
    cfg, weights = model.default_cfg, model.state_dict()
    classifiers = cfg["classifier"] if isinstance(cfg["classifier"], tuple) else (cfg["classifier"],)
    assert cfg["first_conv"] + ".weight" in weights
    if cfg["num_classes"]:
        assert all(c + ".weight" in weights for c in classifiers)
    model = tiny(name, patch_size=16).eval()
    heads = model.get_classifier()
    assert heads is model.head or heads == (model.head, model.head_dist)
    model.reset_classifier(3)
    assert model(image()).shape == (2, 3)
    model.reset_classifier(0)
    assert model(image()).shape == (2, 32)
    assert model.forward_features(image()).shape[-1] == model.num_features == 32
    headless = tiny(name, patch_size=16, num_classes=0).eval()
    assert headless(image()).shape == (2, 32)
    assert not any(k.startswith(f"{c}.") for k in headless.state_dict() for c in classifiers)


@by_name
def test_features_only(name):
    model = timm.create_model(name, features_only=True, img_size=64, patch_size=16, embed_dim=32, num_heads=2, depth=4)
    assert [f.shape for f in model(image())] == [(2, 32, 4, 4)] * 3
    assert model.feature_info.channels() == [32] * 3 and model.feature_info.reduction() == [16] * 3
    last = timm.create_model(name, features_only=True, out_indices=(-1,), img_size=64, patch_size=16, depth=1)
    assert len(last(image())) == 1


@by_name
def test_forward_intermediates(name):
    model = tiny(name, patch_size=16, depth=3).eval()
    x = image()
    features, intermediates = model.forward_intermediates(x, norm=True)
    assert torch.allclose(features, model.forward_features(x), atol=1e-6)
    assert len(intermediates) == 3
    grid = intermediates[-1].flatten(2).transpose(1, 2)
    assert torch.allclose(grid, features[:, model.num_prefix_tokens :], atol=1e-6)
    only = model.forward_intermediates(
        x, indices=[1], intermediates_only=True, stop_early=True, return_prefix_tokens=True
    )
    assert only[0][1].shape == (2, model.num_prefix_tokens, 32)
    model.prune_intermediate_layers([1])
    assert len(model.blocks) == 2
    kept = model.forward_intermediates(x, indices=[1], intermediates_only=True)
    assert torch.equal(kept[0], only[0][0])


class Tracer(NodePathTracer):
    """The tracer of timm's feature extraction: its leaf modules stay whole."""


@pytest.mark.parametrize(
    ("name", "training"), [(n, t) for n in NAMES for t in (False, True) if t or n in NAMES[: len(BASES)]]
)  # every mixer in training, every base in both modes
def test_fx(name, training):
    model = tiny(name, patch_size=16, mixer_options={"depthwise": "v"}).train(training)
    tracer = Tracer(leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions())
    graph = tracer.trace(model)
    leaves = [node.target for node in graph.nodes if node.op == "call_module"]
    assert "blocks.0.attn" in leaves and "blocks.0.attn.proj" not in leaves
    node = list(tracer.node_to_qualname.values())[-1]
    traced = create_feature_extractor(model, [node]).train(training)
    y = model(image())
    torch.manual_seed(0)
    z = next(iter(traced(image()).values()))
    assert torch.equal(y, z)
    z.mean().backward()
    assert not [n for n, p in traced.named_parameters() if p.grad is None]


def test_fx_of_a_dynamic_model_needs_no_grid():
    model = tiny(NAMES[0], dynamic_img_size=True).eval()
    tracer = Tracer(leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions())
    graph = torch.fx.GraphModule(model, tracer.trace(model))
    assert torch.equal(graph(image()), model(image()))
    model = tiny(NAMES[0], dynamic_img_size=True, mixer_options={"depthwise": "v"}).eval()
    graph = torch.fx.GraphModule(model, tracer.trace(model))
    with pytest.raises(ValueError, match="grid"):
        graph(image())


@pytest.mark.parametrize("base", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224", "caformer_s18", "fastvit_sa12"])
def test_the_feature_extractor_of_torchvision_needs_the_leaf_modules_of_timm(base):
    model = timm.create_model(base).eval()
    zoo.convert(model, "softmax")
    with pytest.raises(ValueError, match=r"use timm\.models\.create_feature_extractor"):
        feature_extraction.create_feature_extractor(model, ["head"])
    leaves = {"leaf_modules": get_notrace_modules(), "autowrap_functions": get_notrace_functions()}
    layer = next(name for name, module in model.named_modules() if hasattr(module, "mixer_name"))
    found = feature_extraction.create_feature_extractor(model, [layer], tracer_kwargs=leaves)(image(1, 224, 224))
    theirs = create_feature_extractor(model, [layer])(image(1, 224, 224))
    assert torch.equal(found[layer], theirs[layer])


def test_torchscript_is_refused():
    with pytest.raises(ValueError, match=r"cannot be scripted by TorchScript; use torch\.export"):
        torch.jit.script(tiny(NAMES[0]))


def test_optimiser_groups():
    model = tiny(NAMES[0], mixer_options={"gate": True, "depthwise": "v"})
    assert model.no_weight_decay() == tiny("vit_tiny_patch16_224").no_weight_decay() >= {"pos_embed", "cls_token"}
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert groups["blocks.0.attn.mixer.gate.weight"] == groups["blocks.0.attn.qkv.weight"]
    decayed, plain = timm.optim.param_groups_weight_decay(model, 0.05)[::-1]
    bias = model.blocks[0].attn.mixer.depthwise["v"].bias
    assert any(p is bias for p in plain["params"]) and not any(p is bias for p in decayed["params"])
    timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.7)


def test_distilled_training_returns_both_heads():
    model = tiny("deit_ahla_tiny_distilled_patch16_224").train()
    model.set_distilled_training()
    assert [y.shape for y in model(image())] == [(2, 5), (2, 5)]
    assert [s.prefix for s in model.modules() if hasattr(s, "mixer_name")] == [2, 2]


@pytest.mark.parametrize("pool", ["avg", "avgmax", "max", "token", "", "map"])
def test_pooling(pool):
    model = tiny(NAMES[0], global_pool=pool)
    assert model(image()).shape == ((2, 17, 5) if pool == "" else (2, 5))


def test_fix_init_weight():
    host, model = (tiny(n, fix_init=True) for n in ("vit_tiny_patch16_224", NAMES[0]))
    assert torch.equal(host.blocks[1].attn.proj.weight, model.blocks[1].attn.proj.weight)
    assert isinstance(model.blocks[1].attn.proj, nn.Linear)


def test_fx_of_a_naflexvit():
    """Tracing puts a proxy where the mask of attention is None."""
    model = tiny("naflexvit_base_patch16_gap").eval()
    zoo.convert(model, "ahla")
    tracer = Tracer(leaf_modules=get_notrace_modules(), autowrap_functions=get_notrace_functions())
    graph = torch.fx.GraphModule(model, tracer.trace(model))
    assert torch.equal(graph(image()), model(image()))
