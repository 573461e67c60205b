"""`zoo.convert` on diffusers models: converted layers, weights, reports and errors."""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

import zoo
from tests.helpers.mixers import options_of
from tests.helpers.tiny_diffusers import CASES, blocks_for, converted, host, inputs, noise, record, run, sites
from zoo.mixers import MIXERS
from zoo.mixers.layers import TokenRMSNorm
from zoo.models.diffusers.ltx import ltx_rotation
from zoo.models.timm.registry import REGISTERED_MIXERS

PAIRS = [  # every mixer in three or four families, every family with ten or eleven mixers
    (name, mixer)
    for i, name in enumerate(CASES)
    for j, mixer in enumerate(REGISTERED_MIXERS)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("name", "mixer"), PAIRS)
def test_every_weight_is_inherited_by_identity_and_gets_a_gradient(name, mixer):
    model = host(name)
    before = dict(model.named_parameters())
    if not MIXERS[mixer].takes_rotations and record(name).rotary:
        with pytest.raises(ValueError, match="rotary embedding"):
            zoo.convert(model, mixer)
        return
    options = options_of(mixer, post_norm=True, gate=True, depthwise="v")
    report = zoo.convert(model, mixer, **options, **blocks_for(name, mixer))
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items())
    new = {n: p for n, p in after.items() if n not in before}
    assert new and all(".mixer." in n for n in new)
    assert report.added == sum(p.numel() for p in new.values())
    y = run(model.train(), inputs(name))
    y.square().sum().backward()
    missing = [n for n, p in after.items() if p.grad is None]
    assert y.isfinite().all() and not [n for n in missing if ".mixer." in n or ".to_" in n]


@pytest.mark.parametrize("name", CASES)
def test_tiles_chosen_by_error_approach_softmax(name):
    """Of every family, at two sizes; exact with density 1, further away with less; every weight gets a gradient."""
    options = {"select": "error", "q_tile": 8, "k_tile": 2}
    for size in (8, 12):
        found = {}
        for density in (1.0, 0.9, 0.05):
            model = converted(name, "multipole", density=density, **options)
            found[density] = run(model, inputs(name, size=size))
        wanted = run(converted(name, "softmax"), inputs(name, size=size))
        torch.testing.assert_close(found.pop(1.0), wanted)
        gaps = [float((y - wanted).norm() / wanted.norm()) for y in found.values()]
        assert 1e-6 < gaps[0] < gaps[1] < 0.1
    run(model.train(), inputs(name)).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None and ".to_" in n]


@pytest.mark.parametrize("options", [{"post_norm": True}, {"gate": True}, {"branch": "mhla"}], ids=str)
@torch.no_grad()
def test_norm_gate_and_blocks_leave_text_as_it_is(options):
    """They are of image tokens: text queries have the output of softmax."""
    wanted, found = [], []
    for outputs, mixer, given in (
        (wanted, "softmax", {}),
        (found, "multipole", {"select": "error", "density": 1.0, **options}),
    ):
        site = sites(converted("sd3", mixer, **given))[0]
        site.grid = (4, 4)
        shapes = [(2, n, site.mixer.num_heads, site.mixer.head_dim) for n in (16, 5)]
        image, text = ([noise(*shape, seed=i) for i in range(3)] for shape in shapes)
        outputs += site.joint(tuple(image), tuple(text), image[0].flatten(2), text_first=False)
    torch.testing.assert_close(found[1], wanted[1])
    assert not torch.allclose(found[0], wanted[0])


def test_norms_of_wan_are_those_of_the_host_beside_softmax():
    """Beside another mixer the same weights are normalised by `TokenRMSNorm`, to the same values."""
    model = host("wan")
    keys = list(model.state_dict())
    kinds = []
    for mixer in ("la", "softmax", "la"):
        zoo.convert(model, mixer)
        norms = [norm for site in sites(model) for norm in (site.norm_q, site.norm_k)]
        kinds.append({type(norm) for norm in norms})
    assert kinds == [{TokenRMSNorm}, {torch.nn.RMSNorm}, {TokenRMSNorm}]
    assert [key for key in model.state_dict() if ".mixer." not in key] == keys
    found = run(model, inputs("wan"))
    for norm in norms:
        norm.__class__ = torch.nn.RMSNorm
    assert torch.equal(run(model, inputs("wan")), found)


