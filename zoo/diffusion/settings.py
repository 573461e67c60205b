"""Settings of the training objective."""

from dataclasses import dataclass

from zoo.config import one_of
from zoo.ranges import check_ranges


@dataclass(frozen=True)
class ObjectiveSettings:
    """Training objective.

    kind: flow (flow matching) or ddpm (noise and learned variance with the variational bound, as in DiT)
    t_mean: mean of the logit-normal times of flow matching
    t_std: standard deviation of the logit-normal times of flow matching
    shift: timestep shift of flow matching towards noise, for large images (3 for SD3 and Sana)
    """

    kind: str = "flow"
    t_mean: float = 0.0
    t_std: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        one_of("objective.kind", self.kind, ("flow", "ddpm"))
        check_ranges("objective", self, t_mean="[-20, 20]", t_std="(0, 20]", shift="[0.001, 1000]")
