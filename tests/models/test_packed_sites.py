"""Sites of hosts with one qkv projection: the packed operator reads its output, nothing copies q, k or v."""

import pytest
import torch
from tiny_models import MIXERS, gradients, image, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import zoo

PLAIN = "vit_tiny_patch16_224"
COPIES = ("clone", "copy", "contiguous", "cat", "stack", "_to_copy")


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


@pytest.mark.parametrize("options", [{}, {"feature_map": "softmax_pair"}, {"feature_map": "identity"}])
@pytest.mark.parametrize("mixer", MIXERS)
def test_an_attention_layer_copies_nothing(mixer, options):
    if options.get("feature_map") == "identity":
        options = {**options, "normalize": False}
    elif mixer == "poly":
        options = {**options, "normalize": bool(options), "center": None, "mean_path": False}
    model = tiny(PLAIN)
    zoo.convert(model, mixer, **options)
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
    zoo.convert(model, "ahla")
    with Recorder() as recorder:
        model(image())
    assert (recorder.count("two_sided_qkvpacked") > 0) == packed and (recorder.count("two_sided") > 0) != packed


def test_normed_queries_are_read_apart():
    model = tiny(PLAIN, qk_norm=True).eval()
    zoo.convert(model, "ahla")
    with Recorder() as recorder:
        model(image())
    assert recorder.count("two_sided") == 2 and recorder.count("two_sided_qkvpacked") == 0


@pytest.mark.parametrize("mixer", MIXERS)
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
