"""Settings of a conversion recipe."""

from dataclasses import dataclass, field, fields, replace

from zoo.config import Tree, load, one_of
from zoo.errors import unknown_name
from zoo.mixers.help import check_mixer, mixers_help
from zoo.ranges import POSITIVE, check_ranges

KEYS_SET_BY_RECIPE = {  # key of the fine-tuning -> key of the recipe that sets it
    "model.mixer": "mixer",
    "model.mixer_options": "mixer_options",
    "model.layers": "keep_softmax",
    "model.keep_softmax": "keep_softmax",
    "model.checkpoint": "source",
    "distill.teacher": "source",
}
STAGES = ("inspect", "convert", "calibrate", "transfer", "finetune", "controls", "evaluate")


@dataclass(frozen=True)
class RecipeSettings:
    """Staged conversion of a softmax model. Each stage writes NAME.json, NAME.md and a figure into `out`.

    source: run folder of the softmax model, an image model or a diffusion transformer; or the name of a timm model
      with published weights, or of a diffusion model on the hub
    finetune: configuration of the fine-tuning (of zoo train-classifier or zoo finetune-diffusion); its length is the
      budget of layer-wise distillation and fine-tuning together, and of each control
    changes: section.key=value overrides of this configuration, except the keys that the recipe sets (mixer, checkpoint
      and teacher; the teacher is the source)
    mixer: attention mixer to convert to, one of the names listed below
    mixer_options: options of the mixer (`zoo list options MIXER`); gains=true is added, which calibration needs
    keep_softmax: blocks that keep softmax attention: indices, `every:3` for every third block, or `auto:2` for the two
      most sensitive ones, by measurement
    inputs: number of training images (noisy images for diffusion) for calibration
    batch: batch size of calibration
    transfer: fraction of the budget for layer-wise distillation
    transfer_lr: learning rate of layer-wise distillation, as a factor of the learning rate of fine-tuning
    stages: stages to carry out, among inspect, convert, calibrate, transfer, finetune, controls, evaluate; a finished
      stage is not repeated
    out: output folder
    """

    more_help = staticmethod(mixers_help)

    source: str = ""
    finetune: str = ""
    changes: list[str] = field(default_factory=list)
    mixer: str = "taylor2"
    mixer_options: Tree = field(default_factory=dict)
    keep_softmax: list[int] | str = field(default_factory=list)
    inputs: int = 256
    batch: int = 64
    transfer: float = 0.25
    transfer_lr: float = 1.0
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    out: str = "runs/recipe"

    def __post_init__(self) -> None:
        check_mixer(self.mixer, self.mixer_options)
        for stage in self.stages:
            one_of("stages", stage, STAGES)
        for key in (word.partition("=")[0] for word in self.changes):
            if key in KEYS_SET_BY_RECIPE:
                raise ValueError(f"{key} cannot be changed in a recipe, whose key {KEYS_SET_BY_RECIPE[key]} sets it")
        check_ranges("", self, inputs="[1, inf)", batch="[1, inf)", transfer="[0, 1)", transfer_lr=POSITIVE)
        self.auto_keep()

    def auto_keep(self) -> int | None:
        """Return the number n in keep_softmax=auto:<n>; None for other values. Raises ValueError for auto without a
        number."""
        word, _, number = self.keep_softmax.partition(":") if isinstance(self.keep_softmax, str) else ("", "", "")
        if word != "auto":
            return None
        if not number.isdecimal():
            raise ValueError(f"keep_softmax=auto:<n> needs a number of layers, got {self.keep_softmax!r}")
        return int(number)


def from_words(words: list[str]) -> RecipeSettings:
    """Read a recipe from command-line arguments: a YAML file, keys of the recipe, and keys of the fine-tuning, which
    are added to `changes`. Raises ValueError for unknown keys and several files."""
    own = {f.name for f in fields(RecipeSettings)}
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"expected one configuration file and key=value words, got {' '.join(files)}")
    mine = [word for word in words if "=" in word and word.partition("=")[0].split(".")[0] in own]
    others = [word for word in words if "=" in word and word not in mine]
    for word in others:
        if "." not in word.partition("=")[0]:
            raise unknown_name("key of a recipe", word.partition("=")[0], own)
    found = load(RecipeSettings, files[0] if files else None, mine)
    return replace(found, changes=[*found.changes, *others])
