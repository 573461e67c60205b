"""The terms of which calibration makes the output of a head, for each kind of mixer, and where the solution goes.

A kind has a few trials of what does not enter linearly (a temperature, the c2 in a divisor); for each of them the
output of a head is a sum of terms with weights to be solved for. The terms are read off the mixer itself, so that
whatever stands around its operator (depthwise residuals, rotation) is in them.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from zoo.mixers import LinearMixer
from zoo.mixers.layers import Power, mean_value
from zoo.mixers.poly import Polynomial
from zoo.mixers.taylor2 import Taylor2

TEMPERATURES = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0, 2**1.5, 4.0)
EXPONENTS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)  # of `power`, with which temperatures cancel in a ratio
SECONDS = (0.125, 0.25, 0.5, 1.0, 2.0)  # c2 of a normalised expansion


class Terms(Protocol):
    """How one kind of mixer is calibrated."""

    trials: tuple[float, ...]

    def columns(self, trial: float, tokens: tuple[Any, ...]) -> Tensor:
        """The terms [K, B, N, H, D] at a trial; of all but `LocalTerms` the last one is the mean value.
        tokens: the mixer's arguments."""

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """Give the mixer the chosen trial [H] and weights [H, K] of each head."""


def terms_of(mixer: Any, name: str) -> Terms:
    """The terms of a mixer, with those of its local values if it has some. Raises ValueError for one whose output
    cannot be solved for."""
    if not isinstance(mixer, LinearMixer) or mixer.gains is None:
        raise ValueError(
            f"calibration writes into the gains of each head, and {name} has none: convert with gains=True"
        )
    terms = _global_terms(mixer)
    return terms if mixer.lepe is None else LocalTerms(terms, mixer)


def _global_terms(mixer: LinearMixer) -> Terms:
    opt = mixer.options
    if isinstance(mixer, Taylor2) and not opt.post_norm:
        return TaylorTerms(mixer)
    if isinstance(mixer, Polynomial) and not opt.post_norm and not opt.normalize:
        return OrderTerms(mixer)
    return OutputTerms(mixer)


def _mean(mixer: Any, tokens: tuple[Any, ...]) -> Tensor:
    """The mean value [B, N, H, D] of each head's tokens."""
    q, _, v, ctx = tokens
    mean = mean_value(v, ctx.key_padding_mask).repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    mean = mean.expand(-1, q.shape[1], -1, -1)
    return mean if ctx.key_padding_mask is None else mean.where(ctx.key_padding_mask[:, :, None, None], 0)


def _map_trials(mixer: LinearMixer) -> tuple[float, ...]:
    """What is tried of the feature map: exponents of `power`, temperatures of the others, nothing of the identity."""
    name = mixer.options.feature_map
    return (1.0,) if name == "identity" else EXPONENTS if name == "power" else TEMPERATURES


def _set_map(mixer: LinearMixer, trials: Tensor) -> float | Tensor:
    """Give `power` the exponents [H] of the trials; heads that share keys have the same. Returns the temperatures."""
    if not isinstance(mixer.phi_q, Power) or not isinstance(mixer.phi_k, Power):
        return trials
    mixer.phi_q.set(trials)
    mixer.phi_k.set(trials.unflatten(0, (len(mixer.phi_k.weight), -1)).mean(1))
    return 1.0


def _try_map(mixer: LinearMixer, trial: float) -> float | Tensor:
    return _set_map(mixer, torch.full((mixer.num_heads,), trial, dtype=torch.float64))


class OutputTerms:
    """Any mixer: its output and the mean value, at each exponent or temperature of its feature map."""

    def __init__(self, mixer: LinearMixer) -> None:
        self.mixer = mixer
        self.trials = _map_trials(mixer)

    def columns(self, trial: float, tokens: tuple[Any, ...]) -> Tensor:
        assert self.mixer.gains is not None
        self.mixer.gains.set(1.0, 0.0, _try_map(self.mixer, trial))
        return torch.stack([self.mixer(*tokens).float(), _mean(self.mixer, tokens).float()])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        assert self.mixer.gains is not None
        self.mixer.gains.set(weights[:, 0], weights[:, -1], _set_map(self.mixer, trials))


