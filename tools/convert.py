"""Convert a softmax model to a mixer: inherit every weight, write the result and the report of what was done.

    python tools/convert.py model.name=deit_small_patch16_224 model.pretrained=true model.mixer=ahla out=runs/deit_ahla
    python tools/convert.py model.checkpoint=runs/digits_softmax model.mixer=poly model.keep_softmax=[0] out=runs/poly
    python tools/convert.py diffusers=facebook/DiT-XL-2-256 model.mixer=ahla model.keep_softmax=every:4 out=runs/dit

The source is a timm name (with model.pretrained=true for timm's weights), a .safetensors file of timm with its
model.name, anything that these tools wrote, or a pipeline or transformer of diffusers (folder or hub name). `out` gets
report.json and model.safetensors, which the other tools read; of a diffusers source, what diffusers saves.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zoo import config
from zoo.convert import Report, swap
from zoo.data import InputSpec
from zoo.data.settings import DataSettings
from zoo.eval.results import write_json
from zoo.train.model import WEIGHTS, keep_source, plan, save_weights, start
from zoo.train.settings import ModelSettings

USAGE = "usage: convert.py [CONFIG.yaml] model.mixer=NAME out=FOLDER [model.key=value ...]"


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert and where to write it.

    diffusers: pipeline or transformer of diffusers to convert, a folder or a hub name; empty for a timm model
    precision: type of the weights that a diffusers source is saved with: fp32, bf16, fp16
    out: folder for the result and report.json
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    diffusers: str = ""
    precision: str = "fp32"
    out: str = ""


def main(words: list[str]) -> dict[str, Any]:
    """Convert as the words of the command line say. Returns the report; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, ConvertSettings):
        return {}
    settings = config.from_command_line(ConvertSettings, words)
    if not settings.out or not settings.model.mixer:
        raise ValueError("say which mixer and where to write the result: model.mixer=NAME out=FOLDER")
    keep_source(settings.diffusers or settings.model.checkpoint, Path(settings.out))
    report = (from_diffusers if settings.diffusers else from_timm)(settings, Path(settings.out))
    print(f"{report}\nwrote {settings.out}")
    return report.to_dict()


def from_diffusers(settings: ConvertSettings, out: Path) -> Report:
    """Convert a pipeline or transformer of diffusers. Raises ValueError, also for keys of timm models."""
    from zoo.backbones.diffusion.folders import convert_folder

    m = settings.model
    if m != ModelSettings(mixer=m.mixer, mixer_options=m.mixer_options, keep_softmax=m.keep_softmax):
        raise ValueError("diffusers= goes with mixer, mixer_options and keep_softmax, with no other model.* key")
    arguments = {"keep_softmax": m.keep_softmax or None, **m.mixer_options}
    return convert_folder(settings.diffusers, out, m.mixer, settings.precision, **arguments)


def from_timm(settings: ConvertSettings, out: Path) -> Report:
    """Convert a timm model. Raises ValueError."""
    recipe, found = plan(settings.model)
    if found and found.mixer:
        raise ValueError(f"{settings.model.checkpoint} is already converted: {found.describe()}")
    _, model, _ = start(replace(settings.model, mixer=""))  # the host: converted below, with a report
    report = swap(model, recipe.mixer, keep_softmax=recipe.keep_softmax or None, **recipe.mixer_options)
    wanted = found.input if found else asdict(InputSpec.of(model, recipe.img_size, DataSettings()))
    save_weights(model, replace(recipe, input=wanted, classes=found.classes if found else []), out / WEIGHTS)
    write_json(report.to_dict(), out / "report.json")
    return report


if __name__ == "__main__":
    config.command_line(main)
