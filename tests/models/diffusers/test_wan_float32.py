"""A converted self-attention of Wan in bfloat16 creates no float32 tensor of the size of its tokens.

Uses fake CUDA tensors, which need no GPU; `test_diffusers_gpu.py` checks a real backward pass and autocast.
"""

import math
from collections import Counter

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import zoo
from tests.helpers.tiny_diffusers import Copies

GRID, B, C, H = (5, 12, 20), 2, 1536, 12
MIXES = "hla_kernels.mhla.defaultBackward"
# these write gradients in the dtype of what the forward was given; the others view, or are of the mixing matrix
NORMS = {True: "FusedRmsNormBackward0", False: "hla_kernels.rms_norm.defaultBackward"}
OF_TOKENS = {"AddmmBackward0": 4, MIXES: 1}
VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "TBackward0", "torch::autograd::AccumulateGrad"}
OF_MIXING = {"SoftmaxBackward0", "MulBackward0", "ToCopyBackward0"}


def nodes(root) -> Counter:
    """How often each kind of node occurs in the graph of a backward."""
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen)


@pytest.fixture
def half():
    """Parameters are made in bfloat16: a module of fake tensors cannot be cast."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options", [{"feature_map": "relu"}, {"feature_map": "relu", "normalize": False}, {"feature_map": "elu1"}], ids=str
)
def test_no_float32_tokens(half, options):
    """No operator of the forward returns one, none is saved, and the backward has no step that would form one."""
    saved: list[torch.Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = WanTransformer3DModel(num_layers=1, num_attention_heads=H, ffn_dim=64, text_dim=64)
            zoo.convert(model, "mhla", blocks=[5, 3, 5], **options)
            x = torch.randn(B, math.prod(GRID), C, requires_grad=True)
            turns = model.rope(torch.empty(B, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
        site = model.blocks[0].attn1
        site.grid = GRID
        with Copies(x.numel()) as copies, saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = site(x, rotary_emb=turns)
    assert (x.dtype, y.dtype, y.device.type) == (torch.bfloat16, torch.bfloat16, "cuda")
    assert copies.found == []
    tokens = [t for t in saved if x.shape[1] in t.shape or B * x.shape[1] in t.shape]
    large = [t for t in tokens if t.numel() >= x.numel()]
    assert len(large) == 9 and {t.dtype for t in large} == {torch.bfloat16}
    ratio = options.get("normalize", True)  # without one, norm, map and rotation are one kernel
    norms = [t for t in saved if t.shape == (B * x.shape[1],)]
    assert len(norms) == 0 if ratio else len(norms) == 2
    vectors = sum(t.dtype == torch.float32 and t.dim() == 1 for t in saved)
    assert vectors == 1 + len(norms)  # moments: the Triton form ran
    found, of_tokens = nodes(y.grad_fn), {**OF_TOKENS, NORMS[ratio]: 2}
    assert {name: found[name] for name in of_tokens} == of_tokens
    assert set(found) <= {*of_tokens, *VIEWS, *OF_MIXING}
