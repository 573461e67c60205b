"""Choice of the scheduler that is saved with a trained model."""

from pathlib import Path

from diffusers import SchedulerMixin

from zoo.diffusion.loading import stored_scheduler
from zoo.diffusion.objectives import STEPS, Objective
from zoo.diffusion.settings import ObjectiveSettings

LINEAR = {"num_train_timesteps": STEPS, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}


def scheduler_to_save(checkpoint: str, objective: Objective, settings: ObjectiveSettings) -> SchedulerMixin:
    """Choose the scheduler of the checkpoint's pipeline if it fits the objective, else the scheduler of the objective.

    A fine-tuned model thus keeps the solver, timestep spacing and shift of the published model.
    """
    path = Path(checkpoint)
    for where in (checkpoint, str(path.parent)) if path.is_dir() else (checkpoint,):
        own = stored_scheduler(where) if checkpoint else None
        if own is not None and same_process(own, settings.kind):
            return own
    return objective.scheduler()


def same_process(scheduler: SchedulerMixin, kind: str) -> bool:
    """Whether a scheduler can sample models trained with an objective. kind: flow, or ddpm (noise prediction with the
    betas of DiT)."""
    config = dict(scheduler.config)
    flow = type(scheduler).__name__.startswith("FlowMatch") or config.get("prediction_type") == "flow_prediction"
    if kind == "flow" or flow:
        return flow and kind == "flow"
    plain = config.get("trained_betas") is None and config.get("prediction_type") == "epsilon"
    return plain and all(config.get(key) == value for key, value in LINEAR.items())
