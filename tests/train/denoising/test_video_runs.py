"""Video runs: moving digits in pixels and in latents, from scratch, converted with teachers, sampled to mp4."""

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from tests.helpers.runs import ROOT
from tests.helpers.tiny_video import SIZES, WORDS, clips_on_disk, tiny_pipeline, tiny_wan
from tests.helpers.video_runs import PIXELS, settings, words
from zoo import config
from zoo.data.video.files import read_frames, video_info, write_video
from zoo.diffusion.call import call_denoiser, call_spec, class_tokens
from zoo.diffusion.objectives import FlowMatching
from zoo.diffusion.preview import contact_sheet, grid_video
from zoo.eval import sample_writers
from zoo.train.denoising.run import DiffusionRun, DryDiffusionRun
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.dry_run import dry_run
from zoo.train.metrics_log import read_rows


@pytest.fixture(scope="module")
def pixel_run(tmp_path_factory):
    """A softmax run on the pixels of moving digits, by the tool and its shipped configuration, made tiny."""
    import finetune_dit

    folder = tmp_path_factory.mktemp("run")
    changes = config.merge(PIXELS, {"run": {"folder": str(folder)}})
    result = finetune_dit.main(
        [f"{ROOT}/configs/video/moving_digits.yaml", *words(changes), "schedule.warmup_steps=0"]
    )
    assert result["step"] == 6 and result["model"] == "WanTransformer3DModel"
    return folder


@pytest.fixture
def written(monkeypatch):
    """Frames given to the writer of videos, by file: libx264 may encode equal frames of 8 x 8 pixels differently."""
    found = {}

    def write(frames, file, fps):
        found[file] = frames.astype(int)
        write_video(frames, file, fps)

    monkeypatch.setattr(sample_writers, "write_video", write)
    return found


def sampled(out, **options):
    import sample

    sample.main([*(f"sample.{k}={v}" for k, v in options.items()), f"out={out}"])


def test_a_pixel_run_leaves_videos_and_its_sampler_makes_more(pixel_run, tmp_path, written):
    grid = read_frames(pixel_run / "samples" / "step-00000006.mp4", range(4))
    assert grid.shape == (4, 16, 16, 3)  # three clips of 8 x 8, two a line
    assert np.asarray(Image.open(pixel_run / "samples" / "step-00000006.png")).shape == (24, 32, 3)
    model = {"model": pixel_run / "transformer_ema", "count": 3, "steps": 2, "guidance": 2.0, "labels": "balanced"}
    sampled(tmp_path / "a", **model, batch_size=3)
    sampled(tmp_path / "b", **model, batch_size=1)
    for i in range(3):
        assert read_frames(tmp_path / "a" / f"00000{i}.mp4", range(4)).shape == (4, 8, 8, 3)
        a, b = (written[tmp_path / name / f"00000{i}.mp4"] for name in "ab")
        assert np.abs(a - b).max() <= 1  # the same noise and class, other rounding
    assert video_info(tmp_path / "a" / "000000.mp4").fps == 8
    assert np.asarray(Image.open(tmp_path / "a" / "contact-sheet.png")).shape == (24, 32, 3)
    assert (tmp_path / "a" / "metadata.csv").read_text().splitlines()[3] == "000002.mp4,2"
    (tmp_path / "a" / "000001.mp4").unlink()
    sampled(tmp_path / "a", **model)  # goes on
    assert (tmp_path / "a" / "000001.mp4").is_file()
    sampled(tmp_path / "c", **(model | {"size": 12, "width": 16, "frames": 6, "count": 1}))
    assert read_frames(tmp_path / "c" / "000000.mp4", range(6)).shape == (6, 12, 16, 3)


