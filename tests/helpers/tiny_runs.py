"""Tiny diffusion runs on the digits: 8 x 8 pixels, 16 tokens, two blocks."""

from pathlib import Path
from typing import Any

from zoo import config
from zoo.train.denoising.settings import DiffusionSettings

TINY: dict[str, Any] = {
    "model": {"kwargs": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2}},
    "data": {
        "source": "digits",
        "img_size": 8,
        "batch_size": 20,
        "workers": 0,
        "cache": True,
        "hflip": 0.0,
        "val_images": 40,
    },
    "optim": {"lr": 3e-3, "weight_decay": 0.0, "ema": 0.9},
    "schedule": {"steps": 6},
    "sample": {"count": 4, "steps": 2},
    "run": {"eval_steps": 3, "checkpoint_steps": 3},
    "log": {"every": 1},
}


def tree(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a tiny run in `folder` with some keys changed, as a nested dict."""
    return config.merge(config.merge(TINY, {"run": {"folder": str(folder)}}), sections)


def tiny(folder: Path, **sections: dict[str, Any]) -> DiffusionSettings:
    """The same, checked."""
    return config.from_tree(DiffusionSettings, tree(folder, **sections))
