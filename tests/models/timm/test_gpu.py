"""timm models on a GPU in bfloat16: bitwise softmax, accuracy of every mixer, compiled models.

Run with `pytest -m gpu tests/models/timm/test_gpu.py`. Errors are relative errors of output tokens and attention
gradients against float32 on the CPU, with the same weights and images. The limit is the error of the same bfloat16
model whose mixers compute in float32: their inputs and outputs, and the other layers, are rounded, which costs a
sensitive mixer (ridge regression in `mesa`, sums without a norm) two to five times what it costs softmax.
"""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from tests.helpers.mixers import DELTA, options_of
from tests.helpers.tiny_models import MIXERS, image, padded, tiny
from zoo.mixers import MIXERS as CLASSES
from zoo.mixers.protocol import Mixer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: bfloat16 on a GPU is not checked here"),
]
DEVICE = "cuda"
BASE, ROTARY = "vit_tiny_patch16_224", "vit_small_patch16_rope_224"
SIZES = {"img_size": 128, "embed_dim": 64, "depth": 3}  # 65 tokens, heads of 32 channels
TOKENS = {"num_classes": 0, "global_pool": ""}  # the output is all tokens
OPTIONS = [{}, {"causal": True, "decay": 0.9, "scan": "both"}, {"depthwise": "v", "gate": True, "post_norm": True}]
# without the norm per head, which turns q.k of a first token into its sign: near 0 no rounding bounds the gradient
DELTA_OPTIONS = [{"scan": "both"}, {"scan": "raster", "depthwise": "v", "activation": "identity"}, {}]
DELTA_OPTIONS = [{"post_norm": False, **options} for options in DELTA_OPTIONS]
NO_DECAY = {name: "two-sided only" for name in MIXERS if getattr(CLASSES[name].defaults, "two_sided", False)}
NO_DECAY |= dict.fromkeys(["mhla", "mhla2"], "no option decay")
# so is the gradient of the gates of `strassen`, whose sum over all tokens is 0 but for rounding
WITHOUT_NORM = dict.fromkeys(DELTA, DELTA_OPTIONS)
WITHOUT_NORM["strassen"] = [{**options, "post_norm": False} for options in OPTIONS]
# all tiles of keys exact: which tiles a query reads is a choice, and a near tie falls otherwise after rounding
EXACT = {"multipole": {"density": 1.0}}
# q, k, v and o are rounded in any case; a mixer that rounds r times more loses sqrt(1 + r / 4) times as much
ROUNDINGS = 5  # two features, two convolutions, a gate
# of further projections: second keys and values, divided queries; of delta rules: three convolutions, three
# activations, decayed queries and keys, weights of a chunk, states, a gate
FURTHER = {"strassen": 8, "multilinear": 8} | dict.fromkeys(DELTA, 11)
SEEDS = range(1, 5)  # of images: errors of sums without a norm vary by a factor of two from image to image


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


def run(model, device, dtype, seed=1):
    """Output, and gradients of all attention layers, of one pass over two images, as float32 vectors on the CPU."""
    model = model.to(device, dtype).train()
    model.zero_grad()
    y = model(image(height=128, width=128, seed=seed).to(device, dtype))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (y.float() * weights).mean().backward()
    grads = [p.grad for n, p in model.named_parameters() if ".qkv." in n or ".mixer." in n]
    grads = [grad.float().flatten().cpu() for grad in grads]
    return y.detach().float().flatten().cpu(), torch.cat(grads)


def errors(model) -> dict[str, list[float]]:
    """Relative errors (output, gradients) of bfloat16 against float32 on the CPU: "all" on the GPU, "rest" on the CPU
    with mixers in float32. Geometric means over `SEEDS`."""
    model = model.bfloat16()  # the weights of all runs are the same numbers
    places = {"all": (model, DEVICE), "rest": (with_wide_mixers(model), "cpu")}
    logs = {which: torch.zeros(2) for which in places}
    for seed in SEEDS:
        exact = run(copy.deepcopy(model), "cpu", torch.float32, seed)
        for which, (rounded, device) in places.items():
            found = run(rounded, device, torch.bfloat16, seed)
            assert all(t.isfinite().all() for t in found)
            logs[which] += torch.stack([((a - b).norm() / b.norm()).log() for a, b in zip(found, exact, strict=True)])
    return {which: (total / len(SEEDS)).exp().tolist() for which, total in logs.items()}


def with_wide_mixers(model):
    """A copy of a bfloat16 model whose mixers compute in float32 between a rounded input and a rounded output."""
    model = copy.deepcopy(model)
    for mixer in model.modules():
        if isinstance(mixer, Mixer):
            mixer.register_forward_pre_hook(widen)
            mixer.register_forward_hook(lambda mixer, args, o: o.bfloat16())
    return model