def test_a_pixel_run_is_converted_learns_from_its_teacher_and_continues(pixel_run, tmp_path):
    model = {"checkpoint": str(pixel_run), "mixer": "ahla", "keep_softmax": "every:3"}
    distill = {"teacher": "source", "output": 5.0, "attention": 5.0}
    run = DiffusionRun(settings(tmp_path, model=model, distill=distill, schedule={"steps": 12}, sample={"every": 0}))
    names = [getattr(block.attn1, "mixer_name", "softmax") for block in run.model.blocks]
    assert names == ["softmax", "ahla", "ahla", "softmax"]
    run.train()
    train = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    early, late = ([row["attention"] for row in part] for part in (train[:3], train[-3:]))
    assert np.mean(late) < 0.7 * np.mean(early) and all(row["distill"] > 0 for row in train)
    whole = zoo.HLAWanTransformer3DModel.from_pretrained(tmp_path / "transformer").state_dict()
    half = settings(tmp_path / "half", model=model, distill=distill, schedule={"steps": 12}, sample={"every": 0})
    first = DiffusionRun(half)
    first.last_step = 6
    first.train()
    again = DiffusionRun(
        config.from_tree(DiffusionSettings, config.merge(config.to_tree(half), {"run": {"resume": True}}))
    )
    assert again.step == 6
    again.train()
    assert all(torch.equal(again.model.state_dict()[k].cpu(), v) for k, v in whole.items())


def test_moving_digits_are_learned_and_survive_conversion(tmp_path):
    """The shipped configurations, shortened to seconds; a constant prediction has a loss of about 1.2."""
    import finetune_dit

    short = ["data.clips=100", "data.batch_size=8", "data.val_images=16", "sample.every=0", "optim.ema=0.9"]
    scratch = ["model.kwargs.num_layers=2", "schedule.steps=80", "schedule.warmup_steps=5", "optim.lr=3e-3"]
    folder = [f"run.folder={tmp_path}/softmax", "run.checkpoint_steps=80"]
    softmax = finetune_dit.main([f"{ROOT}/configs/video/moving_digits.yaml", *short, *scratch, *folder])
    assert softmax["ema_val_loss"] < 0.6
    model = [f"model.checkpoint={tmp_path}/softmax", "model.kwargs={}", "model.keep_softmax=[]", "optim.lr=1e-3"]
    steps = ["schedule.steps=20", "schedule.warmup_steps=2", "run.checkpoint_steps=20", f"run.folder={tmp_path}/ahla"]
    file, own = f"{ROOT}/configs/video/moving_digits_finetune.yaml", [*short, *model, *steps]
    untuned = config.load(DiffusionSettings, file, [*own, f"run.folder={tmp_path}/x"])
    before, after = DiffusionRun(untuned).evaluate()["val_loss"], finetune_dit.main([file, *own])["ema_val_loss"]
    assert after < 0.97 * before and after < 1.02 * softmax["ema_val_loss"]


def test_a_dry_run_does_everything_once(pixel_run, tmp_path):
    model = {"checkpoint": str(pixel_run), "mixer": "mhla", "mixer_options": {"blocks": [2, 1, 2]}}
    found = dry_run(settings(tmp_path / "run", model=model, distill={"teacher": "source"}), DryDiffusionRun)
    assert found["step"] == 1 and found["val_images"] == 2
    folder = tmp_path / "run-dry-run"
    assert (folder / "samples" / "step-00000001.mp4").is_file() and (folder / "transformer_ema").is_dir()


def test_only_training_is_compiled(tmp_path, monkeypatch):
    """Validation and samples, of other sizes and without gradients, compile nothing."""
    graphs, compiled = [], torch.nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, options: compiled(module, backend=backend))
    model = PIXELS["model"] | {"mixer": "ahla"}
    run = DiffusionRun(settings(tmp_path, model, schedule={"steps": 1}, run={"compile": True}, optim={"ema": 0.0}))
    run.loss(next(run.batches(0, 1)))
    trained = len(graphs)
    assert trained > 0
    assert np.isfinite(run.evaluate()["val_loss"]) and run.generate(2).shape == (2, 3, 4, 8, 8)
    assert len(graphs) == trained


