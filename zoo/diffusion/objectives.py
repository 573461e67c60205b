"""Training objectives of denoisers: DDPM with learned variance, and flow matching.

x0 is clean data [B, C, H, W] or [B, C, T, H, W], and noise has the same shape. t [B] is the time of each sample: a step
number for DDPM, a number in (0, 1) for flow matching. Signs and timesteps follow the schedulers of diffusers, which can
therefore sample from the trained models.
"""

import math
from typing import NamedTuple, Protocol

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from zoo.diffusion.settings import ObjectiveSettings

STEPS = 1000  # number of DDPM steps; for flow matching, timestep = 1000 t


class Losses(NamedTuple):
    """Losses per sample [B]: the training loss, and the mean squared error alone."""

    loss: Tensor
    mse: Tensor


class Objective(Protocol):
    """A diffusion training objective."""

    outputs: int  # output channels per input channel

    def draw(self, n: int, device: torch.device) -> Tensor:
        """Draw n random times from torch's global generator."""

    def times_at(self, where: Tensor) -> Tensor:
        """Return the times at the given fractions, in [0, 1), of the time range, for validation."""

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the model's input x_t."""

    def timestep(self, t: Tensor) -> Tensor:
        """Return the timestep as passed to the model."""

    def losses(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Losses:
        """Compute the losses of the model output [B, K C, ...], where K is `outputs`."""

    def scheduler(self) -> SchedulerMixin:
        """Return a scheduler of diffusers that samples from the trained model."""


Times = tuple[float, float]  # range of times, where 0 is data and 1 is noise
ALL: Times = (0.0, 1.0)


def create_objective(settings: ObjectiveSettings, times: Times = ALL) -> Objective:
    """Create an objective on a range of times. Raises ValueError for DDPM on less than the full range."""
    if settings.kind == "ddpm" and times != ALL:
        raise ValueError(f"the model denoises the times {times} of flow matching: set objective.kind=flow")
    if settings.kind == "ddpm":
        return DDPM()
    return FlowMatching(settings.t_mean, settings.t_std, settings.shift, times)


class DDPM:
    """Noise prediction with learned variance, as in DiT (arXiv 2212.09748): 1000 steps, linear betas.

    Half of the output channels predict the noise. The other half interpolates, per element, the log variance between
    the posterior variance and beta (Nichol and Dhariwal, arXiv 2102.09672, eq. 15). The loss is the MSE of the noise
    plus the variational bound of step t in bits per element, whose gradient reaches only the variance (eq. 16 with
    weight 1, as in DiT).
    """

    outputs = 2

    def __init__(self) -> None:
        beta = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
        bar = (1 - beta).cumprod(0)
        before = torch.cat([bar.new_ones(1), bar[:-1]])
        variance = beta * (1 - before) / (1 - bar)  # variance of the posterior
        self.table = {
            "signal": bar.sqrt(),
            "noise": (1 - bar).sqrt(),
            "from_start": beta * before.sqrt() / (1 - bar),
            "from_now": (1 - before) * (1 - beta).sqrt() / (1 - bar),
            "low": torch.cat([variance[1:2], variance[1:]]).log(),  # the posterior variance of step 0 is 0
            "high": beta.log(),
        }

    def draw(self, n: int, device: torch.device) -> Tensor:
        return torch.randint(STEPS, (n,), device=device)

    def times_at(self, where: Tensor) -> Tensor:
        return (where * STEPS).long()

    def _buffer_at(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        return expand_to(self.table[name].to(x.device)[t].float(), x)

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return self._buffer_at("signal", t, x0) * x0 + self._buffer_at("noise", t, x0) * noise

    def timestep(self, t: Tensor) -> Tensor:
        return t

    def losses(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Losses:
        predicted, where = output.float().chunk(2, dim=1)
        mse = (predicted - noise).square().flatten(1).mean(1)
        return Losses(mse + self.bound(predicted.detach(), where, x0, noise, t), mse)

    def bound(self, predicted: Tensor, where: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Compute term t of the variational bound, in bits per element [B]: KL(posterior || model), or at t = 0 the
        negative log-likelihood of x0 among 256 levels in [-1, 1]."""
        xt = self.noised(x0, noise, t)
        low, high = self._buffer_at("low", t, x0), self._buffer_at("high", t, x0)
        log_variance = low + (where + 1) / 2 * (high - low)
        start = (xt - self._buffer_at("noise", t, x0) * predicted) / self._buffer_at("signal", t, x0)
        mean = self._buffer_at("from_start", t, x0) * start + self._buffer_at("from_now", t, x0) * xt
        true = self._buffer_at("from_start", t, x0) * x0 + self._buffer_at("from_now", t, x0) * xt
        gap = low - log_variance
        kl = 0.5 * (gap.exp() - gap - 1 + (true - mean).square() * (-log_variance).exp())
        nats = torch.where(expand_to(t == 0, x0), -log_likelihood(x0, mean, 0.5 * log_variance), kl)
        return nats.flatten(1).mean(1) / math.log(2)

    def scheduler(self) -> SchedulerMixin:
        # "trailing" begins at the last step, pure noise
        return DDIMScheduler(STEPS, 1e-4, 0.02, "linear", clip_sample=False, timestep_spacing="trailing")


def expand_to(values: Tensor, x: Tensor) -> Tensor:
    """Reshape values [B], one per sample, to broadcast over x [B, ...]."""
    return values.view(-1, *[1] * (x.ndim - 1))


def log_likelihood(x: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Compute the logarithm of the probability that a Gaussian assigns to the bin of x among 256 levels in [-1, 1].
    The outer bins extend to infinity."""
    scale = (-log_deviation).exp()
    upper = torch.special.ndtr((x - mean + 1 / 255) * scale)
    lower = torch.special.ndtr((x - mean - 1 / 255) * scale)
    upper = torch.where(x > 0.999, torch.ones_like(x), upper)
    lower = torch.where(x < -0.999, torch.zeros_like(x), lower)
    return (upper - lower).clamp(min=1e-12).log()


class FlowMatching:
    """Flow matching: x_t = (1 - t) x0 + t noise, and the model predicts noise - x0 (Lipman et al., arXiv 2210.02747).

    In training t is logit-normal (Esser et al., arXiv 2403.03206, section 3.1), and then shifted for the resolution by
    t' = s t / (1 + (s - 1) t) (eq. 23 there).

    mean, deviation: parameters of the logit-normal distribution.  shift: s.  times: range to which the shifted times
    are truncated.
    """

    outputs = 1

    def __init__(self, mean: float = 0.0, deviation: float = 1.0, shift: float = 1.0, times: Times = ALL) -> None:
        self.mean, self.deviation, self.shift = mean, deviation, shift
        self.whole = times == ALL
        self.low, self.high = (t / (shift - (shift - 1) * t) for t in times)  # ends of the range before the shift

    def draw(self, n: int, device: torch.device) -> Tensor:
        z = torch.randn(n, device=device)
        z = z if self.whole else self._truncated(z)
        return self._shifted((z * self.deviation + self.mean).sigmoid())

    def _truncated(self, z: Tensor) -> Tensor:
        """Map standard normal numbers, by their quantiles, to normal numbers truncated to the range of times."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64, device=z.device).logit()
        low, high = torch.special.ndtr((ends - self.mean) / self.deviation)
        return torch.special.ndtri(low + (high - low) * torch.special.ndtr(z.double())).to(z.dtype)

    def times_at(self, where: Tensor) -> Tensor:
        return self._shifted(self.low + (self.high - self.low) * where)

    def _shifted(self, t: Tensor) -> Tensor:
        return self.shift * t / (1 + (self.shift - 1) * t)

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return torch.lerp(x0, noise, expand_to(t, x0).to(x0))

    def timestep(self, t: Tensor) -> Tensor:
        return t * STEPS

    def losses(self, output: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Losses:
        mse = (output.float() - (noise - x0)).square().flatten(1).mean(1)
        return Losses(mse, mse)

    def scheduler(self) -> SchedulerMixin:
        return FlowMatchEulerDiscreteScheduler(STEPS, shift=self.shift)
