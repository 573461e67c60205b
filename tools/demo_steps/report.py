"""Report of the demo, as Markdown and two figures."""

from pathlib import Path
from typing import Any

from demo_steps.dit import dit_lines, draw_samples
from demo_steps.processes import OPTIONS
from demo_steps.vit import draw_vit, vit_lines
from zoo.io import write_text

CLOSING = [
    "One seed of small models: this shows that the pipeline works, not which mixer is best. The commands",
    "`zoo train-classifier`, `convert`, `evaluate`, `finetune-diffusion`, `sample` and `fid` wrote all results.",
    "Each run folder holds its configuration.",
    "",
]


def write_report(folder: Path, mixers: list[str], rows: dict[str, Any], cards: dict[str, Any], seconds: float) -> Path:
    """Write report.md, demo.png and demo_dit.png to `folder`.

    rows: evaluation results by run: softmax (the source), softmax_more (the control), and NAME_zero_shot and NAME for
    each mixer. cards: scores of the runs of `DIT`. seconds: duration of the demo.
    """
    draw_vit(folder, mixers, rows)
    draw_samples(folder, cards)
    options = [f"- `{mixer}` with {words}" for mixer, words in OPTIONS.items()]
    title = ["# Demo: from softmax to linear attention on handwritten digits", "", f"It took {seconds:.0f} s.", ""]
    lines = [*title, *vit_lines(folder, mixers, rows), *dit_lines(folder, cards)]
    lines += ["Options that are not the defaults:", "", *options, "", *CLOSING]
    write_text("\n".join(lines), folder / "report.md")
    return folder / "report.md"
