"""Settings and words of tiny video runs."""

from tests.helpers.tiny_video import SIZES
from zoo import config
from zoo.train.denoising.settings import DiffusionSettings

PIXELS = {
    "model": {"kind": "wan", "kwargs": {**SIZES, "patch_size": [1, 4, 4]}},
    "data": {"source": "moving_digits", "img_size": 8, "frames": 4, "clips": 20, "batch_size": 5, "hflip": 0.5},
    "optim": {"lr": 3e-3, "weight_decay": 0.0, "ema": 0.9},
    "schedule": {"steps": 6},
    "sample": {"every": 6, "count": 3, "steps": 2},
    "run": {"eval_steps": 3, "checkpoint_steps": 3},
    "log": {"every": 1},
}


def settings(folder, model=None, **sections):
    tree = config.merge({**PIXELS, "model": model or PIXELS["model"]}, {"run": {"folder": str(folder)}})
    return config.from_tree(DiffusionSettings, config.merge(tree, sections))


def words(tree, prefix=""):
    """A nested dict as words of a command line."""
    out = []
    for key, value in tree.items():
        nested = isinstance(value, dict) and key != "kwargs"
        out += words(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}={value}"]
    return out
