"""The whole path on embedded data: train a softmax ViT, convert it, fine-tune, compare. Writes runs/demo/report.md
and demo.png.

    python tools/demo.py

Every step is a call of another tool with a configuration of configs/vit, as a user would make it.
"""

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import convert
import evaluate_imagenet
import train_vit

from zoo import config
from zoo.eval.demo import write_report

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "vit"
USAGE = "usage: demo.py [key=value ...]"
MARK = ".demo"  # in a folder that this tool made and may replace


@dataclass(frozen=True)
class DemoSettings:
    """Size of the demo.

    out: folder of everything; its runs are replaced
    mixers: mixers to convert to
    epochs: epochs of the softmax model; each fine-tuning takes a tenth
    """

    out: str = "runs/demo"
    mixers: list[str] = field(default_factory=lambda: ["ahla", "la", "poly"])
    epochs: int = 40


def main(words: list[str]) -> dict[str, dict[str, Any]]:
    """Run the demo. Returns the evaluation row of each run by its name; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, DemoSettings):
        return {}
    settings, began = config.from_command_line(DemoSettings, words), time.perf_counter()
    out = Path(settings.out)
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ValueError(f"{out} holds something else than a demo, which would be deleted; choose another out=FOLDER")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    short = max(1, settings.epochs // 10)
    source = f"model.checkpoint={out}/softmax"
    train_vit.main([f"{CONFIGS}/digits_softmax.yaml", f"run.folder={out}/softmax", *epochs(settings.epochs)])
    for mixer in settings.mixers:
        convert.main([source, f"model.mixer={mixer}", f"out={out}/{mixer}_zero_shot"])
    for mixer, name in [("", "softmax_more"), *((mixer, mixer) for mixer in settings.mixers)]:
        words = [source, f"model.mixer={mixer}", f"run.folder={out}/{name}", *epochs(short)]
        train_vit.main([f"{CONFIGS}/digits_finetune.yaml", *words])
    names = ["softmax", "softmax_more", *(n for m in settings.mixers for n in (f"{m}_zero_shot", m))]
    models = ",".join(f"{out}/{name}" for name in names)
    found = evaluate_imagenet.main(["data.source=digits", "data.workers=0", f"eval.models=[{models}]", f"out={out}"])
    rows = dict(zip(names, found, strict=True))
    report = write_report(out, settings.mixers, rows, time.perf_counter() - began)
    print(f"\n{report.read_text()}\nwrote {report} and {out}/demo.png")
    return rows


def epochs(number: int) -> list[str]:
    """The words that set the length of a run and of its warm-up (a tenth)."""
    return [f"schedule.epochs={number}", f"schedule.warmup_epochs={number / 10}"]


if __name__ == "__main__":
    config.command_line(main)
