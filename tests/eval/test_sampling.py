"""Sampling: guidance as in DiT, seeds an image, outputs that continue, and what is refused."""

import itertools
import json
import signal
import time

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image

import zoo
from tests.forks import Fork, finish, start_two
from tests.helpers.sampling import settings
from tests.helpers.small_images import noise_images, small_extractor
from tests.helpers.tiny_diffusion import tiny_dit, tiny_pipeline, tiny_pixels, tiny_text_pipeline, tiny_vae
from zoo.data.latents.extracting import ImageSamples
from zoo.data.latents.settings import ImageSettings
from zoo.diffusion.loading import open_model, open_scheduler
from zoo.diffusion.samplers import ClassSampler, batches, check_resolution, to_uint8
from zoo.eval.fid import FidOptions, score
from zoo.eval.sample_settings import SampleOptions
from zoo.eval.sample_writers import open_output
from zoo.eval.sampling import open_sampler, run_sampling
from zoo.train.denoising.model import save_transformer


def difference(a, b):
    return (a.int() - b.int()).abs().max().item()


# Against other definitions


def test_equals_the_pipeline_of_diffusers(tmp_path):
    folder = tiny_pipeline(tmp_path / "pipe")
    pipe = DiTPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    labels = [3, 999, 0]
    theirs = pipe(
        class_labels=labels,
        guidance_scale=1.5,
        generator=[torch.Generator().manual_seed(20 + i) for i in range(3)],
        num_inference_steps=4,
        output_type="np",
    ).images
    ours = open_sampler(SampleOptions(model=folder, steps=4, guidance=1.5, labels=labels, seed=20), "cpu")(range(3))
    theirs = torch.from_numpy((theirs * 255 + 0.5).astype(np.uint8)).permute(0, 3, 1, 2)
    assert ours.shape == (3, 3, 16, 16) and difference(ours, theirs) <= 1  # rounding of halves
    assert len(torch.unique(ours)) > 20


def test_learned_variance_and_first_channels_against_a_loop_by_hand():
    """Ancestral sampling with sigma^2 between beta and its posterior (Nichol and Dhariwal 2021, eq. 15), 1000 steps."""
    model, seed = tiny_dit(4, learned=True), 5
    scheduler = DDPMScheduler(num_train_timesteps=6, variance_type="learned_range", clip_sample=False)
    sampler = ClassSampler(
        model, scheduler, tiny_vae(), steps=6, guidance=2.0, guidance_channels=3, labels=[4], seed=seed
    )
    found = sampler([1])
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(1, 4, 8, 8, generator=generator)
    beta = torch.linspace(0.0001, 0.02, 6)
    total = torch.cumprod(1 - beta, 0)
    with torch.no_grad():
        for t in reversed(range(6)):
            given, free = (
                model(x, timestep=torch.tensor([t]), class_labels=torch.tensor([label])).sample for label in (4, 10)
            )
            noise, v = given[:, :4].clone(), given[:, 4:]
            noise[:, :3] = free[:, :3] + 2 * (given[:, :3] - free[:, :3])
            before = total[t - 1] if t else torch.tensor(1.0)
            x0 = (x - (1 - total[t]).sqrt() * noise) / total[t].sqrt()
            mean = (before.sqrt() * beta[t] * x0 + (1 - beta[t]).sqrt() * (1 - before) * x) / (1 - total[t])
            x = mean
            if t:
                low, high = ((1 - before) / (1 - total[t]) * beta[t]).log(), beta[t].log()
                fraction = (v + 1) / 2
                deviation = (0.5 * (fraction * high + (1 - fraction) * low)).exp()
                x = mean + deviation * torch.randn(1, 4, 8, 8, generator=generator)
        expected = to_uint8(tiny_vae().decode(x / 0.18215).sample)
    assert difference(found, expected) <= 1
    full = ClassSampler(model, scheduler, tiny_vae(), steps=6, guidance=2.0, labels=[4], seed=seed)([1])
    assert difference(found, full) > 1, "guiding the fourth channel changes the image"


