"""The models of the tables of speed: sizes, and what of them is compiled."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models


class Outside(TorchDispatchMode):
    """The operators that run in nothing that is compiled."""

    def __init__(self):
        super().__init__()
        self.depth, self.seen = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.depth == 0:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def compile(self, part, **_):
        """Stands in for torch.compile."""

        def run(*args, **kwargs):
            self.depth += 1
            try:
                return part(*args, **kwargs)
            finally:
                self.depth -= 1

        return run


@pytest.mark.parametrize("mixer", models.MIXERS)
def test_all_of_a_vit_is_compiled(mixer, monkeypatch):
    family, mode = models.MODELS["vit_small"], Outside()
    monkeypatch.setattr(torch, "compile", mode.compile)
    with torch.device("meta"):
        model, images = family.build(mixer, 224), torch.empty(2, 3, 224, 224)
    with mode:
        model(images)
    assert len(mode.seen) > 100
    models.compile_parts(model, family)
    mode.seen.clear()
    with mode:
        model(images)
    assert mode.seen == []


def test_wan_has_its_published_size():
    with torch.device("meta"):
        model = models.MODELS["wan_1.3b"].build("ahla every:3", 480)
        mixed = models.MODELS["wan_1.3b"].build("mhla", 480)
        tiles = models.MODELS["wan_1.3b"].build("multipole density=0.0625 k_tile=32 every:3", 720)
    names = [block.attn1.mixer_name if hasattr(block.attn1, "mixer_name") else "softmax" for block in model.blocks]
    assert names == ["softmax" if i % 3 == 0 else "ahla" for i in range(30)]
    host = [p.numel() for name, p in model.named_parameters() if ".mixer." not in name]
    assert sum(host) == 1_418_996_800  # of Wan-AI/Wan2.1-T2V-1.3B-Diffusers
    assert mixed.blocks[7].attn1.mixer.blocks == (3, 5, 10)
    assert [hasattr(block.attn1, "mixer_name") for block in tiles.blocks] == [i % 3 > 0 for i in range(30)]
    options = tiles.blocks[1].attn1.mixer.options
    assert (options.select, options.density, options.k_tile) == ("error", 0.0625, 32)
    assert models.MODELS["wan_1.3b"].tokens(480) == 21 * 30 * 52 == 32760
    assert models.MODELS["wan_1.3b"].tokens(720) == 21 * 45 * 80 == 75600
    assert models.MODELS["pixart_sigma"].tokens(2048) == 128 * 128
