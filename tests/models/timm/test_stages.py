"""Hierarchical models of timm: every stage has attention over its own grid, or none."""

import copy
from dataclasses import replace

import pytest
import timm
import torch
from timm.models.fastvit import FastVit
from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
from timm.models.pit import PoolingVisionTransformer

import zoo
from tests.helpers.tiny_models import gradients, image, sites, stir
from zoo.conversion.inspection import inspect
from zoo.models.timm.model_files import WEIGHTS, Recipe, build, load_model, save_weights, with_resolved_options
from zoo.models.timm.registry import REGISTERED_MIXERS
from zoo.train.model import start_classifier
from zoo.train.run_folder import with_stored_options
from zoo.train.settings import ModelSettings

SHALLOW = {"depths": [1, 1, 2, 1], "dims": [16, 32, 64, 32]}
NARROW = {**SHALLOW, "num_classes": 5}
FAST = {"layers": (1, 1, 1, 2), "embed_dims": (16, 32, 32, 64), "mlp_ratios": (2,) * 4, "num_classes": 5}
MIXERS = ("la", "ahla", "mhla", "multipole", "flare", "simplex2", "linformer", "hdla")


def caformer() -> MetaFormer:
    """A narrow CAFormer: three attention layers in stages 2 and 3."""
    torch.manual_seed(0)
    mixers, norms = [SepConv] * 2 + [Attention] * 2, [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2
    model = MetaFormer(**NARROW, token_mixers=mixers, norm_layers=norms)
    stir(model)
    return model


def fastvit() -> FastVit:
    """A narrow FastViT: two attention layers in the last stage."""
    torch.manual_seed(0)
    model = FastVit(**FAST, token_mixers=("repmixer",) * 3 + ("attention",))
    stir(model)
    return model


def pit() -> PoolingVisionTransformer:
    """A narrow PiT for images of 96 x 64 pixels: an attention layer in each stage, and a class token."""
    torch.manual_seed(0)
    sizes = {"img_size": (96, 64), "patch_size": 8, "stride": 4, "base_dims": (16, 8, 16), "heads": (1, 4, 2)}
    model = PoolingVisionTransformer(**sizes, depth=(1, 1, 1), num_classes=5)
    stir(model)
    return model


PIT_GRIDS = [(23, 15), (12, 8), (6, 4)]
HOSTS = {"caformer": (caformer, 3, "0, 1"), "fastvit": (fastvit, 2, "0, 1, 2")}


def blocks(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return [site.mixer.blocks for site in sites(model)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("host", [*HOSTS, "pit"])
def test_softmax_is_the_host_bit_for_bit(host):
    make, count, plain = HOSTS.get(host, (pit, 3, ""))
    model, x = make(), image(height=96, width=64)
    converted = copy.deepcopy(model)
    report = zoo.convert(converted, "softmax")
    assert len(report.swapped) == count
    assert report.note == (f"skipped stages without attention: {plain}" if plain else "")
    outs = [m(x) for m in (model, converted)]
    assert torch.equal(*outs)
    for o in outs:
        o.square().sum().backward()
    ours, theirs = gradients(converted), gradients(model)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], g) for n, g in theirs.items())
    zoo.revert(converted)
    assert {type(m) for m in converted.modules()} == {type(m) for m in model.modules()}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("host", HOSTS)
def test_mixers_see_the_grid_of_their_stage(host, mixer):
    """Images of two sizes; the grid reaches the mixer, with a local convolution to notice."""
    model, seen = HOSTS[host][0](), []
    zoo.convert(model, mixer, depthwise="v", cpe=3)
    for site in sites(model):
        site.mixer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3].grid))
    for height, width in ((128, 128), (160, 96)):
        model(image(height=height, width=width)).square().sum().backward()
        late = (height // 32, width // 32)
        grids = [late] * 2 if host == "fastvit" else [(height // 16, width // 16)] * 2 + [late]
        assert seen == grids
        seen.clear()
    assert all(p.grad is not None for site in sites(model) for p in site.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_see_the_grid_of_their_stage_and_class_tokens(mixer):
    model, seen = pit(), []
    zoo.convert(model, mixer, depthwise="v", cpe=3)
    for site in sites(model):
        site.mixer.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[3].grid, inputs[3].prefix)))
    model(image(height=96, width=64)).square().sum().backward()
    assert seen == [(grid, 1) for grid in PIT_GRIDS]
    assert all(p.grad is not None for site in sites(model) for p in site.parameters())


def test_a_pit_compiles():
    model, x = pit(), image(height=96, width=64)
    zoo.convert(model, "mhla")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_converted_pits_are_saved_and_loaded(tmp_path):
    model = timm.create_model("pit_ti_distilled_224", num_classes=3).eval()
    zoo.convert(model, "mhla", keep_softmax="every:4")
    assert [s.mixer.layout for s in sites(model) if s.mixer_name == "mhla"][::4] == [
        "5x5 of 27x27", "4x4 of 14x14", "2x2 of 7x7"
    ]  # fmt: skip
    x = image(height=224, width=224)
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path).eval()
    assert torch.equal(again(x), model(x))
    assert [s.mixer_name for s in sites(again)] == ["mhla"] * 9


