"""Frame-causal video models: frames in pieces equal the whole, earlier frames never see later ones."""

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import zoo
from tests.helpers.sampling import whole_and_streamed
from tests.helpers.tiny_diffusers import converted, inputs, run, sites
from tests.helpers.tiny_video import tiny_pipeline
from tests.helpers.video_runs import PIXELS, settings
from zoo.data.video.files import read_frames
from zoo.diffusion.samplers import denoise
from zoo.diffusion.streaming import FrameStream
from zoo.eval.sample_settings import SampleOptions
from zoo.eval.sampling import open_sampler
from zoo.train.denoising.run import DiffusionRun

MIXERS = ("la", "hla2", "ahla", "hla3")
EVERY = (*MIXERS, "mhla", "softmax")
FRAMES = 6
FRAMED = {"scan": "frame"}  # as delta rules have it


def model_of(name, mixer, **options):
    return converted(name, mixer, **(options if options == FRAMED else {"causal": "frame", **options})).double()


def arguments(name, first=0, last=FRAMES):
    """Inputs of a forward pass with the frames `first` to `last` of a video."""
    given = inputs(name)
    x = torch.randn(2, 4, FRAMES, 8, 12, generator=torch.Generator().manual_seed(5))[:, :, first:last]
    given |= {"hidden_states": x}
    if name == "ltx":
        given |= {"hidden_states": x[..., ::2, ::2].flatten(2).mT, "num_frames": last - first}
    return {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in given.items()}


def frames_of(name, y):
    """Output by frames, [B, T, ...]."""
    return y.unflatten(1, (-1, 24)) if name == "ltx" else y.transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "mixer", "options"),
    [
        *(("wan", mixer, {}) for mixer in MIXERS),
        ("ltx", "hla3", {}),
        ("ltx", "la", {"feature_map": "elu1", "decay": 0.9}),
        ("wan", "mhla", {"blocks": (1, 2, 3)}),
        ("wan", "softmax", {"window": 1}),
        ("ltx", "softmax", {"window": 2}),
        ("ltx", "mhla", {"blocks": (1, 2, 2), "feature_map": "relu", "per_head": True}),
        ("wan", "ahla", {"normalize": False, "post_norm": True}),
        ("wan", "gdn", FRAMED),
        ("ltx", "hdla", FRAMED),
    ],
)
@torch.no_grad()
def test_pieces_are_the_whole(name, mixer, options):
    model = model_of(name, mixer, **options)
    whole = frames_of(name, run(model, arguments(name)))
    stream, pieces, sizes = FrameStream(model), [], set()
    for first, last in ((0, 1), (1, 4), (4, 6)):
        with stream.chunk(first):
            pieces.append(frames_of(name, run(model, arguments(name, first, last))))
        sizes.add(stream.nbytes)
    assert len(sizes) == 1 and (torch.cat(pieces, 1) - whole).norm() < 1e-5 * whole.norm()  # rotations are float32
    assert not any(site.mixer.states for site in sites(model))
    assert torch.equal(frames_of(name, run(model, arguments(name))), whole)


@pytest.mark.parametrize(
    ("name", "mixer"), [*(("wan", mixer) for mixer in (*EVERY, "hdla")), ("ltx", "hla2"), ("ltx", "deltanet")]
)
@torch.no_grad()
def test_later_frames_change_nothing_before_them(name, mixer):
    rules = dict.fromkeys(("hdla", "deltanet"), FRAMED)
    options = {"mhla": {"blocks": (1, 2, 3)}, "softmax": {"window": 3}, **rules}.get(mixer, {})
    model, given = model_of(name, mixer, **options), arguments(name)
    before = frames_of(name, run(model, given))
    x = given["hidden_states"]
    (x[:, 4 * 24 :] if name == "ltx" else x[:, :, 4:]).add_(1.0)
    after = frames_of(name, run(model, given))
    assert torch.equal(before[:, :4], after[:, :4]) and not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("window", [0, 1, 2])
