"""Pipelines with a transformer for the noisy times and one for the others (Wan 2.2 A14B): trained one by one."""

import json

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

import zoo
from tests.helpers.tiny_video import clips_on_disk, tiny_pipeline, tiny_wan
from tests.helpers.video_runs import settings, words
from zoo.diffusion.objectives import FlowMatching, create_objective
from zoo.diffusion.settings import ObjectiveSettings
from zoo.eval.sample_settings import SampleOptions
from zoo.eval.sampling import open_sampler
from zoo.train.denoising.run import DiffusionRun, DryDiffusionRun
from zoo.train.dry_run import dry_run

BOUNDARY = 0.7


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return tiny_pipeline(tmp_path_factory.mktemp("wan"), boundary=BOUNDARY)


@pytest.fixture(scope="module")
def latents(tmp_path_factory, pipe):
    import extract_latents

    folder = tmp_path_factory.mktemp("latents")
    clips = {"source": "videos", "where": clips_on_disk(folder / "clips", True, 4), "text_key": "text"}
    encode = {"vae": pipe, "text": pipe, "max_length": 8, "dtype": "float32"}
    tree = {"images": clips | {"img_size": 16, "frames": 5, "workers": 0}, "encode": encode}
    extract_latents.main([*words(tree), f"out={folder}/latents"])
    return str(folder / "latents")


def run_of(folder, checkpoint, latents, more=None, **sections):
    data = {"source": "latents", "img_size": None, "train": latents, "val": latents, "hflip": 0.0, "batch_size": 2}
    sections = {"schedule": {"steps": 2}, "sample": {"every": 0}, **sections}
    return DiffusionRun(settings(folder, {"checkpoint": str(checkpoint), **(more or {})}, data=data, **sections))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pipe, latents):
    """The folders of a run of each transformer."""
    folders = {part: tmp_path_factory.mktemp(part) for part in ("transformer", "transformer_2")}
    for part, folder in folders.items():
        run = run_of(folder, pipe, latents, {"subfolder": part, "mixer": "la"}, objective={"shift": 3.0})
        source = tiny_wan(seed=9 if part == "transformer_2" else 0).state_dict()
        assert all(torch.equal(v.cpu(), source[k]) for k, v in run.model.state_dict().items() if k in source)
        times = run.objective.draw(1000, torch.device("cpu"))
        low, high = (BOUNDARY, 1.0) if part == "transformer" else (0.0, BOUNDARY)
        assert low - 1e-6 <= times.min() and times.max() <= high + 1e-6
        run.train()
    return folders


def test_a_run_notes_its_times_and_another_goes_on_with_them(tmp_path, trained, latents, pipe):
    notes = json.loads((trained["transformer_2"] / "input.json").read_text())
    assert notes["times"] == [0.0, BOUNDARY]
    again = run_of(tmp_path / "again", trained["transformer_2"], latents)
    assert again.times == (0.0, BOUNDARY)
    alone = run_of(tmp_path / "alone", f"{pipe}/transformer_2", latents)  # its folder names it too
    assert alone.times == (0.0, BOUNDARY)
    second = {"subfolder": "transformer_2", "mixer": "la"}
    teacher = run_of(tmp_path / "t", pipe, latents, second, distill={"teacher": pipe})
    weights = tiny_wan(seed=9).state_dict()
    assert all(torch.equal(v.cpu(), weights[k]) for k, v in teacher.teacher.model.state_dict().items())


def test_a_dry_run_of_one_draws_no_samples_of_its_run(tmp_path, latents, pipe):
    run = run_of(tmp_path / "run", pipe, latents, {"subfolder": "transformer_2", "mixer": "la"})
    assert dry_run(run.settings, DryDiffusionRun)["step"] == 1
    assert not (tmp_path / "run-dry-run" / "samples").exists()


def test_samples_are_those_of_a_pipeline_put_together_by_hand(tmp_path, trained, pipe):
    (tmp_path / "prompts.txt").write_text("3\n")
    one, two = str(trained["transformer"] / "transformer"), str(tmp_path / "second")
    other = zoo.HLAWanTransformer3DModel.from_pretrained(trained["transformer_2"] / "transformer")
    other.proj_out.weight.data *= 5  # so that pictures show whose they are
    other.save_pretrained(two)
    shape = {"prompts": str(tmp_path / "prompts.txt"), "size": 16, "frames": 5, "steps": 4, "guidance": 1.0, "seed": 6}
    found = open_sampler(SampleOptions(model=one, base=pipe, transformer_2=two, **shape), "cpu")
    ours = found([0])
    parts = [zoo.HLAWanTransformer3DModel.from_pretrained(where) for where in (one, two)]
    hand = WanPipeline.from_pretrained(pipe, transformer=parts[0], transformer_2=parts[1])
    hand.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(6)
    theirs = hand("3", height=16, width=16, num_frames=5, num_inference_steps=4, guidance_scale=1.0,
                  generator=generator, output_type="np").frames  # fmt: skip
    theirs = torch.from_numpy((theirs * 255 + 0.5).astype(np.uint8)).permute(0, 4, 1, 2, 3)
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert found.metadata()["second"]["sha256"] != found.metadata()["sha256"]
    only_second = open_sampler(SampleOptions(model=pipe, transformer_2=two, **shape), "cpu")([0])
    only_first = open_sampler(SampleOptions(model=one, base=pipe, **shape), "cpu")([0])
    assert not torch.equal(ours, only_first) and not torch.equal(ours, only_second)


def test_what_is_refused(tmp_path, pipe, latents):
    with pytest.raises(ValueError, match=r"denoises only the times 0.7 to 1.0, so that it draws no samples alone"):
        run_of(tmp_path / "a", pipe, latents, sample={"every": 1})
    plain = tiny_pipeline(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"plain has no transformer_2: leave model.subfolder out"):
        run_of(tmp_path / "b", plain, latents, {"subfolder": "transformer_2"})
    with pytest.raises(ValueError, match=r"unknown model.subfolder 'transformer_3'"):
        run_of(tmp_path / "c", pipe, latents, {"subfolder": "transformer_3"})
    with pytest.raises(ValueError, match=r"plain has no second transformer: leave sample.transformer_2 out"):
        open_sampler(SampleOptions(model=plain, transformer_2=f"{pipe}/transformer_2"), "cpu")
    with pytest.raises(ValueError, match=r"of flow matching: set objective.kind=flow"):
        create_objective(ObjectiveSettings(kind="ddpm"), (0.0, 0.5))


def test_times_of_one_are_those_of_all_between_its_ends():
    """Compared with what all times leave over when the others are thrown away, by their quantiles."""
    torch.manual_seed(0)
    shape, ends = {"mean": 0.3, "deviation": 1.2, "shift": 3.0}, [(0.875, 1.0), (0.0, 0.875)]
    every = FlowMatching(**shape).draw(400_000, torch.device("cpu"))
    at = torch.linspace(0.02, 0.98, 25)
    for low, high in ends:
        part = FlowMatching(**shape, times=(low, high))
        found, wanted = part.draw(100_000, torch.device("cpu")), every[(every >= low) & (every < high)]
        assert (found.quantile(at) - wanted.quantile(at)).abs().max() < 0.01 * (high - low)
        fixed = part.times_at(torch.tensor([0.0, 0.999999]))
        torch.testing.assert_close(fixed, torch.tensor([low, high]), atol=1e-5, rtol=0)