@pytest.mark.parametrize("host", HOSTS)
def test_checkpointing_and_compilation(host):
    model, x = HOSTS[host][0](), image(height=96, width=64)
    model.set_grad_checkpointing()
    zoo.convert(model, "mhla", blocks=[1, 2], depthwise="v")
    assert any(getattr(m, "checkpointing", False) for m in model.modules())
    results = []
    for step in ("checkpointed", "plain", "compiled"):
        model.set_grad_checkpointing(step == "checkpointed")
        f = torch.compile(model, backend="aot_eager", fullgraph=True) if step == "compiled" else model
        model.zero_grad()
        f.eval()(x).square().sum().backward()
        results.append(gradients(model))
    for other in results[1:]:
        for name, grad in results[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [caformer, fastvit, pit])
def test_torch_jit_trace(make):
    model, x = make().eval(), image(height=96, width=64)
    zoo.convert(model, "mhla", blocks=[1, 2])
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x.flip(0)), model(x.flip(0)))


def test_kept_layers_are_numbered_over_all_stages():
    model = caformer()
    report = zoo.convert(model, "la", keep_softmax=[1])
    names = [row.layer for row in report.swapped]
    assert names == ["stages.2.blocks.0.token_mixer", "stages.3.blocks.0.token_mixer"]
    with pytest.raises(ValueError, match="block indices from -3 to 2"):
        zoo.convert(caformer(), "la", keep_softmax=[3])


def test_converted_caformers_are_saved_and_loaded(tmp_path):
    model = timm.create_model("caformer_s18", num_classes=3).eval()
    zoo.convert(model, "mhla", keep_softmax="every:4")
    x = image(height=64, width=96)
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path).eval()
    assert torch.equal(again(x), model(x))
    assert [s.mixer_name for s in sites(again)] == ["mhla"] * 9


RECIPES = {
    "caformer": Recipe("caformer_s18", mixer="mhla", keep_softmax=[0]),
    "pit": Recipe("pit_ti_224", {"depth": [1, 1, 1]}, img_size=96, mixer="mhla"),
    "vlt": Recipe("vlt_mhla_small", {**SHALLOW, "mixer_options": {"lepe": 3}, "keep_softmax": [1]}),
}


@pytest.mark.parametrize("host", RECIPES)
def test_run_folders_are_loaded(host, tmp_path):
    """Each stage has its own blocks, which the stored options leave to be derived again."""
    given = RECIPES[host]
    model = build(given).eval()
    stir(model)
    recipe = with_resolved_options(model, given)
    options = recipe.mixer_options or recipe.kwargs["mixer_options"]
    assert options["blocks"] is None and options["feature_map"] == "power"
    save_weights(model, recipe, tmp_path / WEIGHTS)
    again, found = load_model(tmp_path)
    x = image(height=96, width=96)
    assert found == recipe and torch.equal(again.eval()(x), model(x))


def test_vlt_chooses_blocks_for_the_image_size(tmp_path):
    model = timm.create_model("vlt_mhla_small", img_size=512, **NARROW).eval()
    zoo.save(model, tmp_path)
    other = timm.create_model("vlt_mhla_small", **NARROW)
    again = zoo.load(tmp_path)
    assert blocks(model) == blocks(again) == [(11, 11), (8, 8), (6, 6), (6, 6), (4, 4)]
    assert blocks(other) == [(7, 7), (5, 5), (4, 4), (4, 4), (2, 2)]
    x = image(height=128, width=128)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("settings", [{"name": "vlt_mhla_small"}, {"name": "vlt_small", "mixer": "mhla"}])
