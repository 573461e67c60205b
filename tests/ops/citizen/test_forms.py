"""Calls of a form that was checked before, and the device of their launches."""

from contextlib import contextmanager

import pytest
import torch

import hla_kernels as hk
from hla_kernels import op as front
from hla_kernels.dispatch import forms

pytest.importorskip("triton")


def test_a_form_is_checked_once(monkeypatch):
    q, k, v = (torch.rand(2, 9, 2, 8, requires_grad=True) for _ in range(3))
    qkv = torch.stack((q, k, v), 2).detach().requires_grad_()
    monkeypatch.setattr(forms, "KNOWN", {})
    options = {"feature_map": "relu", "normalize": True}
    first = hk.ahla(q, k, v, **options), hk.ahla_qkvpacked(qkv, **options)
    with torch.no_grad():  # a form of its own: other kernels
        hk.ahla(q, k, v, **options)
    with monkeypatch.context() as patch:
        patch.setattr(front, "prepare", None)
        assert torch.equal(hk.ahla(k, q, v, **options), hk.ahla(k.clone(), q, v, **options))
        assert torch.equal(hk.ahla(q, k, v, **options), first[0])
        assert torch.equal(hk.ahla_qkvpacked(qkv, **options), first[1])
        with torch.no_grad():
            assert not hk.ahla(q, k, v, **options).requires_grad
    assert len(forms.KNOWN) == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert hk.ahla(q, k, v, **options).dtype == torch.bfloat16
        assert hk.ahla(q, k, v.bfloat16(), **options).dtype == torch.bfloat16
    assert hk.ahla(q, k, v, **options).dtype == torch.float32
    mask = torch.zeros(2, 9, dtype=torch.bool)
    assert not hk.ahla(q, k, v, key_padding_mask=mask, **options).any()
    for bad in ({"normalize": 1}, {"normalize": "yes"}, {"eps": True}, {"feature_map": "identity", "center": "k"}):
        with pytest.raises(ValueError):
            hk.ahla(q, k, v, **{**options, **bad})
    for tokens in ((q, k[:, :5], v), (q, k.double(), v), (q[0], k, v), (q, k, None)):
        with pytest.raises(ValueError):
            hk.ahla(*tokens, **options)
    with pytest.raises(ValueError):
        hk.ahla(q, k, v, impl="triton", **options)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        hk.ahla(torch.autograd.forward_ad.make_dual(q, q), k, v, **options)
    monkeypatch.setattr(forms, "MOST", 3)
    for n in range(20):
        hk.ahla(*torch.rand(3, 1, n + 1, 1, 4))
        assert len(forms.KNOWN) <= 3


def test_launches_on_the_device_of_the_tokens(monkeypatch):
    """Triton launches on the current device, which may be another one."""
    from hla_kernels.features import power, power_kernels, rms_norm

    active, launched = [], []

    @contextmanager
    def device_of(x):
        active.append(x)
        yield
        active.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module in (power_kernels, rms_norm):
        monkeypatch.setattr(module, "launch", lambda *args, **more: launched.append(len(active)))
    x, exponents = torch.rand(2, 5, 3, 16, requires_grad=True), torch.full((3,), 2.0)
    sum(y.sum() for y in power.power_op(x, x, exponents, exponents)).backward()
    rms_norm.rms_norm_op(x, torch.ones(16, requires_grad=True), 1e-6)[0].sum().backward()
    assert launched == [1, 1, 1, 1]