class OrderTerms:
    """`poly`: each of its four orders, and the mean value."""

    def __init__(self, mixer: Polynomial) -> None:
        self.mixer = mixer
        self.trials = _map_trials(mixer)

    def columns(self, trial: float, tokens: tuple[Any, ...]) -> Tensor:
        mixer = self.mixer
        assert mixer.gains is not None
        mixer.gains.set(1.0, 0.0, _try_map(mixer, trial))
        mean, unit = _mean(mixer, tokens).float(), torch.eye(4, device=mixer.coefficients.device)
        around = mean if mixer.options.mean_path else torch.zeros_like(mean)
        found = []
        for c in unit:
            mixer.set_coefficients(c.expand_as(mixer.coefficients))
            found.append(mixer(*tokens).float() - around)
        return torch.stack([*found, mean])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        assert self.mixer.gains is not None
        self.mixer.set_coefficients(weights[:, :4].to(self.mixer.coefficients))
        shift = weights[:, 4] - float(self.mixer.options.mean_path)
        self.mixer.gains.set(1.0, shift, _set_map(self.mixer, trials))


class TaylorTerms:
    """`taylor2`: both terms of the expansion, divided by what the trial's c2 makes of the divisor, and the mean."""

    def __init__(self, mixer: Taylor2) -> None:
        self.mixer = mixer
        self.trials: tuple[float, ...] = SECONDS if mixer.options.normalize else (1.0,)

    def columns(self, trial: float, tokens: tuple[Any, ...]) -> Tensor:
        mixer = self.mixer
        assert mixer.gains is not None
        mixer.gains.set(1.0, 0.0)
        mean, found = _mean(mixer, tokens).float(), []
        for c1 in (0.0, 1.0):
            mixer.set_coefficients(torch.tensor([c1, trial]).expand_as(mixer.coefficients).to(mixer.coefficients))
            found.append(mixer(*tokens).float() - mean)
        return torch.stack([found[1] - found[0], found[0], mean])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """o = w1 X1 + w2 X2 + w3 mean with X the divided terms: gain w2, c1 = w1 / w2, c2 that of the trial. A w2 near
        zero is moved away from it, which changes the output by a thousandth of its first term."""
        assert self.mixer.gains is not None
        first, second, mean = weights.unbind(1)
        if self.mixer.options.normalize:
            least = (1e-3 * first.abs()).clamp(min=1e-6)
            gain = torch.where(second.abs() > least, second, least)
            c = torch.stack([first / gain, trials.to(weights)], 1)
        else:
            gain, c = torch.ones_like(first), torch.stack([first, second], 1)
        self.mixer.set_coefficients(c.to(self.mixer.coefficients))
        self.mixer.gains.set(gain, mean - gain)


class LocalTerms:
    """Other terms, then the values at each place of the kernel of `lepe`: the part of attention that looks at the same
    neighbours whatever the content. All channels of a head begin with the same kernel."""

    def __init__(self, others: Terms, mixer: LinearMixer) -> None:
        self.others, self.mixer, self.trials = others, mixer, others.trials

    @property
    def kernel(self) -> Tensor:
        """[channels of v, places], a view of the weights."""
        assert self.mixer.lepe is not None
        return self.mixer.lepe.weight.data.flatten(1)

    def columns(self, trial: float, tokens: tuple[Any, ...]) -> Tensor:
        q, _, v, ctx = tokens
        kernel, nothing = self.kernel.zero_(), torch.zeros_like(q, dtype=torch.float32)
        found = list(self.others.columns(trial, tokens))
        for place in kernel.mT:
            place.fill_(1)
            found.append(self.mixer.with_lepe(nothing, v.float(), ctx))
            place.zero_()
        return torch.stack(found)

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """Heads that share values get the mean of their kernels."""
        kernel = self.kernel
        others, local = weights.split([weights.shape[1] - kernel.shape[1], kernel.shape[1]], 1)
        self.others.write(trials, others)
        heads = len(kernel) // self.mixer.head_dim
        local = local.unflatten(0, (heads, -1)).mean(1)  # [heads of v, places]
        kernel.copy_(local.repeat_interleave(self.mixer.head_dim, dim=0))
