"""Every save writes a model card that says what the saved model is."""

import pytest
import torch
import yaml

import zoo
from tests.helpers.tiny_diffusers import CASES, converted, run
from tests.helpers.tiny_models import image, tiny
from tests.helpers.tiny_pipelines import pipeline
from zoo.models.model_card import CARD
from zoo.models.timm.model_files import Recipe, save_weights


def metadata(text: str) -> dict:
    """The YAML between the two lines of dashes, as the hub reads it."""
    _, head, _ = text.split("---\n", 2)
    return yaml.safe_load(head)


def test_a_timm_folder(tmp_path):
    model = tiny("vit_tiny_patch16_224").eval()
    zoo.convert(model, "mhla", lepe=3, layers=[0])
    zoo.convert(model, "la", layers=[1])
    zoo.save(model, tmp_path / "hub")
    text = (tmp_path / "hub" / CARD).read_text()
    assert metadata(text) == {"library_name": "timm", "tags": ["hla-zoo", "la", "mhla"]}
    assert "| base model | `vit_tiny_patch16_224` |" in text and "`lepe=3`" in text and "zoo.load(" in text
    assert f"{sum(p.numel() for p in model.parameters()):,}" in text
    assert torch.equal(zoo.load(tmp_path / "hub")(image()), model(image()))


def test_a_softmax_model_has_no_table_of_mixers(tmp_path):
    save_weights(tiny("vit_tiny_patch16_224"), Recipe("vit_tiny_patch16_224"), tmp_path / "model.safetensors")
    text = (tmp_path / CARD).read_text()
    assert metadata(text)["tags"] == ["hla-zoo"] and "| mixer |" not in text


def test_a_transformer_of_diffusers(tmp_path):
    model = converted("dit", "multipole", density=0.25).eval()
    zoo.save(model, tmp_path)
    text = (tmp_path / CARD).read_text()
    assert metadata(text) == {"library_name": "diffusers", "tags": ["hla-zoo", "multipole"]}
    assert "# HLADiTTransformer2DModel" in text and "DiTTransformer2DModel` |" in text and "`density=0.25`" in text
    inputs = CASES["dit"].inputs()
    assert torch.equal(run(zoo.load(tmp_path), inputs), run(model, inputs))


def test_a_pipeline_has_a_card_beside_its_transformer(tmp_path):
    pipe, _ = pipeline("dit")
    zoo.convert(pipe, "la")
    zoo.save(pipe, tmp_path)
    assert "`la`" in (tmp_path / "transformer" / CARD).read_text()


def test_only_our_cards_are_replaced(tmp_path):
    model = tiny("vit_tiny_patch16_224")
    zoo.save(model, tmp_path)
    zoo.convert(model, "la")
    zoo.save(model, tmp_path)
    assert "`la`" in (tmp_path / CARD).read_text()
    (tmp_path / CARD).write_text("My own words about hla-zoo.\n")
    zoo.save(model, tmp_path)
    assert (tmp_path / CARD).read_text() == "My own words about hla-zoo.\n"


def test_a_model_without_a_timm_name_is_refused(tmp_path):
    from timm.models.vision_transformer import VisionTransformer

    with pytest.raises(ValueError, match=r"not made by timm\.create_model.*state_dict"):
        zoo.save(VisionTransformer(img_size=32, patch_size=16, embed_dim=24, depth=1, num_heads=2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_another_kind_of_model_is_refused(tmp_path):
    """`zoo.load` would open the other one, or neither."""
    model, transformer, (pipe, _) = tiny("vit_tiny_patch16_224"), converted("dit", "la"), pipeline("dit")
    for saved, others in ((model, (transformer,)), (transformer, (model,)), (pipe, (model, transformer))):
        folder = tmp_path / type(saved).__name__
        zoo.save(saved, folder)
        before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for other in others:
            with pytest.raises(ValueError, match="holds another kind of model: choose another folder"):
                zoo.save(other, folder)
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    (tmp_path / "config.yaml").touch()
    for other, folder, reason in ((model, tmp_path, "holds a run"), (pipe, tmp_path / "config.yaml", "is a file")):
        with pytest.raises(ValueError, match=reason):
            zoo.save(other, folder)
