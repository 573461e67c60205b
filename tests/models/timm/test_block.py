"""A converted block under torch.compile, torch.export, checkpointing, autocast and CUDA graphs.

The packed operator reads the projection, and nothing is copied around the attention.
"""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zoo
from hla_kernels import explain
from tests.helpers.tiny_models import GRIDLESS, gradients, image, tiny
from tests.ops.fused.cases import kernel_names
from zoo.mixers import MIXERS, LinearMixer

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
PLAIN = "vit_tiny_patch16_224"
COPIES = ("clone", "copy", "contiguous", "cat", "stack", "_to_copy")
# hla2 and hla3 differ from ahla in the name of the operator, which tests/ops/citizen compiles and exports
ONE_OF_EACH = [m for m in GRIDLESS if torch.cuda.is_available() or m not in ("hla2", "hla3")]
WIDTH = 64  # two heads of 32 channels, which the Triton forms take


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def make_block(mixer: str, device: str = "cpu", **options):
    """The first block of a small converted ViT; bfloat16 on a GPU."""
    model = tiny("vit_tiny_patch16_224", embed_dim=WIDTH)
    zoo.convert(model, mixer, **options)
    return model.blocks[0].to(device, dtype_of(device))


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def tokens(n: int, device: str = "cpu", batch: int = 2, seed: int = 0) -> torch.Tensor:
    x = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype_of(device)).requires_grad_()


def results(block, x, f=None) -> list[torch.Tensor]:
    """Output and all gradients of one pass."""
    block.zero_grad()
    y = (block if f is None else f)(x)
    weights = [x, *block.parameters()]
    return [y.detach(), *torch.autograd.grad(y, weights, y.detach().float().cos().to(y.dtype), allow_unused=True)]


def assert_close(found, wanted, exact=None):
    """Equal up to the order of additions: a compiler fuses and reorders the host's own norms and products. The gradient
    of a few numbers is a sum that nearly cancels: with `exact`, the results in float32, the difference may also be
    twice the error of the eager call."""
    limit = 2e-2 if found[0].dtype == torch.bfloat16 else 1e-5
    for f, w, e in zip(found, wanted, exact or wanted, strict=True):
        assert (f is None) == (w is None)
        if w is not None:
            assert distance(f, w) <= limit * float(w.float().norm()) + 2 * distance(w, e) + 1e-6


def distance(a, b):
    return float((a.float() - b.float()).norm())


def in_float32(block, x):
    """`results` of the block in float32."""
    return results(copy.deepcopy(block).float(), x.detach().float().requires_grad_())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", ONE_OF_EACH)
def test_one_graph_for_every_number_of_tokens(mixer, device):
    block = make_block(mixer, device)
    if device == "cpu" and mixer != "ahla":
        block = block.attn  # the rest of a block is the same for all, and tracing it takes as long
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    fast = torch.compile(block, backend=counter, fullgraph=True)
    frames = set()
    for n in (50, 197, 65, 333):
        x = tokens(n, device)
        torch._dynamo.mark_dynamic(x, 1)  # an error where the number is fixed
        exact = in_float32(block, x) if device == "cuda" else None
        assert_close(results(block, x, fast), results(block, x), exact)
        frames.add(counter.frame_count)
    assert len(frames) == 1