@pytest.mark.parametrize("name", CASES)
def test_attention_reaches_the_output_of_the_tiny_model(name):
    """Otherwise no test that compares converted models could fail; larger gates help."""
    before = run(host(name), inputs(name))
    assert (run(converted(name, "la"), inputs(name)) - before).norm() > 0.05 * before.norm()


@pytest.mark.parametrize("name", CASES)
def test_keep_softmax_every_third(name):
    model = converted(name, "ahla", keep_softmax="every:3")
    kept = [row.layer for row in zoo.convert(model, "la", keep_softmax="every:3").skipped]
    assert any(".0." in name for name in kept) and {site.mixer_name for site in sites(model)} == {"la"}
    assert run(model, inputs(name)).isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_two_resolutions_in_one_backward_with_checkpointing(name):
    gradients = []
    for checkpointing in (False, True):
        model = converted(name, "ahla", depthwise="qkv")
        if checkpointing:
            model.enable_gradient_checkpointing()
        loss = sum(run(model, inputs(name, size=size)).square().mean() for size in (8, 12))
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][n], g) for n, g in gradients[0].items())


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("dit", {"layers": [0, -1]}, ["ahla", "", "ahla"]),
        ("pixart", {"layers": "transformer_blocks.[01].*"}, ["ahla", "ahla", ""]),
        ("sana", {"keep_softmax": [1]}, ["ahla", "", "ahla"]),
        ("wan", {"layers": {"blocks.0.*": "la", "*": "hla2"}}, ["la", "hla2", "hla2"]),
        ("sd35", {"layers": [1]}, ["", "", "ahla", "ahla", ""]),
        ("sd35", {"layers": "*.attn2"}, ["", "ahla", "", "ahla", ""]),
        ("flux", {"layers": [2, 3]}, ["", "", "ahla", "ahla", ""]),
        ("flux", {"keep_softmax": "single_*"}, ["ahla", "ahla", "ahla", "", ""]),
        ("flux", {"keep_softmax": "every:2"}, ["", "ahla", "", "ahla", ""]),
    ],
)
def test_layers_and_keep_softmax(name, arguments, expected):
    model = host(name)
    report = zoo.convert(model, "ahla", **arguments)
    rows = [row for row in report.rows if "cross" not in row.reason]
    assert [getattr(model.get_submodule(row.layer), "mixer_name", "") for row in rows] == expected
    assert run(model, inputs(name)).isfinite().all()


def test_the_report_names_host_and_cross_attention():
    report = zoo.convert(host("wan"), "ahla", depthwise="v", keep_softmax=[0])
    assert report.model == "WanTransformer3DModel" and len(report.swapped) == 2
    assert [row.layer for row in report.skipped] == ["blocks.0.attn1", *(f"blocks.{i}.attn2" for i in range(3))]
    assert report.skipped[-1].reason.startswith("cross-attention")
    assert report.added == 2 * (32 * (27 + 1) + 2 * 2)  # 3 x 3 x 3 filters, since a video's grid is 3-D; exponents


