"""Full models under torch.compile without graph breaks, torch.export and autocast."""

from collections import Counter
from functools import cache

import diffusers
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import zoo
from tests.helpers.tiny_models import GRID_OPTIONS, GRIDLESS, MIXERS, gradients, image, sites, tiny
from zoo.mixers import MIXERS as CLASSES
from zoo.models import hla_name

NAME = "vit_ahla_tiny_patch16_224"
WHOLE = ["ahla", *(mixer for mixer in MIXERS if mixer not in GRIDLESS)]  # test_block has blocks of all the others


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(model):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("mixer", WHOLE)
def test_fullgraph_forward_and_backward(mixer):
    depth = 2 if mixer == "ahla" else 1
    model = tiny(hla_name("vit_tiny_patch16_224", mixer), mixer_options=GRID_OPTIONS, depth=depth)
    fast, _ = compiled(model)
    found, wanted = fast(image()), model(image())
    assert torch.allclose(found, wanted, atol=1e-5)
    wanted.square().sum().backward()
    plain = gradients(model)
    model.zero_grad()
    found.square().sum().backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3"])
def test_fullgraph_of_rotary_models(name):
    model = tiny(name, depth=1).eval()
    zoo.convert(model, "hla2")
    fast, _ = compiled(model)
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)


def operations(model, blocks, **inputs):
    """What the compiled first block calls, forward and backward, in a training step under bfloat16 autocast, without
    the views, which move nothing."""
    found = Counter()

    def keep(graph, _):
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    getattr(model, blocks)[0].compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs)
    (out if torch.is_tensor(out) else out.sample).square().mean().backward()
    del found["aten.view.default"]
    return found


def dit():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "sample_size": 8}
    return diffusers.DiTTransformer2DModel(**sizes, in_channels=4, out_channels=8)


def vit_operations(model):
    return operations(model, "blocks", x=image())


def dit_operations(model):
    label = torch.tensor([3])
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": label, "class_labels": label}
    return operations(model, "transformer_blocks", **inputs)


@cache
def of_the_hosts():
    return vit_operations(tiny("vit_tiny_patch16_224", depth=1)), dit_operations(dit())


@pytest.mark.parametrize("mixer", ["la", "ahla"])
def test_a_converted_block_adds_its_operator_and_nothing_else(mixer):
    """No cast, copy, transpose or feature map that the softmax block does not have."""
    vit_host, dit_host = of_the_hosts()
    elu1 = {"feature_map": "elu1"}
    more = vit_operations(tiny(hla_name("vit_tiny_patch16_224", mixer), mixer_options=elu1, depth=1)) - vit_host
    packed = "hla_kernels.two_sided_qkvpacked"
    assert more == {f"{packed}.default": 1, f"{packed}_backward.default": 1}
    converted = dit()
    zoo.convert(converted, mixer, **elu1)
    more = dit_operations(converted) - dit_host
    assert more == {"hla_kernels.two_sided.default": 1, "hla_kernels.two_sided_backward.default": 1}


@torch.no_grad()
def test_two_batch_sizes_make_one_dynamic_graph():
    model = tiny(NAME, mixer_options=GRID_OPTIONS, depth=1).eval()
    fast, counter = compiled(model)
    for batch in (2, 3, 4, 7):
        assert torch.allclose(fast(image(batch)), model(image(batch)), atol=1e-5)
    assert counter.frame_count == 2


@torch.no_grad()
def test_dynamic_image_sizes():
    model = tiny(NAME, mixer_options=GRID_OPTIONS, dynamic_img_size=True, depth=1).eval()
    fast, _ = compiled(model)
    for height, width in [(64, 64), (32, 128), (48, 80)]:
        x = image(height=height, width=width)
        found = fast(x)
        assert {s.grid for s in sites(model)} == {(height // 16, width // 16)}
        assert torch.allclose(found, model(x), atol=1e-5)


def test_checkpointing_under_compile():
    model = tiny(NAME, mixer_options=GRID_OPTIONS, dynamic_img_size=True, depth=1)
    x = image(height=32, width=96)
    model(x).square().sum().backward()
    plain = gradients(model)
    model.zero_grad()
    model.set_grad_checkpointing()
    fast, _ = compiled(model)
    fast(x).square().sum().backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mixer", WHOLE)
def test_export(mixer):
    model = tiny(hla_name("vit_tiny_patch16_224", mixer), mixer_options=GRID_OPTIONS, depth=1).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (image(),), dynamic_shapes=({0: batch},))
    x = image(5)
    assert torch.allclose(program.module()(x), model(x), atol=1e-5)


def test_export_of_dynamic_and_rotary_models():
    model = tiny(NAME, mixer_options=GRID_OPTIONS, dynamic_img_size=True, depth=1).eval()
    rotary = tiny("vit_small_patch16_rope_224", depth=1).eval()
    zoo.convert(rotary, "la")
    for each in (model, rotary):
        program = torch.export.export(each, (image(),))
        assert torch.allclose(program.module()(image(seed=4)), each(image(seed=4)), atol=1e-5)


@pytest.mark.parametrize("mixer", ["la", "mhla"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_jit_trace(mixer, dynamic):
    model = tiny("vit_tiny_patch16_224", dynamic_img_size=dynamic).eval()
    zoo.convert(model, mixer)
    with torch.no_grad():
        traced = torch.jit.trace(model, image())
        assert torch.equal(traced(image(1, seed=4)), model(image(1, seed=4)))


def test_torch_jit_trace_of_adaptive_multipole_is_refused():
    model = tiny("vit_multipole_tiny_patch16_224").eval()
    with pytest.raises(ValueError, match=r"cannot trace adaptive multipole: use torch\.export"):
        torch.jit.trace(model, image())


def test_exportable_models():
    model = tiny(NAME, exportable=True).eval()
    assert torch.equal(model(image()), tiny(NAME).eval()(image()))


@pytest.mark.parametrize("mixer", ["softmax", *MIXERS])
@pytest.mark.parametrize("base", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224"])
def test_autocast(base, mixer):
    if "rope" in base and not CLASSES[mixer].takes_rotations:
        pytest.skip("refuses rotary models")
    model = tiny(base)
    zoo.convert(model, mixer)
    wanted = model(image())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(image())
        loss = found.square().sum()
    loss.backward()
    assert found.dtype == torch.bfloat16 and (found - wanted).abs().max() < 0.1 * wanted.abs().max() + 0.05
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whole_model_casts(dtype):
    model = tiny(NAME, mixer_options={"depthwise": "v", "gate": True, "post_norm": True}).to(dtype)
    y = model(image().to(dtype))
    assert y.dtype == dtype and y.isfinite().all()
    assert sites(model)[0].mixer.tag.dtype == torch.uint8
