"""Density of adaptive multipole attention by denoising step."""

import pytest
import torch

import zoo
from tests.helpers.tiny_diffusers import converted, inputs, run
from zoo.diffusion.density import schedule_density

ADAPTIVE = {"select": "error", "q_tile": 16, "k_tile": 4, "density": 0.1}


def at(model, time):
    """The output at a time step."""
    with torch.no_grad():
        return run(model.eval(), {**inputs("dit"), "timestep": torch.full((2,), time)})


def test_the_first_step_is_exact_and_every_batch_begins_anew():
    model, own = (converted("dit", "multipole", **ADAPTIVE) for _ in range(2))
    softmax = converted("dit", "softmax")
    schedule_density([model], [[0, 1.0], [2, 0.5], [3, 0]])
    half = converted("dit", "multipole", **{**ADAPTIVE, "density": 0.5})
    for _ in range(2):  # two batches; guidance may call the model twice per step
        for time in (900, 900, 700):
            torch.testing.assert_close(at(model, time), at(softmax, time))
            assert not torch.equal(at(own, time), at(model, time))
        assert torch.equal(at(model, 500), at(half, 500))
        assert torch.equal(at(model, 300), at(own, 300)) and torch.equal(at(model, 100), at(own, 100))


@pytest.mark.parametrize(
    "steps", [[], [[1, 0.5]], [[0, 0.5], [0, 1]], [[0, 2]], [[0.5, 1]], [[0, 0.5, 1]], [[0, 1], [3, 1], [2, 1]]]
)
def test_steps_that_are_refused(steps):
    with pytest.raises(ValueError, match="first step"):
        schedule_density([converted("dit", "multipole", **ADAPTIVE)], steps)


def test_models_without_adaptive_layers_are_refused():
    for mixer in ("la", "multipole"):
        with pytest.raises(ValueError, match="there is none"):
            schedule_density([converted("dit", mixer)], [[0, 1.0]])
    assert zoo.MIXERS["multipole"].defaults.density == 0.125