def test_blocks_are_chosen_for_the_clips(tmp_path):
    """Clips of 4 frames of 8 x 8 pixels are 4 x 2 x 2 tokens; a run goes on from such a checkpoint, named or not."""
    model = PIXELS["model"] | {"mixer": "mhla"}
    run = DiffusionRun(settings(tmp_path / "a", model, schedule={"steps": 1, "warmup_steps": 0}))
    mixer = run.model.blocks[0].attn1.mixer
    assert mixer.blocks == (2, 1, 1)
    run.train()
    for folder, more in (("b", {"mixer": "mhla"}), ("c", {})):
        source = {"checkpoint": str(tmp_path / "a"), **more}
        assert DiffusionRun(settings(tmp_path / folder, source)).model.blocks[0].attn1.mixer.blocks == mixer.blocks
    other = {"checkpoint": str(tmp_path / "a"), "mixer": "mhla", "mixer_options": {"blocks": [1, 2, 2]}}
    with pytest.raises(ValueError, match=r"is converted already"):
        DiffusionRun(settings(tmp_path / "d", other))


def test_mp4_to_latents_to_a_converted_wan_to_mp4(tmp_path):
    import extract_latents
    import finetune_dit

    pipe = tiny_pipeline(tmp_path / "wan")
    for part, count in (("train", 6), ("val", 3)):
        where = clips_on_disk(tmp_path / "clips" / part, part == "train", count)
        clips = {"images": {"source": "videos", "where": where, "text_key": "text", "img_size": 16, "frames": 5}}
        encode = {"encode": {"vae": pipe, "text": pipe, "max_length": 8, "batch_size": 3}}  # float16, the default
        extract_latents.main([*words(clips | encode), "images.workers=0", f"out={tmp_path}/latents/{part}"])
    folder = tmp_path / "run"
    changes = words({
        "model": {"checkpoint": pipe, "mixer": "la"},
        "data": {part: f"{tmp_path}/latents/{part}" for part in ("train", "val")} | {"batch_size": 2, "val_images": 3},
        "optim": {"grad_accum_steps": 1},
        "schedule": {"steps": 2, "warmup_steps": 1},
        "sample": {"every": 2, "count": 2, "steps": 1},
        "run": {"folder": folder, "precision": "fp32", "eval_steps": 2, "checkpoint_steps": 2},
    })  # fmt: skip
    finetune_dit.main([f"{ROOT}/configs/video/wan_1.3b_hybrid.yaml", *changes])  # checkpointing, both teachers
    (row,) = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "eval"]
    assert np.isfinite(row["val_loss"]) and (folder / "samples" / "step-00000002.mp4").is_file()
    (tmp_path / "prompts.txt").write_text("3\n7\n")
    model = {"model": folder / "transformer", "base": pipe, "prompts": tmp_path / "prompts.txt", "count": 2, "steps": 1}
    sampled(tmp_path / "videos", **model, size=16, frames=5)
    videos = [read_frames(tmp_path / "videos" / f"00000{i}.mp4", range(5)) for i in range(2)]
    assert videos[0].shape == (5, 16, 16, 3) and not np.array_equal(*videos)
    with pytest.raises(ValueError, match=r"sample.frames must be 4 n \+ 1, got 6"):
        sampled(tmp_path / "x", **model, size=16, frames=6)
    with pytest.raises(ValueError, match=r"needs the rest of its pipeline \(it was trained on prompts\)"):
        sampled(tmp_path / "x", model=folder / "transformer", count=1)
    with pytest.raises(ValueError, match="videos go into a folder of mp4 files"):
        sampled(tmp_path / "x.npz", **model, size=16, frames=5)


