"""Models saved by earlier versions, with other default options, load and give the same outputs.

tests/data/earlier holds folders written by commit c31fcd5, of mixers with the default options of that version:
`hub_ahla` and `hub_all` (one layer of each mixer) by `timm.models.save_for_hf`, `run_mhla` and `run_distance`
(mixing="distance", which stored no blocks) as runs save their model, `dit` by `save_pretrained` of diffusers.
`expected.safetensors` in each folder holds an input and the output of that version.
"""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import zoo
from zoo.models.timm.model_files import load_model

FOLDER = Path(__file__).parents[1] / "data" / "earlier"
READERS = {
    "hub_ahla": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
    "hub_all": lambda folder: timm.create_model(f"local-dir:{folder}", pretrained=True),
    "run_mhla": lambda folder: load_model(folder)[0],
    "run_distance": lambda folder: load_model(folder)[0],
    "dit": lambda folder: zoo.HLADiTTransformer2DModel.from_pretrained(folder),
}


@pytest.mark.parametrize("name", READERS)
def test_an_earlier_model_gives_the_output_of_then(name):
    model = READERS[name](FOLDER / name).eval()
    inputs = load_file(FOLDER / name / "expected.safetensors")
    wanted = inputs.pop("output")
    with torch.no_grad():
        found = model(inputs["image"]) if "image" in inputs else model(**inputs).sample
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for layer in (m for m in model.modules() if hasattr(m, "mixer_name")):
        options = layer.mixer.options
        assert options.feature_map == ("identity" if layer.mixer_name in ("poly", "taylor2", "multipole") else "elu1")
        assert getattr(layer.mixer, "blocks", (2, 2)) == (2, 2)  # today an 8 x 8 grid has 3 x 3


@pytest.mark.parametrize("name", [name for name in READERS if name != "dit"])
def test_an_earlier_model_that_is_saved_again_is_the_same(name, tmp_path):
    model = READERS[name](FOLDER / name).eval()
    timm.models.save_for_hf(model, tmp_path / "again", safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    image = load_file(FOLDER / name / "expected.safetensors")["image"]
    with torch.no_grad():
        torch.testing.assert_close(again(image), model(image), rtol=0, atol=0)
