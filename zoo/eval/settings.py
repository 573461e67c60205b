"""The keys of an evaluation and of a quality table."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from zoo.config import one_of
from zoo.data.settings import DataSettings
from zoo.ranges import SEED, check_device, check_ranges


@dataclass(frozen=True)
class EvalOptions:
    """Which models are compared on which labels.

    models: run folders, .safetensors files of these tools, folders of timm's save_for_hf, or timm names (with timm's
      weights); the first is the one that the others are compared with
    batch_size: images at once
    precision: fp32, bf16 or fp16
    real_labels: also the accuracy on reassessed ImageNet labels: timm (the file that comes with timm) or a JSON file;
      empty for no
    device: torch device; empty takes the accelerator if there is one
    """

    models: list[str] = field(default_factory=list)
    batch_size: int = 256
    precision: str = "fp32"
    real_labels: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        one_of("eval.precision", self.precision, ("fp32", "bf16", "fp16"))
        check_ranges("eval", self, batch_size="[1, inf)")
        check_device("eval.device", self.device)


@dataclass(frozen=True)
class EvalSettings:
    """An evaluation. See the sections.

    out: folder for results.csv and predictions.csv
    """

    data: DataSettings = field(default_factory=DataSettings)
    eval: EvalOptions = field(default_factory=EvalOptions)
    out: str = "runs/evaluation"

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out is empty: name the folder for the results")


@dataclass(frozen=True)
class QualitySettings:
    """Which runs make the table.

    mixers: mixers, each with its options, such as "mhla mixing=project depthwise=v" (softmax alone is the source of
      conversions)
    seeds: seeds of every run
    recipe: recipe by which the softmax run of each seed is converted to the mixers; empty to train them from scratch
    data: name of the data in the table; empty takes the name of the configuration
    out: folder of the runs
    json: file to write the table to
    merge: files of other calls to join into `json`, instead of running
    """

    mixers: list[str] = field(default_factory=lambda: ["softmax", "la", "mhla", "multipole"])
    seeds: list[int] = field(default_factory=lambda: [0])
    recipe: str = ""
    data: str = ""
    out: str = "runs/quality"
    json: str = "runs/quality/quality.json"
    merge: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges("", self, seeds=SEED)
        for mixer in self.mixers:
            arm(mixer)


def arm(words: str) -> tuple[str, dict[str, Any]]:
    """(mixer, options) of its words. Raises ValueError for a word without a value."""
    mixer, *options = words.split()
    found = {}
    for word in options:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"expected a mixer and its options, such as 'mhla mixing=project', got {words!r}")
        found[key] = yaml.safe_load(value)
    return mixer, found
