"""Convert a softmax model to a mixer; the converted model inherits all weights.

    zoo convert model.name=deit_small_patch16_224 model.pretrained=true model.mixer=multipole out=runs/deit
    zoo convert diffusers=facebook/DiT-XL-2-256 model.mixer=mhla model.keep_softmax=every:4 out=runs/dit
    zoo convert recipe recipes/digits_vit source=runs/digits_softmax out=runs/digits_recipe

The source is one of:
    model.name=NAME: a timm model, with model.pretrained=true for its published weights
    model.checkpoint=FILE: a run folder or .safetensors file of these tools, or with model.name, one of timm
    diffusers=NAME: a pipeline or transformer of diffusers, a folder or hub name

`out` gets report.json, and the converted model as model.safetensors (for the other commands) or, for a diffusers
source, as a folder of diffusers.

`zoo convert recipe` carries out a conversion in stages: inspect, convert, calibrate, transfer, finetune, controls,
evaluate; stages=[inspect] carries out only some. Each stage writes JSON, Markdown and a figure into `out`. Rerun the
same command to resume.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo import config
from zoo.models.convert import Report
from zoo.models.timm.model_files import check_output_folder
from zoo.recipes.plain import from_timm
from zoo.recipes.report import summary
from zoo.recipes.settings import RecipeSettings, from_words
from zoo.recipes.stages import run_recipe
from zoo.train.settings import ModelSettings

USAGE = "usage: zoo convert [recipe] [CONFIG.yaml] [key=value ...] [section.key=value ...]"


@dataclass(frozen=True)
class ConvertSettings:
    """Settings of a conversion.

    diffusers: pipeline or transformer of diffusers to convert, a folder or a hub name; empty for a timm model
    precision: type of the weights in which a diffusers source is saved: fp32, bf16 or fp16
    out: folder for the result and report.json
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    diffusers: str = ""
    precision: str = "fp32"
    out: str = ""

    def __post_init__(self) -> None:
        config.one_of("precision", self.precision, ("fp32", "bf16", "fp16"))


def main(words: list[str]) -> dict[str, Any]:
    """Run a conversion or a recipe from command-line arguments. Returns the report; raises ValueError."""
    recipe = words[:1] == ["recipe"]
    if config.print_help_if_asked(words, __doc__, USAGE, RecipeSettings if recipe else ConvertSettings):
        return {}
    if recipe:
        stages = from_words(words[1:])
        found = run_recipe(stages)
        print(summary(found), f"wrote {stages.out}/report.md", sep="\n")
        return found
    settings = config.from_command_line(ConvertSettings, words)
    if not settings.out or not settings.model.mixer:
        raise ValueError("say which mixer and where to write the result: model.mixer=NAME out=FOLDER")
    check_output_folder(settings.diffusers or settings.model.checkpoint, Path(settings.out))
    report = from_diffusers(settings) if settings.diffusers else from_timm(settings.model, Path(settings.out))
    print(report)
    if not (settings.diffusers or settings.model.checkpoint or settings.model.pretrained):
        print("the weights are random: give model.pretrained=true or model.checkpoint=RUN to convert trained ones")
    print(f"wrote {settings.out}")
    return report.to_dict()


def from_diffusers(settings: ConvertSettings) -> Report:
    """Convert a pipeline or transformer of diffusers. Raises ValueError for one that cannot be converted, and for keys
    of timm models."""
    from zoo.models.diffusers.convert_folder import convert_folder

    m = settings.model
    given = ModelSettings(
        mixer=m.mixer, mixer_options=m.mixer_options, layers=m.layers, keep_softmax=m.keep_softmax
    )
    if m != given:
        raise ValueError("diffusers= goes with mixer, mixer_options, layers, keep_softmax, with no other model.* key")
    chosen = {"layers": m.layers or None, "keep_softmax": m.keep_softmax or None}
    out, options = Path(settings.out), {**chosen, **m.mixer_options}
    return convert_folder(settings.diffusers, out, m.mixer, settings.precision, **options)
