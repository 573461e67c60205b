"""Videos on disk, clips out of them, moving digits, and the latents of clips."""

import struct
from fractions import Fraction

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import center_crop, resize

from tests.helpers.tiny_video import SHAPE, clips_on_disk, tiny_pipeline, tiny_vae
from zoo import config
from zoo.data.decoding import Unreadable
from zoo.data.latents import Latents
from zoo.data.latents.encoders import encode_first_frames, latent_shape, scaled, scaling_of, unscaled
from zoo.data.latents.extracting import extract_latents
from zoo.data.latents.settings import ExtractSettings
from zoo.data.video import Clips, ClipShape, MovingDigits, files, read_frames, write_video
from zoo.data.video.clips import cover
from zoo.data.video.files import read_video, video_info


def moving_bar(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Frame t has the grey level 8 t (mod 256), and a white bar that moves: no two frames are alike."""
    video = np.zeros((frames, height, width, 3), np.uint8)
    for t, frame in enumerate(video):
        frame[:] = 8 * t % 256
        frame[:, 2 * t % width : 2 * t % width + 8] = 255
    return video


def test_a_video_comes_back_frame_by_frame(tmp_path):
    video = moving_bar(20)
    write_video(video, tmp_path / "a.mp4", 12.5)
    assert video_info(tmp_path / "a.mp4") == (20, 32, 48, 12.5)
    numbers = [0, 3, 4, 19]
    found = read_frames(tmp_path / "a.mp4", numbers).astype(float)
    error = np.abs(found - video[numbers]).mean(axis=(1, 2, 3))
    assert (error < 3).all(), error  # neighbours differ by 8 in all but the bar
    write_video(video[:, :31, :47], tmp_path / "odd.mp4", 8)
    assert read_frames(tmp_path / "odd.mp4", [5]).shape == (1, 32, 48, 3)
    with pytest.raises(Unreadable, match="ends before its frame 20"):
        read_frames(tmp_path / "a.mp4", [20])


def write_stream(file, times, codec="libx264", **options):
    """Frames at these times, in ticks of 1 / 24 s, in groups of 12 with frames that point both ways."""
    av = pytest.importorskip("av")
    tick = Fraction(1, 24)
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt, stream.codec_context.time_base = 32, 48, "yuv420p", tick
        stream.options = {"g": "12", "bf": "2", **options}
        packets = []
        for time, picture in zip(times, moving_bar(len(times)), strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, tick
            packets += stream.encode(frame)
        for packet in [*packets, *stream.encode(None)]:
            container.mux(packet)


@pytest.mark.parametrize(
    ("name", "codec", "options", "most"),
    [
        ("a.mp4", "libx264", {}, 16),
        ("a.mp4", "libx264", {"x264-params": "open-gop=1"}, 16),
        ("a.mkv", "libx264", {}, 16),
        ("a.avi", "mpeg4", {}, 80),  # times of an avi file with such frames lie beside those of its index
    ],
)
def test_a_clip_is_decoded_from_its_key_frame(tmp_path, monkeypatch, name, codec, options, most):
    """Bit for bit the frames of the whole file; no more of it is decoded than the group around them."""
    write_stream(tmp_path / name, range(60), codec, **options)
    whole, count, decoded = read_video(tmp_path / name), [0], files._decoded
    monkeypatch.setattr(files, "_decoded", lambda *opened: (count.append(1) or f for f in decoded(*opened)))
    for number in (0, 1, 2, 11, 12, 13, 29, 35, 36, 47, 57, 58):
        count.clear()
        assert np.array_equal(read_frames(tmp_path / name, [number, number + 1]), whole[number : number + 2]), number
        assert len(count) <= most
    with pytest.raises(Unreadable, match="ends before its frame 60"):
        read_frames(tmp_path / name, [58, 60])


def test_a_video_is_read_at_another_rate(tmp_path):
    """16 frames a second of a file of 24, and a file whose frames come at irregular times."""
    write_stream(tmp_path / "even.mp4", range(30))
    whole = read_video(tmp_path / "even.mp4")
    shown = [int(n * 1.5) for n in range(20)]  # the frame that has begun by n / 16 s
    assert np.array_equal(read_frames(tmp_path / "even.mp4", range(20), 16), whole[shown])
    assert np.array_equal(read_frames(tmp_path / "even.mp4", range(4, 8), 48), whole[[2, 2, 3, 3]])
    times = [0, 1, 4, 6, 7, 12, 13, 20, 22, 23]
    write_stream(tmp_path / "odd.mp4", times)
    whole = read_video(tmp_path / "odd.mp4")
    shown = [max(i for i, t in enumerate(times) if t <= 2 * n) for n in range(12)]
    assert np.array_equal(read_frames(tmp_path / "odd.mp4", range(12), 12), whole[shown])
    assert np.array_equal(read_frames(tmp_path / "odd.mp4", range(9, 12), 12), whole[shown[9:]])
    clips = Clips(str(tmp_path), ClipShape(frames=4, height=32, width=48, stride=2, fps=16))
    assert clips.fps == 8 and [(file.stem, start) for file, start in clips.starts] == [
        ("even", 0), ("even", 7), ("odd", 0), ("odd", 7),
    ]  # fmt: skip
    assert torch.equal(clips.read(1)[0], cover(read_frames(tmp_path / "even.mp4", [7, 9, 11, 13], 16), 32, 48))


def test_a_portrait_of_a_phone_stands_upright(tmp_path):
    """The display matrix of the track says: a quarter turn clockwise."""
    frames = np.zeros((3, 16, 32, 3), np.uint8)
    frames[:, :8, :16] = 255  # top left, which becomes top right
    write_video(frames, tmp_path / "a.mp4", 8)
    stored = (tmp_path / "a.mp4").read_bytes()
    as_stored, turned = (65536, 0, 0, 0, 65536, 0, 0, 0), (0, 65536, 0, -65536, 0, 0, 0, 0)
    matrices = [struct.pack(">9i", *m, 1 << 30) for m in (as_stored, turned)]
    track = stored.index(matrices[0], stored.index(b"tkhd"))
    (tmp_path / "b.mp4").write_bytes(stored[:track] + matrices[1] + stored[track + 36 :])
    for number in (1, 2):  # the second one after a jump
        (found,) = read_frames(tmp_path / "b.mp4", [number])
        assert found.shape == (32, 16, 3)
        assert found[:14, 10:].min() > 200 and found[:14, :6].max() < 50 and found[18:].max() < 50


def test_clips_are_windows_of_the_files(tmp_path):
    for name, frames in (("a/one.mp4", 20), ("b/two.mp4", 11), ("b/short.mp4", 6)):
        write_video(moving_bar(frames), tmp_path / name, 10)
    shape = ClipShape(frames=4, height=32, width=48, stride=2)  # 7 frames of the file
    clips = Clips(str(tmp_path), shape)
    assert clips.classes == ["a", "b"] and clips.fps == 5
    assert [(file.stem, start) for file, start in clips.starts] == [("one", 0), ("one", 7), ("two", 0)]
    clip, label = clips.read(1)
    assert label == 0 and clip.shape == (3, 4, 32, 48)
    assert clip[0, :, 0, -1].float().sub(torch.tensor([56.0, 72.0, 88.0, 104.0])).abs().max() < 8
    assert len(Clips(str(tmp_path), shape._replace(step=1))) == 14 + 5
    with pytest.raises(ValueError, match=r"every video in .* is shorter than a clip, 61 frames"):
        Clips(str(tmp_path), ClipShape(61, 8, 8))


def test_frames_cover_the_clip(tmp_path):
    video = np.random.default_rng(0).integers(0, 255, (2, 40, 60, 3), dtype=np.uint8)
    assert torch.equal(cover(video, 40, 60), torch.from_numpy(video).permute(3, 0, 1, 2))
    found = cover(video, 20, 24)
    wanted = center_crop(resize(torch.from_numpy(video).permute(0, 3, 1, 2), [20, 30], antialias=True), [20, 24])
    assert found.shape == (3, 2, 20, 24)
    assert found.float().sub(wanted.transpose(0, 1).float()).abs().mean() < 12  # bicubic, theirs bilinear: noise
    grey = cover(np.full((1, 30, 30, 3), 77, np.uint8), 16, 32)
    assert grey.shape == (3, 1, 16, 32) and (grey == 77).all()


def test_random_crops_depend_on_the_seed_and_the_number_of_a_clip(tmp_path):
    """A clip is one window of all its frames, any window, the same in every extraction with that seed."""
    write_video(np.random.default_rng(0).integers(0, 255, (24, 16, 40, 3), dtype=np.uint8), tmp_path / "a.mp4", 10)
    shape, frames = ClipShape(frames=1, height=16, width=32), read_frames(tmp_path / "a.mp4", range(24))
    found = []
    for seed in (0, 0, 1):
        clips = Clips(str(tmp_path), shape, crop_seed=seed)
        windows = frames.shape[2] - 32 + 1
        whole = [[cover(f[None, :, left : left + 32], 16, 32) for left in range(windows)] for f in frames]
        lefts = [[torch.equal(clips.read(i)[0], w) for w in whole[i]].index(True) for i in reversed(range(24))]
        found.append(lefts[::-1])
    assert found[0] == found[1] != found[2] and set(found[0] + found[2]) == set(range(9))
    two = Clips(str(tmp_path), shape._replace(frames=2), crop_seed=0).read(3)[0]
    left = found[0][3]
    assert torch.equal(two, torch.from_numpy(frames[6:8, :, left : left + 32]).permute(3, 0, 1, 2))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (None, r"images.text_key=text needs .*metadata.csv with the columns file_name and text"),
        ("file_name,caption\n00000.mp4,a\n", r"metadata.csv has no column 'text'; its columns are file_name, caption"),
        ("file_name,text\n00000.mp4,a\n", r"metadata.csv has no text for 00001.mp4"),
    ],
)
def test_captions_are_needed_for_every_video(tmp_path, table, sentence):
    folder = clips_on_disk(tmp_path, True, 2)
    (folder / "metadata.csv").unlink()
    if table:
        (folder / "metadata.csv").write_text(table)
    with pytest.raises(ValueError, match=sentence):
        Clips(str(folder), SHAPE, "text")


def test_captions_of_a_spreadsheet_are_read(tmp_path):
    folder = clips_on_disk(tmp_path, True, 1)
    (folder / "metadata.csv").write_text("file_name,text\r\n00000.mp4,\u00e9t\u00e9\r\n", encoding="utf-8-sig")
    assert Clips(str(folder), SHAPE, "text").read(0)[1] == "\u00e9t\u00e9"


def test_digits_move_and_stay_on_the_canvas():
    clips = MovingDigits(True, ClipShape(frames=30, height=32, width=48), 5)
    again = MovingDigits(True, ClipShape(frames=30, height=32, width=48), 5)
    for number in range(5):
        clip, label = clips.read(number)
        other, its_label = again.read(number)
        assert torch.equal(clip, other) and label == its_label
        mass = clip[0].flatten(1).sum(1)
        assert (mass == mass[0]).all() and mass[0] > 0  # the whole digit, in every frame
        assert (clip[0, 1:] != clip[0, :-1]).flatten(1).any(1).all()
    assert not torch.equal(MovingDigits(False, clips.shape, 5).read(0)[0], clips.read(0)[0])


def extraction(folder, pipeline, out, **sections):
    tree = {
        "images": {"source": "videos", "where": str(folder), "text_key": "text", "img_size": 16, "frames": 5,
                   "workers": 0},
        "encode": {"vae": pipeline, "text": pipeline, "max_length": 8, "batch_size": 2, "shard": 2, "dtype": "float32",
                   "posterior": "mean", "device": "cpu"},
        "out": str(out),
    }  # fmt: skip
    return config.from_tree(ExtractSettings, config.merge(tree, sections))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return tiny_pipeline(tmp_path_factory.mktemp("wan"))


def test_latents_of_clips_are_those_of_wan(tmp_path, pipeline):
    """Against the formula of the pipeline of diffusers: (z - mean) / deviation, channel by channel."""
    folder = clips_on_disk(tmp_path / "clips", True, 5)
    (folder / "00003.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match="1 of 5 images cannot be read"):
        extract_latents(extraction(folder, pipeline, tmp_path / "bad"))
    (folder / "00003.mp4").unlink()
    manifest = extract_latents(extraction(folder, pipeline, tmp_path / "latents"))
    assert manifest.shape == [4, 2, 2, 2] and manifest.image_size == [5, 16, 16] and manifest.fps == 8
    assert manifest.shards == [2, 2]
    latents = Latents(str(tmp_path / "latents"), "", 0.0, 0, torch.device("cpu"))
    batch = next(latents.evaluation(4))
    vae, clips = tiny_vae(), Clips(str(folder), SHAPE, "text")
    x = torch.stack([clips.read(i)[0] for i in range(4)]).float() / 127.5 - 1
    with torch.no_grad():
        z = vae.encode(x).latent_dist.mean
    mean, deviation = (torch.tensor(v).view(1, 4, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    torch.testing.assert_close(batch.x0, (z - mean) / deviation)
    torch.testing.assert_close(unscaled(scaled(z, *scaling_of(vae)), *scaling_of(vae)), z)
    assert batch.condition["encoder_hidden_states"].shape == (4, 8, 16)
    assert latents.null["encoder_hidden_states"].shape == (8, 16)


def test_latents_of_random_crops(tmp_path, pipeline):
    write_video(moving_bar(20), tmp_path / "clips" / "a.mp4", 10)
    more = {"images": {"text_key": "", "crop": "random"}, "encode": {"text": "", "seed": 3}}
    manifest = extract_latents(extraction(tmp_path / "clips", pipeline, tmp_path / "latents", **more))
    assert manifest.crop == "random" and sum(manifest.shards) == 4
    x0 = next(Latents(str(tmp_path / "latents"), "", 0.0, 0, torch.device("cpu")).evaluation(4)).x0
    vae, clips = tiny_vae(), Clips(str(tmp_path / "clips"), SHAPE, crop_seed=3)
    x = torch.stack([clips.read(i)[0] for i in range(4)]).float() / 127.5 - 1
    with torch.no_grad():
        torch.testing.assert_close(x0, scaled(vae.encode(x).latent_dist.mean, *scaling_of(vae)))
    with pytest.raises(ValueError, match="was begun with another crop"):
        changed = {**more, "images": {"text_key": ""}}
        extract_latents(extraction(tmp_path / "clips", pipeline, tmp_path / "latents", **changed))
    with pytest.raises(ValueError, match=r"images.crop=random is for files of videos, not for the source 'folder'"):
        extraction(tmp_path, pipeline, tmp_path / "x", images={"source": "folder", "text_key": "", "crop": "random"})


def test_first_frames_are_those_of_the_pipeline(tmp_path):
    """Against `prepare_latents` and `encode_image` of the pipeline of diffusers."""
    where = tiny_pipeline(tmp_path / "pipe", from_image=True, eye=True)
    folder = clips_on_disk(tmp_path / "clips", True, 2)
    with pytest.raises(ValueError, match=r"before 512 of text, no more and no fewer: set encode.max_length=512, got 8"):
        extract_latents(extraction(folder, where, tmp_path / "latents"))
    manifest = extract_latents(extraction(folder, where, tmp_path / "latents", encode={"max_length": 512}))
    latents = Latents(str(tmp_path / "latents"), "", 0.0, 0, torch.device("cpu"))
    condition = next(latents.evaluation(2)).condition
    found, tokens = condition["image_latents"], condition["encoder_hidden_states_image"]
    assert latents.channels("image_latents") == 8 and manifest.shape == [4, 2, 2, 2]
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(where)
    clips = Clips(str(folder), SHAPE, "text")
    x = torch.stack([clips.read(i)[0] for i in range(2)]).float() / 127.5 - 1
    for i in range(2):
        _, wanted = pipe.prepare_latents(x[i : i + 1, :, 0], 1, 4, 16, 16, 5, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(found[i : i + 1], wanted)
        first = Image.fromarray(clips.read(i)[0][:, 0].permute(1, 2, 0).numpy())
        torch.testing.assert_close(tokens[i : i + 1], pipe.encode_image(first, torch.device("cpu")))
    assert tokens.shape == (2, 5, 12) and not torch.equal(*tokens)
    torch.testing.assert_close(encode_first_frames(pipe.vae, x), found)
    with pytest.raises(ValueError, match=r"encode.flip mirrors clips, but not the first frames"):
        extract_latents(extraction(folder, where, tmp_path / "flipped", encode={"flip": True, "max_length": 512}))
    own_time = diffusers.WanImageToVideoPipeline.from_pretrained(where)
    own_time.register_to_config(expand_timesteps=True)
    own_time.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="gives the first frame its own timestep"):
        extract_latents(extraction(folder, str(tmp_path / "own"), tmp_path / "x", encode={"max_length": 512}))


def test_the_vae_of_wan_2_2_halves_the_sides_once_more():
    twelve = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True, "scale_factor_spatial": 16}
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **twelve)
    z = vae.encode(torch.zeros(1, 3, 5, 32, 48)).latent_dist.mean
    assert latent_shape(vae, (5, 32, 48), "wan") == list(z.shape[1:]) == [4, 2, 2, 3]
    with pytest.raises(ValueError, match=r"images.img_size=24 is not divisible by 16"):
        latent_shape(vae, (5, 24, 48), "wan")


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        ((6, 16, 16), r"images.frames must be 4 n \+ 1 for the VAE wan, got 6"),
        ((5, 16, 20), r"images.width=20 is not divisible by 8, the step of the VAE wan"),
        ((16, 16), r"wan is a VAE of videos, but the data are images"),
    ],
)
def test_sizes_that_the_vae_does_not_take(pixels, sentence):
    with pytest.raises(ValueError, match=sentence):
        latent_shape(tiny_vae(), pixels, "wan")
