"""What diffusers does with its models works on converted ones, or says why not."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from diffusers.models.attention_processor import AttnProcessor2_0, PAGIdentitySelfAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.training_utils import EMAModel

import zoo
from tests.helpers.tiny_diffusers import CASES, cast, close, converted, gradients, host, inputs, noise, run, sites


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dit", {}),
        ("wan", {}),
        ("sd35", {}),  # two kinds of blocks
        ("sana", {"num_layers": 1}),
        ("flux", {"num_layers": 1, "num_single_layers": 1}),
    ],
)
def test_repeated_blocks_compile_into_one_graph(name, config):
    model = converted(name, "ahla", config=config, gate=True)
    wanted = run(model, inputs(name))
    wanted.square().mean().backward()
    theirs = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    found = run(model, inputs(name))
    close(found, wanted)
    found.square().mean().backward()
    for n, g in gradients(model).items():
        close(g, theirs[n])


def test_the_whole_model_compiles_with_a_grid_and_checkpointing():
    model = converted("wan", "ahla", config={"num_layers": 1}, depthwise="v")
    model.enable_gradient_checkpointing()
    run(model, inputs("wan")).square().mean().backward()
    theirs = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    run(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs("wan")).square().mean().backward()
    for n, g in gradients(model).items():
        close(g, theirs[n])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision(name, dtype):
    model = converted(name, "ahla", gate=True)
    wanted = run(model, inputs(name))
    found = run(model.to(dtype), cast(inputs(name), dtype))
    assert found.dtype == dtype and (found.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("mixer", ["ahla", "hla2", "poly"])
def test_gradients_of_bfloat16_weights(mixer):
    """The error against float32 is at most twice the error of the softmax model."""
    lost = []
    for model in (host("dit"), converted("dit", mixer, gate=True)):
        grads = []
        for dtype in (torch.float32, torch.bfloat16):
            model = model.bfloat16().to(dtype)
            model.zero_grad()
            run(model, cast(cast(inputs("dit"), torch.bfloat16), dtype)).float().square().mean().backward()
            grads.append(torch.cat([g.float().flatten() for g in gradients(model).values()]))
            assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
        lost.append(float((grads[1] - grads[0]).norm() / grads[0].norm()))
    assert 0 < lost[1] <= 2 * lost[0], lost


@pytest.mark.parametrize("name", ["pixart", "wan", "sd3", "flux"])
def test_layerwise_casting_leaves_the_mixers(name):
    model = converted(name, "ahla", gate=True)
    wanted = run(model, inputs(name))
    model = model.to(torch.bfloat16)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    site = sites(model)[0]
    assert site.to_q.weight.dtype == torch.float8_e4m3fn
    assert {p.dtype for p in site.mixer.parameters()} == {torch.bfloat16}
    found = run(model, cast(inputs(name), torch.bfloat16))
    assert (found.float() - wanted).norm() < 0.2 * wanted.norm()
    with pytest.raises(ValueError, match="convert the model before it is quantised or cast"):
        zoo.convert(model, "la")


@pytest.mark.parametrize("name", ["dit", "wan", "flux"])
def test_cpu_offload(name):
    model = converted(name, "poly", gate=True, depthwise="v")
    wanted = run(model, inputs(name))
    cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(run(model, inputs(name)), wanted)


def test_ema_is_saved_as_a_model(tmp_path):
    model = converted("dit", "ahla", gate=True)
    ema = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    ema.step(model.parameters())
    ema.save_pretrained(tmp_path)
    again = EMAModel.from_pretrained(tmp_path, model_cls=type(model))
    averaged = type(model).from_pretrained(tmp_path)
    ema.copy_to(model.parameters())
    assert torch.equal(run(averaged, inputs("dit")), run(model, inputs("dit")))
    assert again.optimization_step == 1
    assert all(torch.equal(a, b) for a, b in zip(again.shadow_params, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["pixart", "sd3", "sd35", "flux", "wan"])
def test_fused_projections_keep_the_mixers(name):
    kept = [] if name == "sd35" else [0]  # the host itself cannot fuse its second attention
    model = converted(name, "ahla", keep_softmax=kept)
    wanted = run(model, inputs(name))
    model.fuse_qkv_projections()
    assert all(site.fused and site.mixer_name == "ahla" for site in sites(model))
    close(run(model, inputs(name)), wanted)
    model.unfuse_qkv_projections()
    assert not any(site.fused for site in sites(model))
    close(run(model, inputs(name)), wanted)


def test_other_processors_are_refused():
    model = converted("pixart", "ahla")
    wanted = run(model, inputs("pixart"))
    model.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(run(model, inputs("pixart")), wanted)
    with pytest.raises(ValueError, match="PAGIdentitySelfAttnProcessor2_0 does more than the self-attention"):
        model.set_attn_processor(PAGIdentitySelfAttnProcessor2_0())
    guided = host("pixart")
    guided.transformer_blocks[1].attn1.set_processor(PAGIdentitySelfAttnProcessor2_0())
    with pytest.raises(ValueError, match="PAGIdentitySelfAttnProcessor2_0 does more"):
        zoo.convert(guided, "la")


def test_adapters_of_images_are_refused():
    model = converted("flux", "ahla")
    with pytest.raises(ValueError, match="does more than the self-attention"):
        model.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(32, 32))
    with pytest.raises(ValueError, match="cannot honour the argument 'ip_hidden_states'"):
        run(model, {**inputs("flux"), "joint_attention_kwargs": {"ip_hidden_states": [noise(2, 4, 32)]}})


@pytest.mark.parametrize("name", CASES)
def test_copies_have_grids_of_their_own(name):
    model = converted(name, "la", depthwise="v")
    wanted = run(model, inputs(name))
    other = copy.deepcopy(model)
    assert run(other, inputs(name, size=12)).isfinite().all()
    assert torch.equal(run(model, inputs(name)), wanted) and torch.equal(run(other, inputs(name)), wanted)
