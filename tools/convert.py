"""Convert a softmax model to a mixer: inherit every weight, write the result and the report of what was done.

    python tools/convert.py model.name=deit_small_patch16_224 model.pretrained=true model.mixer=ahla out=runs/deit_ahla
    python tools/convert.py model.checkpoint=runs/digits_softmax model.mixer=poly model.keep_softmax=[0] out=runs/poly

The source is a timm name (with model.pretrained=true for timm's weights), a .safetensors file of timm with its
model.name, or
anything that these tools wrote. `out` gets model.safetensors, which the other tools read, and report.json.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zoo import config
from zoo.convert import swap
from zoo.data import InputSpec
from zoo.data.settings import DataSettings
from zoo.train.model import WEIGHTS, plan, save_weights, start
from zoo.train.settings import ModelSettings

USAGE = "usage: convert.py [CONFIG.yaml] model.mixer=NAME out=FOLDER [model.key=value ...]"


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert and where to write it.

    out: folder for model.safetensors and report.json
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    out: str = ""


def main(words: list[str]) -> dict[str, Any]:
    """Convert as the words of the command line say. Returns the report; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, ConvertSettings):
        return {}
    settings = config.from_command_line(ConvertSettings, words)
    if not settings.out or not settings.model.mixer:
        raise ValueError("say which mixer and where to write the result: model.mixer=NAME out=FOLDER")
    recipe, found = plan(settings.model)
    if found and found.mixer:
        raise ValueError(f"{settings.model.checkpoint} is already converted: {found.describe()}")
    _, model, _ = start(replace(settings.model, mixer=""))  # the host: converted below, with a report
    report = swap(model, recipe.mixer, keep_softmax=recipe.keep_softmax or None, **recipe.mixer_options)
    print(report)
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = found.input if found else asdict(InputSpec.of(model, recipe.img_size, DataSettings()))
    classes = found.classes if found else []
    save_weights(model, replace(recipe, input=wanted, classes=classes), folder / WEIGHTS)
    (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    print(f"wrote {folder / WEIGHTS}")
    return report.to_dict()


if __name__ == "__main__":
    config.command_line(main)