def test_flow_matching_by_euler_steps_in_pixels():
    model = tiny_dit()
    found = ClassSampler(model, FlowMatchEulerDiscreteScheduler(), steps=5, labels=[2], seed=9)([0])
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(9))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    sigmas = scheduler.sigmas.tolist()
    with torch.no_grad():
        for now, then in itertools.pairwise(sigmas):
            x += (then - now) * model(x, timestep=torch.tensor([1000 * now]), class_labels=torch.tensor([2])).sample
    assert sigmas[0] == 1 and sigmas[-1] == 0 and difference(found, to_uint8(x)) <= 1


# One image, whatever is sampled beside it


@pytest.mark.parametrize(
    "scheduler", [DDPMScheduler(), DDIMScheduler(), FlowMatchEulerDiscreteScheduler()], ids=lambda s: type(s).__name__
)
def test_images_do_not_depend_on_the_batch(scheduler):
    sampler = ClassSampler(tiny_dit(), scheduler, steps=4, guidance=1.5, seed=3)
    whole = sampler(range(6))
    alone = torch.cat([sampler([i]) for i in range(6)])
    mixed = sampler([5, 1, 3])
    assert difference(whole, alone) <= 1 and difference(whole[[5, 1, 3]], mixed) <= 1
    assert difference(whole[:3], whole[3:]) > 20 and difference(whole, torch.cat(list(batches(sampler, 6, 4)))) <= 1
    assert sampler.labels([5, 1]) == [sampler.labels(range(6))[i] for i in (5, 1)]


def test_labels():
    def labels(choice, n, seed=0):
        return ClassSampler(tiny_dit(), DDIMScheduler(), labels=choice, seed=seed).labels(range(n))

    assert labels("balanced", 12) == [*range(10), 0, 1] and labels([7, 2], 3) == [7, 2, 7]
    counts = np.bincount(labels("random", 3000), minlength=10)
    assert counts.min() > 240 and counts.max() < 360
    assert labels("random", 50) == labels("random", 50) != labels("random", 50, seed=1)


def test_two_processes_make_the_images_of_one(tmp_path):
    folder = tiny_pixels(tmp_path / "model")
    words = [f"sample.model={folder}", "sample.steps=3", "sample.count=7", "sample.device=cpu", "sample.guidance=2"]
    status, out, err = finish(start_two("tools/sample.py", *words, "sample.batch_size=2", f"out={tmp_path}/two.npz"))
    assert status == 0, err
    assert out.count("wrote ") == 1
    run_sampling(settings(tmp_path / "one.npz", model=folder, guidance=2.0), "")
    one, other = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert one["arr_0"].shape == (7, 8, 8, 3) and one["arr_0"].dtype == np.uint8
    assert np.abs(one["arr_0"].astype(int) - other["arr_0"]).max() <= 1
    assert one["arr_1"].tolist() == other["arr_1"].tolist() and one["arr_1"].dtype == np.int64


# Outputs


def test_png_folder_holds_the_same_images_and_a_card(tmp_path):
    folder = tiny_pixels(tmp_path / "model")
    for out in ("samples.npz", "samples"):
        run_sampling(settings(tmp_path / out, model=folder), "python tools/sample.py")
    arrays = np.load(tmp_path / "samples.npz")
    files = sorted((tmp_path / "samples").glob("*.png"))
    assert [f.name for f in files] == [f"{i:06d}.png" for i in range(7)]
    assert np.array_equal(np.stack([np.asarray(Image.open(f)) for f in files]), arrays["arr_0"])
    rows = (tmp_path / "samples" / "metadata.csv").read_text().splitlines()
    assert rows[0] == "file_name,label" and [int(r.split(",")[1]) for r in rows[1:]] == arrays["arr_1"].tolist()
    one, other = (json.loads((tmp_path / f"samples{end}.json").read_text()) for end in ("", ".npz"))
    assert one == other and one["sampling"]["scheduler"] == "FlowMatchEulerDiscreteScheduler"
    assert not {"density", "stream"} & one["sampling"].keys()  # which outputs of earlier versions do not have
    assert one["sampling"]["guided_channels"] == "the first 3 of 3" and len(one["sampling"]["sha256"]) == 64
    assert not (tmp_path / "samples.npz.parts").exists()


