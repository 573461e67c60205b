"""The scheduler that is saved with a trained model: the one that its user would sample it with."""

from pathlib import Path
from typing import Any

from zoo.diffusion.loading import stored_scheduler
from zoo.diffusion.objectives import STEPS, Objective
from zoo.diffusion.settings import ObjectiveSettings

LINEAR = {"num_train_timesteps": STEPS, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}


def scheduler_to_save(checkpoint: str, objective: Objective, settings: ObjectiveSettings) -> Any:
    """The scheduler of the checkpoint's pipeline if it samples what the objective trains, else that of the objective.

    So the solver, spacing and shift that a published model is sampled with outlive its fine-tuning.
    """
    path = Path(checkpoint)
    for where in (checkpoint, str(path.parent)) if path.is_dir() else (checkpoint,):
        own = stored_scheduler(where) if checkpoint else None
        if own is not None and same_process(own, settings.kind):
            return own
    return objective.scheduler()


def same_process(scheduler: Any, kind: str) -> bool:
    """Whether a scheduler samples models of an objective: flow matching, or noise of DDPM with DiT's betas."""
    config = dict(scheduler.config)
    flow = type(scheduler).__name__.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction"
    if kind == "flow" or flow:
        return flow and kind == "flow"
    plain = config.get("trained_betas") is None and config.get("prediction_type") == "epsilon"
    return plain and all(config.get(key) == value for key, value in LINEAR.items())
