"""timm models on a GPU in bfloat16: bitwise softmax, accuracy of every mixer, compiled models.

Run with `pytest -m gpu tests/models/timm/test_gpu.py`. Errors are compared with the error that bfloat16 causes in the
softmax host: relative errors of output tokens and attention gradients, on the GPU against float32 on the CPU, with the
same weights and images.
"""

import copy
import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from tests.helpers.tiny_models import MIXERS, image, padded, tiny
from zoo.mixers import MIXERS as CLASSES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: bfloat16 on a GPU is not checked here"),
]
DEVICE = "cuda"
BASE, ROTARY = "vit_tiny_patch16_224", "vit_small_patch16_rope_224"
SIZES = {"img_size": 128, "embed_dim": 64, "depth": 3}  # 65 tokens, heads of 32 channels
TOKENS = {"num_classes": 0, "global_pool": ""}  # the output is all tokens
OPTIONS = [{}, {"causal": True, "decay": 0.9, "scan": "both"}, {"depthwise": "v", "gate": True, "post_norm": True}]
NO_DECAY = {
    **dict.fromkeys(["poly", "taylor2", "multipole", "mala", "rala", "mesa", "resolvent"], "two-sided only"),
    "mhla": "no decay",
    "mhla2": "no decay",
}
TIMES = 1.5  # a mixer with elu1 may lose this many times what softmax loses; measured on an H200: 1.02 at most


def make(mixer=None, base=BASE, **options):
    """A narrow model, converted if a mixer is named, with weights that make the output depend on the attention.

    At initialisation queries are almost zero and layer scales 1e-5: every mixer would give the same output.
    """
    model = tiny(base, **SIZES, **TOKENS)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "attn.qkv.weight" in name or "attn.proj.weight" in name:
                p.normal_(std=p.shape[1] ** -0.5)
            elif "gamma" in name:
                p.fill_(1)
    if mixer is not None:
        zoo.convert(model, mixer, **options)
    return model


def run(model, device, dtype):
    """Output, and gradients of all attention layers, of one pass over two images, as float32 vectors on the CPU."""
    model = model.to(device, dtype).train()
    model.zero_grad()
    y = model(image(height=128, width=128).to(device, dtype))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (y.float() * weights).mean().backward()
    grads = [p.grad for n, p in model.named_parameters() if ".qkv." in n or ".mixer." in n]
    grads = [grad.float().flatten().cpu() for grad in grads]
    return y.detach().float().flatten().cpu(), torch.cat(grads)


def errors(model) -> tuple[float, float]:
    """Relative errors (output, gradients) of bfloat16 on the GPU against float32 on the CPU."""
    model = model.bfloat16()  # the weights of both runs are the same numbers
    exact = run(model, "cpu", torch.float32)
    found = run(model, DEVICE, torch.bfloat16)
    assert all(t.isfinite().all() for t in found)
    return tuple(((f - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True))


@functools.cache
def of_softmax(base: str = BASE) -> tuple[float, float]:
    return errors(make(base=base))


@pytest.mark.parametrize("base", [BASE, ROTARY, "vit_small_patch16_dinov3", "vit_little_patch16_reg4_gap_256"])
def test_softmax_is_the_host_bit_for_bit(base):
    host, model = (make(m, base).to(DEVICE, torch.bfloat16).eval() for m in (None, "softmax"))
    x = image(height=128, width=128).to(DEVICE, torch.bfloat16)
    assert torch.equal(host(x), model(x))
    with sdpa_kernel(SDPBackend.MATH):  # the fused backward adds in no fixed order
        wanted, found = (run(m, DEVICE, torch.bfloat16) for m in (host, model))
    assert torch.equal(wanted[0], found[0]) and torch.equal(wanted[1], found[1])


def assert_as_exact_as_softmax(found, base, name, times=TIMES):
    yardstick = of_softmax(base)
    print(f"{name}: output {found[0]:.2e} (softmax {yardstick[0]:.2e}), gradients {found[1]:.2e} ({yardstick[1]:.2e})")
    assert found[0] <= times * yardstick[0] and found[1] <= times * yardstick[1]


def maps_of(mixer):
    """(feature map, the times that it may lose) of a mixer: a power p makes errors of q and k p times as large."""
    defaults = CLASSES[mixer].defaults
    power = defaults.feature_map == "power"
    return [("elu1", TIMES), ("power", TIMES * defaults.exponent)] if power else [(defaults.feature_map, TIMES)]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "local"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_are_as_exact_as_softmax(mixer, options):
    if mixer in NO_DECAY and options.get("causal"):
        with pytest.raises(ValueError, match=NO_DECAY[mixer]):
            make(mixer, **options)
        return
    for feature_map, times in maps_of(mixer):
        model = make(mixer, feature_map=feature_map, **options)
        assert_as_exact_as_softmax(errors(model), BASE, f"{mixer} {feature_map} {options}", times)


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "resolvent"])  # which refuses rotary hosts
def test_mixers_of_rotary_hosts_are_as_exact_as_softmax(mixer):
    for feature_map, times in maps_of(mixer):
        model = make(mixer, ROTARY, feature_map=feature_map)
        assert_as_exact_as_softmax(errors(model), ROTARY, f"rotary {mixer} {feature_map}", times)


@pytest.mark.parametrize(("mixer", "options"), [("ahla", OPTIONS[2]), ("hla2", OPTIONS[1]), ("poly", {})])  # with elu1
def test_inductor_compiles_whole_models(mixer, options):
    torch._dynamo.reset()
    model = make(mixer, feature_map="elu1", **options).to(DEVICE, torch.bfloat16)
    wanted = run(model, DEVICE, torch.bfloat16)
    found = run(torch.compile(model, fullgraph=True), DEVICE, torch.bfloat16)
    assert all(t.isfinite().all() for t in found)
    for f, w, limit in zip(found, wanted, of_softmax(), strict=True):
        assert (f - w).norm() <= 2 * limit * w.norm()  # both sides are rounded


def naflex_error(mixer: str, **options) -> float:
    """Relative error in bfloat16 of a padded batch, against float32 on the CPU."""
    model = tiny("naflexvit_base_patch16_gap", embed_dim=128, num_heads=2, depth=3, num_classes=64)
    zoo.convert(model, mixer, **options)
    batch = padded(length=16)
    batch["patches"] = batch["patches"].where(batch["patch_valid"][..., None], 0).bfloat16()
    model = model.bfloat16().eval()
    found = copy.deepcopy(model).to(DEVICE)({k: x.to(DEVICE) for k, x in batch.items()}).float().cpu()
    exact = model.float()({**batch, "patches": batch["patches"].float()})
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("mixer", ["la", "ahla", "hla2", "poly"])
def test_padded_batches_are_as_exact_as_softmax(mixer):
    """NaFlexViT, whose padding is a mask of keys in the fused kernels."""
    yardstick = naflex_error("softmax")
    for feature_map, times in maps_of(mixer):
        found = naflex_error(mixer, feature_map=feature_map)
        print(f"NaFlex {mixer} {feature_map}: {found:.2e} (softmax {yardstick:.2e})")
        assert found <= times * yardstick