@pytest.mark.parametrize("out", ["x.npz", "x"])
def test_a_run_continues_where_it_stopped(out, tmp_path):
    folder = tiny_pixels(tmp_path / "model")
    run_sampling(settings(tmp_path / f"whole{out}", model=folder, count=9), "")
    place, options = tmp_path / out, settings(tmp_path / out, model=folder, count=9)
    output, sampler = open_output(str(place)), open_sampler(options.sample, "cpu")
    run_sampling(settings(place, model=folder, count=2), "") if out == "x" else None
    if out == "x.npz":
        card = json.loads((tmp_path / "wholex.npz.json").read_text())
        output.start(card)
        output.write([4, 5], sampler([4, 5]))
        (output.parts / "00000007.tmp").write_bytes(b"half")
    assert run_sampling(settings(place, model=folder, count=9, batch_size=4), "") == 7
    assert run_sampling(settings(place, model=folder, count=9), "") == 0
    if out == "x.npz":
        one, other = (np.load(tmp_path / name) for name in ("x.npz", "wholex.npz"))
        assert np.abs(one["arr_0"].astype(int) - other["arr_0"]).max() <= 1
        with pytest.raises(ValueError, match="finished and holds fewer than 10"):
            run_sampling(settings(place, model=folder, count=10), "")
    else:
        assert len(list(place.glob("*.png"))) == 9
    with pytest.raises(ValueError, match="already holds images up to number 9: ask for at least as many"):
        run_sampling(settings(place, model=folder, count=8), "")
    with pytest.raises(ValueError, match="made in another way; they differ in guidance, seed"):
        run_sampling(settings(place, model=folder, count=9, seed=1, guidance=3.0), "")