def test_runs_choose_blocks_for_the_image_size(settings, tmp_path):
    """Their files store the size; files of earlier versions, which store none, keep the blocks for 224 pixels."""
    given = ModelSettings(**settings, kwargs=dict(SHALLOW), img_size=512)
    model, _, recipe = start_classifier(given, 5)
    save_weights(model, recipe, tmp_path / "new" / WEIGHTS)
    on = ModelSettings(checkpoint=str(tmp_path / "new"), mixer=given.mixer, img_size=64)
    loaded = zoo.load(tmp_path / "new"), start_classifier(on, 5)[0]
    assert [blocks(m)[0] for m in (model, *loaded)] == [(11, 11)] * 3
    kwargs = {key: value for key, value in recipe.kwargs.items() if key != "img_size"}
    earlier = replace(recipe, kwargs=kwargs)
    save_weights(build(earlier), earlier, tmp_path / "earlier" / WEIGHTS)
    resumed = start_classifier(with_stored_options(given, tmp_path / "earlier"), 5)[0]
    assert blocks(zoo.load(tmp_path / "earlier"))[0] == blocks(resumed)[0] == (7, 7)


def test_a_conversion_of_a_run_chooses_blocks_for_its_own_image_size(tmp_path):
    host, _, recipe = start_classifier(ModelSettings(name="vlt_small", kwargs=dict(SHALLOW), img_size=64), 5)
    save_weights(host, recipe, tmp_path / WEIGHTS)
    model, _, _ = start_classifier(ModelSettings(checkpoint=str(tmp_path), mixer="mhla", img_size=512), 5)
    assert blocks(model)[0] == (11, 11)


def test_a_run_resumes_with_the_blocks_of_each_stage(tmp_path):
    model = build(RECIPES["pit"])
    save_weights(model, RECIPES["pit"], tmp_path / WEIGHTS)
    options = with_stored_options(ModelSettings(name="pit_ti_224", mixer="mhla"), tmp_path).mixer_options
    again = build(replace(RECIPES["pit"], mixer_options=options))
    assert options["feature_map"] == "power"
    assert [s.mixer.blocks for s in sites(again)] == [s.mixer.blocks for s in sites(model)] == [(3, 3), (2, 2), (1, 1)]


@pytest.mark.parametrize("host", HOSTS)
def test_inspection_counts_the_tokens_of_each_stage(host):
    found = [row.tokens for row in inspect(HOSTS[host][0](), image(height=96, width=64), "la")]
    assert found == ([6, 6] if host == "fastvit" else [24, 24, 6])
    assert [row.tokens for row in inspect(pit(), image(height=96, width=64), "la")] == [346, 97, 25]


def test_models_without_attention_are_refused():
    with pytest.raises(ValueError, match="cannot convert this MetaFormer: it has no attention"):
        zoo.convert(MetaFormer(**NARROW, token_mixers=SepConv), "la")


def test_vlt_names():
    """As many parameters as VLT-S, within a tenth of its 27 million; linear mixers in all four stages."""
    names = {f"vlt_{mixer}_small" for mixer in REGISTERED_MIXERS}
    assert names | {"vlt_small"} <= set(timm.list_models("vlt_*", module="vlt"))
    model = timm.create_model("vlt_mhla_small", device="meta")
    assert abs(sum(p.numel() for p in model.parameters()) - 27e6) < 2.7e6
    assert len(sites(model)) == 18 and all(s.mixer.options.cpe == 3 for s in sites(model))
    assert model.default_cfg["architecture"] == "hla_converted"  # blocks differ between stages
    assert timm.create_model("vlt_la_small", device="meta").default_cfg["architecture"] == "vlt_la_small"


def test_vlt_has_no_weights():
    with pytest.raises(ValueError, match="no published weights of vlt_la_small, nor of its base model"):
        timm.create_model("vlt_la_small", pretrained=True)


@pytest.mark.parametrize("mixer", ["la", "mhla"])
def test_vlt_runs_and_is_saved(mixer, tmp_path):
    model = timm.create_model(f"vlt_{mixer}_small", **NARROW, mixer_options={"lepe": 3}).eval()
    stir(model)
    x = image(height=128, width=64)
    zoo.save(model, tmp_path)
    assert torch.equal(zoo.load(tmp_path).eval()(x), model(x))
    plain = timm.create_model("vlt_small", **NARROW).eval()
    zoo.convert(plain, mixer, cpe=3, lepe=3)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model(x))
