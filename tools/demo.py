"""Demo on embedded data: train, convert, fine-tune and compare a ViT and a DiT.

    python tools/demo.py

Writes report.md, demo.png and demo_dit.png to runs/demo. Each step calls another tool with a configuration of configs/.
"""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_steps import DIT, alongside, dit_commands, run, score_commands, vit_commands, write_report
from zoo import config
from zoo.ranges import check_ranges

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
USAGE = "usage: demo.py [key=value ...]"
DIGITS = ("data.source=digits", "data.workers=0")
MARK = ".demo"  # file that marks an output folder of the demo, which may be replaced


@dataclass(frozen=True)
class DemoSettings:
    """Size of the demo.

    out: output folder; its runs are replaced
    mixers: mixers to convert the ViT to (the DiT is converted to multipole)
    epochs: epochs of the softmax ViT; each fine-tuning takes a tenth
    steps: steps of the softmax DiT; each fine-tuning takes a tenth
    samples: images per DiT for its Frechet distance
    """

    out: str = "runs/demo"
    mixers: list[str] = field(default_factory=lambda: ["mhla", "la", "multipole"])
    epochs: int = 30
    steps: int = 1000
    samples: int = 300

    def __post_init__(self) -> None:
        check_ranges("", self, epochs="[1, inf)", steps="[1, inf)", samples="[1, inf)")


def main(words: list[str]) -> dict[str, dict[str, Any]]:
    """Run the demo. Returns the evaluation row or the scores of each run by name. Raises ValueError."""
    if config.print_help_if_asked(words, __doc__, USAGE, DemoSettings):
        return {}
    settings, began = config.from_command_line(DemoSettings, words), time.perf_counter()
    out = Path(settings.out)
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ValueError(f"{out} holds files that are not from a demo and would be deleted; choose another out=FOLDER")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    names = ["softmax", "softmax_more", *(n for m in settings.mixers for n in (f"{m}_zero_shot", m))]
    models = ",".join(f"{out}/{name}" for name in names)
    classifiers = vit_commands(out, CONFIGS, settings.mixers, settings.epochs)
    print(f"the diffusion transformer is trained at the same time: {out}/dit.log")
    with alongside(dit_commands(out, CONFIGS, settings.steps, settings.samples), out / "dit.log"):
        for command in classifiers:
            run(*command)
        found = run(
            "evaluate_imagenet", ["data.source=digits", "data.workers=0", f"eval.models=[{models}]", f"out={out}"]
        )
    rows = dict(zip(names, found, strict=True))
    _, *scores = [run(*command) for command in score_commands(out)]
    cards = dict(zip(DIT, scores, strict=True))
    report = write_report(out, settings.mixers, rows, cards, time.perf_counter() - began)
    print(f"\n{report.read_text()}\nwrote {report}, {out}/demo.png and {out}/demo_dit.png")
    return rows | cards


if __name__ == "__main__":
    config.command_line(main)