def test_killed_and_started_again(tmp_path):
    folder = tiny_pixels(tmp_path / "model")
    words = [f"sample.model={folder}", "sample.steps=40", "sample.count=60", "sample.batch_size=1", "sample.device=cpu"]
    process = Fork("tools/sample.py", *words, f"out={tmp_path}/x")
    deadline = time.monotonic() + 600
    while len(list((tmp_path / "x").glob("*.png"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    there = {f: f.stat().st_mtime_ns for f in (tmp_path / "x").glob("*.png")}
    made = run_sampling(settings(tmp_path / "x", model=folder, steps=40, count=60, batch_size=20), "")
    assert 3 <= len(there) < 60 and made == 60 - len(there)
    assert all(f.stat().st_mtime_ns == then for f, then in there.items())
    whole = open_sampler(SampleOptions(model=folder, steps=40), "cpu")(range(60))
    found = [np.asarray(Image.open(tmp_path / "x" / f"{i:06d}.png")) for i in range(60)]
    assert difference(torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2), whole) <= 1


# Models


def test_a_bare_transformer_with_the_rest_of_a_pipeline(tmp_path):
    base = tiny_pipeline(tmp_path / "pipe")
    shared = {"steps": 3, "labels": [5], "guidance": 1.5}
    whole = open_sampler(SampleOptions(model=base, **shared), "cpu")([0])
    parts = open_sampler(SampleOptions(model=f"{base}/transformer", base=base, **shared), "cpu")([0])
    assert torch.equal(whole, parts)
    with pytest.raises(ValueError, match=r"latents of 4 channels: give the pipeline with its VAE as sample\.base"):
        open_model(f"{base}/transformer")
    with pytest.raises(ValueError, match=r"sample\.base is for transformers"):
        open_model(base, base=base)
    tiny_dit(4).save_pretrained(tmp_path / "run" / "transformer_ema")
    with pytest.raises(ValueError, match=r"run/transformer_ema makes latents of 4 channels"):
        open_model(f"{tmp_path}/run")


def test_a_trained_transformer_is_sampled_by_its_own_scheduler(tmp_path):
    """A model of flow matching with the VAE of a pipeline of DDPM."""
    base, tuned = tiny_pipeline(tmp_path / "pipe"), tmp_path / "run" / "transformer_ema"
    model, own = tiny_dit(4), FlowMatchEulerDiscreteScheduler(shift=2.0)
    save_transformer(model, tuned, own)
    opened = open_model(str(tuned), base)
    found = open_sampler(SampleOptions(model=str(tuned), base=base, steps=3, labels=[5]), "cpu")([0])
    expected = ClassSampler(model, own, opened.vae, steps=3, labels=[5])([0])
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="DDIMScheduler cannot sample a model of FlowMatchEulerDiscreteScheduler"):
        open_sampler(SampleOptions(model=str(tuned), base=base, scheduler="DDIMScheduler"), "cpu")


def test_converted_models_are_loaded_with_their_mixers(tmp_path):
    source = tiny_pixels(tmp_path / "softmax")
    model = DiTTransformer2DModel.from_pretrained(source)
    zoo.convert(model, mixer="ahla")
    model.save_pretrained(tmp_path / "ahla")
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.save_pretrained(tmp_path / "ahla" / "scheduler")
    options = {"steps": 3, "guidance": 2.0, "seed": 1}
    loaded = open_sampler(SampleOptions(model=f"{tmp_path}/ahla", **options), "cpu")
    assert torch.equal(loaded(range(3)), ClassSampler(model, scheduler, **options)(range(3)))
    assert difference(loaded(range(3)), open_sampler(SampleOptions(model=source, **options), "cpu")(range(3))) > 1
    about = loaded.metadata()
    assert about["model"] == "HLADiTTransformer2DModel" and "ahla" in json.dumps(about["config"])


def test_a_score_of_live_images_is_that_of_the_file(tmp_path):
    pytest.importorskip("torch_fidelity", reason="it comes with hla-zoo[eval]")
    folder = tiny_pixels(tmp_path / "model")
    run_sampling(settings(tmp_path / "x.npz", model=folder, count=20, batch_size=20), "")
    sampler = open_sampler(SampleOptions(model=folder, steps=3), "cpu")
    reference = [noise_images(30, 0)]
    with pytest.warns(UserWarning, match="biased upwards"):
        file, live = (
            score(samples, reference, small_extractor(), FidOptions(workers=0))
            for samples in (str(tmp_path / "x.npz"), batches(sampler, 20, 20))
        )
    assert live["scores"]["fid"] == pytest.approx(file["scores"]["fid"], rel=1e-6)
    assert file["samples"]["card"]["sampling"]["steps"] == 3 and live["samples"]["card"] is None


def test_text_to_image_pipelines(tmp_path):
    folder = tiny_text_pipeline(tmp_path / "pipe")
    (tmp_path / "prompts.txt").write_text("a b c\n\nd e\nx y z\n")
    options = {"model": folder, "prompts": f"{tmp_path}/prompts.txt", "steps": 3, "seed": 4, "size": 16}
    sampler = open_sampler(SampleOptions(**options), "cpu")
    whole = sampler(range(4))
    assert whole.shape == (4, 3, 16, 16) and difference(whole[[0]], whole[[3]]) > 3  # one prompt, other noise
    assert difference(whole, torch.cat([sampler([i]) for i in range(4)])) <= 1
    assert sampler.metadata()["guidance"] == 4.5 and sampler.labels([4, 0]) == ["d e", "a b c"]
    run_sampling(settings(tmp_path / "made", **options, count=4), "")  # a data set for tools/extract_latents.py
    made = ImageSamples(ImageSettings(source="hf", where=f"{tmp_path}/made", text_key="text", img_size=16))
    assert [made[i][2] for i in range(4)] == sampler.labels(range(4))
    assert difference(((made[3][1] + 1) * 127.5).round(), whole[3]) <= 1
    bare = open_sampler(SampleOptions(**options | {"model": f"{folder}/transformer", "base": folder}), "cpu")
    assert torch.equal(bare([1]), sampler([1]))
    (tmp_path / "long.txt").write_text("a\n" + "b " * 20)
    for change, sentence in [
        ({"prompts": ""}, r"PixArtAlphaPipeline needs prompts"),
        ({"prompts": f"{tmp_path}/none.txt"}, r"there is no file of prompts"),
        ({"prompts": f"{tmp_path}/long.txt"}, r"line 2 of the prompts has 20 tokens, the model reads at most 16"),
        ({"size": 18}, r"sample\.size must be a positive multiple of 4 .*got 18"),
        ({"guidance_channels": 3}, r"is for class-conditional models"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, r"cannot sample a model of DDIMScheduler"),
        ({"model": f"{folder}/transformer"}, r"PixArtTransformer2DModel needs the rest of its pipeline"),
    ]:
        with pytest.raises(ValueError, match=sentence) as caught:
            open_sampler(SampleOptions(**options | change), "cpu")
        assert "\n" not in str(caught.value)


def write_index(folder, name, file="model_index.json"):
    folder.mkdir()
    (folder / file).write_text(json.dumps({"_class_name": name, "_diffusers_version": "0.42.0"}))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("DitPipeline", r"unknown pipeline class 'DitPipeline'; .*Did you mean 'DiTPipeline'"),
        ("LTX2Pipeline", r"LTX2Pipeline makes videos, and only WanPipeline, .* can be sampled here"),
        ("DDPMPipeline", r"takes neither class labels nor a prompt"),
        ("StableDiffusionInpaintPipeline", r"changes an image that it is given"),
    ],
)
def test_pipelines_that_make_no_images(name, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        open_model(write_index(tmp_path / "pipe", name))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("DiTTransformer2dModel", r"unknown model class .*Did you mean 'DiTTransformer2DModel'"),
        ("CogVideoXTransformer3DModel", r"makes videos, and only WanPipeline, .* can be sampled here"),
    ],
)
def test_transformers_that_make_no_images(name, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        open_model(write_index(tmp_path / "model", name, "config.json"))


def test_no_model_there(tmp_path):
    with pytest.raises(ValueError, match=r"there is no diffusion model"):
        open_model(str(tmp_path))


def test_a_misspelt_run_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("diffusers.ConfigMixin.load_config", None)
    with pytest.raises(ValueError, match=r"there is no diffusion model '.*/rum'"):
        open_model(f"{tmp_path.name}/rum")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scheduler_options": {"shift": "x"}}, r"sample.scheduler_options.shift must be float, got 'x'"),
        ({"scheduler": "DDIMSchedular"}, r"unknown scheduler .*Did you mean 'DDIMScheduler'"),
        ({"scheduler_options": {"shfit": 3}}, r"unknown option of FlowMatchEulerDiscreteScheduler .*'shift'"),
        ({"scheduler": "DDIMScheduler"}, r"DDIMScheduler cannot sample a model of FlowMatchEulerDiscreteScheduler"),
        ({"size": 9}, r"sample\.size must be a positive multiple of 2 \(the patch 2\), got 9"),
        ({"labels": [3, 10]}, r"the model has the classes 0 to 9, got the label 10"),
        ({"guidance_channels": 4}, r"guidance_channels must be in \[1, 3\], got 4"),
        ({"prompts": "x.txt"}, r"is class-conditional"),
    ],
)
def test_what_a_class_conditional_model_cannot_do(change, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence) as caught:
        open_sampler(SampleOptions(model=tiny_pixels(tmp_path / "model"), **change), "cpu")
    assert "\n" not in str(caught.value)


