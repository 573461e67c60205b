"""Effective attention: the matrix that a mixer applies, its rank and entropy, tables and pictures."""

import csv
import math

import diffusers
import pytest
import timm
import torch

from tests.helpers.runs import tiny
from zoo.eval.attention import LayerAttention, attention_matrix, attentions
from zoo.eval.attention.probes import measures
from zoo.models.convert import convert
from zoo.train.classification import ClassificationRun

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}


def _layer(weights: torch.Tensor) -> LayerAttention:
    """A layer with these weights [H, N, N], whose values are one-hot in the token."""
    return LayerAttention(0, "la", None, 0, weights, weights.transpose(0, 1))


def small_vit(**changes):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **changes}).eval()


def test_the_attention_of_softmax_is_softmax():
    model = small_vit()
    image = torch.randn(3, 16, 16)
    attn = model.blocks[1].attn
    seen = []
    handle = attn.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    model(image[None])
    handle.remove()
    q, k, _ = attn.qkv(seen[0]).reshape(1, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    expected = (q @ k.transpose(-1, -2) * attn.scale).softmax(-1)[0, 2]
    torch.testing.assert_close(attention_matrix(model, image, 1, 2), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mixer", ["la", "hla2", "ahla", "hla3", "poly", "mhla", "mhla2"])
def test_the_attention_of_a_mixer_is_what_it_applies_to_values(mixer):
    model = small_vit()
    torch.nn.init.normal_(model.blocks[0].attn.qkv.weight, std=24**-0.5)  # so that no eps counts
    convert(model, mixer)
    image = torch.randn(3, 16, 16)
    site = model.blocks[0].attn
    seen = []
    handle = site.mixer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[2], output)))
    model(image[None])
    handle.remove()
    v, o = seen[0]
    matrix = attention_matrix(model, image, 0, 1)
    assert matrix.shape == (17, 17)
    torch.testing.assert_close(matrix @ v[0, :, 1], o[0, :, 1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(matrix.sum(1), torch.ones(17), atol=1e-3, rtol=0)  # both defaults keep constants


@pytest.mark.parametrize("options", [{"mixer": "la"}, {"mixer": "mhla", "blocks": [1, 2, 2]}], ids=lambda o: o["mixer"])
def test_the_attention_of_a_video_transformer_is_what_its_mixers_apply(options):
    """With a rotary embedding in the numerator alone, so that rows need not sum to one."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 32, "text_dim": 8}
    model = diffusers.WanTransformer3DModel(in_channels=4, out_channels=4, freq_dim=16, **sizes).eval()
    convert(model, **options)
    seen = []
    model.blocks[1].attn1.mixer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[2], output)))
    x, t, text = torch.randn(1, 4, 3, 8, 12), torch.tensor([300.0]), torch.randn(1, 5, 8)
    found = list(attentions(model, lambda: model(x, t, text)))
    v, o = seen[0]
    assert [one.weights.shape for one in found] == [(2, 72, 72)] * 2
    torch.testing.assert_close((found[1].weights @ v[0].transpose(0, 1)).transpose(0, 1), o[0], atol=1e-5, rtol=1e-4)


def test_attention_of_a_layer_or_head_that_is_not_there():
    with pytest.raises(ValueError, match=r"unknown attention layer 5; allowed: 0, 1"):
        attention_matrix(small_vit(), torch.randn(3, 16, 16), 5, 0)
    with pytest.raises(ValueError, match=r"unknown head 3; allowed: 0, 1, 2"):
        attention_matrix(small_vit(), torch.randn(3, 16, 16), 0, 3)


def test_norms_and_gates_behind_the_mixer_are_left_out():
    """What is not linear in v does not enter the matrix, and is back afterwards."""
    image = torch.randn(3, 16, 16)
    plain, more = small_vit(), small_vit()
    convert(plain, "ahla")
    convert(more, "ahla", post_norm=True, gate=True)
    norm, gate = more.blocks[0].attn.mixer.norm, more.blocks[0].attn.mixer.gate
    torch.testing.assert_close(attention_matrix(more, image, 0, 1), attention_matrix(plain, image, 0, 1))
    assert more.blocks[0].attn.mixer.norm is norm and more.blocks[0].attn.mixer.gate is gate


def test_measures_of_matrices_that_are_known():
    n = 12
    uniform, identity = torch.full((n, n), 1 / n), torch.eye(n)
    two = torch.zeros(n, n)
    two[:6, :6] = two[6:, 6:] = 1 / 6
    found = measures(_layer(torch.stack([uniform, identity, two, -3 * two])))
    assert found["rank"].tolist() == [1, n, 2, 2]
    assert found["effective_rank"].tolist() == pytest.approx([1, n, 2, 2], rel=1e-5)
    assert found["entropy"].tolist() == pytest.approx([math.log(n), 0, math.log(6), math.log(6)], abs=1e-5)
    assert found["token_share"].tolist() == pytest.approx([0, (1 - 1 / n) ** 0.5, 0.5**0.5, 0.5**0.5], abs=1e-6)
    assert all(bool(x.isfinite().all()) for x in measures(_layer(torch.zeros(1, 4, 4))).values())


def test_ranks_of_mixers():
    """First order at most D = 8, blocks more, at most the sum of min(n_b, D)."""
    image, ranks = torch.randn(3, 32, 32), {}
    for mixer, options in (("la", {}), ("mhla", {"prior": "gaussian", "blocks": [2, 2]})):
        model = small_vit(img_size=32)
        convert(model, mixer, **options)
        found = list(attentions(model, lambda model=model: model(image[None])))
        assert [(a.layer, a.mixer, a.grid, a.prefix) for a in found] == [(i, mixer, (8, 8), 1) for i in (0, 1)]
        ranks[mixer] = measures(found[0])["rank"].tolist()
    bound = 4 * 8 + 1  # the prefix is a block of one token
    assert ranks["la"] == [8] * 3 and 8 < min(ranks["mhla"]) <= max(ranks["mhla"]) <= bound


def test_the_command(tmp_path):
    import evaluate_imagenet

    models = []
    for mixer in ("", "mhla"):
        torch.manual_seed(0)
        settings = tiny(tmp_path / (mixer or "softmax"), model={"mixer": mixer}, schedule={"epochs": 1})
        ClassificationRun(settings).train()
        models.append(settings.run.folder)
    words = ["data.source=digits", "data.workers=0", f"eval.models=[{','.join(models)}]", f"out={tmp_path}/out"]
    rows = evaluate_imagenet.main(["attention", *words, "attention.images=2", "attention.queries=[[0,3]]"])
    written = list(csv.DictReader((tmp_path / "out" / "attention.csv").open()))
    assert len(rows) == len(written) == 2 * 2 * 2  # models, layers, heads
    assert [row["mixer"] for row in written] == ["softmax"] * 4 + ["mhla"] * 4
    assert all(float(row["rank"]) <= 16 and 0 < float(row["entropy"]) <= math.log(16) + 1e-3 for row in written)
    cells = list(csv.DictReader((tmp_path / "out" / "maps.csv").open()))
    assert len(cells) == 2 * 2 * 16 and {(c["query_row"], c["query_column"]) for c in cells} == {("0", "3")}
    softmax = sum(float(c["weight"]) for c in cells[:16])
    assert softmax == pytest.approx(1, abs=1e-4)  # no prefix tokens here: the patches get all
    for name in ("attention.png", "maps_0.png", "maps_1.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    for query, sentence in (("4,0", r"\[4, 0\] is outside of the token grid 4 x 4"), ("1", "are pairs")):
        with pytest.raises(ValueError, match=sentence):
            evaluate_imagenet.main(["attention", *words, f"attention.queries=[[{query}]]"])
    with pytest.raises(ValueError, match=r"missing required option eval\.models"):
        evaluate_imagenet.main(["attention", "data.source=digits"])
