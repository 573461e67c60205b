"""Terms of the least-squares fit of calibration, for each kind of mixer.

The output of a head is a linear combination of terms. The terms depend on a nonlinear parameter (a temperature, an
exponent, or c2 in a denominator), for which several values are tried. `write` stores the solution in the mixer. The
mixer itself computes the terms, so that they include the steps around its operator (depthwise residuals, rotation).
"""

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from zoo.mixers import Context, LinearMixer, Mixer
from zoo.mixers.layers import HeadGains, Power, mean_value
from zoo.mixers.poly import Polynomial
from zoo.mixers.taylor2 import Taylor2

TEMPERATURES = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0, 2**1.5, 4.0)
EXPONENTS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)  # trials for `power`; normalisation would cancel a temperature
SECOND_COEFFICIENTS = (0.125, 0.25, 0.5, 1.0, 2.0)  # trials for c2 of a normalised expansion

MixerInput: TypeAlias = tuple[Tensor, Tensor, Tensor, Context]  # q, k, v, ctx


class Terms(Protocol):
    """Terms of one mixer."""

    trials: tuple[float, ...]

    def columns(self, trial: float, tokens: MixerInput) -> Tensor:
        """Compute the terms [K, B, N, H, D] at a trial; except in `LocalTerms`, the last one is the mean value."""

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """Store the chosen trials [H] and weights [H, K] in the mixer."""


def terms_of(mixer: Mixer, name: str) -> Terms:
    """Return the terms of a mixer, including LePE terms. Raises ValueError for a mixer without gains."""
    if not isinstance(mixer, LinearMixer) or mixer.gains is None:
        raise ValueError(f"calibration needs the gains of each head, but {name} has none: convert with gains=True")
    terms = _global_terms(mixer, mixer.gains)
    return terms if mixer.lepe is None else LocalTerms(terms, mixer)


def _global_terms(mixer: LinearMixer, gains: HeadGains) -> Terms:
    opt = mixer.options
    if isinstance(mixer, Taylor2) and not opt.post_norm:
        return TaylorTerms(mixer, gains)
    if isinstance(mixer, Polynomial) and not opt.post_norm and not opt.normalize:
        return OrderTerms(mixer, gains)
    return OutputTerms(mixer, gains)


def _mean(tokens: MixerInput) -> Tensor:
    """Compute the mean value per head, expanded to [B, N, H, D]."""
    q, _, v, ctx = tokens
    mean = mean_value(v, ctx.key_padding_mask).repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    mean = mean.expand(-1, q.shape[1], -1, -1)
    return mean if ctx.key_padding_mask is None else mean.where(ctx.key_padding_mask[:, :, None, None], 0)


def _map_trials(mixer: LinearMixer) -> tuple[float, ...]:
    """Return the trials of the feature map: exponents for `power`, temperatures for other maps, 1 for the identity."""
    name = mixer.options.feature_map
    return (1.0,) if name == "identity" else EXPONENTS if name == "power" else TEMPERATURES


def _set_map(mixer: LinearMixer, trials: Tensor) -> float | Tensor:
    """Set the exponents [H] of `power`, averaged over heads that share keys; return the temperatures."""
    if not isinstance(mixer.phi_q, Power) or not isinstance(mixer.phi_k, Power):
        return trials
    mixer.phi_q.set(trials)
    mixer.phi_k.set(trials.unflatten(0, (len(mixer.phi_k.weight), -1)).mean(1))
    return 1.0


def _try_map(mixer: LinearMixer, trial: float) -> float | Tensor:
    return _set_map(mixer, torch.full((mixer.num_heads,), trial, dtype=torch.float64))


class OutputTerms:
    """Terms of a general mixer: its output and the mean value, for each exponent or temperature."""

    def __init__(self, mixer: LinearMixer, gains: HeadGains) -> None:
        self.mixer, self.gains = mixer, gains
        self.trials = _map_trials(mixer)

    def columns(self, trial: float, tokens: MixerInput) -> Tensor:
        self.gains.set(1.0, 0.0, _try_map(self.mixer, trial))
        return torch.stack([self.mixer(*tokens).float(), _mean(tokens).float()])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        self.gains.set(weights[:, 0], weights[:, -1], _set_map(self.mixer, trials))