def test_classes_in_latents_are_sampled_with_the_vae_of_the_run(tmp_path):
    import extract_latents

    pipe = tiny_pipeline(tmp_path / "wan")
    for part in ("train", "val"):
        clips = {
            "images": {"source": "moving_digits", "where": part, "clips": 4, "img_size": 16, "width": 32, "frames": 5}
        }
        encode = {"encode": {"vae": pipe, "dtype": "float32"}}
        extract_latents.main([*words(clips | encode), "images.workers=0", f"out={tmp_path}/{part}"])
    data = {"source": "latents", "img_size": None, "train": f"{tmp_path}/train", "val": f"{tmp_path}/val", "hflip": 0.0}
    run = settings(
        tmp_path / "run", model={"kind": "wan", "kwargs": SIZES}, data=data | {"batch_size": 2}, schedule={"steps": 1}
    )
    DiffusionRun(run).train()
    sampled(tmp_path / "videos", model=tmp_path / "run" / "transformer", count=2, steps=1, labels="balanced")
    assert video_info(tmp_path / "videos" / "000001.mp4") == (5, 16, 32, 8.0)
    other = {"kind": "dit", "kwargs": {"num_layers": 1}}
    with pytest.raises(ValueError, match="DiTTransformer2DModel makes images, but the data are videos"):
        DiffusionRun(settings(tmp_path / "x", model=other, data=data | {"batch_size": 2}))


@pytest.mark.parametrize("eye", [False, True], ids=["wan-2.2", "wan-2.1"])
def test_image_to_video_trains_and_samples(tmp_path, eye):
    """eye: the pipeline has an image encoder, whose tokens of the first frame the model reads too."""
    import extract_latents

    pipe = tiny_pipeline(tmp_path / "wan", from_image=True, eye=eye)
    where = clips_on_disk(tmp_path / "clips", True, 4)
    clips = {"images": {"source": "videos", "where": where, "text_key": "text", "img_size": 16, "frames": 5}}
    encode = {"encode": {"vae": pipe, "text": pipe, "max_length": 512 if eye else 8, "dtype": "float32"}}
    extract_latents.main([*words(clips | encode), "images.workers=0", f"out={tmp_path}/latents"])
    data = {"source": "latents", "img_size": None, "train": f"{tmp_path}/latents", "val": f"{tmp_path}/latents"}
    data |= {"hflip": 0.0, "batch_size": 2}
    model = {"checkpoint": pipe, "mixer": "ahla"}
    run = DiffusionRun(settings(tmp_path / "run", model=model, data=data))
    batch = next(run.batches(0, 1))
    seen = []
    run.model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    run.loss(batch)
    x = seen[0]["hidden_states"]
    assert x.shape == (2, 12, 2, 2, 2) and torch.equal(x[:, 4:], batch.condition["image_latents"])
    if eye:  # and they change the output
        tokens = seen[0]["encoder_hidden_states_image"]
        assert torch.equal(tokens, batch.condition["encoder_hidden_states_image"])
        others = seen[0] | {"encoder_hidden_states_image": tokens.flip(2)}
        assert not torch.allclose(run.model(**seen[0])[0], run.model(**others)[0])
    run.train()
    (tmp_path / "frames").mkdir()
    Image.fromarray(np.full((20, 20, 3), 200, np.uint8)).save(tmp_path / "frames" / "a.png")
    (tmp_path / "prompts.txt").write_text("3\n")
    model = {"model": tmp_path / "run" / "transformer", "base": pipe, "prompts": tmp_path / "prompts.txt", "count": 1}
    shape = {"steps": 1, "size": 16, "frames": 5}
    sampled(tmp_path / "videos", **model, **shape, images=tmp_path / "frames")
    assert video_info(tmp_path / "videos" / "000000.mp4")[:3] == (5, 16, 16)
    with pytest.raises(ValueError, match=r"WanImageToVideoPipeline needs sample.images=FOLDER"):
        sampled(tmp_path / "x", **model, **shape)
    tiny_wan(12, **({} if eye else {"image_dim": 12, "added_kv_proj_dim": 16})).save_pretrained(tmp_path / "other")
    other = settings(tmp_path / "y", model={"checkpoint": str(tmp_path / "other")}, data=data)
    with pytest.raises(ValueError, match="reads no tokens of an image" if eye else "reads the tokens of an image"):
        DiffusionRun(other)