BAD = [
    ("dit", {"mixer": "hlaa2"}, "unknown mixer 'hlaa2'.*Did you mean 'hla2'"),
    ("dit", {"mixer": "la", "layers": [3]}, "layers lists block indices from -3 to 2, got 3"),
    ("flux", {"mixer": "la", "layers": [5]}, "layers lists block indices from -5 to 4, got 5"),
    ("wan", {"mixer": "la", "layers": "blocks.*.attn2"}, "matches none of the attention layers blocks.0.attn1"),
    ("wan", {"mixer": "la", "grid_dims": 2}, "WanTransformer3DModel lie on a 3-D grid"),
    ("dit", {"mixer": "la", "depthwise": "v", "grid_dims": 3}, "DiTTransformer2DModel lie on a 2-D grid"),
    ("sd3", {"mixer": "la", "device": "cpu"}, "device= cannot be set"),
    ("sana", {"mixer": "la", "keep_softmax": [0, 1, 2]}, "nothing to swap in SanaTransformer2DModel"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_bad_input_is_one_sentence_and_changes_nothing(name, arguments, message):
    model = host(name)
    classes, keys, config = [type(m) for m in model.modules()], list(model.state_dict()), dict(model.config)
    with pytest.raises(ValueError, match=message):
        zoo.convert(model, **arguments)
    assert [type(m) for m in model.modules()] == classes and list(model.state_dict()) == keys
    assert dict(model.config) == config


def test_softmax_honours_every_mask_as_the_host():
    mask = torch.ones(2, 24)
    mask[:, -4:] = 0
    kept = host("pixart")
    wanted = run(host("pixart"), {**inputs("pixart"), "attention_mask": mask})
    zoo.convert(kept, "softmax")
    assert torch.equal(run(kept, {**inputs("pixart"), "attention_mask": mask}), wanted)


@pytest.mark.parametrize("mixer", [m for m in REGISTERED_MIXERS if not MIXERS[m].defaults.needs_grid])
def test_padded_keys_are_not_read(mixer):
    """A layer with padding gives the real tokens what it gives without the padded ones."""
    site = sites(converted("pixart", mixer, **options_of(mixer, gate=True)))[0]
    x = noise(2, 12, 32)
    bias = torch.zeros(2, 1, 12)
    bias[..., 9:] = -10000.0
    torch.testing.assert_close(site(x, attention_mask=bias)[:, :9], site(x[:, :9]))
    with pytest.raises(ValueError, match="not other biases"):
        site(x, attention_mask=bias / 1000)
    with pytest.raises(ValueError, match="cannot honour an attention mask"):
        site(x, attention_mask=bias.expand(2, 12, 12))


def test_wrapped_models_are_named():
    with pytest.raises(ValueError, match="pass its submodule 'module'"):
        zoo.convert(torch.nn.DataParallel(host("dit")), "la")
    with pytest.raises(ValueError, match="pass its submodule '_orig_mod'"):
        zoo.convert(torch.compile(host("dit")), "la")


def test_checkpointing_survives_conversion():
    model = host("dit")
    model.enable_gradient_checkpointing()
    zoo.convert(model, "ahla", depthwise="v")
    loss = sum(run(model, inputs("dit", size=size)).square().mean() for size in (8, 12))
    loss.backward()
    assert model.is_gradient_checkpointing and all(s.to_q.weight.grad.isfinite().all() for s in sites(model))
    model.disable_gradient_checkpointing()
    assert not model.is_gradient_checkpointing


def test_ltx_with_coordinates_of_each_token_has_no_grid():
    """The grid follows from num_frames, height and width; without them, mixers that need it raise an error."""
    arguments = inputs("ltx")
    sizes = [arguments.pop(key) for key in ("num_frames", "height", "width")]
    places = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).T.float()  # [3, N]
    scale = torch.tensor(arguments.pop("rope_interpolation_scale"))[:, None]
    arguments["video_coords"] = (places * scale).expand(2, -1, -1)
    for options, ok in (({}, True), ({"depthwise": "v"}, False)):
        model = converted("ltx", "ahla", **options)
        if ok:
            torch.testing.assert_close(run(model, arguments), run(model, inputs("ltx")))
        else:
            with pytest.raises(ValueError, match="grid"):
                run(model, arguments)


def test_the_tables_of_ltx_turn_as_its_rotation():
    """(cos, sin) [N, H, D / 2] of channels (2i, 2i + 1), which operators read, against the host's own function."""
    model, t = host("ltx"), noise(2, 24, 2, 16)
    rotary = model.rope(t, 2, 3, 4, (0.3, 32, 32))
    cos, sin = ltx_rotation(rotary, 2, True).tables()
    even, odd = t.unflatten(-1, (-1, 2)).unbind(-1)
    by_tables = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    wanted = apply_rotary_emb(t.flatten(2), rotary).unflatten(2, (2, 16))
    torch.testing.assert_close(by_tables, wanted)
    assert torch.equal(ltx_rotation(rotary, 2, False)(t), wanted)
    twice = ltx_rotation(rotary, 2, True)(torch.cat([t, -t], -1))  # feature maps that widen
    assert torch.equal(twice, torch.cat([wanted, -wanted], -1))


def test_the_grid_reaches_the_mixers():
    grids = {}
    flat, deep = ("pixart", "sana", "sd3", "flux"), ("wan", "ltx")
    for name, wanted in [*((name, (4, 6)) for name in flat), *((name, (3, 4, 6)) for name in deep)]:
        model = converted(name, "ahla", depthwise="v")
        run(model, inputs(name))
        grids[name] = ({site.grid for site in sites(model)}, {wanted})
    assert all(found == wanted for found, wanted in grids.values()), grids
