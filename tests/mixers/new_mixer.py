"""Child process of test_new_mixer.py, whose `zoo` has the mixer `landmark`."""

import copy
import math
import sys
import warnings
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf

import zoo
from tests.helpers.additions import ROOT
from zoo.config import describe, from_command_line
from zoo.mixers import MIXERS, Context, build_mixer
from zoo.mixers.help import options_help
from zoo.models.timm.model_files import Recipe, build, load_model, save_weights
from zoo.train.settings import TrainSettings

NAME = "vit_landmark_tiny_patch16_224"
SMALL = {"img_size": 64, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def definition() -> None:
    """forward against the N x N weights, in float64."""
    mixer = build_mixer("landmark", 16, 2, 8, landmarks=3, sharpness=2.0, dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 7, 2, 8, dtype=torch.float64)
    scores_q, scores_k = (torch.einsum("bnhd,hmd->bhnm", t, mixer.landmarks) / math.sqrt(8) for t in (q, k))
    matrix = scores_q.softmax(-1) @ (2 * scores_k).mT.softmax(-1)
    wanted = torch.einsum("bhtj,bjhd->bthd", matrix, v)
    torch.testing.assert_close(mixer(q, k, v, Context(x=q.flatten(2))), wanted)


def made_and_converted(folder: Path) -> None:
    """By name, in place, and through timm's format: the same outputs."""
    model = timm.create_model(NAME, **SMALL, mixer_options={"landmarks": 4}).eval()
    host = timm.create_model("vit_tiny_patch16_224", **SMALL)
    report = zoo.convert(host, "landmark", landmarks=4)
    assert len(report.swapped) == 2
    host.load_state_dict(model.state_dict())
    torch.testing.assert_close(host.eval()(X), model(X), rtol=0, atol=0)
    save_for_hf(model, folder, safe_serialization=True, model_args={**SMALL, **model.hla_args})
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)


def compared(folder: Path) -> None:
    """A file of weights builds its model again; one with another option, which no parameter shows, is noticed."""
    kwargs = {k: v for k, v in SMALL.items() if k not in ("img_size", "num_classes")}
    recipe = Recipe("vit_tiny_patch16_224", kwargs, 64, 5, "landmark", {"sharpness": 2.0})
    model = build(recipe).eval()
    save_weights(model, recipe, folder / "model.safetensors")
    again, found = load_model(folder)
    torch.testing.assert_close(again.eval()(X), model(X), rtol=0, atol=0)
    assert found.mixer_options["sharpness"] == 2.0
    with pytest.warns(UserWarning, match="sharpness=2.0"):
        timm.create_model(NAME, **SMALL).load_state_dict(copy.deepcopy(model.state_dict()))


def in_settings() -> None:
    """Help, and errors when a configuration is read."""
    assert " landmark, " in describe(TrainSettings)
    text = "\n".join(options_help("landmark"))
    assert "mixer_options of landmark:" in text and "number of landmarks per head" in text
    words = ["model.mixer=landmark", "model.mixer_options.landmarks=4"]
    assert from_command_line(TrainSettings, words).model.mixer_options == {"landmarks": 4}
    for options, message in (("{landmark: 4}", "Did you mean 'landmarks'"), ("{landmarks: 0}", "positive number")):
        with pytest.raises(ValueError, match=message):
            from_command_line(TrainSettings, ["model.mixer=landmark", f"model.mixer_options={options}"])
    with pytest.raises(ValueError, match="landmark"):
        from_command_line(TrainSettings, ["model.mixer=landmrak"])
    rotary = timm.create_model("vit_small_patch16_rope_224", depth=1, img_size=32)
    with pytest.raises(ValueError, match="rotary"):
        zoo.convert(rotary, "landmark")


def tested() -> None:
    """The tests over all mixers pass for the new one; those that compile models take too long here."""
    folders = [str(ROOT / "tests" / name) for name in ("mixers", "models")]
    chosen = "landmark and not gpu and not one_graph and not export"
    assert pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, *folders]) == 0


if __name__ == "__main__":
    warnings.simplefilter("error")
    assert "landmark" in MIXERS and Path(zoo.__file__).is_relative_to(sys.argv[1])
    definition()
    made_and_converted(Path(sys.argv[1]) / "timm")
    compared(Path(sys.argv[1]))
    in_settings()
    tested()