def widen(mixer, args):
    mixer.float()
    *tokens, ctx = args
    rotation = ctx.rotate and replace(
        ctx.rotate,
        rotate=lambda t: ctx.rotate(t).float(),
        tables=lambda: tuple(t.float() for t in ctx.rotate.tables()),
    )
    return *(t.float() for t in tokens), replace(ctx, x=ctx.x.float(), qkv=None, rotate=rotation)


@functools.cache
def of_softmax() -> list[float]:
    return errors(make())["all"]


@pytest.mark.parametrize("base", [BASE, ROTARY, "vit_small_patch16_dinov3", "vit_little_patch16_reg4_gap_256"])
def test_softmax_is_the_host_bit_for_bit(base):
    host, model = (make(m, base).to(DEVICE, torch.bfloat16).eval() for m in (None, "softmax"))
    x = image(height=128, width=128).to(DEVICE, torch.bfloat16)
    assert torch.equal(host(x), model(x))
    with sdpa_kernel(SDPBackend.MATH):  # the fused backward adds in no fixed order
        wanted, found = (run(m, DEVICE, torch.bfloat16) for m in (host, model))
    assert torch.equal(wanted[0], found[0]) and torch.equal(wanted[1], found[1])


def assert_exact(model, mixer, name):
    found, times = errors(model), (1 + FURTHER.get(mixer, ROUNDINGS) / 4) ** 0.5
    for i, what in enumerate(("output", "gradients")):
        print(f"{name}: {what} {found['all'][i]:.2e}, with mixers in float32 {found['rest'][i]:.2e}")
        assert found["all"][i] <= times * found["rest"][i]


def maps_of(mixer):
    """Feature maps to test, as options."""
    if not options_of(mixer, feature_map=""):
        return [{}]
    default = CLASSES[mixer].defaults.feature_map
    return [{"feature_map": name} for name in (["elu1", "power"] if default == "power" else [default])]


@pytest.mark.parametrize("i", range(3), ids=["plain", "causal", "local"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_add_little_error(mixer, i):
    options = options_of(mixer, **WITHOUT_NORM.get(mixer, OPTIONS)[i], **EXACT.get(mixer, {}))
    if mixer in NO_DECAY and options.get("causal"):
        with pytest.raises(ValueError, match=NO_DECAY[mixer]):
            make(mixer, **options)
        return
    for feature_map in maps_of(mixer):
        assert_exact(make(mixer, **options, **feature_map), mixer, f"{mixer} {feature_map} {options}")


@pytest.mark.parametrize("mixer", [name for name in MIXERS if CLASSES[name].takes_rotations])
def test_mixers_of_rotary_hosts_add_little_error(mixer):
    options = EXACT.get(mixer, {}) | ({"post_norm": False} if mixer in WITHOUT_NORM else {})
    for feature_map in maps_of(mixer):
        assert_exact(make(mixer, ROTARY, **options, **feature_map), mixer, f"rotary {mixer} {feature_map}")


@pytest.mark.parametrize(("mixer", "options"), [("ahla", OPTIONS[2]), ("hla2", OPTIONS[1]), ("poly", {})])  # with elu1
def test_inductor_compiles_whole_models(mixer, options):
    torch._dynamo.reset()
    model = make(mixer, feature_map="elu1", **options).to(DEVICE, torch.bfloat16)
    wanted = run(model, DEVICE, torch.bfloat16)
    found = run(torch.compile(model, fullgraph=True), DEVICE, torch.bfloat16)
    assert all(t.isfinite().all() for t in found)
    for f, w, limit in zip(found, wanted, of_softmax(), strict=True):
        assert (f - w).norm() <= 2 * limit * w.norm()  # both sides are rounded


def test_delta_mixers_compile_as_one_graph():
    torch._dynamo.reset()
    model = make("gdn").to(DEVICE, torch.bfloat16)
    run(torch.compile(model, fullgraph=True, backend="aot_eager"), DEVICE, torch.bfloat16)


@pytest.mark.parametrize("mixer", ["la", "ahla", "hla2", "poly"])
def test_padded_batches_add_little_error(mixer):
    """NaFlexViT, whose padding is a mask of keys in the fused kernels."""
    batch = padded(length=16)
    batch["patches"] = batch["patches"].where(batch["patch_valid"][..., None], 0).bfloat16()
    for feature_map in maps_of(mixer):
        model = tiny("naflexvit_base_patch16_gap", embed_dim=128, num_heads=2, depth=3, num_classes=64)
        zoo.convert(model, mixer, **feature_map)
        model = model.bfloat16().eval()
        rest = with_wide_mixers(model)(batch).float()
        found = copy.deepcopy(model).to(DEVICE)({k: x.to(DEVICE) for k, x in batch.items()}).float().cpu()
        exact = model.float()({**batch, "patches": batch["patches"].float()})
        error, least = ((t - exact).norm() / exact.norm() for t in (found, rest))
        print(f"NaFlex {mixer} {feature_map}: {error:.2e}, with mixers in float32 {least:.2e}")
        assert error <= (1 + ROUNDINGS / 4) ** 0.5 * least
