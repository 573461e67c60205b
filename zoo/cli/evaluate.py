"""Compare the top-1 and top-5 accuracy of models, each with its own preprocessing.

    zoo evaluate data.source=folder data.val=IMAGENET/val eval.real_labels=timm \\
        eval.models=[deit_small_patch16_224.fb_in1k,runs/deit_small_multipole]
    zoo evaluate data.source=digits eval.models=[runs/digits_softmax,runs/digits_mhla]
    zoo evaluate attention data.source=digits eval.models=[runs/digits_softmax,runs/digits_mhla]

All models are compared with the first one: top1_diff is the difference in percentage points, and diff_low and diff_high
are the ends of its paired 95 % confidence interval. Sub-folders of images may be named by class number (ImageNet-V2).
`out` gets results.csv with timm's columns, and predictions.csv with one line per image.

`zoo evaluate attention` measures the effective attention matrix of each head, for any mixer: rank, effective rank,
entropy and token share in attention.csv and attention.png. The attention maps of query tokens are in maps.csv, and in
maps_<n>.png for model n.
"""

from pathlib import Path
from typing import Any

from zoo import config
from zoo.eval.attention.probes import ProbeSettings, probe, table
from zoo.eval.compare import compare
from zoo.eval.results import write_predictions, write_results
from zoo.eval.settings import EvalSettings

USAGE = "usage: zoo evaluate [attention] [CONFIG.yaml] eval.models=[A,B] data.val=WHERE [section.key=value ...]"


def main(words: list[str]) -> list[dict[str, Any]]:
    """Evaluate models from command-line arguments. Returns one row per model, or per head with `attention`; raises
    ValueError."""
    inside = words[:1] == ["attention"]
    words = words[inside:]
    if config.print_help_if_asked(words, __doc__, USAGE, ProbeSettings if inside else EvalSettings):
        return []
    if inside:
        looked = config.from_command_line(ProbeSettings, words)
        found = probe(looked)
        print(table(found), f"wrote {looked.out}/attention.csv, maps.csv, attention.png and maps_<n>.png", sep="\n")
        return found
    return accuracy(config.from_command_line(EvalSettings, words))


def accuracy(settings: EvalSettings) -> list[dict[str, Any]]:
    """Compute, print and write the accuracies of the models. Returns one row per model; raises ValueError."""
    rows, found, names = compare(settings)
    out = Path(settings.out)
    write_results(rows, out / "results.csv")
    write_predictions(found, names, out / "predictions.csv")
    for row in rows:
        interval = f", against the first {row['top1_diff']:+.2f} [{row['diff_low']:+.2f}, {row['diff_high']:+.2f}]"
        change = "" if row is rows[0] else interval
        print(f"{row['model']}: top-1 {row['top1']:.2f} %, top-5 {row['top5']:.2f} %{change}")
    print(f"wrote {out / 'results.csv'}")
    return rows
