"""Scaling over several GPUs: context parallelism in `table`, training with DDP and FSDP2 in `data_parallel`."""

from benchmarks.scaling.data_parallel import DATA_MODELS
from benchmarks.scaling.table import KEY, ScalingSettings, alone, run

__all__ = ["DATA_MODELS", "KEY", "ScalingSettings", "alone", "run"]
