"""Properties of mala, rala, inline, mesa and resolvent: shared keys, gradients, dtypes, autocast."""

import pytest
import torch
from torch.func import functional_call

from zoo.mixers import Context, build_mixer

NAMES = ("mala", "rala", "inline", "mesa", "resolvent")
B, N, H, D, C = 2, 37, 4, 16, 24


def setting(name: str, n: int = N, heads: int = H, width: int = D, **options):
    """A float64 mixer with random parameters, and q, k, v, x for it."""
    torch.manual_seed(3)
    mixer = build_mixer(name, C, heads, width, dtype=torch.float64, **options)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    q, k, v = (torch.randn(B, n, heads, width, dtype=torch.float64) for _ in range(3))
    return mixer, q, k, v, torch.randn(B, n, C, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_shared_keys_are_repeated_keys(name):
    _, q, k, v, x = setting(name)
    grouped = build_mixer(name, C, H, D, num_kv_heads=2, dtype=torch.float64)
    whole = build_mixer(name, C, H, D, dtype=torch.float64)
    k, v = k[:, :, :2], v[:, :, :2]
    if name == "rala":  # whose heads with shared keys share the weights of the keys, too
        q = q[:, :, ::2].repeat_interleave(2, 2)
    wanted = whole(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), Context(x=x))
    torch.testing.assert_close(grouped(q, k, v, Context(x=x)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, masked):
    mixer, q, k, v, x = setting(name, n=5, heads=2, width=4)
    mask = torch.ones(B, 5, dtype=torch.bool)
    mask[0, 3:] = False
    names = [n for n, _ in mixer.named_parameters()]

    def run(q, k, v, *parameters):
        ctx = Context(x=x, key_padding_mask=mask if masked else None)
        return functional_call(mixer, dict(zip(names, parameters, strict=True)), (q, k, v, ctx))

    tensors = [t.detach().requires_grad_() for t in (q, k, v, *mixer.parameters())]
    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_float64(name, autocast):
    """A module in bfloat16, and one in float32 whose host gives bfloat16 under autocast."""
    mixer, q, k, v, x = setting(name, n=256)
    q, k, v, x = (t.bfloat16() for t in (q, k, v, x))
    low = build_mixer(name, C, H, D, dtype=torch.float32 if autocast else torch.bfloat16)
    low.load_state_dict(mixer.state_dict())
    mixer.load_state_dict(low.state_dict())  # what bfloat16 rounded of the parameters
    wanted = mixer(*(t.double() for t in (q, k, v)), Context(x=x.double()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = low(q, k, v, Context(x=x))
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).norm() < 0.01 * wanted.norm()  # measured: 0.0017 to 0.0042


@pytest.mark.parametrize("name", NAMES)
def test_the_packed_call_is_the_separate_one(name):
    mixer, q, k, v, x = setting(name)
    for feature_map in ("own", "elu1"):  # which reads the packed tensor, where `power` comes before the operator
        if feature_map == "elu1" and name != "inline":
            mixer = build_mixer(name, C, H, D, dtype=torch.float64, feature_map="elu1")
        qkv = torch.stack([q, k, v], 2).requires_grad_()
        gradients = []
        for packed in (qkv, None):
            o = mixer(*qkv.unbind(2), Context(x=x, qkv=packed))
            gradients.append(torch.autograd.grad(o.cos().sum(), qkv)[0])
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