def test_a_class_is_a_row_of_the_projection():
    """The first layer that reads text gives class c the c-th column of its weights, and no class the bias alone."""
    model = tiny_wan(text_dim=10)
    linear = model.condition_embedder.text_embedder.linear_1
    found = linear(class_tokens(torch.tensor([4, 10]), 10))[:, 0]
    torch.testing.assert_close(found, torch.stack([linear.weight[:, 4] + linear.bias, linear.bias]))
    x, t = torch.randn(1, 4, 2, 4, 4), torch.tensor([500.0])
    tokens = {"encoder_hidden_states": class_tokens(torch.tensor([4]), 10)}
    wanted = model(hidden_states=x, timestep=t, **tokens).sample
    torch.testing.assert_close(
        call_denoiser(model, x, t, {"class_labels": torch.tensor([4])}, call_spec(model, x.shape[1:], {})), wanted
    )


def test_flow_matching_of_clips_is_that_of_their_frames():
    objective, x0 = FlowMatching(shift=3.0), torch.randn(2, 3, 4, 5, 5)
    noise, output, t = torch.randn_like(x0), torch.randn_like(x0), torch.tensor([0.2, 0.9])
    for frame in range(4):
        one = [x[:, :, frame] for x in (x0, noise)]
        torch.testing.assert_close(objective.noised(x0, noise, t)[:, :, frame], objective.noised(*one, t))
    each = [objective.losses(output[:, :, i], x0[:, :, i], noise[:, :, i], t).mse for i in range(4)]
    torch.testing.assert_close(objective.losses(output, x0, noise, t).mse, torch.stack(each).mean(0))


def test_sheets_and_grids_show_every_clip():
    clips = torch.zeros(3, 3, 9, 2, 4, dtype=torch.uint8)
    clips += torch.arange(3).view(3, 1, 1, 1, 1).to(torch.uint8) * 100 + torch.arange(9).view(9, 1, 1).to(torch.uint8)
    sheet = contact_sheet(clips)
    assert sheet.shape == (6, 32, 3) and sheet[4, :, 0].tolist() == [
        200 + i for i in (0, 1, 2, 3, 5, 6, 7, 8) for _ in range(4)
    ]
    grid = grid_video(clips)
    assert grid.shape == (9, 4, 8, 3)
    assert grid[7, :, :, 1].tolist() == [[7] * 4 + [107] * 4] * 2 + [[207] * 4 + [255] * 4] * 2


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": {"img_size": 9}}, r"inputs of 4 x 9 x 9 are not divisible by the patch size 1 x 4 x 4"),
        ({"data": {"source": "digits", "img_size": 8}}, r"WanTransformer3DModel makes videos, but the data are images"),
        ({"model": {"kind": "dit", "kwargs": {}}}, r"DiTTransformer2DModel makes images, but the data are videos"),
        ({"model": {"kind": "wan", "kwargs": {"text_dim": 3}}}, r"model.kwargs must not give text_dim"),
        ({"data": {"source": "videos", "train": "nowhere"}}, r"data.train must be a folder of videos, got 'nowhere'"),
        ({"data": {"source": "digits", "width": 8}}, r"data.width is for videos"),
        ({"data": {"fps": 16.0}}, r"data.fps is for files of videos, not for the source 'moving_digits'"),
        ({"data": {"fps": -1.0}}, r"data.fps must be 0 or more, got -1"),
        ({"data": {"step": -1}}, r"data.step must be 0 or more, got -1"),
    ],
)  # fmt: skip
def test_wrong_settings(tmp_path, sections, sentence):
    with pytest.raises(ValueError, match=sentence):
        DiffusionRun(settings(tmp_path, **sections))


def test_a_model_of_text_does_not_read_classes(tmp_path):
    tiny_wan(in_channels=3, out_channels=3, patch_size=(1, 4, 4)).save_pretrained(tmp_path / "text")
    model = {"checkpoint": str(tmp_path / "text")}
    with pytest.raises(ValueError, match=rf"reads tokens of {WORDS} numbers, but the data has 10 classes"):
        DiffusionRun(settings(tmp_path / "run", model=model))


def test_other_video_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "LatteTransformer3DModel"}')
    with pytest.raises(ValueError, match=r"LatteTransformer3DModel makes videos, and only WanPipeline,"):
        sampled(tmp_path / "x", model=tmp_path)
