"""Folders of diffusers whose configuration is not that of their weights: one sentence."""

import json

import pytest

from tests.helpers.tiny_diffusion import tiny_pixels
from zoo.diffusion.loading import open_model


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
