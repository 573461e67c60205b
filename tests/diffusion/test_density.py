"""Density of adaptive multipole attention by denoising step."""

import diffusers
import pytest
import torch

import zoo
from tests.helpers.tiny_diffusers import converted, inputs, run
from tests.helpers.tiny_diffusion import tiny_pipeline
from tests.helpers.tiny_pipelines import pipeline
from zoo.diffusion.density import DensitySchedule
from zoo.diffusion.samplers import denoise
from zoo.eval.sample_settings import SampleOptions
from zoo.eval.sampling import open_sampler
from zoo.mixers.multipole import Multipole

ADAPTIVE = {"select": "error", "q_tile": 16, "k_tile": 4, "density": 0.1}


def output(model, time):
    """The output at a time step."""
    with torch.no_grad():
        return run(model.eval(), {**inputs("dit"), "timestep": torch.full((2,), time)})


def test_the_first_steps_are_exact_and_every_batch_begins_anew():
    model, own = (converted("dit", "multipole", **ADAPTIVE) for _ in range(2))
    half = converted("dit", "multipole", **{**ADAPTIVE, "density": 0.5})
    expected = [converted("dit", "softmax")] * 2 + [half] + [own] * 2
    scheduler = diffusers.DDIMScheduler()
    schedule = DensitySchedule([model], scheduler, [[0, 1.0], [2, 0.5], [3, 0]])
    checked = []

    def predict(x, t):
        step = len(checked) % 5
        for _ in range(2):  # guidance may call the model twice per step
            torch.testing.assert_close(output(model, int(t)), output(expected[step], int(t)))
        checked.append(torch.equal(output(model, int(t)), output(own, int(t))))
        return x

    for _ in range(2):  # two batches
        with schedule:
            denoise(scheduler, torch.randn(2, 4, 8, 8), 5, predict)
        assert torch.equal(output(model, 900), output(own, 900))  # undone
    assert checked == [False, False, False, True, True] * 2
    assert "step" not in vars(scheduler) and "set_timesteps" not in vars(scheduler)


def test_steps_are_counted_where_16_bits_make_neighbouring_times_equal():
    """A pipeline of Flux in bfloat16 gives its model times that are rounded to 8 bits."""
    pipe, arguments = pipeline("flux")
    zoo.convert(pipe, "multipole", **ADAPTIVE)
    pipe.to(torch.bfloat16)
    layer = next(m for m in pipe.transformer.modules() if isinstance(m, Multipole))
    seen = []
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((float(kwargs["timestep"][0]), layer.density)), with_kwargs=True
    )
    schedule = [[0, 1.0], [300, 0.5], [301, 0]]
    cast = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}
    with DensitySchedule([pipe.transformer], pipe.scheduler, schedule), torch.no_grad():
        pipe(**cast | {"num_inference_steps": 400})
    times = [time for time, _ in seen]
    assert len(set(times)) < len(times) == 400
    assert [density for _, density in seen] == [1.0] * 300 + [0.5] + [0.1] * 99


def test_a_sampler_with_a_density_of_one_equals_softmax(tmp_path):
    folder = tiny_pipeline(tmp_path / "pipe")
    pipe = diffusers.DiTPipeline.from_pretrained(folder)
    zoo.convert(pipe, "multipole", **ADAPTIVE | {"q_tile": 4, "k_tile": 2})
    pipe.save_pretrained(tmp_path / "multipole")
    cases = (folder, []), (tmp_path / "multipole", []), (tmp_path / "multipole", [[0, 1.0]])
    softmax, own, exact = (
        open_sampler(SampleOptions(model=str(model), density=density, steps=3, labels=[3, 0]), "cpu")(range(2)).int()
        for model, density in cases
    )
    assert (softmax - exact).abs().max() <= 1 < (softmax - own).abs().max()  # 1: rounding of halves


@pytest.mark.parametrize(
    "steps", [[], [[1, 0.5]], [[0, 0.5], [0, 1]], [[0, 2]], [[0.5, 1]], [[0, 0.5, 1]], [[0, 1], [3, 1], [2, 1]]]
)
def test_steps_that_are_refused(steps):
    with pytest.raises(ValueError, match="first step"):
        DensitySchedule([converted("dit", "multipole", **ADAPTIVE)], diffusers.DDIMScheduler(), steps)


def test_models_without_adaptive_layers_are_refused():
    for mixer, options in (("la", {}), ("multipole", {"select": "near"})):
        with pytest.raises(ValueError, match="there is none"):
            DensitySchedule([converted("dit", mixer, **options)], diffusers.DDIMScheduler(), [[0, 1.0]])
    assert zoo.MIXERS["multipole"].defaults.density == 0.125