def test_schedulers_of_the_same_process_may_be_exchanged():
    own = DDIMScheduler(beta_schedule="squaredcos_cap_v2")
    found = open_scheduler("DDPMScheduler", {"variance_type": "learned_range"}, own)
    assert found.config.beta_schedule == "squaredcos_cap_v2" and found.config.variance_type == "learned_range"
    assert type(open_scheduler("FlowMatchHeunDiscreteScheduler", {}, FlowMatchEulerDiscreteScheduler())).__name__
    with pytest.raises(ValueError, match="learned no variance"):
        ClassSampler(tiny_dit(), found)
    with pytest.raises(ValueError, match=r"has no scheduler: set sample\.scheduler"):
        open_scheduler("", {}, None)


def test_noise_that_all_images_share_is_refused():
    class Careless(DDIMScheduler):
        def step(self, found, t, x, generator=None):
            return super().step(found, t, x + torch.randn_like(x), generator=generator)

    with pytest.raises(ValueError, match="Careless uses the global random generator"):
        ClassSampler(tiny_dit(), Careless(), steps=2)([0])


def test_pixels_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="infinite or not a number"):
        to_uint8(torch.full((1, 3, 2, 2), float("nan")))
    assert to_uint8(torch.tensor([-2.0, -1, 0, 1, 2]).reshape(1, 1, 1, 5))[0, 2, 0].tolist() == [0, 0, 128, 255, 255]


def test_resolutions():
    check_resolution(256, 2, 8)
    with pytest.raises(
        ValueError, match=r"a positive multiple of 16 \(the patch 2 of latents 8 times smaller\), got 250"
    ):
        check_resolution(250, 2, 8)
