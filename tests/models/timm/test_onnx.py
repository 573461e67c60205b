"""ONNX export of converted models, run by onnxruntime."""

from functools import cache

import pytest
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

import zoo
from tests.helpers.tiny_models import GRID_OPTIONS, image, tiny

pytest.importorskip("onnxscript")  # of the extra `test`
onnxruntime = pytest.importorskip("onnxruntime")


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.fixture(autouse=True, scope="module")
def translations_are_read_once():
    """An export parses the sources of all of torchlib; no test here changes the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


TILES = {"density": 0.3, "q_tile": 4, "k_tile": 4}  # of 16 tokens: one of four tiles is exact


@pytest.mark.parametrize("mixer", ["la", "ahla", "hla3", "poly", "mhla", "multipole"])
def test_export(mixer, tmp_path):
    size = 96 if mixer == "mhla" else 64  # of no other test: tables of blocks that an export traces must not be kept
    model = tiny("vit_tiny_patch16_224", img_size=size, depth=1).eval()
    zoo.convert(model, mixer, **GRID_OPTIONS, **(TILES if mixer == "multipole" else {}))
    path, batch = tmp_path / "model.onnx", torch.export.Dim("batch", min=1, max=64)
    example = image(height=size, width=size)
    torch.onnx.export(model, (example,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    x = image(5, height=size, width=size)
    with torch.no_grad():
        wanted = model(x)
    found = run(path, x)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    other = x.flip(0)  # the exported model must depend on its input as the model does
    assert (run(path, other) - found).norm() > 1e-2 * wanted.norm()
