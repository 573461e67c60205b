"""Scaling over several GPUs: `table` has context parallelism, `data_parallel` training steps."""

from benchmarks.scaling.data_parallel import DATA_MODELS
from benchmarks.scaling.table import KEY, ScalingSettings, alone, run

__all__ = ["DATA_MODELS", "KEY", "ScalingSettings", "alone", "run"]