@pytest.mark.parametrize("mixer", ONE_OF_EACH)
def test_export_with_any_number_of_tokens(mixer):
    layer = make_block(mixer).attn.eval()  # test_compile_export exports whole models
    n, b = torch.export.Dim("n", min=2, max=8192), torch.export.Dim("b", min=1, max=64)
    program = torch.export.export(layer, (tokens(50).detach(),), dynamic_shapes=({0: b, 1: n},)).module()
    for count, batch in ((2, 3), (64, 1), (197, 2)):
        x = tokens(count, batch=batch).detach()
        torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, compiled, device):
    if reentrant and compiled:
        pytest.skip("torch compiles the non-reentrant form only")
    block = make_block("hla2", device)
    x = tokens(65, device)
    f = lambda x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    f = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    block.zero_grad()
    y = f(x)
    y.backward(torch.ones_like(y))
    found = [y.detach(), x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    z = tokens(65, device)
    y = block(z)
    y.backward(torch.ones_like(y))
    wanted = [y.detach(), z.grad, *(p.grad for p in block.parameters())]
    if compiled:
        assert_close(found, wanted)
    else:
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True) if w is not None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixer", [m for m in GRIDLESS if issubclass(MIXERS[m], LinearMixer)])
def test_autocast_gives_the_bits_of_the_cast_attention(mixer, device):
    """Under autocast the operator sees the projection's bfloat16 and nothing else changes."""
    block = make_block(mixer, device).float()
    seen = []
    handle = block.attn.mixer.register_forward_hook(lambda m, args, o: seen.append((args, o)))
    x = tokens(65, device).detach().float().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = block(x)
        y.float().square().mean().backward()
    handle.remove()
    (q, k, v, ctx), o = seen[0]
    assert q.dtype == k.dtype == v.dtype == o.dtype == torch.bfloat16
    assert torch.equal(block.attn.mixer(q, k, v, ctx), o)
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs are captured there only")
@pytest.mark.parametrize("mixer", GRIDLESS)
def test_cuda_graph_of_forward_and_backward(mixer):
    block = make_block(mixer, "cuda")
    x, other = tokens(197, "cuda"), tokens(197, "cuda", seed=1)
    wanted = results(block, other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(block, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(block, x)
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    assert all(torch.equal(f, w) for f, w in zip(captured, wanted, strict=True) if w is not None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs are captured there only")
@pytest.mark.parametrize("mixer", GRIDLESS)
def test_graphs_of_the_compiler(mixer):
    """mode="reduce-overhead": captured, and replayed on other inputs."""
    block = make_block(mixer, "cuda")
    fast = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    counters["inductor"].clear()
    for seed in range(4):
        x = tokens(197, "cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(results(block, x, fast), results(block, x), in_float32(block, x))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: only there kernels have names")
@pytest.mark.parametrize("mixer", ["la", "hla2", "ahla", "hla3", "poly", "inline"])
def test_attention_runs_our_kernels_only(mixer):
    """Between the projections, forward and backward run Triton forms only: no cast, copy or transpose."""
    options = {"feature_map": "identity", "normalize": False}
    mixer = make_block(mixer, "cuda", **options).attn.mixer
    qkv = torch.randn(2, 197, 3, 2, WIDTH // 2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    name = mixer.operator.__name__
    chosen = explain(name, qkv, *mixer.parameters(), feature_map="identity")
    if chosen.impl != "triton":
        pytest.skip(chosen.why_not["triton"])
    ctx = zoo.mixers.Context(x=qkv, qkv=qkv)
    grad = torch.randn(2, 197, 2, WIDTH // 2, device="cuda", dtype=torch.bfloat16)

    def step():
        torch.autograd.grad(mixer(*qkv.unbind(2), ctx), qkv, grad)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    assert names and names <= kernel_names(), names - kernel_names()


class Recorder(TorchDispatchMode):
    """The operators that run, each with the largest of its tensor results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.calls.append((func.__name__.removesuffix(".default"), max(sizes, default=0)))
        return out

    def count(self, name: str) -> int:
        return sum(found == name for found, _ in self.calls)


def attention(model, name="blocks.0.attn"):
    """One attention layer of a model, and hidden states and a gradient for it."""
    layer, width = model.get_submodule(name), model.embed_dim
    g = torch.Generator().manual_seed(3)
    return layer, torch.randn(2, 17, width, generator=g), torch.randn(2, 17, width, generator=g)


@pytest.mark.parametrize("feature_map", ["elu1", "softmax_pair", "identity"])
@pytest.mark.parametrize("mixer", ["la", "hla2", "ahla", "hla3", "poly", "inline"])  # test_packed has the others
def test_an_attention_layer_copies_nothing(mixer, feature_map):
    model = tiny(PLAIN)
    zoo.convert(model, mixer, feature_map=feature_map, normalize=feature_map != "identity" and mixer != "inline")
    layer, x, grad = attention(model)
    with Recorder() as recorder:
        layer(x.requires_grad_()).backward(grad)
    assert recorder.count("two_sided_qkvpacked") == recorder.count("two_sided_qkvpacked_backward") == 1
    assert recorder.count("two_sided") == 0
    tokens = 2 * 17 * model.embed_dim
    assert [call for call in recorder.calls if call[0] in COPIES and call[1] >= tokens] == []


@pytest.mark.parametrize(
    "base, packed",
    [
        (PLAIN, True),
        ("deit_tiny_distilled_patch16_224", True),
        ("vit_base_patch16_clip_quickgelu_224", True),
        ("eva02_tiny_patch14_224", False),  # rotary
        ("vit_small_patch16_rope_224", False),  # rotary
    ],
)
def test_which_hosts_are_read_packed(base, packed):
    model = tiny(base).eval()
    zoo.convert(model, "ahla", feature_map="elu1")
    with Recorder() as recorder:
        model(image())
    assert (recorder.count("two_sided_qkvpacked") > 0) == packed and (recorder.count("two_sided") > 0) != packed


def test_normed_queries_are_read_apart():
    model = tiny(PLAIN, qk_norm=True).eval()
    zoo.convert(model, "ahla")
    with Recorder() as recorder:
        model(image())
    assert recorder.count("two_sided") == 2 and recorder.count("two_sided_qkvpacked") == 0


@pytest.mark.parametrize("mixer", GRIDLESS)
def test_models_are_the_same_packed_and_apart(mixer, monkeypatch):
    """Bit for bit in the torch form, gradients of all parameters too, and the same state dict."""
    model = tiny(PLAIN)
    zoo.convert(model, mixer)
    results = []
    for packed in (True, False):
        if not packed:
            monkeypatch.setattr(zoo.mixers.LinearMixer, "_reads_packed", lambda self, ctx: False)
        model.zero_grad()
        y = model(image())
        y.square().sum().backward()
        results.append((y.detach(), gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())