def test_window_of_softmax_frames(window):
    """Against a masked softmax in float64; a window of all frames, and of one."""
    mixer = zoo.mixers.MixerConfig.parse("softmax", {"causal": "frame", "window": window, "grid_dims": 3}).build(
        zoo.mixers.context.LayerSpec(dim=16, num_heads=2, head_dim=8, num_kv_heads=1)
    )
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 24, heads, 8, generator=g, dtype=torch.float64) for heads in (2, 1, 1))
    frame = torch.arange(24) // 6
    apart = frame[:, None] - frame
    seen = (apart >= 0) & (apart < (window or 4))
    scores = torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) * 8**-0.5
    o = torch.einsum("bhij,bjd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[:, :, 0])
    torch.testing.assert_close(mixer(q, k, v, zoo.mixers.context.Context(q, grid=(4, 2, 3))), o)


def test_layers_of_two_kinds_are_streamed(tmp_path):
    """Frame-causal `la` with every third layer softmax over two frames; saved and loaded."""
    model = model_of("wan", "la", keep_softmax=[0])
    zoo.convert(model, "softmax", causal="frame", window=2, keep_softmax=[1, 2])
    whole, stream = run(model, arguments("wan")), FrameStream(model)
    with torch.no_grad():
        pieces = []
        for first in range(0, FRAMES, 2):
            with stream.chunk(first):
                pieces.append(run(model, arguments("wan", first, first + 2)))
    assert (torch.cat(pieces, 2) - whole).norm() < 1e-5 * whole.norm()
    model.float().save_pretrained(tmp_path)
    loaded = zoo.load(tmp_path).double()
    assert (run(loaded, arguments("wan")) - whole).norm() < 1e-5 * whole.norm()


def test_a_video_in_chunks_is_the_video():
    """All denoising steps of one chunk after those of another; states do not grow with the number of frames."""
    model, given, sizes = model_of("wan", "hla2"), arguments("wan"), []

    def predict(x, t):
        return model(hidden_states=x, timestep=t.expand(2), encoder_hidden_states=given["encoder_hidden_states"])[0]

    for frames in (4, 40):  # ten times as many
        x = torch.randn(2, 4, frames, 8, 12, generator=torch.Generator().manual_seed(6)).double()
        stream = FrameStream(model)
        with torch.no_grad():
            chunks = list(stream.denoise(FlowMatchEulerDiscreteScheduler(), x, 3, 4, predict))
            whole = denoise(FlowMatchEulerDiscreteScheduler(), x, 3, predict)
        assert len(chunks) == frames // 4 and (torch.cat(chunks, 2) - whole).norm() < 1e-5 * whole.norm()
        sizes.append(stream.nbytes)
    assert sizes[0] == sizes[1] and len(stream.steps) == 3


@pytest.mark.parametrize("name", ["wan", "ltx"])
@torch.no_grad()
def test_positions_of_later_frames(name):
    """A piece has its rows of the whole video's tables and no others, so that later pieces take no more memory."""
    model, found = model_of(name, "la"), []
    block = model.transformer_blocks[0] if name == "ltx" else model.blocks[0]
    read = lambda _, args, named: found.append(named["image_rotary_emb"] if name == "ltx" else args[3])  # noqa: E731
    block.register_forward_pre_hook(read, with_kwargs=True)
    run(model, arguments(name))
    stream = FrameStream(model)
    for first, last in ((0, 1), (1, 4), (4, 6)):
        with stream.chunk(first):
            run(model, arguments(name, first, last))
        for table, whole in zip(found[-1], found[0], strict=True):
            assert torch.equal(table, whole[:, 24 * first : 24 * last])
            assert table.untyped_storage().nbytes() * FRAMES == whole.nbytes * (last - first)


def test_frames_are_trained_in_parallel():
    model = model_of("wan", "ahla").train()
    run(model, arguments("wan")).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_run_is_trained_and_streams_longer_clips(tmp_path):
    import sample

    model = PIXELS["model"] | {"mixer": "la", "mixer_options": {"causal": "frame"}}
    DiffusionRun(settings(tmp_path / "run", model, sample={"every": 0})).train()
    shape = {"model": str(tmp_path / "run/transformer_ema"), "steps": 2, "guidance": 2.0, "frames": 16}
    whole, stream = (open_sampler(SampleOptions(stream=x, **shape), "cpu")([0]).int() for x in (False, True))
    assert whole.shape == (1, 3, 16, 8, 8) and (whole - stream).abs().max() <= 1
    options = [f"sample.{k}={v}" for k, v in {**shape, "stream": True, "count": 1}.items()]
    sample.main([*options, f"out={tmp_path / 'videos'}"])
    assert read_frames(tmp_path / "videos/000000.mp4", range(16)).shape == (16, 8, 8, 3)
    two_sided = PIXELS["model"] | {"mixer": "la"}
    once = {"sample": {"every": 0}, "schedule": {"steps": 1, "warmup_steps": 0}}
    DiffusionRun(settings(tmp_path / "other", two_sided, **once)).train()
    with pytest.raises(ValueError, match="causal='frame' in every attention layer"):
        sample.main([f"sample.model={tmp_path}/other/transformer", "sample.stream=true", f"out={tmp_path}/x"])


def test_a_pipeline_of_wan_streams_its_videos(tmp_path):
    pipe = tiny_pipeline(tmp_path / "wan")
    model = diffusers.WanPipeline.from_pretrained(pipe).transformer
    zoo.convert(model, "la", causal="frame")
    model.save_pretrained(tmp_path / "frames")
    (tmp_path / "prompts.txt").write_text("3\n")
    shape = {"size": 16, "frames": 17, "steps": 2, "guidance": 3.0, "prompts": str(tmp_path / "prompts.txt")}
    found = whole_and_streamed(tmp_path / "frames", pipe, shape)
    assert found[0].shape == (1, 3, 17, 16, 16) and (found[0] - found[1]).abs().max() <= 1


def test_errors():
    for options, words in (
        ({"depthwise": "v"}, "read later frames"),
        ({"cpe": 3}, "read later frames"),
        ({"scan": "both"}, "read later frames"),
        ({"gains": True}, "causal=True must not see"),
    ):
        with pytest.raises(ValueError, match=words):
            converted("wan", "la", causal="frame", **options)
    with pytest.raises(ValueError, match="causal must be True, False or 'frame'"):
        converted("wan", "la", causal="frames")
    with pytest.raises(ValueError, match="needs blocks of one frame"):
        converted("wan", "mhla", causal="frame", blocks=[3, 1, 1])
    with pytest.raises(ValueError, match="for order='la'"):
        converted("wan", "mhla2", causal="frame", blocks=[1, 2, 3])
    with pytest.raises(ValueError, match="two-sided only"):
        converted("wan", "mala", causal="frame")
    for model in (
        converted("wan", "la"),
        converted("wan", "la", causal="frame", keep_softmax="every:3"),
        converted("dit", "la", causal="frame"),
    ):
        with pytest.raises(ValueError, match=r"stream of frames|one after the other"):
            FrameStream(model)
    stream = FrameStream(model_of("wan", "la"))
    with pytest.raises(ValueError, match="positions for 1024 frames, got 1025"):
        list(stream.denoise(FlowMatchEulerDiscreteScheduler(), torch.zeros(1, 4, 1025, 1, 1), 1, 1, lambda x, t: x))
    with pytest.raises(ValueError, match="no whole patches"):
        stream.model.config["patch_size"] = (2, 2, 2)
        list(stream.denoise(FlowMatchEulerDiscreteScheduler(), torch.zeros(1, 4, 3, 8, 8), 1, 1, lambda x, t: x))
