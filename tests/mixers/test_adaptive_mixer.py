"""The mixer multipole with key tiles that are chosen, and its fidelity table."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F

import hla_kernels
import zoo
from benchmarks import fidelity
from zoo.mixers import Context, build_mixer
from zoo.models.stored_options import restored_options

ADAPTIVE = {"select": "error", "q_tile": 16, "k_tile": 4}


@pytest.mark.parametrize("grid", [(1, 37), (5, 7), (3, 4, 5)])
def test_all_tiles_are_softmax(grid):
    """Uneven grids, prefix and suffix tokens, grouped heads, padding."""
    torch.manual_seed(0)
    n = torch.Size(grid).numel() + 3
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    mask = torch.arange(n) < torch.tensor([[n], [n - 9]])
    options = {"grid_dims": len(grid), "grid": grid, "num_kv_heads": 2}
    mixer = build_mixer("multipole", 32, 4, 8, **options, **ADAPTIVE, density=1.0)
    o = mixer(q, k, v, Context(x=q.flatten(2), grid=grid, prefix=2, suffix=1, key_padding_mask=mask))
    q, k, v = (x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2)
    torch.testing.assert_close(o[mask], wanted[mask], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"select": "eror"}, "error"), ({"select": "error", "radius": 3}, "select='near'"),
        ({"select": "near", "density": 0.5}, "mass"),
        ({"select": "mean", "density": [0.5, 2]}, "density must be"), ({"select": "mean", "density": []}, "0 values"),
        ({"select": "mean", "k_tile": 12}, "power of two"), ({"select": "mean", "far": "nothing"}, "far"),
        ({"select": "mean", "branch": "mhla2"}, "branch"), ({"radius": 2, "branch": "la"}, "select='error'"),
        ({"branch": "mhla", "radius": 2}, "select='error'"), ({"branch": "mhla", "blocks": [2]}, "each of 2 axes"),
        ({"select": "mean", "branch": "la", "blocks": [2, 2]}, "select='near'"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_mixer("multipole", 32, 4, 8, grid=(4, 4), **options)


@pytest.mark.parametrize(
    ("given", "select"),
    [
        ({}, "error"), ({"density": 0.25}, "error"), ({"select": "mass"}, "mass"), ({"radius": 2}, "near"),
        ({"blocks": [2, 2]}, "near"), ({"degree": 1, "select": "near"}, "near"),
        ({"blocks": [2, 2], "branch": "mhla"}, "error"),
    ],
)  # fmt: skip
def test_options_of_near_tokens_select_them(given, select):
    """Also with the values of their defaults, as in files from before the option `select`."""
    mixer = build_mixer("multipole", 32, 4, 8, grid=(4, 4), **given)
    assert mixer.options.select == select and (mixer.options.density, mixer.options.k_tile) == (
        given.get("density", 0.125), 16,
    )  # fmt: skip
    assert restored_options("multipole", {}) == {"select": "near"}
    assert restored_options("multipole", {"select": "mean"})["select"] == "mean"


def test_no_grid_is_needed_before_a_call():
    """A model without a default grid, such as a loaded Wan, gets the tiles of each call."""
    mixer = build_mixer("multipole", 32, 4, 8, grid_dims=3, density=0.5, q_tile=8, k_tile=2)
    q, k, v = (torch.randn(1, 24, 4, 8) for _ in range(3))
    for grid in ((2, 3, 4), (1, 4, 6)):
        o = mixer(q, k, v, Context(x=q.flatten(2), grid=grid))
        wanted = hla_kernels.adaptive_multipole(q, k, v, grid=grid, density=0.5, q_tile=8, k_tile=2, q_scale=8**-0.5)
        assert torch.equal(o, wanted)


def test_fidelity_of_a_converted_model(monkeypatch):
    """Everything exact changes nothing, less does."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=2, num_classes=5).double()
    for block in model.blocks:  # scores that differ
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    images = torch.randn(6, 3, 64, 64, dtype=torch.float64).split(3)
    monkeypatch.setattr(fidelity, "load_images", lambda *_: (images, torch.zeros(6)))
    settings = fidelity.FidelitySettings(
        selects=["error"], fars=["first"], q_tiles=[16], k_tiles=[4], densities=[0.1, 0.5, 1.0]
    )
    candidate = type("Opened", (), {"model": model, "name": "nothing"})
    found = list(fidelity.measured(candidate, settings, torch.device("cpu")))
    assert [row["density"] for row in found] == [0.1, 0.5, 1.0] and found[2]["kl"] == 0 and found[2]["same"] == 1
    assert min(row["kl"] for row in found[:2]) > 0 and found[0]["tokens"] == 64 and found[0]["seed"] is None
    near = fidelity.FidelitySettings(selects=["near"], densities=[0.1, 1.0])
    found = list(fidelity.measured(candidate, near, torch.device("cpu")))
    assert [row["density"] for row in found] == [round((8 * 3 - 2) ** 2 / 64**2, 5), 1.0]  # radii of 1 and 7
    assert found[0]["kl"] > 0 and found[1]["kl"] < 1e-12
    peers = fidelity.FidelitySettings(selects=["mean"], fars=["first", "none"], k_tiles=[4], densities=[0.1])
    lines = fidelity.text({"rows": list(fidelity.measured(candidate, peers, torch.device("cpu")))}).splitlines()
    assert {line.split("|")[-2].strip() for line in lines[2:]} == {"PISA's form", "SLA's and VSA's form"}


