"""Settings of an evaluation."""

from dataclasses import dataclass, field

from zoo.config import one_of
from zoo.data.settings import DataSettings
from zoo.precision import PRECISIONS
from zoo.ranges import check_device, check_ranges


@dataclass(frozen=True)
class EvalOptions:
    """Models to evaluate.

    models: run folders, .safetensors files of these tools, folders of timm's save_for_hf, or names of timm models with
      published weights; all are compared with the first one
    batch_size: batch size
    precision: fp32, bf16 or fp16
    real_labels: also report accuracy on reassessed ImageNet labels: timm (the file that comes with timm) or a JSON
      file; empty for none
    device: torch device; empty for the accelerator if there is one
    """

    models: list[str] = field(default_factory=list)
    batch_size: int = 256
    precision: str = "fp32"
    real_labels: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        one_of("eval.precision", self.precision, PRECISIONS)
        check_ranges("eval", self, batch_size="[1, inf)")
        check_device("eval.device", self.device)


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation.

    out: folder for results.csv and predictions.csv
    """

    data: DataSettings = field(default_factory=DataSettings)
    eval: EvalOptions = field(default_factory=EvalOptions)
    out: str = "runs/evaluation"

    def __post_init__(self) -> None:
        if not self.out:
            raise ValueError("out is empty: name the folder for the results")