class OrderTerms:
    """Terms of `poly`: the four orders and the mean value."""

    def __init__(self, mixer: Polynomial, gains: HeadGains) -> None:
        self.mixer, self.gains = mixer, gains
        self.trials = _map_trials(mixer)

    def columns(self, trial: float, tokens: MixerInput) -> Tensor:
        mixer = self.mixer
        self.gains.set(1.0, 0.0, _try_map(mixer, trial))
        mean, unit = _mean(tokens).float(), torch.eye(4, device=mixer.coefficients.device)
        offset = mean if mixer.options.mean_path else torch.zeros_like(mean)
        orders = []
        for c in unit:
            mixer.set_coefficients(c.expand_as(mixer.coefficients))
            orders.append(mixer(*tokens).float() - offset)
        return torch.stack([*orders, mean])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        self.mixer.set_coefficients(weights[:, :4].to(self.mixer.coefficients))
        shift = weights[:, 4] - float(self.mixer.options.mean_path)
        self.gains.set(1.0, shift, _set_map(self.mixer, trials))


class TaylorTerms:
    """Terms of `taylor2`: both terms of the expansion, divided by the denominator at the trial c2, and the mean."""

    def __init__(self, mixer: Taylor2, gains: HeadGains) -> None:
        self.mixer, self.gains = mixer, gains
        self.trials: tuple[float, ...] = SECOND_COEFFICIENTS if mixer.options.normalize else (1.0,)

    def columns(self, trial: float, tokens: MixerInput) -> Tensor:
        mixer = self.mixer
        self.gains.set(1.0, 0.0)
        mean, outputs = _mean(tokens).float(), []
        for c1 in (0.0, 1.0):
            mixer.set_coefficients(torch.tensor([c1, trial]).expand_as(mixer.coefficients).to(mixer.coefficients))
            outputs.append(mixer(*tokens).float() - mean)
        return torch.stack([outputs[1] - outputs[0], outputs[0], mean])

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """Store o = w1 X1 + w2 X2 + w3 mean, with terms X that are divided by the denominator, as gain w2, c1 = w1 / w2
        and the trial c2.

        A w2 near zero is replaced by a small number, which changes the output by at most 0.1 % of its first term.
        """
        first, second, mean = weights.unbind(1)
        if self.mixer.options.normalize:
            smallest = (1e-3 * first.abs()).clamp(min=1e-6)
            gain = torch.where(second.abs() > smallest, second, smallest)
            c = torch.stack([first / gain, trials.to(weights)], 1)
        else:
            gain, c = torch.ones_like(first), torch.stack([first, second], 1)
        self.mixer.set_coefficients(c.to(self.mixer.coefficients))
        self.gains.set(gain, mean - gain)


class LocalTerms:
    """Terms of a mixer with LePE: the terms without it, and one term per position of the `lepe` kernel.

    The additional terms are attention to one fixed neighbour each. All channels of a head get the same kernel.
    """

    def __init__(self, others: Terms, mixer: LinearMixer) -> None:
        self.others, self.mixer, self.trials = others, mixer, others.trials

    @property
    def kernel(self) -> Tensor:
        """Kernel weights [channels of v, positions], a view."""
        assert self.mixer.lepe is not None
        return self.mixer.lepe.weight.data.flatten(1)

    def columns(self, trial: float, tokens: MixerInput) -> Tensor:
        q, _, v, ctx = tokens
        kernel, zeros = self.kernel.zero_(), torch.zeros_like(q, dtype=torch.float32)
        terms = list(self.others.columns(trial, tokens))
        for position in kernel.mT:
            position.fill_(1)
            terms.append(self.mixer.with_lepe(zeros, v.float(), ctx))
            position.zero_()
        return torch.stack(terms)

    def write(self, trials: Tensor, weights: Tensor) -> None:
        """Store the solution; heads that share values get the mean kernel."""
        kernel = self.kernel
        others, local = weights.split([weights.shape[1] - kernel.shape[1], kernel.shape[1]], 1)
        self.others.write(trials, others)
        heads = len(kernel) // self.mixer.head_dim
        local = local.unflatten(0, (heads, -1)).mean(1)  # [heads of v, positions]
        kernel.copy_(local.repeat_interleave(self.mixer.head_dim, dim=0))
