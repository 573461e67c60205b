"""Converted diffusers models on a GPU: bit equality, DiT-XL/2, Inductor, offloading, Wan in Triton."""

import copy
import math

import pytest
import torch
from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel, WanTransformer3DModel
from torch.profiler import ProfilerActivity, profile

import hla_kernels
import zoo
from tests.helpers.tiny_diffusers import (
    CASES,
    Copies,
    build,
    cast,
    close,
    converted,
    gradients,
    host,
    inputs,
    noise,
    record,
    run,
)
from tests.helpers.tiny_pipelines import image, pipeline, vae
from zoo.mixers.layers import swap_rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(arguments: dict, dtype: torch.dtype = torch.float32) -> dict:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in cast(arguments, dtype).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if record(name).mixer == "softmax"])
def test_softmax_is_the_host(name, dtype):
    wanted = host(name).to("cuda", dtype)
    model = copy.deepcopy(wanted)
    zoo.convert(model, "softmax")
    assert torch.equal(run(model, on_gpu(inputs(name), dtype)), run(wanted, on_gpu(inputs(name), dtype)))


@pytest.mark.parametrize("mixer", ["la", "ahla"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_cpu(name, mixer):
    model = converted(name, mixer, gate=True, depthwise="v")
    wanted = run(model, inputs(name))
    wanted.square().mean().backward()
    theirs = gradients(model)
    model = model.cuda()
    model.zero_grad()
    found = run(model, on_gpu(inputs(name)))
    torch.testing.assert_close(found.cpu(), wanted, rtol=2e-3, atol=2e-3)
    found.square().mean().backward()
    for n, g in gradients(model).items():
        assert (g.cpu() - theirs[n]).norm() <= 5e-3 * theirs[n].norm() + 1e-5, n


@pytest.mark.parametrize("size", [32, 64])
def test_dit_xl_2_in_bfloat16(size):
    """Output and gradients against float32, with checkpointing; evaluation mode, since training drops labels."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = DiTTransformer2DModel(sample_size=size, out_channels=8, num_embeds_ada_norm=1000).eval()
    zoo.convert(model, "ahla", depthwise="v", gate=True)
    labels = {"timestep": torch.tensor([3, 800]), "class_labels": torch.tensor([1, 2])}
    arguments = on_gpu({"hidden_states": noise(2, 4, size, size), **labels})
    model.enable_gradient_checkpointing()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        o = run(model.to(dtype), cast(arguments, dtype)).float()
        o.square().mean().backward()
        grads = {n: g.float() for n, g in gradients(model).items() if ".attn1." in n}
        results.append((o.detach(), grads))
    (exact, theirs), (found, ours) = results
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert len(ours) == 28 * 14 and all(g.isfinite().all() and g.any() for g in ours.values())
    errors = {}
    for kind in {n.split(".attn1.")[1] for n in ours}:
        a, b = (torch.stack([g for n, g in grads.items() if n.endswith(kind)]) for grads in (ours, theirs))
        errors[kind] = ((a - b).norm() / b.norm()).item()
    assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("name", ["dit", "wan", "flux"])
def test_blocks_compile_with_inductor(name):
    model = converted(name, "ahla", gate=True, depthwise="v").cuda()
    wanted = run(model, on_gpu(inputs(name)))
    wanted.square().mean().backward()
    theirs = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True)
    found = run(model, on_gpu(inputs(name)))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    found.square().mean().backward()
    for n, g in gradients(model).items():
        assert (g - theirs[n]).norm() <= 5e-3 * theirs[n].norm() + 1e-5, n


def test_pipelines_offload_to_the_cpu():
    transformer = build(CASES["dit"], num_embeds_ada_norm=1000)
    pipe = DiTPipeline(transformer, vae(), DDIMScheduler())
    zoo.convert(pipe, "poly", gate=True, depthwise="v")
    arguments = pipeline("dit")[1]
    wanted = image(pipe.to("cuda"), arguments)
    for enable in (pipe.enable_model_cpu_offload, pipe.enable_sequential_cpu_offload):
        pipe.to("cpu")
        enable()
        assert torch.equal(image(pipe, arguments), wanted)
        pipe.remove_all_hooks()


@pytest.mark.parametrize("name", ["pixart", "wan", "sd35", "flux"])
def test_group_offload(name):
    model = converted(name, "poly", gate=True, depthwise="v")
    with torch.no_grad():
        wanted = run(copy.deepcopy(model).cuda(), on_gpu(inputs(name)))
        model.enable_group_offload(torch.device("cuda"), offload_type="leaf_level")
        close(run(model, on_gpu(inputs(name))), wanted)


@pytest.mark.parametrize("order", ["la", "hla2"])
def test_wan_prepares_queries_in_one_kernel(order):
    """The same function as with norm, map and rotation one after the other, output and gradients: at most twice as far
    from float64 as the same layer in bfloat16 with softmax's norms and the operator's rotation."""
    torch.manual_seed(0)
    grid = (3, 8, 12)
    with torch.device("cuda"):
        model = WanTransformer3DModel(num_layers=1, num_attention_heads=4, ffn_dim=64, text_dim=64)
        zoo.convert(model, "mhla", blocks=[3, 2, 3], order=order, feature_map="relu", normalize=False, post_norm=True)
        x = torch.randn(2, math.prod(grid), 512)
        turns = model.rope(torch.empty(2, 16, grid[0], 2 * grid[1], 2 * grid[2]))
    site = model.blocks[0].attn1
    site.grid = grid
    torch.nn.init.normal_(site.norm_q.weight, 1.0, 0.3)

    def outcome(dtype, early):
        site.to(dtype).zero_grad()
        swap_rms_norm(site.norm_q, early), swap_rms_norm(site.norm_k, early)
        y = site(x.to(dtype), rotary_emb=tuple(t.to(torch.float64) for t in turns) if dtype == torch.float64 else turns)
        y.backward(torch.ones_like(y) * torch.linspace(-1, 1, y.shape[-1], device="cuda", dtype=dtype))
        return [
            y.detach(),
            site.to_q.weight.grad,
            site.norm_q.weight.grad,
            site.to_k.weight.grad,
            site.to_v.weight.grad,
        ]

    weights = {name: p.detach().clone() for name, p in site.bfloat16().named_parameters()}
    early, plain = outcome(torch.bfloat16, True), outcome(torch.bfloat16, False)
    early, plain = ([t.double().clone() for t in found] for found in (early, plain))
    site.double().load_state_dict(weights, strict=False)
    truth = outcome(torch.float64, False)
    for a, b, t in zip(early, plain, truth, strict=True):
        assert (a - t).norm() <= 2 * (b - t).norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "options", [{"feature_map": "relu"}, {"feature_map": "relu", "normalize": False}, {"feature_map": "elu1"}], ids=str
)
def test_wan_mixes_blocks_in_triton(monkeypatch, options, autocast):
    """A converted self-attention of Wan 2.1 1.3B, bfloat16 or float32 weights under autocast: norms, rotation and
    feature map in kernels, and no operator returns a float32 tensor of the size of its tokens."""
    torch.manual_seed(0)
    grid, b = (5, 12, 24), 2  # long enough not to run by pairs of tokens
    with torch.device("cuda"):
        model = WanTransformer3DModel(num_layers=1, num_attention_heads=12, ffn_dim=64, text_dim=64)
        zoo.convert(model, "mhla", blocks=[5, 3, 6], **options)
        x = torch.randn(b, math.prod(grid), 1536, dtype=torch.bfloat16, requires_grad=True)
        turns = model.rope(torch.empty(b, 16, grid[0], 2 * grid[1], 2 * grid[2]))
    site, calls = model.blocks[0].attn1.to(torch.float32 if autocast else torch.bfloat16), []
    site.grid = grid
    operator = type(site.mixer).operator
    monkeypatch.setattr(
        type(site.mixer), "operator",
        staticmethod(lambda *t, **o: calls.append(hla_kernels.explain("mhla", *t, **o)) or operator(*t, **o)),
    )  # fmt: skip
    grad = torch.randn_like(x)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        site(x, rotary_emb=turns).backward(grad)  # compiles
        with profile(activities=[ProfilerActivity.CUDA]) as seen, Copies(x.numel()) as copies:
            site(x, rotary_emb=turns).backward(grad)
            torch.cuda.synchronize()
    assert [call.impl for call in calls] == ["triton"] * 2
    kernels = {event.key for event in seen.key_averages()}
    assert {"blockmix_reduce_moments", "blockmix_mix", "blockmix_read_out", "blockmix_token_grads"} <= kernels
    assert ({"norm_rows", "norm_grads"} <= kernels) == (autocast or not options.get("normalize", True))
    assert copies.found == []