def test_a_density_per_layer_is_saved(tmp_path):
    """The first layer is exact, so that a model whose other layers are exact too equals softmax."""
    torch.manual_seed(0)
    x, kwargs = torch.randn(2, 3, 64, 64), {"img_size": 64, "patch_size": 8, "depth": 2, "num_classes": 5}
    softmax = timm.create_model("vit_tiny_patch16_224", **kwargs).eval()
    found = []
    for density in ([1.0, 1.0], [1.0, 0.1], [0.1, 0.1], 0.1):
        model = copy.deepcopy(softmax)
        report = zoo.convert(model, "multipole", **ADAPTIVE, density=density)
        found.append(model(x))
    assert [row.blocks.split()[0] for row in report.rows] == ["0.1", "0.1"]
    torch.testing.assert_close(found[0], softmax(x))
    assert torch.equal(found[2], found[3]) and (found[1] - found[0]).norm() > 0 and not torch.equal(found[1], found[2])
    zoo.convert(model := copy.deepcopy(softmax), "multipole", **ADAPTIVE, density=[1.0, 0.1])
    zoo.save(model, tmp_path / "saved")
    assert torch.equal(zoo.load(tmp_path / "saved").eval()(x), found[1])
    for density in ([0.5], [0.5] * 3):
        with pytest.raises(ValueError, match=f"lists {len(density)} values for 2 attention layers"):
            zoo.convert(copy.deepcopy(softmax), "multipole", **ADAPTIVE, density=density)


def small_vit(**sizes):
    """A softmax ViT in float64, with patches of 8 and weights that are far from uniform."""
    torch.manual_seed(0)
    sizes |= {"patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).double().eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    return model


def test_tiles_of_a_converted_model_lie_on_its_grid():
    """Where each tile of 2 x 2 patches holds equal tokens, far tiles are exact, at any density. 4 x 6 patches after a
    class token and register tokens."""
    softmax = small_vit(img_size=(32, 48), reg_tokens=2)
    torch.nn.init.zeros_(softmax.pos_embed)
    torch.nn.init.normal_(softmax.reg_token)
    model = copy.deepcopy(softmax)
    zoo.convert(model, "multipole", density=0.1, q_tile=4, k_tile=4)
    x = torch.randn(2, 3, 2, 8, 3, 8, dtype=torch.float64)  # [B, C, rows, 8, columns, 8]
    equal = x.repeat_interleave(2, 2).repeat_interleave(2, 4).reshape(2, 3, 32, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(equal), softmax(equal), rtol=1e-10, atol=1e-10)
        other = torch.randn_like(equal)
        assert (model(other) - softmax(other)).norm() > 1e-3 * softmax(other).norm()


@pytest.mark.parametrize(("size", "density"), [(32, 1.0), (64, 0.25)])
def test_models_of_few_tokens_have_a_far_tile_or_are_softmax(size, density):
    """With the defaults: 16 patches are one tile of 16, 64 patches are four."""
    softmax = small_vit(img_size=size)
    model = copy.deepcopy(softmax)
    zoo.convert(model, "multipole")
    x, q = torch.randn(2, 3, size, size, dtype=torch.float64), torch.randn(1, (size // 8) ** 2 + 1, 2, 16)
    grid = (size // 8, size // 8)
    assert hla_kernels.explain("adaptive_multipole", q, q, q, grid=grid, prefix=1).density == density
    with torch.no_grad():
        assert torch.allclose(model(x), softmax(x), rtol=1e-10, atol=1e-10) == (density == 1)


def test_explain_says_the_density():
    """The fraction of tiles that is computed exactly, which is a rounded number of tiles."""
    q = torch.randn(1, 64, 2, 8)
    found = hla_kernels.explain("adaptive_multipole", q, q, q, grid=(8, 8), density=0.1, k_tile=4)
    assert found.density == 2 / 16 and "CUDA" in found.why_not["triton"]
    assert hla_kernels.explain("softmax_attention", q, q, q).density is None


@pytest.mark.parametrize(
    ("branch", "far", "grid"),
    [("la", "none", (5, 7)), ("ahla", "first", (5, 7)), ("mhla", "first", (5, 7)), ("mhla", "none", (3, 4, 3))],
)
def test_a_linear_branch_is_added(branch, far, grid):
    """Nothing at initialisation; then the gain times the mixer alone, with a gradient for the gain from the start."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, torch.Size(grid).numel() + 1, 4, 8, dtype=torch.float64) for _ in range(3))
    ctx, options = Context(x=q.flatten(2), grid=grid, prefix=1), {**ADAPTIVE, "density": 0.2, "far": far}
    layer = {"dim": 32, "num_heads": 4, "head_dim": 8, "grid": grid, "prefix": 1, "grid_dims": len(grid)}
    mixer = build_mixer("multipole", **layer, **options, branch=branch).double()
    plain = build_mixer("multipole", **layer, **options)
    alone = build_mixer(branch, **layer).double()
    assert torch.equal(mixer(q, k, v, ctx), plain(q, k, v, ctx))
    mixer(q, k, v, ctx).square().sum().backward()
    assert mixer.branch_gain.grad.norm() > 0
    with torch.no_grad():
        mixer.branch_gain.copy_(torch.randn(4, 8))
    wanted = plain(q, k, v, ctx) + mixer.branch_gain * alone(q, k, v, ctx)
    torch.testing.assert_close(mixer(q, k, v, ctx), wanted)
    mixer(q, k, v, ctx).square().sum().backward()
    assert all(p.grad.norm() > 0 for p in mixer.parameters())
    mixer.reset_parameters()
    assert not mixer.branch_gain.any()
