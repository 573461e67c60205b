"""Token dependence of mixers: closed forms, and the warning of a conversion that averages all tokens."""

import math
import warnings

import pytest
import timm
import torch

from zoo.conversion.dependence import token_share, token_shares, warn_of_mean_pooling
from zoo.conversion.inspection import inspect
from zoo.models.convert import swap

SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


def converted(mixer: str, **options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL).eval()
    swap(model, mixer, **options)
    for p in model.parameters():  # random weights of timm are so small that softmax itself is uniform
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=1.5 * p.shape[1] ** -0.5)
    return model


def test_share_of_a_constant_and_a_wave():
    """o_t = (cos w_t, 3): the part that differs has the norm sqrt(N / 2), all of it sqrt(N / 2 + 9 N)."""
    t = torch.arange(16, dtype=torch.float64) * (2 * math.pi / 16)
    wave = torch.stack([t.cos(), torch.full_like(t, 3.0)], -1)
    o = torch.stack([wave, torch.ones_like(wave)], 1)[None]  # the second head is constant
    torch.testing.assert_close(token_share(o), torch.tensor([(0.5 / 9.5) ** 0.5, 0.0], dtype=torch.float64))
    assert token_share(torch.zeros(1, 4, 2, 3)).tolist() == [0.0, 0.0]


def test_padded_tokens_do_not_count():
    torch.manual_seed(0)
    o, mask = torch.randn(2, 9, 3, 4), torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    torch.testing.assert_close(token_share(o, mask), token_share(o[:, :6]))


def test_shares_of_a_model_tell_maps_apart():
    """Three products of positive weights average all tokens with elu1, not with power."""
    x = torch.randn(2, 3, 32, 32)
    flat, sharp = (token_shares(converted("hla3", feature_map=name), x) for name in ("elu1", "power"))
    assert flat.keys() == sharp.keys() == {"blocks.0.attn", "blocks.1.attn"}
    for name in flat:
        assert flat[name].shape == (3,) and float(flat[name].mean()) < 2**-8 < float(sharp[name].mean())


def test_a_conversion_that_averages_says_so():
    x = torch.randn(2, 3, 32, 32)
    names = {f"blocks.{i}.attn": "hla3" for i in (0, 1)}
    with pytest.warns(UserWarning, match=r"^2 of 2 layers nearly average all tokens: .*'hla3'.*feature_map='power'"):
        warn_of_mean_pooling(token_shares(converted("hla3", feature_map="elu1"), x), names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_mean_pooling(token_shares(converted("hla3"), x), names)


def test_inspection_measures_what_the_mixer_would_keep_of_the_tokens():
    model, x = timm.create_model("vit_tiny_patch16_224", **SMALL).eval(), torch.randn(2, 3, 32, 32)
    before = [name for name, _ in model.named_modules()]
    rows = inspect(model, x, "la", keep_softmax=[1])
    assert 0 < rows[0].token_share <= 1 and rows[1].token_share is None
    assert [name for name, _ in model.named_modules()] == before
