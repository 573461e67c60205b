"""Folders of diffusers whose configuration is not that of their weights: one sentence."""

import json

import pytest
from diffusers import DDPMScheduler
from safetensors import safe_open

from tests.helpers.tiny_diffusion import tiny_pixels
from zoo.diffusion.loading import open_model
from zoo.train.denoising.model import save_transformer


@pytest.mark.parametrize(
    ("layers", "sentence"), [(3, r"dit lacks weights, such as transformer_blocks\.2\."), (-1, "dit has no blocks")]
)
def test_another_number_of_blocks(layers, sentence, tmp_path):
    folder = tmp_path / "dit"
    tiny_pixels(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": layers}))
    with pytest.raises(ValueError, match=sentence):
        open_model(str(folder))


def test_other_tensors_than_the_run_wrote(tmp_path):
    tiny_pixels(tmp_path / "source")
    found = open_model(str(tmp_path / "source"))
    save_transformer(found.transformer, tmp_path / "dit", DDPMScheduler(), step=3)
    open_model(str(tmp_path / "dit"))
    file = tmp_path / "dit" / "diffusion_pytorch_model.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["step"] == "3"
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x01
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read: .*model\.safetensors is damaged: its tensors are"):
        open_model(str(tmp_path / "dit"))
