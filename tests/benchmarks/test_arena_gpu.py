"""Training steps of the arena that are replayed from a CUDA graph."""

import benchmark
import pytest
import torch

from arena import training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
SMALL = ["tasks=[charges]", "size=64", "dim=64", "batch_size=32", "steps=300", "seeds=[0]", "test=64"]


@pytest.mark.parametrize("mixer", ["la", "hla2", "flare", "strassen", "mesa"])
def test_replayed_steps_train_as_launched_ones(mixer, tmp_path, monkeypatch):
    """A tenth covers the roundings of 300 steps; without the replayed steps, the error is near the constant answer."""
    found = []
    for name in ("replayed", "launched"):
        if name == "launched":
            monkeypatch.setattr(training, "captured", lambda step, device: (step, False))
        files = [f"json={tmp_path}/{name}.json", f"picture={tmp_path}/{name}.png"]
        found += benchmark.main(["arena", *SMALL, f"mixers=[{mixer}]", *files])["rows"]
    replayed, launched = found
    assert replayed["graph"] and not launched["graph"]
    assert replayed["score"] == pytest.approx(launched["score"], rel=0.1)
    assert replayed["score"] < 0.85 * replayed["constant"]
