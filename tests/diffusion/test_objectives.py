"""Objectives against diffusers' schedulers, and against the definition in float64."""

import math

import diffusers
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from zoo.diffusion.call import CallSpec
from zoo.diffusion.objectives import DDPM, FlowMatching
from zoo.diffusion.preview import sample


def data(seed=0, n=5):
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.rand(n, 3, 4, 4, generator=generator) * 2 - 1
    return x0, torch.randn(n, 3, 4, 4, generator=generator)


def configured(model):
    """A function that looks like a model of diffusers."""
    model.config = None
    return model


def test_noising_is_that_of_the_schedulers():
    x0, noise = data()
    t = torch.tensor([0, 1, 500, 900, 999])
    theirs = diffusers.DDPMScheduler(1000, 1e-4, 0.02, "linear").add_noise(x0, noise, t)
    assert torch.allclose(DDPM().noised(x0, noise, t), theirs, atol=1e-5)
    flow = FlowMatching()
    scheduler = flow.scheduler()
    scheduler.set_timesteps(20)
    index = torch.tensor([0, 3, 10, 15, 19])
    theirs = scheduler.scale_noise(x0, scheduler.timesteps[index], noise)
    assert torch.allclose(flow.noised(x0, noise, scheduler.sigmas[index]), theirs, atol=1e-6)
    assert torch.allclose(flow.timestep(scheduler.sigmas[index]), scheduler.timesteps[index])


@pytest.mark.parametrize("step", [1, 2, 500, 999])
def test_the_bound_is_the_divergence_of_two_normals(step):
    x0, noise = data()
    objective, t = DDPM(), torch.full((5,), step)
    generator = torch.Generator().manual_seed(3)
    predicted, where = torch.randn(2, 5, 3, 4, 4, generator=generator)
    found = objective.bound(predicted, where, x0, noise, t)
    beta = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    bar = (1 - beta).cumprod(0)
    now, before, b = bar[step], bar[step - 1], beta[step]
    x0, noise, predicted, where = (v.double() for v in (x0, noise, predicted, where))
    xt = now.sqrt() * x0 + (1 - now).sqrt() * noise

    def posterior_mean(start):  # Ho et al. 2020, eq. 7
        return before.sqrt() * b / (1 - now) * start + (1 - b).sqrt() * (1 - before) / (1 - now) * xt

    small = b * (1 - before) / (1 - now)
    variance = small ** ((1 - where) / 2) * b ** ((1 + where) / 2)
    start = (xt - (1 - now).sqrt() * predicted) / now.sqrt()
    model = Normal(posterior_mean(start), variance.sqrt())
    expected = kl_divergence(Normal(posterior_mean(x0), small.sqrt()), model).flatten(1).mean(1) / math.log(2)
    assert torch.allclose(found.double(), expected, rtol=2e-3)  # x0 from noise loses digits in float32


def test_the_last_step_is_the_likelihood_of_256_levels():
    objective, t = DDPM(), torch.zeros(1, dtype=torch.long)
    levels = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16)
    noise, where = data()[1][:1, :1].repeat(1, 1, 4, 4), torch.zeros(1, 1, 16, 16)
    found = objective.bound(noise, where, levels, noise, t)  # the right noise: the mean is x0
    variance = 1e-4**0.5 * float(objective.table["low"][0].exp()) ** 0.5
    normal = Normal(levels.double(), math.sqrt(variance))
    mass = normal.cdf(levels.double() + 1 / 255) - normal.cdf(levels.double() - 1 / 255)
    mass[..., -1, -1] = 1 - normal.cdf(levels.double() - 1 / 255)[..., -1, -1]
    mass[..., 0, 0] = normal.cdf(levels.double() + 1 / 255)[..., 0, 0]
    assert float(found) == pytest.approx(float(-mass.log2().mean()), rel=1e-2)


def test_learned_variance_is_what_diffusers_samples_with():
    objective, where = DDPM(), torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4)
    scheduler = diffusers.DDPMScheduler(1000, 1e-4, 0.02, "linear", variance_type="learned_range")
    for step in (1, 10, 700):
        low, high = (objective.table[k][step].float() for k in ("low", "high"))
        theirs = scheduler._get_variance(step, predicted_variance=where)
        assert torch.allclose(low + (where + 1) / 2 * (high - low), theirs, rtol=1e-3)


def test_the_bound_trains_the_variance_only():
    x0, noise = data()
    output = torch.randn(5, 6, 4, 4, requires_grad=True)
    losses = DDPM().losses(output, x0, noise, torch.tensor([0, 1, 10, 500, 999]))
    (gradient,) = torch.autograd.grad((losses.loss - losses.mse).sum(), output)
    assert gradient[:, :3].abs().max() == 0 and gradient[:, 3:].abs().amin((1, 2, 3)).min() > 0


@pytest.mark.parametrize("objective", [DDPM(), FlowMatching(), FlowMatching(shift=3.0)])
def test_a_model_that_knows_the_noise_has_no_error_and_samples_the_data(objective):
    x0, noise = data()
    wanted = noise if objective.outputs == 2 else noise - x0

    @configured
    def model(hidden_states, timestep, class_labels, return_dict):
        return (torch.cat([wanted, torch.zeros_like(wanted)], 1)[:, : 3 * objective.outputs],)

    t = objective.times_at(torch.linspace(0, 0.99, 5))
    output = model(None, None, None, False)[0]
    assert objective.losses(output, x0, noise, t).mse.max() == 0
    start = objective.noised(x0, noise, objective.times_at(torch.full((5,), 0.99999)))
    labels = {"class_labels": torch.zeros(5, dtype=torch.long)}
    scheduler = objective.scheduler()
    found = sample(model, CallSpec({}, 1.0), scheduler, start, labels, {"class_labels": torch.tensor(10)}, 10, 1.0)
    assert (found - x0).abs().max() < 0.02


def test_times_are_drawn_as_said():
    torch.manual_seed(0)
    t = FlowMatching(mean=1.0, deviation=0.5).draw(20000, torch.device("cpu"))
    logit = (t / (1 - t)).log()
    assert float(logit.mean()) == pytest.approx(1.0, abs=0.02) and float(logit.std()) == pytest.approx(0.5, abs=0.02)
    plain, shifted = (FlowMatching(shift=s).times_at(torch.tensor([0.5])) for s in (1.0, 3.0))
    assert float(plain) == 0.5 and float(shifted) == pytest.approx(0.75)
    steps = DDPM().draw(20000, torch.device("cpu"))
    assert steps.min() == 0 and steps.max() == 999


def test_guidance_is_its_formula():
    noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    @configured
    def model(hidden_states, timestep, class_labels, return_dict):
        return (class_labels.float().view(-1, 1, 1, 1).expand_as(hidden_states),)

    labels, null = {"class_labels": torch.tensor([3, 5])}, {"class_labels": torch.tensor(10)}
    scheduler = FlowMatching().scheduler()
    found = sample(model, CallSpec({}, 1.0), scheduler, noise, labels, null, 1, 1.5)
    expected = noise - (10 + 1.5 * (torch.tensor([3.0, 5.0]) - 10)).view(2, 1, 1, 1)  # one Euler step of length 1
    assert torch.allclose(found, expected, atol=1e-4)
