"""ONNX export of converted models, run by onnxruntime."""

import pytest
import torch

import zoo
from tests.helpers.tiny_models import GRID_OPTIONS, image, tiny

pytest.importorskip("onnxscript")  # of the extra `test`
onnxruntime = pytest.importorskip("onnxruntime")


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


TILES = {"density": 0.3, "q_tile": 4, "k_tile": 4}  # of 16 tokens: one of four tiles is exact


@pytest.mark.parametrize("mixer", ["la", "ahla", "hla3", "poly", "mhla", "multipole"])
def test_export(mixer, tmp_path):
    model = tiny("vit_tiny_patch16_224", depth=1).eval()
    zoo.convert(model, mixer, **GRID_OPTIONS, **(TILES if mixer == "multipole" else {}))
    path, batch = tmp_path / "model.onnx", torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(model, (image(),), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    x = image(5)
    with torch.no_grad():
        wanted = model(x)
    found = run(path, x)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    other = x.flip(0)  # the exported model must depend on its input as the model does
    assert (run(path, other) - found).norm() > 1e-2 * wanted.norm()


def test_calls_after_an_export_are_real(tmp_path):
    """The tables of blocks that an export traces must not be kept."""
    model = tiny("vit_tiny_patch16_224", img_size=96, depth=1).eval()
    zoo.convert(model, "mhla", **GRID_OPTIONS)
    x = image(height=96, width=96)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    assert torch.isfinite(model(x)).all()
