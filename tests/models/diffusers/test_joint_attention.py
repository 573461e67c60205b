"""Joint attention with a linear image part: algebra against softmax, and the partition function."""

import math

import pytest
import torch

from tests.helpers.tiny_diffusers import converted, inputs, noise, run
from zoo.models.diffusers import joint
from zoo.models.diffusers.joint import attend_text_and_image, estimate_log_partition


def tokens(n: int, seed: int, width: int = 16) -> torch.Tensor:
    return noise(2, n, 3, width, seed=seed).double()


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bnhd,bmhd->bnhm", q, k) * q.shape[-1] ** -0.5


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bnhm,bmhd->bnhd", scores(q, k).softmax(-1), v)


def test_with_the_true_mass_and_mean_it_is_the_joint_softmax(monkeypatch):
    q, k, v, text_k, text_v = (tokens(n, seed) for seed, n in enumerate((20, 20, 20, 5, 5)))
    monkeypatch.setattr(joint, "estimate_log_partition", lambda q, k, scale: scores(q, k).logsumexp(-1, keepdim=True))
    found = attend_text_and_image(q, k, softmax(q, k, v), text_k, text_v)
    wanted = softmax(q, torch.cat([text_k, k], 1), torch.cat([text_v, v], 1))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mass_survives_half_precision(dtype):
    """A score of about log N + 8 would be off by 3 % and more after rounding to bfloat16 once."""
    q, k, text_k, text_v = (3 * tokens(n, seed) for seed, n in enumerate((64, 64, 5, 5)))
    q, k, text_k, text_v = (t.to(dtype).double() for t in (q, k, text_k, text_v))
    ones = torch.ones_like(q)
    wanted = attend_text_and_image(q, k, ones, text_k, torch.zeros_like(text_v))  # the share of the image
    halves = [t.to(dtype) for t in (q, k, ones, text_k, torch.zeros_like(text_v))]
    assert (attend_text_and_image(*halves).double() - wanted).abs().max() < 0.01


@pytest.mark.parametrize(("sigma", "error"), [(0.5, 0.02), (1.5, 0.1), (8.0, 4.0)])
def test_the_mass_of_gaussian_keys(sigma, error):
    """Against the sum itself; beyond sqrt(2 log N) = 4.1 the Gaussian formula alone is off by more than seven."""
    n, width = 4096, 64
    q = torch.nn.functional.normalize(noise(1, 50, 1, width), dim=-1)
    k = sigma * noise(1, n, 1, width, seed=2) + 0.3
    true = torch.einsum("bnhd,bmhd->bnhm", q, k).logsumexp(-1, keepdim=True)
    found = estimate_log_partition(q, k, 1.0)
    assert (found - true).abs().mean() < error
    gaussian = math.log(n) + (q * k.mean(1, keepdim=True)).sum(-1, keepdim=True) + sigma**2 / 2
    assert sigma < 4.1 or (gaussian - true).abs().mean() > 7


def test_the_mass_has_finite_gradients_at_constant_keys():
    q, k = noise(1, 8, 1, 4).requires_grad_(), torch.ones(1, 8, 1, 4, requires_grad=True)
    estimate_log_partition(q, k, 0.5).sum().backward()
    assert q.grad.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("name", ["sd3", "sd35", "flux"])
def test_text_sees_the_image_and_the_image_sees_the_text(name):
    model = converted(name, "la")
    first, second = inputs(name), inputs(name)
    second["encoder_hidden_states"] = second["encoder_hidden_states"] + 1
    assert not torch.allclose(run(model, first), run(model, second), atol=1e-4)


def test_ids_of_several_images_have_no_grid():
    arguments = inputs("flux")
    arguments["img_ids"][-6:, 0] = 1
    assert run(converted("flux", "ahla"), arguments).isfinite().all()
    with pytest.raises(ValueError, match="not the raster of one image"):
        run(converted("flux", "ahla", depthwise="v"), arguments)
