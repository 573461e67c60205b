"""With default options, the output of every mixer depends on the token."""

import pytest
import torch

from zoo.mixers import MIXERS, Context, build_mixer

N, D, GRID = 256, 64, (16, 16)


def token_dependence(name: str, size: float, seed: int, **options) -> float:
    """The norm of what differs between the tokens of an output over the norm of the output, for random q, k and v."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, N, 1, D, generator=g, dtype=torch.float64) for _ in range(3))
    layout = {"grid": GRID} if MIXERS[name].defaults.needs_grid else {}
    mixer = build_mixer(name, D, 1, D, dtype=torch.float64, **layout, **options)
    with torch.no_grad():
        o = mixer(size * q, size * k, v, Context(x=v.flatten(2), grid=GRID))
    return float((o - o.mean(1, keepdim=True)).norm() / o.norm())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [1.0, 2.0])
@pytest.mark.parametrize("name", MIXERS)
def test_at_least_three_percent_of_the_output_differ_between_tokens(name, size, seed):
    assert token_dependence(name, size, seed) > 0.03


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_third_order_of_elu1_averages_all_tokens(seed):
    """So that the bound above can fail."""
    assert token_dependence("hla3", 1.0, seed, feature_map="elu1") < 0.001
